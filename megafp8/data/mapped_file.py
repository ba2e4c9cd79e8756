"""Memory-mapped file of a data set."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megafp8.data import DataError


class MappedFile:
    """Memory-mapped bytes of a file. Raises OSError, or ValueError for an empty file, as `np.memmap` does.

    If the file is truncated while it is mapped, reading the missing part ends the process with SIGBUS. Call `check`
    before each use to get an error instead.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self.content: NDArray[np.uint8] = np.memmap(self._file, mode="r", dtype=np.uint8)

    def check(self) -> None:
        """Raise DataError if the file has become shorter since it was opened."""
        size = os.fstat(self._file.fileno()).st_size
        if size < len(self.content):
            raise DataError(
                f"{self.path} has become shorter since it was opened: it had {len(self.content):,} bytes and now has "
                f"{size:,}; copy or write it again"
            )
