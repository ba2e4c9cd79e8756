"""Advice for names and paths that do not exist: those that do and are spelt alike."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def near_name(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that is spelt most like `name`; None if none is like it."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


def near_path(path: Path) -> Path | None:
    """An existing path spelt like `path`, each part of which may be misspelt; None if there is none, or for a URL."""
    if "://" in str(path) or path.exists():
        return None
    parent = path.parent
    if parent != path and not parent.is_dir():
        corrected = near_path(parent)
        if corrected is None or not corrected.is_dir():
            return None
        if (corrected / path.name).exists():
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
