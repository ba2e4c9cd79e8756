"""Base class of sinks, and the folder that a sink writes.

The folder is hidden while it is being written, becomes visible by a rename, and can be continued after a kill:

    <parent>/.<name>.converting/     the files, and a journal of the tensors that are safely on disk
    <parent>/<name>/                 the complete target

The rename is atomic. So at any time, the target is either complete or does not exist, even if a conversion is killed.
The cleanup of a run's checkpoints does not delete folders with the hidden name.

The first line of the journal is a JSON object that describes the conversion. Once a tensor is safely on disk, a
different conversion into the folder is refused. Each further line stands for a tensor, and is written after the
tensor's data has been flushed to disk. A flush for each of a thousand small tensors would cost more than writing them.
So every few seconds, all files in the folder are flushed, and then the collected lines are written at once. A kill
costs the work of the last few seconds. An incomplete last line has no newline and is ignored. The journal is locked
while it is open, so a second process cannot write into the same folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megafp8.checkpoint.files import MAX_FILE_BYTES, rename_synced, sync
from megafp8.conversion.base import CheckpointSource
from megafp8.data.tokenizer_files import CONFIG_FILE, TEMPLATE_FILE, TOKENS_FILE
from megafp8.host.strict_json import parse_json
from megafp8.host.user_cache import make_own_folder

JOURNAL_FILE = "journal"
TOKENIZER_FOLDER = "tokenizer"
TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    CONFIG_FILE,
    TOKENS_FILE,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE_FILE,
    "chat_template.json",
)
"""Names of the tokenizer files in a Hugging Face folder."""


class Journal:
    """Journal of a conversion. `done` holds the lines of the tensors that are safely on disk.

    Args:
        folder: Existing folder of the conversion.
        key: JSON object that is equal for two attempts at the same conversion.
        seconds: Interval between flushes, in seconds.

    Raises:
        ValueError: Another process has the journal open, or its conversion has another key.
    """

    def __init__(self, folder: str | Path, key: Mapping[str, Any], *, seconds: float = 2.0) -> None:
        self.folder, self.seconds = Path(folder), seconds
        self.path = self.folder / JOURNAL_FILE
        self._stream = self.path.open("a+b")
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._stream.close()
            raise ValueError(f"{self.folder} is being written by another process; wait for it, or end it") from None
        self._pending: list[str] = []
        self._flushed = time.monotonic()
        self._stream.seek(0)
        text = self._stream.read()
        end = text.rfind(b"\n") + 1
        lines = text[:end].decode().split("\n")[:-1]
        same = bool(lines) and lines[0] == json.dumps(key)
        if not same and len(lines) > 1:
            self._stream.close()
            try:
                entries = parse_json(lines[0])
            except ValueError as error:
                raise ValueError(f"{self.path} is damaged: {error}; delete the folder to start over") from None
            entries = entries if isinstance(entries, dict) else {}
            changes = (
                f"{name} was {entries.get(name)} and is {key[name]}" for name in key if entries.get(name) != key[name]
            )
            raise ValueError(
                f"{self.folder} contains another unfinished conversion: {', '.join(changes)}. Repeat that conversion, "
                "or delete the folder to start over"
            )
        self.done = set(lines[1:])
        self._stream.truncate(end if same else 0)
        if not same:
            self._write([json.dumps(key)])

    def add(self, line: str) -> None:
        """Record a tensor after its data has been written and is no longer in Python's buffers."""
        assert "\n" not in line, f"a record of several lines: {line!r}"
        self._pending.append(line)
        if time.monotonic() - self._flushed >= self.seconds:
            self.flush()

    def flush(self) -> None:
        """Flush all files to disk, and then write the lines added so far."""
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
        """Flush everything, and delete the journal, because the folder is complete."""
        self.flush()
        self.path.unlink()
        self._stream.close()
        sync(self.folder)

    def _write(self, lines: list[str]) -> None:
        self._stream.write("".join(f"{line}\n" for line in lines).encode())
        self._stream.flush()
        os.fsync(self._stream.fileno())


