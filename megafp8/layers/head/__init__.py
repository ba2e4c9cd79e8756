"""Output layer and loss, with the vocabulary divided over tensor-parallel ranks."""
