"""The feed-forward network of two or three linear layers."""
