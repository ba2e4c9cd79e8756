"""Placeholder for a mixer or feed-forward network that a layer does not have."""
