"""FP8 recipes: which elements of a tensor share a scale, and where the scale comes from."""
