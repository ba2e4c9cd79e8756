"""The CRC-32 that each rectangle of a checkpoint carries.

A rectangle is stored as `torch.save` writes it, as a zip archive, many in one file. `torch.save` gives each member of
an archive its CRC-32, and `torch.load` does not look at it; Python's zipfile does.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path


class _Part(io.RawIOBase):
    """Bytes `[start, start + length)` of a file that is open without a buffer, as a file of their own.

    torch has such a view too; that one seeks to the wrong side of the end, where a zip archive has its directory.
    """

    def __init__(self, file: io.FileIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        done = self._file.readinto(view)
        self._at += done
        return done


def find_damage(file: Path, start: int, length: int) -> str | None:
    """Read the archive at these bytes of `file`, and say what is wrong with it; None where it is as it was written."""
    with file.open("rb", buffering=0) as stream:
        try:
            with zipfile.ZipFile(io.BufferedReader(_Part(stream, start, length), 1 << 20)) as archive:
                damaged = archive.testzip()
        except OSError:
            raise
        except Exception as error:  # a damaged archive raises nearly anything
            return f"{type(error).__name__}: {error}"
    return None if damaged is None else f"{damaged} does not have its CRC-32"
