"""Paths of objects, `s3://bucket/prefix/name`, with the part of pathlib's interface that data and checkpoints need.

fsspec has an implementation for each protocol, in a package of its own (s3fs, gcsfs, adlfs, ...). Credentials and
endpoints are found where that package looks for them: environment variables such as AWS_ENDPOINT_URL, files such as
~/.aws/credentials, the role of the machine, or fsspec's own settings (`FSSPEC_S3_...`, ~/.config/fsspec). They are no
keys of a config, since configs are written into checkpoints.

fsspec's implementations try again by themselves where a connection fails. What still fails after that is tried again
here, a bounded number of times. An `ObjectStoreError` names the URL, what failed, and what would work.

An object appears when it is written completely, and never half (`PUT`, or the end of a multipart upload). There are no
folders: a prefix of objects is called one here.
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
"""Seconds before each further attempt of reading or writing contents."""
_SHORT_DELAYS = (1.0,)  # of finding out what there is, so that a wrong address is told soon

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
    """Object storage could not do what was asked; says where, what and what would work.

    `is_transient`: it may work later, so a job may be started again.
    """

    def __init__(self, text: str, is_transient: bool = True) -> None:
        super().__init__(errno.EHOSTUNREACH, text)
        self.is_transient = is_transient

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStoreError, (self.strerror, self.is_transient)

    def __str__(self) -> str:
        return str(self.strerror)


def is_transient(error: BaseException) -> bool:
    """Whether `error` is of object storage and may not come again."""
    return isinstance(error, ObjectStoreError) and error.is_transient


def is_url(path: object) -> bool:
    """Whether `path` is a URL, `protocol://...`, and no local path."""
    return "://" in str(path)


@dataclass(frozen=True)
class Version:
    """Size in bytes of an object, and its ETag, or whatever else the storage changes with its content."""

    size: int
    tag: str


@dataclass(frozen=True, order=True)
class ObjectPath:
    """An object, or the prefix of several. Methods raise ObjectStoreError, and FileNotFoundError where nothing is."""

    url: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", self.url.rstrip("/"))

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.url.rpartition("/")[0])

    def with_name(self, name: str) -> ObjectPath:
        return self.parent / name

    @property
    def suffixes(self) -> list[str]:
        return Path(self.name).suffixes

    # --- what there is ---

    def exists(self) -> bool:
        return self._kind() is not None

    def is_file(self) -> bool:
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Whether there are objects with this prefix."""
        return self._kind() == "directory"

    def _kind(self) -> str | None:
        try:  # fsspec's own exists, isfile and isdir take every error for an answer
            return str(self._call(lambda fs, path: fs.info(path), _SHORT_DELAYS)["type"])
        except FileNotFoundError:
            return None

    def iterdir(self) -> Iterator[ObjectPath]:
        """The objects and prefixes right under this one; none where there is nothing."""
        names = self._call(_list, _SHORT_DELAYS)
        yield from (self / name.rstrip("/").rpartition("/")[2] for name in sorted(names))

    def glob(self) -> list[ObjectPath]:
        """The objects and prefixes that match this path as a pattern."""
        return self._call(lambda fs, path: [ObjectPath(fs.unstrip_protocol(name)) for name in fs.glob(path)])

    def sizes(self) -> dict[str, int]:
        """Bytes of all objects with this prefix, by their names in it; empty where there are none."""

        def find(fs: Any, path: str) -> dict[str, int]:
            infos = fs.find(path, detail=True)
            return {name.removeprefix(path).lstrip("/"): int(info["size"]) for name, info in infos.items()}

        return self._call(find, _SHORT_DELAYS)

    def modified(self) -> datetime.datetime:
        """When the object was written, by the storage's clock."""
        return self._call(lambda fs, path: fs.modified(path), _SHORT_DELAYS)

    def version(self) -> Version:
        """Size and version of the object."""
        info = self._call(lambda fs, path: fs.info(path), _SHORT_DELAYS)
        if info.get("type") != "file":
            raise FileNotFoundError(errno.ENOENT, "no such object", self.url)
        keys = [key for key in (*_VERSION_KEYS, *_LOCAL_VERSION_KEYS) if info.get(key)][:1]
        return Version(int(info["size"]), " ".join(str(info[key]) for key in keys))

    def stat(self) -> os.stat_result:
        """A result of which st_size alone is meaningful."""
        return os.stat_result((0, 0, 0, 0, 0, 0, self.version().size, 0, 0, 0))

    # --- reading ---

    def read_bytes(self) -> bytes:
        return self._call(lambda fs, path: fs.cat_file(path))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def read_range(self, start: int, end: int) -> bytes:
        """The bytes `[start, end)`; fewer where the object ends before."""
        if start >= end:
            return b""
        return self._call(lambda fs, path: fs.cat_file(path, start=start, end=end))

    def open(self, mode: str = "rb") -> BinaryIO:
        """A buffered file to be read (rb) or written from beginning to end (wb), which appears when it is closed."""
        assert mode in ("rb", "wb"), mode
        return cast(BinaryIO, self._call(lambda fs, path: fs.open(path, mode), _SHORT_DELAYS))

    # --- changing ---

    def write_bytes(self, content: bytes) -> None:
        self._call(lambda fs, path: fs.pipe_file(path, content))

    def create(self, content: bytes) -> bool:
        """Write the object unless there is one; whether it was written. One of several writers succeeds."""

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
        """`action` of the file system and the path in it, again after each of `delays` where it may help."""
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
    """Return the local path or the URL that a text names; `~` begins the home folder, and file:// is local."""
    if isinstance(path, Path | ObjectPath):
        return path
    text = os.path.expanduser(path)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return ObjectPath(text) if is_url(text) else Path(text)


_filesystems: dict[tuple[int, str], Any] = {}
_lock = threading.Lock()


def filesystem(url: str) -> Any:
    """The process's file system for the protocol of `url`, for all threads; fsspec makes one for each thread.

    Listings are not cached, as other processes write.
    """
    key = os.getpid(), url.partition("://")[0]
    with _lock:
        if key not in _filesystems:
            _filesystems[key] = fsspec.filesystem(key[1], use_listings_cache=False, skip_instance_cache=True)
        return _filesystems[key]


def url_problem(path: str) -> tuple[str, str] | None:
    """What is wrong with `path`, a local one or a URL, and what would work; None if nothing is. Contacts no storage."""
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
    """Whether another attempt would fail as well."""
    kinds = (ImportError, ValueError, TypeError, NotImplementedError, FileExistsError, IsADirectoryError)
    return isinstance(error, kinds) or _is_credentials(error)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _explain(url: str, error: Exception) -> str:
    """What is wrong, and what would work."""
    protocol = url.partition("://")[0]
    if isinstance(error, ImportError):
        package = known_implementations.get(protocol, {}).get("class", "").partition(".")[0]
        install = install_command("s3") if package == "s3fs" else f"pip install {package}"
        return f"{protocol}:// needs the package {package}, which is not installed; {install}"
    if isinstance(error, ValueError) and "rotocol not known" in str(error):
        return f"fsspec knows no protocol {protocol}://; known are s3, gs, az, file, memory and others"
    if _is_credentials(error):
        where = _CREDENTIALS.get(_ALIASES.get(protocol, protocol), "the settings of its fsspec implementation")
        return f"{_one_line(error)}; credentials with access to it are needed, in {where}"
    hint = "; check the address (AWS_ENDPOINT_URL) and the network" if _ALIASES.get(protocol, protocol) == "s3" else ""
    return f"{_one_line(error)}{hint}"
