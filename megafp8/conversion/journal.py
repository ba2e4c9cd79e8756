"""What of a long conversion is done, so that a killed one goes on where it stopped.

A sink writes into a hidden folder, and beside its files lies the journal: a line a tensor. The one rule is the order:
first a tensor's data are on the disk, then its name is. Waiting for the disk after each of a thousand small tensors
would cost more than writing them, so names are collected, and every few seconds the files of the folder are flushed,
all of them, and then the names in one write. Flushing a file that has nothing new costs microseconds, so nobody has to
say which file a tensor went to. A kill costs the last few seconds.

A line that was cut off in the middle has no newline and does not count. The first line is a key, which says what is
converted and how; a journal with another key is of other data and starts empty. While it is open the file is locked,
so a second process cannot write into the same folder; the system drops the lock of a process that dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

FILE_NAME = "journal"


class Journal:
    """The journal of the existing folder `folder`; `done` are the names whose data are safe.

    `key`: one line, equal for two attempts at the same thing. `seconds`: how often names are made safe.
    Raises ValueError where another process has it open.
    """

    def __init__(self, folder: str | Path, key: str = "", *, seconds: float = 2.0) -> None:
        assert "\n" not in key, f"a key of several lines: {key!r}"
        self.folder, self.seconds = Path(folder), seconds
        self.path = self.folder / FILE_NAME
        self._stream = self.path.open("a+b")
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._stream.close()
            raise ValueError(f"{self.folder} is being written by another process; wait for it, or end it") from None
        self.done: set[str] = set()
        self._pending: list[str] = []
        self._flushed = time.monotonic()
        self._read(key)

    def _read(self, key: str) -> None:
        """Take what the file says, without a torn last line; begin it anew where it is of another key."""
        self._stream.seek(0)
        text = self._stream.read()
        end = text.rfind(b"\n") + 1
        lines = text[:end].decode("utf-8", errors="replace").split("\n")[:-1]
        if lines and lines[0] == key:
            self.done = set(lines[1:])
            self._stream.truncate(end)
        else:
            self._stream.truncate(0)
            self._write([key])

    def add(self, name: str) -> None:
        """All data of `name` are written (not in a buffer of Python's). They are in `done` once they are safe."""
        assert "\n" not in name, f"a name of several lines: {name!r}"
        self._pending.append(name)
        if time.monotonic() - self._flushed >= self.seconds:
            self.flush()

    def flush(self) -> None:
        """Make everything added safe."""
        for file in sorted(self.folder.rglob("*")):
            if file.is_file() and file != self.path:
                sync(file)
        sync(self.folder)
        if self._pending:
            self._write(self._pending)
        self.done |= set(self._pending)
        self._pending = []
        self._flushed = time.monotonic()

    def remove(self) -> None:
        """Flush, and delete the file: the folder is complete, and looks as if there had been none."""
        self.flush()
        self.path.unlink()
        self._stream.close()
        sync(self.folder)

    def close(self) -> None:
        """Flush, and let go of the folder with its journal in it."""
        self.flush()
        self._stream.close()

    def _write(self, lines: list[str]) -> None:
        self._stream.write("".join(f"{line}\n" for line in lines).encode())
        self._stream.flush()
        os.fsync(self._stream.fileno())


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
