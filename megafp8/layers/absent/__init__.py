"""The absence of a mixer or of a feed-forward network."""
