"""The folder that a sink writes: hidden while it is written, made visible by one rename, continued after a kill.

    <parent>/.<name>.converting/     the files, and a journal of the tensors that are safe on disk
    <parent>/<name>/                 complete

The rename is atomic, so there is a complete target or none, whenever a conversion is killed. The hidden name is not
one that the clean-up of a run's checkpoints deletes.

The journal has a line a tensor, written after the tensor's data has been flushed to disk. A flush for each of a
thousand small tensors would cost more than writing them, so every few seconds all files of the folder are flushed, and
then the collected lines are written at once. A kill costs the last few seconds. A torn last line has no newline and
does not count. The first line is a key that says what is converted and how; a journal with another key is of other
data, and starts empty. The file is locked while it is open, so a second process cannot write into the same folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megafp8.checkpoint.files import rename_synced, sync
from megafp8.conversion.base import Source, TensorInfo

JOURNAL_FILE = "journal"
TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a Hugging Face folder that are its tokenizer."""


class Journal:
    """The journal of the existing folder `folder`; `done` has the lines whose data is safe on disk.

    `key`: one line, equal for two attempts at the same conversion. `seconds`: interval of flushes. Raises ValueError
    where another process has it open.
    """

    def __init__(self, folder: str | Path, key: str = "", *, seconds: float = 2.0) -> None:
        assert "\n" not in key, f"a key of several lines: {key!r}"
        self.folder, self.seconds = Path(folder), seconds
        self.path = self.folder / JOURNAL_FILE
        self._stream = self.path.open("a+b")
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._stream.close()
            raise ValueError(f"{self.folder} is being written by another process; wait for it, or end it") from None
        self.done: set[str] = set()
        self._pending: list[str] = []
        self._flushed = time.monotonic()
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

    def add(self, line: str) -> None:
        """Record a tensor whose data is written (not in a buffer of Python's)."""
        assert "\n" not in line, f"a record of several lines: {line!r}"
        self._pending.append(line)
        if time.monotonic() - self._flushed >= self.seconds:
            self.flush()

    def flush(self) -> None:
        """Flush all files to disk, then the lines added so far."""
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
        """Flush, and delete the journal of a complete folder."""
        self.flush()
        self.path.unlink()
        self._stream.close()
        sync(self.folder)

    def close(self) -> None:
        """Flush, and release the folder with its journal in it."""
        self.flush()
        self._stream.close()

    def _write(self, lines: list[str]) -> None:
        self._stream.write("".join(f"{line}\n" for line in lines).encode())
        self._stream.flush()
        os.fsync(self._stream.fileno())


class FolderSink:
    """Base of all sinks: writes the folder `path`, which must be absent or empty; it grows in `hidden`."""

    _source: Source
    _journal: Journal

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.hidden = self.path.with_name(f".{self.path.name}.converting")

    def open_journal(self, source: Source, tensors: Iterable[str], key: Any = None) -> bool:
        """Make the hidden folder, or continue in that of an interrupted conversion of the same `tensors` and `key`.

        Returns whether it starts anew, with an empty folder. Raises ValueError where `path` holds something, or another
        process writes it.
        """
        check_free(self.path)
        self.hidden.mkdir(parents=True, exist_ok=True)
        infos = {name: str(TensorInfo(*source.tensors[name])) for name in tensors}
        text = json.dumps([type(self).__name__, str(source.path.resolve()), infos, key], default=str)
        self._source, self._journal = source, Journal(self.hidden, hashlib.sha256(text.encode()).hexdigest())
        if self._journal.done:
            return False
        for old in self.hidden.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
            elif old != self._journal.path:
                old.unlink()
        return True

    def publish(self, tokenizer: bool = True) -> None:
        """Copy the tokenizer's files, flush everything to disk, and rename the folder to its final name."""
        for file in self._source.tokenizer_files if tokenizer else ():
            (self.hidden / TOKENIZER_FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(file, self.hidden / TOKENIZER_FOLDER / file.name)
        self._journal.remove()
        try:
            rename_synced(self.hidden, self.path)
        except OSError as error:
            raise ValueError(f"{self.hidden} is complete, but cannot become {self.path}: {error.strerror}") from error


def is_taken(path: Path) -> bool:
    """Whether something is at `path` that is not an empty folder, which a conversion may fill."""
    return path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir())))


def check_free(path: Path) -> None:
    """Raise ValueError where a conversion to `path` would overwrite something."""
    if is_taken(path):
        raise ValueError(
            f"{path} exists already and is no empty folder; nothing was overwritten. Choose another path, or remove it"
        )


def with_companions(file: Path) -> list[Path]:
    """The tokenizer file `file`, and the other tokenizer files beside it where it is of a Hugging Face folder."""
    others = TOKENIZER_NAMES if file.name in TOKENIZER_NAMES else ()
    return [file, *(other for name in others if name != file.name and (other := file.with_name(name)).is_file())]


def tokenizer_files(path: Path) -> list[Path]:
    """The tokenizer files in the target `path`."""
    folder = path / TOKENIZER_FOLDER
    return sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []
