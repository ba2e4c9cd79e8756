"""Folders of this user on the node: the package's folder in the user's cache, and private folders in shared places."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/megafp8`, by default `~/.cache/megafp8` (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megafp8"


def make_own_folder(path: Path) -> None:
    """Make the folder `path`, or accept it if it is a real directory of this user.

    For predictable names of folders whose contents are replaced or deleted: a symlink would lead to other folders.
    ValueError otherwise.
    """
    _make(path, private=False)


def make_private_folder(path: Path) -> None:
    """Make the folder `path`, or accept it if it is there and no other user can have put or can put anything into it.

    For predictable names in folders that all users may write to, such as /dev/shm: another user may have made the
    folder, or a symlink by which files elsewhere would be read, replaced or deleted. ValueError unless it is a real
    directory of this user that no group and no other user may write to.
    """
    _make(path, private=True)


def _make(path: Path, *, private: bool) -> None:
    """Make the folder `path`. ValueError if it exists and is not a real directory owned by this user.

    `private`: it is made with mode 0700, and refused if group or others may write to it.
    """
    with contextlib.suppress(FileExistsError):  # exist_ok=True would accept a symlink and refuse a dangling one
        path.mkdir(mode=0o700 if private else 0o777)
    found = path.lstat()  # after mkdir: in a sticky folder nobody else can replace what is this user's
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no directory"
        problem = f"is {kind} of user {found.st_uid}"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
    elif private and found.st_mode & 0o022:
        problem = f"may be written to by other users (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return
    raise ValueError(
        f"{path} {problem}; it must be a directory of this user{' alone' * private}: remove it, or use another folder"
    )
