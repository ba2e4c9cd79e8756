"""Activations of feed-forward networks."""
