"""Small text files: replaced as a whole, or appended to by lines. Must not import torch (`megafp8.training.errors`)."""

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
    """Write `text` to the file, in place of what it has. A reader sees the whole of one or of the other."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


class JsonLines:
    """A file of JSON objects, one a line, to append to. It is opened, or made, when the first is appended.

    A last line that a kill truncated is ended first, so that no object is appended to it. What cannot be written whole,
    as on a full disk, is not written at all: OSError, with the file's name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def append(self, *records: Mapping[str, Any]) -> None:
        """Append `records`, all or none of them."""
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
        if self._file is not None:
            os.close(self._file)
            self._file = None


class DiskErrorsLogged:
    """Context in which errors of the file system, as of a full disk, are warnings: what it writes is not worth a run.

    Of several errors in a row the first is logged. `what`: is written there, for the warning.
    """

    def __init__(self, what: str) -> None:
        self._what, self._failing = what, False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if isinstance(error, OSError):
            if not self._failing:
                logger.warning(f"{self._what} cannot be written: {error}; the run goes on without")
            self._failing = True
            return True
        self._failing = False
        return False


def _lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return text.encode("utf-8", "backslashreplace")  # a lone surrogate as JSON escapes it


def _append(file: int, size: int, content: bytes) -> None:
    """Append `content` to a file of `size` bytes, or leave it as it was."""
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        with contextlib.suppress(OSError):  # a device
            os.ftruncate(file, size)
        raise
