"""The folder that a sink writes: hidden while it is written, made visible by one rename, continued after a kill.

    <parent>/.<name>.converting/     the files, and a journal of the tensors that are safe on disk
    <parent>/<name>/                 complete

The rename is atomic, so there is a complete target or none, whenever a conversion is killed. The hidden name is not
one that the clean-up of a run's checkpoints deletes.

The journal's first line is a JSON object that says what is converted and how; another conversion is refused once a
tensor is safe. Then it has a line a tensor, written after the tensor's data has been flushed to disk. A flush for each
of a thousand small tensors would cost more than writing them, so every few seconds all files of the folder are flushed,
and then the collected lines are written at once. A kill costs the last few seconds. A torn last line has no newline and
does not count. The file is locked while it is open, so a second process cannot write into the same folder.
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
"""Files of a Hugging Face folder that are its tokenizer."""


class Journal:
    """The journal of the existing folder `folder`; `done` has the lines whose data is safe on disk.

    `key`: a JSON object, equal for two attempts at the same conversion. `seconds`: interval of flushes. Raises
    ValueError where another process has the journal open, or it has another key.
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
                raise ValueError(f"{self.path} is damaged: {error}; delete the folder to begin anew") from None
            entries = entries if isinstance(entries, dict) else {}
            changes = (
                f"{name} was {entries.get(name)} and is {key[name]}" for name in key if entries.get(name) != key[name]
            )
            raise ValueError(
                f"{self.folder} is half done by another conversion: {', '.join(changes)}. Repeat that one, or delete "
                "the folder to begin anew"
            )
        self.done = set(lines[1:])
        self._stream.truncate(end if same else 0)
        if not same:
            self._write([json.dumps(key)])

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

    def _write(self, lines: list[str]) -> None:
        self._stream.write("".join(f"{line}\n" for line in lines).encode())
        self._stream.flush()
        os.fsync(self._stream.fileno())


class Sink(ABC):
    """Base of the sinks: writes the folder `path`, which must be absent or empty; it grows in `hidden`.

    An interrupted sink is continued by making it again for the same source and path.
    """

    _source: CheckpointSource
    _journal: Journal

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.hidden = self.path.with_name(f".{self.path.name}.converting")

    @abstractmethod
    def begin(self, source: CheckpointSource, options: Mapping[str, Any]) -> Collection[str]:
        """Prepare the files for what of `source` the format can hold, and return the names yet to be written.

        `options`: JSON that must be equal to continue an interrupted conversion. Raises ValueError where the format
        cannot express the model, `path` is taken, another process writes it, or it is half done by another conversion;
        OSError where the disk is too small.
        """

    @abstractmethod
    def write(self, name: str, tensor: Tensor) -> None:
        """Store a whole tensor."""

    @abstractmethod
    def finish(self) -> None:
        """Write what describes the tensors; `hidden` is then a complete checkpoint."""

    def publish(self) -> None:
        """Flush everything to disk, and rename the folder to its final name."""
        self._journal.remove()
        try:
            rename_synced(self.hidden, self.path)
        except OSError as error:
            raise ValueError(f"{self.hidden} is complete, but cannot become {self.path}: {error.strerror}") from error

    def _open_journal(
        self, source: CheckpointSource, names: Collection[str], options: Mapping[str, Any], layout: Any = 0
    ) -> bool:
        """Make the hidden folder, or continue in that of an interrupted conversion of tensors `names` to `layout`.

        Returns whether it starts anew, with an empty folder.
        """
        if is_taken(self.path):
            raise ValueError(
                f"{self.path} exists already and is no empty folder; nothing was overwritten. Choose another path, or "
                "remove it"
            )
        self.hidden.parent.mkdir(parents=True, exist_ok=True)
        make_own_folder(self.hidden)
        link = next((file for file in self.hidden.rglob("*") if file.is_symlink()), None)
        if link is not None:
            raise ValueError(
                f"{link} is a symbolic link, and what is written to it would change files elsewhere; delete "
                f"{self.hidden} to begin anew"
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
    """Whether a conversion to `path` would overwrite something; an empty folder may be filled."""
    return path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir())))


def own_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """The files of `names` that `folder` has and that may be copied from it.

    A symbolic link may end in the folder, or where the cache of Hugging Face's hub keeps its files: links in
    <model>/snapshots/<revision> lead to <model>/blobs. Raises ValueError for any other, which whoever made the folder
    could have led to a file of yours, and for a file of more than `MAX_FILE_BYTES`.
    """
    real = folder.resolve()
    allowed = [real, real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [real]
    files = [file for name in names if (file := folder / name).is_file()]
    for file in files:
        target = file.resolve()
        if not any(target.is_relative_to(place) for place in allowed):
            raise ValueError(
                f"{file} is a symbolic link to {target}, outside of its folder, so it is not copied; put the file "
                "itself there if it is the model's, or remove the link"
            )
        if (size := target.stat().st_size) > MAX_FILE_BYTES:
            raise ValueError(f"{file} has {size:,} bytes, and a tokenizer at most {MAX_FILE_BYTES:,}")
    return files


def with_companions(file: Path) -> list[Path]:
    """Return the tokenizer file `file`, and the files in its folder that belong to it.

    These are the other tokenizer files of a Hugging Face folder if `file` is one of them; otherwise the files that
    state special tokens and the chat template, and the merges of a GPT-2 vocabulary.
    """
    others: tuple[str, ...] = TOKENIZER_NAMES
    if file.name not in TOKENIZER_NAMES:
        merges = file.name.removesuffix("vocab.json") + "merges.txt" if file.name.endswith("vocab.json") else ""
        others = tuple(filter(None, (CONFIG_FILE, TOKENS_FILE, TEMPLATE_FILE, merges)))
    return [file, *(other for name in others if name != file.name and (other := file.with_name(name)).is_file())]


def tokenizer_files(path: Path) -> list[Path]:
    """The tokenizer files in the target `path`."""
    folder = path / TOKENIZER_FOLDER
    if not folder.is_dir():
        return []
    if folder.is_symlink():
        raise ValueError(f"{folder} is a symbolic link, so its files are not copied; put the folder itself there")
    return own_files(folder, sorted(file.name for file in folder.iterdir()))
