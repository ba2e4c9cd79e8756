"""Dropout with masks that depend on a key and a position only."""
