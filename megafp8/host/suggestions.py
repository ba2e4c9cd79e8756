"""Advice for names and paths that do not exist: those that do and are spelt alike."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


def near_name(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that is spelt most like `name`; None if none is like it."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


def near_path(path: Path) -> Path | None:
    """Return an existing path spelt like `path`, each part of which may be misspelt; None if there is none.

    It is None for a URL, too, and where a folder may not be read.
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
    """`did you mean PATH?` if an existing path is spelt like `path`, else the other advice."""
    near = near_path(path)
    return otherwise if near is None else f"did you mean {near}?"
