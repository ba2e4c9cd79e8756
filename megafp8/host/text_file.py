"""Small text files that are replaced as a whole or extended line by line.

This module must not import torch, because `megafp8.training.errors` works without it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)


def replace_text(path: Path, text: str) -> None:
    """Replace the content of the file by `text`. A reader sees either the old or the new content as a whole."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


class JsonLines:
    """File of JSON objects, one per line, that can be extended. It is opened or created at the first append.

    If a kill truncated the last line, the line is ended first, so that no object is appended to it. If an object cannot
    be written as a whole, as on a full disk, nothing is written and OSError is raised with the file's name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def append(self, *records: Mapping[str, Any]) -> None:
        """Append all of `records`, or none of them."""
        try:
            if self._file is None:
                self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if not records:
                return
            size = os.fstat(self._file).st_size
            torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
            _append(self._file, size, b"\n" * torn + _lines(records))
        except OSError as error:
            error.filename = str(self.path)
            raise

    def close(self) -> None:
        """Close the file if it is open."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def last_integer(path: Path, key: str, most_bytes: int = 1 << 20) -> int:
    """Return the integer under `key` in the last JSON object of a file that has one, or 0 without such an object.

    The file has one object per line. Other lines are ignored, such as a line truncated by a kill, and so are lines
    before the last `most_bytes` of the file.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            return int(json.loads(line)[key])
    return 0


class DiskErrorsLogged:
    """Context manager that turns file system errors, such as a full disk, into warnings, so that they do not end a run.

    Only the first of several errors in a row is logged. `what` is the name of the output in the warning.
    """

    def __init__(self, what: str) -> None:
        self._what, self._failing = what, False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if isinstance(error, OSError):
            if not self._failing:
                logger.warning(f"{self._what} cannot be written: {error}; the run continues without it")
            self._failing = True
            return True
        self._failing = False
        return False


def _lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return text.encode("utf-8", "backslashreplace")  # writes a lone surrogate as its JSON escape


def _append(file: int, size: int, content: bytes) -> None:
    """Append `content` to a file of `size` bytes, or leave the file unchanged."""
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        with contextlib.suppress(OSError):  # the file may be a device
            os.ftruncate(file, size)
        raise
