"""Feed-forward network with two or three linear layers."""
