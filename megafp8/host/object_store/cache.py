"""Cache of objects on local disk, shared by all processes of a node.

Small objects are stored whole, large objects in blocks.

    <folder>/whole/<key>             an object that is needed as a whole, such as the index of a data set
    <folder>/folders/<key>/          hard links to whole objects: a copy of all objects with a common prefix
    <folder>/blocks/<key>.<number>   bytes [number · block size, ...) of an object, then the CRC-32 of these bytes
    <folder>/.size                   bytes of all blocks; locked by `flock` while blocks are added or deleted
    <folder>/locks/                  locked by `flock` while something is downloaded

`key` is a hash of URL, size and version (ETag), so blocks of two versions of an object are never mixed. After a block
is downloaded, the object's version is read again. If it has changed meanwhile, ObjectChanged is raised.

Several processes. A file is written under a temporary name and renamed, so it is either complete or absent. One process
downloads a block, and the others that need it wait. Locks end with their process. If the owner of a lock has downloaded
nothing for a minute, a waiting process downloads, too. So no process waits forever for another one.

Limit. If a new block would exceed the limit, the least recently read blocks are deleted first. A temporary file gets
its full size before it is written, and counts. Whole objects do not count, because a run needs them all the time. A
process that reads a block does not keep the file open, so the space of a deleted block is free at once.

After a crash of the machine, a block may hold other bytes than were written. Therefore each process compares the CRC-32
of a block before its first read. If the disk is full, blocks are used without being stored, with a warning.

Reading ahead. `fetch_ahead` queues blocks that will be read soon, and threads download several at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from megafp8.host.object_store.path import ObjectPath, ObjectStoreError, Version
from megafp8.host.user_cache import user_cache

logger = logging.getLogger(__name__)


def default_cache() -> Path:
    """Return the default folder of cached objects, local to the node and the user."""
    return user_cache() / "objects"


DEFAULT_LIMIT = 64 * 2**30
DEFAULT_BLOCK = 4 * 2**20
THREADS = 16
"""Number of concurrent downloads per process."""
_STALE_SECONDS = 60.0
_POLL_SECONDS = 0.02
_CRC = struct.Struct("<I")
_KEPT = 0.9  # fraction of the limit that remains after deletion, so that not every block needs a deletion
_LOCKS = 1024


class ObjectChanged(Exception):
    """Object that differs from the version that was opened."""


@dataclass(frozen=True)
class CachedObject:
    """Version of an object, and the cache through which its contents are read. It can be pickled."""

    path: ObjectPath
    version: Version
    cache: ObjectCache

    @property
    def size(self) -> int:
        """Size of the object in bytes."""
        return self.version.size

    @cached_property
    def key(self) -> str:
        """Hash of URL, size and version, for file names in the cache."""
        text = f"{self.path.url}\n{self.version.size}\n{self.version.tag}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def download(self) -> Path:
        """Return a local file with the whole content. Raises OSError and ObjectChanged."""
        return self.cache.whole(self)

    def read(self, start: int, end: int) -> bytearray:
        """Return the bytes `[start, end)`, which must be within the object. Raises OSError and ObjectChanged."""
        assert 0 <= start <= end <= self.size
        content, size = bytearray(end - start), self.cache.block_bytes
        for number in range(start // size, -(-end // size) if end > start else start // size):
            first = number * size
            low, high = max(start, first), min(end, first + size)
            content[low - start : high - start] = self.cache.read(self, number, low - first, high - first)
        return content

    def fetch_ahead(self, start: int, end: int) -> None:
        """Start to download the blocks that `read` of these bytes will need."""
        size = self.cache.block_bytes
        for number in range(start // size, -(-end // size)):
            self.cache.fetch_ahead(self, number)

    def fetch_range(self, start: int, end: int) -> bytes:
        """Return the bytes `[start, end)` directly from the storage. Raises OSError and ObjectChanged."""
        content = self.path.read_range(start, end)
        self.check()
        if len(content) != end - start:
            raise ObjectStoreError(f"{self.path}: got {len(content):,} of {end - start:,} bytes at position {start:,}")
        return content

    def check(self) -> None:
        """Raise ObjectChanged if the object has changed or no longer exists."""
        try:
            now = self.path.version()
        except FileNotFoundError:
            now = None
        if now != self.version:
            present = "it no longer exists" if now is None else f"{now.size:,} bytes, version {now.tag}"
            raise ObjectChanged(
                f"{self.path} has changed since it was opened ({self.size:,} bytes, version {self.version.tag}; now "
                f"{present}); restore it, or give the new contents another name"
            )


@dataclass(frozen=True)
class ObjectCache:
    """Folder on local disk with blocks of at most `limit_bytes` in total. It can be pickled."""

    folder: Path
    limit_bytes: int = DEFAULT_LIMIT
    block_bytes: int = DEFAULT_BLOCK
    _verified: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    _pending: dict[tuple[str, int], Future[None]] = field(default_factory=dict, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectCache, (self.folder, self.limit_bytes, self.block_bytes)

    def open(self, path: ObjectPath) -> CachedObject:
        """Return the current version of an object. Raises OSError."""
        return CachedObject(path, path.version(), self)

    # --- whole objects ---

    def whole(self, obj: CachedObject) -> Path:
        """Return a local file with the whole object, downloaded if necessary. Raises OSError and ObjectChanged."""
        target = self.folder / "whole" / obj.key
        with self._download_lock(obj.key, target.exists) as touch:
            if target.exists() and target.stat().st_size == obj.size:
                return target
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".part-")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    os.truncate(file.fileno(), obj.size)
                    pieces = range(0, obj.size, 2**25)

                    def fetch(start: int) -> None:
                        content = obj.path.read_range(start, min(obj.size, start + 2**25))
                        os.pwrite(file.fileno(), content, start)
                        touch()

                    with ThreadPoolExecutor(8) as executor:
                        list(executor.map(fetch, pieces))
                    obj.check()
                    os.fsync(file.fileno())
                os.replace(temporary, target)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        return target

    def whole_folder(self, path: ObjectPath) -> Path:
        """Return a local folder with all objects under the prefix `path`. Raises OSError and ObjectChanged."""
        objects = {name: self.open(path / name) for name in sorted(path.sizes())}
        if not objects:
            raise FileNotFoundError(errno.ENOENT, "no such object", path.url)
        keys = hashlib.sha256("\n".join(f"{name} {obj.key}" for name, obj in objects.items()).encode())
        target = self.folder / "folders" / keys.hexdigest()[:32] / path.name
        for name, obj in objects.items():
            content = obj.download()
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(content, target / name)
        return target

    # --- blocks ---

    def read(self, obj: CachedObject, number: int, start: int, end: int) -> bytes:
        """Return the bytes `[start, end)` of block `number`."""
        pending = self._pending.get((obj.key, number))
        if pending is not None and not pending.cancel():
            with contextlib.suppress(Exception):  # the download is tried again below
                pending.result()
        content = self._stored(obj, number, start, end)
        if content is None:
            content = self._fetch(obj, number)[start:end]
        return content

    def fetch_ahead(self, obj: CachedObject, number: int) -> None:
        """Start to download block `number`, unless it is stored already."""
        key = (obj.key, number)
        if key in self._pending or self._path(obj, number).exists():
            return

        def fetch() -> None:
            try:
                if threading.main_thread().is_alive() and self._stored(obj, number, 0, 0) is None:
                    self._fetch(obj, number)
            finally:
                self._pending.pop(key, None)

        future = _executor(os.getpid()).submit(fetch)
        self._pending[key] = future
        future.add_done_callback(lambda _: self._pending.pop(key, None))

    def _path(self, obj: CachedObject, number: int) -> Path:
        return self.folder / "blocks" / f"{obj.key}.{self.block_bytes}.{number}"

    def _stored(self, obj: CachedObject, number: int, start: int, end: int) -> bytes | None:
        """Return the bytes `[start, end)` of a stored block, or None if it is missing or damaged.

        A damaged block is deleted.
        """
        path = self._path(obj, number)
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
            if self._verified.get(path.name) != status.st_ino:
                size = min(self.block_bytes, obj.size - number * self.block_bytes)
                content = os.pread(descriptor, size + _CRC.size, 0)
                if content[size:] != _CRC.pack(zlib.crc32(content[:size])):
                    logger.warning("%s is damaged: its CRC-32 does not match; it is downloaded again", path)
                    path.unlink(missing_ok=True)
                    return None
                self._verified[path.name] = status.st_ino
            if time.time() - status.st_mtime > 1:
                os.utime(descriptor)
            content = os.pread(descriptor, end - start, start)
            return content if len(content) == end - start else None
        except OSError as error:
            logger.warning("%s cannot be read: %s", path, error)
            return None
        finally:
            os.close(descriptor)

    def _fetch(self, obj: CachedObject, number: int) -> bytes:
        """Download a block, or wait until another process has downloaded it, and return its content."""
        first = number * self.block_bytes
        end = min(obj.size, first + self.block_bytes)
        path = self._path(obj, number)
        with self._download_lock(path.name, path.exists):
            stored = self._stored(obj, number, 0, end - first)
            if stored is not None:
                return stored
            content = obj.fetch_range(first, end)
            try:
                self._store(path, content)
            except OSError as error:
                logger.warning("%s is used without being stored in the cache: %s", path.name, error)
        return content

    def _store(self, path: Path, content: bytes) -> None:
        """Add a block. Delete others first if necessary."""
        size = len(content) + _CRC.size
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
        with _held(self.folder / ".size", _STALE_SECONDS) as locked:
            if locked is None:
                raise OSError(f"{self.folder / '.size'} is locked by a process that does not respond")
            used = locked.read()
            if used is None or used + size > self.limit_bytes:
                used = self._evict(size)
            if used + size > self.limit_bytes:
                raise OSError(f"a block of {size:,} bytes does not fit into a limit of {self.limit_bytes:,}")
            with temporary.open("wb") as file:
                os.truncate(file.fileno(), size)
            locked.write(used + size)
        try:
            with temporary.open("r+b") as file:  # the mode keeps its size
                file.writelines([content, _CRC.pack(zlib.crc32(content))])
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _evict(self, needed: int) -> int:
        """Delete the least recently read blocks until there is room for `needed` bytes.

        Return the bytes of the remaining blocks.
        """
        files, now, folder = [], time.time(), self.folder / "blocks"
        for name in os.listdir(folder):
            temporary = name.startswith(".")
            # A file listed under its temporary name may be renamed before it is examined, and still counts.
            names = [name, name[1:].rpartition(".")[0]] if temporary else [name]
            for path in map(folder.joinpath, names):
                with contextlib.suppress(FileNotFoundError):
                    about = path.stat()
                    if temporary and now - about.st_mtime > 10 * _STALE_SECONDS:
                        path.unlink()  # left by a process that was killed
                    else:
                        files.append((temporary, about.st_mtime, about.st_size, path))
                    break
        total, room = sum(size for _, _, size, _ in files), int(self.limit_bytes * _KEPT)
        for temporary, _, size, path in sorted(files):
            if total + needed <= room or temporary:
                break
            path.unlink(missing_ok=True)
            total -= size
        return total

    @contextlib.contextmanager
    def _download_lock(self, name: str, done: Callable[[], bool]) -> Iterator[Callable[[], None]]:
        """Hold the lock called `name`, unless `done` returns True or the heartbeat of its owner has stopped.

        Yields a function that gives a heartbeat.
        """
        folder = self.folder / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / str(zlib.crc32(name.encode()) % _LOCKS), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            while not _try_lock(descriptor) and not done():
                if time.time() - os.fstat(descriptor).st_mtime > _STALE_SECONDS:
                    break
                time.sleep(_POLL_SECONDS)
            os.utime(descriptor)
            yield lambda: os.utime(descriptor)
        finally:
            os.close(descriptor)  # releases the lock


@lru_cache(maxsize=1)
def _executor(pid: int) -> ThreadPoolExecutor:
    """Return the threads of this process that read ahead."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="object cache")


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class _Number:
    """Number stored in an open file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self) -> int | None:
        """Return the number, or None if the file has no number."""
        text = os.pread(self._descriptor, 32, 0)
        return int(text) if text.isdigit() else None

    def write(self, number: int) -> None:
        """Write the number."""
        os.pwrite(self._descriptor, b"%020d" % number, 0)


@contextlib.contextmanager
def _held(path: Path, seconds: float) -> Iterator[_Number | None]:
    """Hold the lock of the file `path`, which contains a number. Yield None if others hold it for `seconds` seconds."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        end = time.monotonic() + seconds
        while not (locked := _try_lock(descriptor)) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS / 4)
        yield _Number(descriptor) if locked else None
    finally:
        os.close(descriptor)
