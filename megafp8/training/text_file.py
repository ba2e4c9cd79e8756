"""Small text files that are seen only when they are complete. Must not import torch (`megafp8.training.errors`)."""

from __future__ import annotations

from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write `text` to the file, in place of what it has. A reader sees the whole of one or of the other."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
