"""A file of a data set that is mapped into memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megafp8.data import DataError


class MappedFile:
    """The bytes of the file `path`, which stays on disk. Raises OSError or ValueError (empty) as `np.memmap` does.

    A file that is cut while it is mapped ends the process by SIGBUS when what is missing is read. So `check` is to be
    called before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self.content: NDArray[np.uint8] = np.memmap(self._file, mode="r", dtype=np.uint8)

    def check(self) -> None:
        """Raise DataError where the file has become shorter since it was opened."""
        size = os.fstat(self._file.fileno()).st_size
        if size < len(self.content):
            raise DataError(
                f"{self.path} has become shorter since it was opened: it had {len(self.content):,} bytes, and has "
                f"{size:,}; copy or write it again"
            )
