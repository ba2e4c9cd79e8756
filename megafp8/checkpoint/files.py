"""Files of a checkpoint: written with a CRC-32 and fsync, and verified before they are read.

    checksums.json   {"algorithm": "crc32", "files": {"<name>": {"bytes": 123, "crc32": "89abcdef"}, ...},
                      "crc32_of_files": "..."}

Storage sometimes returns other bytes than were written, and training would go on with a wrong weight. So the CRC-32 of
each file is computed while it is written, and compared before anything is loaded. `crc32_of_files` is the CRC-32 of
`files` as `_canonical` spells it; it tells a damaged checksums.json from damaged data. The format of checksums.json
does not depend on the checkpoint's format version, because metadata.json is verified before its version is read.

CRC-32 is in the standard library, runs at 3.5 GB/s a core without the interpreter's lock, and misses one accidental
damage in 4 billion, and no burst of up to 32 bits. It does not protect against forgery.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple, cast

from torch.distributed.checkpoint.filesystem import FileSystem

from megafp8.checkpoint.errors import DamagedCheckpoint
from megafp8.host.object_store import AnyPath, ObjectPath, as_path, is_transient
from megafp8.host.object_store.reader import ObjectReader
from megafp8.host.strict_json import parse_json

CHECKSUMS_FILE = "checksums.json"
ALGORITHM = "crc32"

BUFFER_BYTES = 1 << 20
BLOCK_BYTES = 1 << 25
MAX_FILE_BYTES = 1 << 28
"""Largest size of a file that is read whole: an index, a description, a tokenizer."""
_MAX_IO_BYTES = 1 << 30  # Linux transfers at most 2 GiB a call


class Checksum(NamedTuple):
    """Size of a file in bytes, and the CRC-32 of its content."""

    size: int
    crc32: int

    @classmethod
    def from_content(cls, content: bytes) -> Checksum:
        return cls(len(content), zlib.crc32(content))


EMPTY = Checksum(0, 0)


# --- writing ---


class ChecksummedFile(io.FileIO):
    """A file written from beginning to end that keeps the checksum of its content.

    `checksum`: of what the file holds already, where it is opened to append.
    """

    failure: OSError | None = None

    def __init__(self, path: str | os.PathLike, mode: str = "wb", checksum: Checksum = EMPTY) -> None:
        super().__init__(path, mode)
        self.checksum = checksum

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            written = super().write(view)
        except OSError as error:
            error.filename = str(self.name)
            self.failure = error
            raise
        size, crc = self.checksum
        self.checksum = Checksum(size + written, zlib.crc32(view[:written], crc))
        return written

    @contextmanager
    def raising_failure(self) -> Iterator[None]:
        """Raise the OSError of a failed write in place of the error that torch.save makes of it."""
        try:
            yield
        except Exception as error:
            if self.failure is None or error is self.failure:
                raise
            raise self.failure from None  # torch.save's error says no more, and may have this one as its cause


class _SyncedStream(io.BufferedWriter):
    """Flushed to disk when it is closed, which DCP does itself."""

    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()


class ChecksummedObject(io.RawIOBase):
    """An object in object storage, written from beginning to end, that keeps the checksum of its content.

    It appears when it is closed; `abandon` leaves nothing.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._stream: Any = path.open("wb")
        self.checksum = EMPTY

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.checksum.size

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):  # the stream copies what it has not sent
            self._stream.write(view[start : start + BLOCK_BYTES])
        self.checksum = Checksum(self.checksum.size + len(view), zlib.crc32(view, self.checksum.crc32))
        return len(view)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._stream.close()

    def abandon(self) -> None:
        """Write nothing."""
        super().close()
        with suppress(Exception):
            self._stream.discard()
        with suppress(AttributeError):
            self._stream.closed = True  # fsspec completes the object otherwise, when its stream is garbage


