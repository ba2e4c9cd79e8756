"""Folders of this user on the node: the package's cache folder, and private folders in shared places."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


def user_cache() -> Path:
    """Return `$XDG_CACHE_HOME/megafp8`, by default `~/.cache/megafp8` (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megafp8"


def make_own_folder(path: Path, *, private: bool = False) -> None:
    """Create the folder `path`, or accept an existing real directory of this user. Raises ValueError otherwise.

    Use this for folders with predictable names and contents that are read, replaced or deleted: a symbolic link would
    lead to files elsewhere. Set `private` in places to which all users may write, such as /dev/shm, where another user
    may have created the folder or put something into it. A private folder gets mode 0700, and is rejected if group or
    others may write to it.
    """
    with contextlib.suppress(FileExistsError):  # exist_ok=True would accept a symlink and refuse a dangling one
        path.mkdir(mode=0o700 if private else 0o777)
    status = path.lstat()  # after mkdir: in a sticky folder, no other user can replace a folder of this user
    if not stat.S_ISDIR(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no directory"
        problem = f"is {kind} of user {status.st_uid}"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
    elif private and status.st_mode & 0o022:
        problem = f"may be written to by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    else:
        return
    raise ValueError(
        f"{path} {problem}; it must be a directory of this user{' alone' * private}: remove it, or use another folder"
    )
