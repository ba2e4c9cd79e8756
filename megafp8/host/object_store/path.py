"""Paths of objects, `s3://bucket/prefix/name`, with the part of pathlib's interface that data and checkpoints need.

fsspec has an implementation for each protocol, in a separate package (s3fs, gcsfs, adlfs, ...). That package finds
credentials and endpoints in environment variables such as AWS_ENDPOINT_URL, files such as ~/.aws/credentials, the role
of the machine, or fsspec's own settings (`FSSPEC_S3_...`, ~/.config/fsspec). They are not config keys, because configs
are written into checkpoints.

fsspec's implementations retry failed connections themselves. Operations that still fail are retried here, a limited
number of times. An `ObjectStoreError` names the URL, the failure, and what would work.

An object appears only when it is completely written (`PUT`, or the end of a multipart upload). There are no folders; a
common prefix of objects acts as one.
"""

from __future__ import annotations

import datetime
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from fsspec.registry import known_implementations

from megafp8.host.shipped import install_command

T = TypeVar("T")
logger = logging.getLogger(__name__)

DELAYS = (1.0, 4.0, 16.0)
"""Seconds before each further attempt to read or write contents."""
_SHORT_DELAYS = (1.0,)  # for lookups, so that a wrong address is reported soon

_VERSION_KEYS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "content_md5",
    "blob_id",
    "last_modified",
    "LastModified",
    "updated",
)
_LOCAL_VERSION_KEYS = ("mtime", "created")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, ~/.aws/credentials, or a role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or a service account of the machine",
    "hf": "HF_TOKEN, or hf auth login",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or a managed identity",
}
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az"}


class ObjectStoreError(OSError):
    """Failed operation of object storage. The message says where it failed, why, and what would work.

    `is_transient`: the operation may work later, so the job may be restarted.
    """

    def __init__(self, text: str, is_transient: bool = True) -> None:
        super().__init__(errno.EHOSTUNREACH, text)
        self.is_transient = is_transient

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStoreError, (self.strerror, self.is_transient)

    def __str__(self) -> str:
        return str(self.strerror)


def is_transient(error: BaseException) -> bool:
    """Return whether `error` is a failure of object storage that may disappear."""
    return isinstance(error, ObjectStoreError) and error.is_transient


def is_url(path: object) -> bool:
    """Return whether `path` is a URL, `protocol://...`, not a local path."""
    return "://" in str(path)


@dataclass(frozen=True)
class Version:
    """Size of an object in bytes, and its ETag or another value that the storage changes with the content."""

    size: int
    tag: str


@dataclass(frozen=True, order=True)
class ObjectPath:
    """Object, or common prefix of several objects.

    Methods raise ObjectStoreError, and FileNotFoundError if nothing exists.
    """

    url: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", self.url.rstrip("/"))

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """Path without its last part."""
        return ObjectPath(self.url.rpartition("/")[0])

    def with_name(self, name: str) -> ObjectPath:
        """Return the path with another last part."""
        return self.parent / name

    @property
    def suffixes(self) -> list[str]:
        """Suffixes of the name, as in pathlib."""
        return Path(self.name).suffixes

    # --- queries ---

    def exists(self) -> bool:
        """Return whether there is an object or a prefix of this name."""
        return self._kind() is not None

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Return whether there are objects with this prefix."""
        return self._kind() == "directory"

    def _kind(self) -> str | None:
        try:  # fsspec's own exists, isfile and isdir return False for every error
            return str(self._call(lambda fs, path: fs.info(path), _SHORT_DELAYS)["type"])
        except FileNotFoundError:
            return None

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield the objects and prefixes directly under this one, if any."""
        names = self._call(_list, _SHORT_DELAYS)
        yield from (self / name.rstrip("/").rpartition("/")[2] for name in sorted(names))

    def glob(self) -> list[ObjectPath]:
        """Return the objects and prefixes that match this path as a pattern."""
        return self._call(lambda fs, path: [ObjectPath(fs.unstrip_protocol(name)) for name in fs.glob(path)])

    def sizes(self) -> dict[str, int]:
        """Return the bytes of all objects with this prefix, by their names relative to it."""

        def find(fs: Any, path: str) -> dict[str, int]:
            infos = fs.find(path, detail=True)
            return {name.removeprefix(path).lstrip("/"): int(info["size"]) for name, info in infos.items()}

        return self._call(find, _SHORT_DELAYS)

    def modified(self) -> datetime.datetime:
        """Return the time at which the object was written, by the storage's clock."""
        return self._call(lambda fs, path: fs.modified(path), _SHORT_DELAYS)

    def version(self) -> Version:
        """Return the size and version of the object."""
        info = self._call(lambda fs, path: fs.info(path), _SHORT_DELAYS)
        if info.get("type") != "file":
            raise FileNotFoundError(errno.ENOENT, "no such object", self.url)
        keys = [key for key in (*_VERSION_KEYS, *_LOCAL_VERSION_KEYS) if info.get(key)][:1]
        return Version(int(info["size"]), " ".join(str(info[key]) for key in keys))

    def stat(self) -> os.stat_result:
        """Return a result in which only st_size is meaningful."""
        return os.stat_result((0, 0, 0, 0, 0, 0, self.version().size, 0, 0, 0))

    # --- reading ---

    def read_bytes(self) -> bytes:
        """Return the content of the object."""
        return self._call(lambda fs, path: fs.cat_file(path))

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the content of the object as text."""
        return self.read_bytes().decode(encoding)

    def read_range(self, start: int, end: int) -> bytes:
        """Return the bytes `[start, end)`; fewer if the object ends before."""
        if start >= end:
            return b""
        return self._call(lambda fs, path: fs.cat_file(path, start=start, end=end))

    def open(self, mode: str = "rb") -> BinaryIO:
        """Return a buffered file for reading (rb) or for writing from the beginning (wb).

        A written object appears when the file is closed.
        """
        assert mode in ("rb", "wb"), mode
        return cast(BinaryIO, self._call(lambda fs, path: fs.open(path, mode), _SHORT_DELAYS))

    # --- changing ---

    def write_bytes(self, content: bytes) -> None:
        """Write the content of the object, replacing an existing one."""
        self._call(lambda fs, path: fs.pipe_file(path, content))

    def create(self, content: bytes) -> bool:
        """Write the object unless it exists, and return whether it was written.

        Only one of several writers succeeds.
        """

        def put(fs: Any, path: str) -> bool:
            try:
                fs.pipe_file(path, content, mode="create")
            except FileExistsError:
                return False
            return True

        return self._call(put, ())

    def remove_tree(self) -> None:
        """Delete all objects with this prefix."""

        def remove(fs: Any, path: str) -> None:
            paths = fs.find(path)
            if paths:
                fs.rm(paths)

        self._call(remove)

    def unlink(self) -> None:
        """Delete the object, if it is there."""

        def remove(fs: Any, path: str) -> None:
            try:
                fs.rm_file(path)
            except FileNotFoundError:
                return

        self._call(remove)

    def copy_to(self, target: ObjectPath) -> None:
        """Copy the object within the storage."""
        self._call(lambda fs, path: fs.copy(path, fs._strip_protocol(target.url)))

    def _call(self, action: Callable[[Any, str], T], delays: tuple[float, ...] = DELAYS) -> T:
        """Call `action` with the file system and the path within it. Retry after each of `delays` if that may help."""
        for delay in (*delays, None):
            try:
                fs = filesystem(self.url)
                return action(fs, fs._strip_protocol(self.url))
            except FileNotFoundError as error:
                what = "bucket" if "bucket does not exist" in str(error) else "object"
                raise FileNotFoundError(errno.ENOENT, f"no such {what}", self.url) from None
            except Exception as error:
                if delay is None or _is_final(error):
                    text = f"{self.url} cannot be used: {_explain(self.url, error)}"
                    raise ObjectStoreError(text, is_transient=not _is_final(error)) from error
                logger.warning("%s: %s; next attempt in %g s", self.url, _one_line(error), delay)
                time.sleep(delay)
        raise AssertionError


AnyPath = Path | ObjectPath


def as_path(path: str | Path | ObjectPath) -> AnyPath:
    """Return the local path or the URL that a text names. `~` is the home folder, and file:// is local."""
    if isinstance(path, Path | ObjectPath):
        return path
    text = os.path.expanduser(path)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return ObjectPath(text) if is_url(text) else Path(text)


