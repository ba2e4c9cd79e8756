"""Checkpoint files, written with a CRC-32 and fsync, and verified before they are parsed.

    checksums.json   {"algorithm": "crc32", "files": {"<name>": {"bytes": 123, "crc32": "89abcdef"}, ...},
                      "crc32_of_files": "..."}

Storage sometimes returns bytes other than the ones that were written, and training would continue with wrong weights.
So the CRC-32 of each file is computed while it is written, and compared before anything is loaded. `crc32_of_files` is
the CRC-32 of `files` in canonical form (`_canonical`); it distinguishes a damaged checksums.json from damaged data. The
format of checksums.json does not depend on the checkpoint's format version, because metadata.json is verified before
its version is read.

CRC-32 is in the standard library and runs at 3.5 GB/s per core without the interpreter's lock. It misses one in 4
billion accidental changes, and detects every burst error of up to 32 bits. It does not protect against forgery.
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
"""Largest size in bytes of a file that is read in one piece: an index, a description, or a tokenizer."""
_MAX_IO_BYTES = 1 << 30  # Linux transfers at most 2 GiB per call


class Checksum(NamedTuple):
    """Size of a file in bytes, and the CRC-32 of its content."""

    size: int
    crc32: int

    @classmethod
    def from_content(cls, content: bytes) -> Checksum:
        """Return the checksum of a file with this content."""
        return cls(len(content), zlib.crc32(content))


EMPTY = Checksum(0, 0)


# --- writing ---


class ChecksummedFile(io.FileIO):
    """File that is written sequentially and keeps the checksum of its content.

    When a file is opened to append, `checksum` is the checksum of its existing content.
    """

    failure: OSError | None = None
    """Error of the last failed write."""

    def __init__(self, path: str | os.PathLike, mode: str = "wb", checksum: Checksum = EMPTY) -> None:
        super().__init__(path, mode)
        self.checksum = checksum

    def write(self, data: Any) -> int:
        """Write `data`, update the checksum, and return the number of bytes written."""
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
        """Raise the OSError of a failed write instead of the error into which torch.save converts it."""
        try:
            yield
        except Exception as error:
            if self.failure is None or error is self.failure:
                raise
            raise self.failure from None  # torch.save's error adds no information, and may have this one as its cause


class _SyncedStream(io.BufferedWriter):
    """Buffered stream that is flushed to disk when it is closed. DCP closes the streams that it writes."""

    def close(self) -> None:
        """Write the buffer, flush the file to disk, and close it."""
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()


class ChecksummedObject(io.RawIOBase):
    """Object in object storage that is written sequentially and keeps the checksum of its content.

    The object becomes visible when it is closed. `abandon` leaves no object behind.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._stream: Any = path.open("wb")
        self.checksum = EMPTY

    def writable(self) -> bool:
        """Return True: the object can be written."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self.checksum.size

    def write(self, data: Any, /) -> int:
        """Write `data`, update the checksum, and return the number of bytes written."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):  # the stream copies data that it has not sent
            self._stream.write(view[start : start + BLOCK_BYTES])
        self.checksum = Checksum(self.checksum.size + len(view), zlib.crc32(view, self.checksum.crc32))
        return len(view)

    def close(self) -> None:
        """Complete the object, which makes it visible."""
        if not self.closed:
            super().close()
            self._stream.close()

    def abandon(self) -> None:
        """Discard the data written so far; no object is created."""
        super().close()
        with suppress(Exception):
            self._stream.discard()
        with suppress(AttributeError):
            self._stream.closed = True  # fsspec completes the object otherwise, when its stream is garbage