class Sink(ABC):
    """Base class of sinks, which write a checkpoint to the folder `path`.

    `path` must not exist, or must be an empty folder. The sink writes to the folder `hidden`. To continue an
    interrupted conversion, create the sink again for the same source and path.
    """

    _source: CheckpointSource
    _journal: Journal

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.hidden = self.path.with_name(f".{self.path.name}.converting")

    @abstractmethod
    def begin(self, source: CheckpointSource, options: Mapping[str, Any]) -> Collection[str]:
        """Prepare the files for the tensors that the format can hold, and return the names yet to be written.

        Args:
            source: Source of the conversion.
            options: JSON that must be equal to continue an interrupted conversion.

        Raises:
            ValueError: The format cannot express the model, `path` exists and is not an empty folder, another process
                is writing it, or it contains another unfinished conversion.
            OSError: The disk is too small.
        """

    @abstractmethod
    def write(self, name: str, tensor: Tensor) -> None:
        """Store a whole tensor."""

    @abstractmethod
    def finish(self) -> None:
        """Write the files that describe the tensors. `hidden` is then a complete checkpoint."""

    def publish(self) -> None:
        """Flush everything to disk, and rename the folder to its final name."""
        self._journal.remove()
        try:
            rename_synced(self.hidden, self.path)
        except OSError as error:
            raise ValueError(
                f"{self.hidden} is complete, but cannot be renamed to {self.path}: {error.strerror}"
            ) from error

    def _open_journal(
        self, source: CheckpointSource, names: Collection[str], options: Mapping[str, Any], layout: Any = 0
    ) -> bool:
        """Create the hidden folder, or open the hidden folder of the interrupted conversion.

        A conversion is the same if its source, `options`, tensors `names` and `layout` are equal. Returns True if the
        folder is new and empty, False if a conversion continues.
        """
        if is_taken(self.path):
            raise ValueError(
                f"{self.path} already exists and is not an empty folder; nothing was overwritten. Choose another path, "
                "or remove it"
            )
        self.hidden.parent.mkdir(parents=True, exist_ok=True)
        make_own_folder(self.hidden)
        link = next((file for file in self.hidden.rglob("*") if file.is_symlink()), None)
        if link is not None:
            raise ValueError(
                f"{link} is a symbolic link, and writing to it would change files elsewhere; delete "
                f"{self.hidden} to start over"
            )
        text = json.dumps([[name, str(source.tensors[name])] for name in names] + [layout], default=str)
        key = {"format": type(self).__name__, "source": str(source.path.resolve()), **options}
        key["files"] = hashlib.sha256(text.encode()).hexdigest()
        self._source, self._journal = source, Journal(self.hidden, key)
        if self._journal.done:
            return False
        for old in self.hidden.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
            elif old != self._journal.path:
                old.unlink()
        return True

    def _check_done(self, names: Collection[str]) -> None:
        """Flush everything to disk, and assert that all `names` are written."""
        self._journal.flush()
        missing = sorted(set(names) - self._journal.done)
        assert not missing, f"finish() before {missing[0]} was written"

    def _copy_tokenizer(self) -> None:
        for file in self._source.tokenizer_files:
            (self.hidden / TOKENIZER_FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(file, self.hidden / TOKENIZER_FOLDER / file.name)


def is_taken(path: Path) -> bool:
    """Return whether a conversion to `path` would overwrite something. An empty folder is not taken."""
    return path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir())))


def own_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """Return the files among `names` that exist in `folder`, after checking that they may be copied.

    A symbolic link may point into the folder, or to a file in the cache of the Hugging Face Hub, where links in
    <model>/snapshots/<revision> point to <model>/blobs. Raises ValueError for any other link, because the author of the
    folder could have pointed it to one of the user's files, and for a file of more than `MAX_FILE_BYTES`.
    """
    real = folder.resolve()
    allowed = [real, real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [real]
    files = [file for name in names if (file := folder / name).is_file()]
    for file in files:
        target = file.resolve()
        if not any(target.is_relative_to(place) for place in allowed):
            raise ValueError(
                f"{file} is a symbolic link to {target}, outside its folder, so it is not copied; replace it by the "
                "file itself if that belongs to the model, or remove the link"
            )
        if (size := target.stat().st_size) > MAX_FILE_BYTES:
            raise ValueError(f"{file} has {size:,} bytes; a tokenizer file may have at most {MAX_FILE_BYTES:,}")
    return files


def with_companions(file: Path) -> list[Path]:
    """Return the tokenizer file `file`, and the files in its folder that belong to it.

    If `file` has the name of a tokenizer file in a Hugging Face folder, these are the other such files. Otherwise they
    are the files with special tokens and the chat template, and the merges of a GPT-2 vocabulary.
    """
    others: tuple[str, ...] = TOKENIZER_NAMES
    if file.name not in TOKENIZER_NAMES:
        merges = file.name.removesuffix("vocab.json") + "merges.txt" if file.name.endswith("vocab.json") else ""
        others = tuple(filter(None, (CONFIG_FILE, TOKENS_FILE, TEMPLATE_FILE, merges)))
    return [file, *(other for name in others if name != file.name and (other := file.with_name(name)).is_file())]


def tokenizer_files(path: Path) -> list[Path]:
    """Return the tokenizer files in the target `path`."""
    folder = path / TOKENIZER_FOLDER
    if not folder.is_dir():
        return []
    if folder.is_symlink():
        raise ValueError(f"{folder} is a symbolic link, so its files are not copied; replace it by the folder itself")
    return own_files(folder, sorted(file.name for file in folder.iterdir()))
