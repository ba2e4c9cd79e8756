"""Base of mixers that pass a state from token to token."""