class ChecksummedFiles(FileSystem):
    """File system through which DCP writes; `sums` holds the checksum of each closed file by name."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Checksum] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        """Open a file or object for writing, and store its checksum in `sums` once it is written without an error."""
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
        """Return the path of `suffix` in the folder `path`."""
        return as_path(path) / suffix

    def exists(self, path: Any) -> bool:
        """Return whether a file or object exists."""
        return bool(path.exists())

    def rename(self, path: Any, new_path: Any) -> None:
        """Rename a file (an object is copied and then deleted), and its checksum with it."""
        if isinstance(path, ObjectPath):
            path.copy_to(new_path)
            path.unlink()
        else:
            super().rename(path, new_path)
        self.sums[new_path.name] = self.sums.pop(path.name)


def write_file(path: AnyPath, content: bytes) -> Checksum:
    """Write a file and flush it to disk, or write an object; return its checksum."""
    if isinstance(path, ObjectPath):
        path.write_bytes(content)
        return Checksum.from_content(content)
    file = ChecksummedFile(path)
    with _SyncedStream(file, BUFFER_BYTES) as stream:
        stream.write(content)
    return file.checksum


def to_json(content: Mapping[str, Any], **options: Any) -> bytes:
    """Return `content` as indented JSON, UTF-8, with a newline at the end."""
    return (json.dumps(content, indent=2, **options) + "\n").encode()


def allocate(path: Path, size: int, start: int = 0) -> None:
    """Reserve disk space for `size` bytes of a file from byte `start` on. Raises OSError if there is too little."""
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
    """Removal of file ranges from the page cache soon after they were read or written.

    Without it, a conversion fills the page cache with gigabytes that are not read again, and evicts the data of other
    processes. On virtual machines, where the host must find memory for each new page, this takes ten times as long as
    copying the data.

    Args:
        bytes: Number of bytes that stay in the cache; these are the newest ranges.
        written: Whether the ranges were written. Their writing to disk is then started early, but without a flush it is
            not guaranteed to complete.
    """

    def __init__(self, bytes: int, *, written: bool) -> None:
        self._limit, self._written = bytes, written
        self._newest: tuple[Path, int, int] | None = None
        self._parts: deque[tuple[Path, int, int]] = deque()
        self._bytes = 0
        self._lock = Lock()

    def add(self, file: Path, start: int, size: int) -> None:
        """Record that `size` bytes from byte `start` of a file on were read or written. Adjacent ranges are merged."""
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
        """Drop the pages that are on disk. Start writing the other pages to disk; these stay in the cache."""
        if not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError), file.open("rb", buffering=0) as stream:  # this is advice, and the file may be gone
            os.posix_fadvise(stream.fileno(), start, size, os.POSIX_FADV_DONTNEED)


WRITTEN_BYTES = 1 << 27
"""Usual `bytes` of a `DropBehind` for written files: enough to keep the disk busy."""
_READ_BYTES = 1 << 30  # the weights of one layer, which a conversion may read a second time for their amax
_read: ContextVar[DropBehind | None] = ContextVar("_read", default=None)


@contextmanager
def reading_once() -> Iterator[None]:
    """Return a context in which data that `read_into` reads from files is soon removed from the page cache."""
    token = _read.set(DropBehind(_READ_BYTES, written=False))
    try:
        yield
    finally:
        _read.reset(token)


def sync(path: str | Path) -> None:
    """Flush a file, or a folder's directory entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename_synced(old: Path, new: Path) -> None:
    """Rename a file or folder within its parent folder, and flush the rename to disk. The rename is atomic."""
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
    """Return the checksums of the checkpoint folder `path` by file name; None if it has no checksums.json.

    Raises DamagedCheckpoint if checksums.json is damaged.
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
            raise DamagedCheckpoint(f"{file} is damaged: its entry for {name} is not a size and a CRC-32")
        sums[name] = Checksum(size, crc)
    return sums


def _parse_crc32(text: Any) -> int | None:
    """Parse eight hexadecimal digits; return None for anything else."""
    return int(text, 16) if isinstance(text, str) and re.fullmatch("[0-9a-fA-F]{8}", text) else None


def read_verified(path: AnyPath, name: str, sums: Mapping[str, Checksum] | None) -> bytes:
    """Return the content of the small file `name` in the checkpoint folder `path`, compared with its checksum.

    The file is read once, so the caller parses exactly the bytes that were verified. If `sums` is None, the checkpoint
    has no checksums and the content is not verified.

    Raises:
        DamagedCheckpoint: The file is missing, is not in `sums`, or differs from its checksum.
    """
    file = path / name
    if not file.is_file():
        raise DamagedCheckpoint(f"{path} is not a checkpoint: it has no {name}")
    content = read_file(file)
    if sums is not None:
        if name not in sums:
            raise DamagedCheckpoint(f"{path / CHECKSUMS_FILE} has no checksum for {name}")
        problem = _difference(file, Checksum.from_content(content), sums[name])
        if problem is not None:
            raise DamagedCheckpoint(problem)
    return content


def read_file(file: AnyPath) -> bytes:
    """Return the content of a small file.

    Raises:
        DamagedCheckpoint: The disk cannot read the file.
        ValueError: The file is too large, or cannot be read for another reason.
        ObjectStoreError: Object storage cannot be reached.
    """
    try:
        if (size := file.stat().st_size) > MAX_FILE_BYTES:
            raise ValueError(f"{file} has {size:,} bytes; files of its kind may have at most {MAX_FILE_BYTES:,}")
        return file.read_bytes()
    except OSError as error:
        if is_transient(error):
            raise
        kind = DamagedCheckpoint if error.errno == errno.EIO else ValueError
        raise kind(f"{file} cannot be read: {error.strerror}") from error


def parse_object(file: AnyPath | str, content: bytes, constant: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Parse `content`, the UTF-8 bytes of `file`, as a JSON object. `constant` is passed to `parse_json`.

    Raises DamagedCheckpoint if the content is anything else; by default NaN is refused, too.
    """
    try:
        content_object = parse_json(content, constant)
    except ValueError as error:
        raise DamagedCheckpoint(f"{file} is damaged: {error}") from error
    if not isinstance(content_object, dict):
        raise DamagedCheckpoint(f"{file} is damaged: it does not contain a JSON object")
    return content_object


def find_damage(file: AnyPath, expected: Checksum) -> str | None:
    """Read `file` once, in blocks, and describe how it differs from `expected`; return None if it does not."""
    try:
        size, crc = file.stat().st_size, 0
        if size == expected.size:  # a file of another size need not be read
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
        return f"{file} is damaged: its CRC-32 is {actual.crc32:08x}, but {expected.crc32:08x} was written"
    return None


RawFile = BinaryIO | ObjectReader
"""An unbuffered file, or an object in object storage."""


def open_raw(path: AnyPath) -> RawFile:
    """Open a file (unbuffered) or an object for reading."""
    return ObjectReader(path) if isinstance(path, ObjectPath) else cast(BinaryIO, path.open("rb", buffering=0))


def read_some(stream: RawFile, start: int, view: memoryview) -> int:
    """Read from byte `start` of a file on into the beginning of `view`; return the bytes read, 0 at the file's end."""
    if isinstance(stream, ObjectReader):
        return stream.read_some(start, view)
    return os.preadv(stream.fileno(), [view], start)


def read_at(stream: RawFile, start: int, size: int) -> bytes:
    """Read up to `size` bytes, a small number, from byte `start` of a file on."""
    content = bytearray(size)
    return bytes(content[: read_some(stream, start, memoryview(content))])


def read_into(stream: RawFile, start: int, view: memoryview) -> None:
    """Fill `view` with the bytes of a file from `start` on. Raises EOFError if the file ends too early."""
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
    """Return the CRC-32 of `size` bytes of a file from byte `start` on. Raises EOFError if the file ends too early."""
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
