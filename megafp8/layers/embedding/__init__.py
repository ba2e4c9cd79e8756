"""The embedding of tokens."""
