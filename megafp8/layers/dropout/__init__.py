"""Dropout with masks that depend only on a key and a position."""
