"""Suggestions for names and paths that do not exist: existing ones with a similar spelling."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


def near_name(name: str, names: Iterable[str]) -> str | None:
    """Return the element of `names` with the spelling most similar to `name`, or None."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


def near_path(path: Path) -> Path | None:
    """Return an existing path with a spelling similar to `path`, or None. Any part of the path may be misspelled.

    The result is also None for a URL, and if a folder cannot be read.
    """
    if "://" in str(path) or os.path.exists(path):
        return None
    parent = path.parent
    if parent != path and not os.path.isdir(parent):
        corrected = near_path(parent)
        if corrected is None or not os.path.isdir(corrected):
            return None
        if os.path.exists(corrected / path.name):
            return corrected / path.name
        parent = corrected
    try:
        near = near_name(path.name, (entry.name for entry in parent.iterdir()))
    except OSError:
        return None
    return None if near is None else parent / near


def did_you_mean(path: Path, otherwise: str) -> str:
    """Return `did you mean PATH?` if an existing path has a similar spelling, else the other advice."""
    near = near_path(path)
    return otherwise if near is None else f"did you mean {near}?"