_filesystems: dict[tuple[int, str], Any] = {}
_lock = threading.Lock()


def filesystem(url: str) -> Any:
    """Return the process's file system for the protocol of `url`, shared by all threads; fsspec has one per thread.

    Listings are not cached, because other processes write.
    """
    key = os.getpid(), url.partition("://")[0]
    with _lock:
        if key not in _filesystems:
            _filesystems[key] = fsspec.filesystem(key[1], use_listings_cache=False, skip_instance_cache=True)
        return _filesystems[key]


def url_problem(path: str) -> tuple[str, str] | None:
    """Return the problem of a path or URL and what would work, or None if it is valid. Contacts no storage."""
    protocol, _, rest = path.partition(":/")
    if protocol in known_implementations and rest and not rest.startswith("/"):
        return "a URL has two slashes after its protocol", f"try {protocol}://{rest}"
    if not is_url(path) or protocol == "file":
        return None
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        rule, _, works = _explain(path, error).partition("; ")
        return rule, works
    return None


def _list(fs: Any, path: str) -> list[str]:
    try:
        names = fs.ls(path, detail=False)
    except FileNotFoundError:
        return []
    return [name for name in names if name.rstrip("/") != path.rstrip("/")]


def _is_credentials(error: Exception) -> bool:
    return isinstance(error, PermissionError) or "Credential" in type(error).__name__


def _is_final(error: Exception) -> bool:
    """Return whether another attempt would fail, too."""
    kinds = (ImportError, ValueError, TypeError, NotImplementedError, FileExistsError, IsADirectoryError)
    return isinstance(error, kinds) or _is_credentials(error)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _explain(url: str, error: Exception) -> str:
    """Return what is wrong, and what would work."""
    protocol = url.partition("://")[0]
    if isinstance(error, ImportError):
        package = known_implementations.get(protocol, {}).get("class", "").partition(".")[0]
        install = install_command("s3") if package == "s3fs" else f"pip install {package}"
        return f"{protocol}:// needs the package {package}, which is not installed; {install}"
    if isinstance(error, ValueError) and "rotocol not known" in str(error):
        return f"fsspec knows no protocol {protocol}://; it knows s3, gs, az, file, memory and others"
    if _is_credentials(error):
        where = _CREDENTIALS.get(_ALIASES.get(protocol, protocol), "the settings of its fsspec implementation")
        return f"{_one_line(error)}; credentials with access to it are needed, in {where}"
    hint = "; check the address (AWS_ENDPOINT_URL) and the network" if _ALIASES.get(protocol, protocol) == "s3" else ""
    return f"{_one_line(error)}{hint}"
