"""Errors of input data."""

from __future__ import annotations


class DataError(ValueError):
    """A data set that is missing, damaged, or not what the model can read. The message is for the user."""