class ChecksummedFiles(FileSystem):
    """The file system that DCP writes through; `sums` holds the checksum of each closed file by name."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Checksum] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        if isinstance(path, ObjectPath):
            written = ChecksummedObject(path)
            try:
                yield written
            except BaseException:
                written.abandon()
                raise
            written.close()
            self.sums[path.name] = written.checksum
            return
        file = ChecksummedFile(path)
        with file.raising_failure(), _SyncedStream(file, BUFFER_BYTES) as stream:
            yield stream
        self.sums[Path(path).name] = file.checksum

    def concat_path(self, path: Any, suffix: str) -> Any:
        return as_path(path) / suffix

    def exists(self, path: Any) -> bool:
        return bool(path.exists())

    def rename(self, path: Any, new_path: Any) -> None:
        if isinstance(path, ObjectPath):
            path.copy_to(new_path)
            path.unlink()
        else:
            super().rename(path, new_path)
        self.sums[new_path.name] = self.sums.pop(path.name)


def write_file(path: AnyPath, content: bytes) -> Checksum:
    """Write a file, flushed to disk, or an object; returns its checksum."""
    if isinstance(path, ObjectPath):
        path.write_bytes(content)
        return Checksum.from_content(content)
    file = ChecksummedFile(path)
    with _SyncedStream(file, BUFFER_BYTES) as stream:
        stream.write(content)
    return file.checksum


def to_json(content: Mapping[str, Any], **options: Any) -> bytes:
    """`content` as a JSON file holds it."""
    return (json.dumps(content, indent=2, **options) + "\n").encode()


def allocate(path: Path, size: int, start: int = 0) -> None:
    """Reserve disk space for `size` bytes of a file from byte `start` on. Raises OSError where there is too little."""
    with path.open("r+b") as stream:
        try:
            os.posix_fallocate(stream.fileno(), start, size)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: {size:,} bytes are needed for {path}") from error


def write_at(stream: BinaryIO, start: int, data: memoryview) -> None:
    """Write all of `data`, a view of bytes, from byte `start` of a file on."""
    done = 0
    while done < len(data):
        done += os.pwrite(stream.fileno(), data[done : done + _MAX_IO_BYTES], start + done)


class DropBehind:
    """Removes parts of files from the page cache soon after they were read or written.

    Else a conversion fills it with gigabytes that are not read again, and pushes out what other processes read. On
    virtual machines, whose host has to find memory for each new page, this takes ten times as long as the copy of the
    data. `bytes`: how much of the newest parts stays. `written`: parts are written to disk meanwhile; without a flush
    it is not certain that they are.
    """

    def __init__(self, bytes: int, *, written: bool) -> None:
        self._limit, self._written = bytes, written
        self._newest: tuple[Path, int, int] | None = None
        self._parts: deque[tuple[Path, int, int]] = deque()
        self._bytes = 0
        self._lock = Lock()

    def add(self, file: Path, start: int, size: int) -> None:
        """`size` bytes from byte `start` of a file on were read or written. Neighbouring parts become one."""
        with self._lock:
            self._add(file, start, size)

    def _add(self, file: Path, start: int, size: int) -> None:
        if self._newest is not None:
            newest, first, length = self._newest
            if newest == file and first + length == start:
                start, size = first, length + size
            else:
                self._close(self._newest)
        self._newest = file, start, size
        if size >= BLOCK_BYTES:
            self._close(self._newest)
            self._newest = None

    def _close(self, part: tuple[Path, int, int]) -> None:
        if part[2] < BUFFER_BYTES:
            return
        if self._written:
            self._advise(*part)
        self._parts.append(part)
        self._bytes += part[2]
        while self._bytes > self._limit:
            oldest = self._parts.popleft()
            self._bytes -= oldest[2]
            self._advise(*oldest)

    def _advise(self, file: Path, start: int, size: int) -> None:
        """Remove pages that are on disk; others are sent there, and stay."""
        if not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError), file.open("rb", buffering=0) as stream:  # it is advice, and the file may be gone
            os.posix_fadvise(stream.fileno(), start, size, os.POSIX_FADV_DONTNEED)


WRITTEN_BYTES = 1 << 27
"""Usual `bytes` of a `DropBehind` of what is written: enough for the disk to be busy."""
_READ_BYTES = 1 << 30  # the weights of a layer, which a conversion may read a second time for their amax
_read: ContextVar[DropBehind | None] = ContextVar("_read", default=None)


@contextmanager
def reading_once() -> Iterator[None]:
    """Within it, what `read_into` has read of files is removed from the page cache soon after."""
    token = _read.set(DropBehind(_READ_BYTES, written=False))
    try:
        yield
    finally:
        _read.reset(token)


def sync(path: str | Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename_synced(old: Path, new: Path) -> None:
    """Rename within one folder, flushed to disk. A file system does it completely or not at all."""
    os.rename(old, new)
    sync(new.parent)


def _canonical(files: dict[str, Any]) -> bytes:
    return json.dumps(files, sort_keys=True, separators=(",", ":")).encode()


def write_checksums(path: AnyPath, sums: Mapping[str, Checksum]) -> None:
    """Write checksums.json of the checkpoint folder `path`."""
    files = {name: {"bytes": size, "crc32": f"{crc:08x}"} for name, (size, crc) in sorted(sums.items())}
    crc_of_files = f"{zlib.crc32(_canonical(files)):08x}"
    write_file(path / CHECKSUMS_FILE, to_json({"algorithm": ALGORITHM, "files": files, "crc32_of_files": crc_of_files}))


# --- reading ---


def read_checksums(path: AnyPath) -> dict[str, Checksum] | None:
    """The checksums of the checkpoint folder `path` by file name; None where it has none.

    Raises DamagedCheckpoint where checksums.json is damaged.
    """
    file = path / CHECKSUMS_FILE
    if not file.is_file():
        return None
    whole = parse_object(file, read_file(file))
    algorithm, files = whole.get("algorithm"), whole.get("files")
    crc_of_files = _parse_crc32(whole.get("crc32_of_files"))
    if not isinstance(files, dict) or algorithm != ALGORITHM or crc_of_files != zlib.crc32(_canonical(files)):
        raise DamagedCheckpoint(f"{file} is damaged: its own checksum does not match")
    sums = {}
    for name, entry in files.items():
        size, crc = (entry.get("bytes"), _parse_crc32(entry.get("crc32"))) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or size < 0 or crc is None:
            raise DamagedCheckpoint(f"{file} is damaged: its entry of {name} is no size and CRC-32")
        sums[name] = Checksum(size, crc)
    return sums


def _parse_crc32(text: Any) -> int | None:
    """The number that eight hexadecimal digits are; None for anything else."""
    return int(text, 16) if isinstance(text, str) and re.fullmatch("[0-9a-fA-F]{8}", text) else None


def read_verified(path: AnyPath, name: str, sums: Mapping[str, Checksum] | None) -> bytes:
    """The content of the small file `name` in the checkpoint folder `path`, compared with its checksum in `sums`.

    The bytes that a caller parses are those that were verified. `sums` None: the checkpoint has no checksums. Raises
    DamagedCheckpoint where the file is missing, is not in `sums`, or is not what was written.
    """
    file = path / name
    if not file.is_file():
        raise DamagedCheckpoint(f"{path} is no checkpoint: it has no {name}")
    content = read_file(file)
    if sums is not None:
        if name not in sums:
            raise DamagedCheckpoint(f"{path / CHECKSUMS_FILE} has no checksum of {name}")
        problem = _difference(file, Checksum.from_content(content), sums[name])
        if problem is not None:
            raise DamagedCheckpoint(problem)
    return content


def read_file(file: AnyPath) -> bytes:
    """The content of a small file. Raises DamagedCheckpoint where the disk cannot read it, else ValueError.

    ObjectStoreError where object storage cannot be reached.
    """
    try:
        if (size := file.stat().st_size) > MAX_FILE_BYTES:
            raise ValueError(f"{file} has {size:,} bytes, and such a file at most {MAX_FILE_BYTES:,}")
        return file.read_bytes()
    except OSError as error:
        if is_transient(error):
            raise
        kind = DamagedCheckpoint if error.errno == errno.EIO else ValueError
        raise kind(f"{file} cannot be read: {error.strerror}") from error


def parse_object(file: AnyPath | str, content: bytes, constant: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """The JSON object in `content`, UTF-8, of `file`. Raises DamagedCheckpoint for anything else, NaN included.

    `constant`: as for `parse_json`.
    """
    try:
        content_object = parse_json(content, constant)
    except ValueError as error:
        raise DamagedCheckpoint(f"{file} is damaged: {error}") from error
    if not isinstance(content_object, dict):
        raise DamagedCheckpoint(f"{file} is damaged: it holds no JSON object")
    return content_object


def find_damage(file: AnyPath, expected: Checksum) -> str | None:
    """Read `file` once, in blocks, and describe how it differs from what was written; None where it does not."""
    try:
        size, crc = file.stat().st_size, 0
        if size == expected.size:  # else there is no need to read it
            with open_raw(file) as stream:
                crc = crc32_of(stream, 0, size)
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return f"{file} cannot be read: {error.strerror}"
    return _difference(file, Checksum(size, crc), expected)


def _difference(file: AnyPath, actual: Checksum, expected: Checksum) -> str | None:
    if actual.size != expected.size:
        what = "truncated" if actual.size < expected.size else "too long"
        return f"{file} is {what}: {actual.size} bytes of {expected.size}"
    if actual.crc32 != expected.crc32:
        return f"{file} is damaged: its CRC-32 is {actual.crc32:08x}, and {expected.crc32:08x} was written"
    return None


RawFile = BinaryIO | ObjectReader
"""A file without a buffer, or an object."""


def open_raw(path: AnyPath) -> RawFile:
    """Open a file, without a buffer, or an object, to be read."""
    return ObjectReader(path) if isinstance(path, ObjectPath) else cast(BinaryIO, path.open("rb", buffering=0))


def read_some(stream: RawFile, start: int, view: memoryview) -> int:
    """Fill the beginning of `view`, of bytes, from byte `start` of a file on; returns how much of it, 0 at its end."""
    if isinstance(stream, ObjectReader):
        return stream.read_some(start, view)
    return os.preadv(stream.fileno(), [view], start)


def read_at(stream: RawFile, start: int, size: int) -> bytes:
    """Up to `size` bytes, a few, from byte `start` of a file on."""
    content = bytearray(size)
    return bytes(content[: read_some(stream, start, memoryview(content))])


def read_into(stream: RawFile, start: int, view: memoryview) -> None:
    """Fill `view`, of bytes, from byte `start` of a file on. Raises EOFError where the file ends before."""
    done = 0
    while done < len(view):
        got = read_some(stream, start + done, view[done : done + _MAX_IO_BYTES])
        if got == 0:
            raise EOFError("the file is truncated")
        done += got
    behind = _read.get()
    if behind is not None and not isinstance(stream, ObjectReader):
        behind.add(Path(stream.name), start, len(view))


def crc32_of(stream: RawFile, start: int, size: int) -> int:
    """The CRC-32 of `size` bytes of a file. Raises EOFError where the file ends before."""
    crc = 0
    if isinstance(stream, ObjectReader):
        for content in stream.blocks(start, size):
            crc = zlib.crc32(content, crc)
        return crc
    buffer = memoryview(bytearray(min(BLOCK_BYTES, size)))
    for at in range(0, size, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, size - at)]
        read_into(stream, start + at, block)
        crc = zlib.crc32(block, crc)
    return crc
