"""Lock file that lets one job at a time write to a run's checkpoints.

    <folder>/.lock   {"host": ..., "pid": ..., "pid_namespace": ..., "process_start": ..., "job": ...,
                      "replicas": ..., "restart": ..., "since": ..., "token": ...}

Two jobs in one folder would delete each other's incomplete checkpoints. So rank 0 creates this file before it changes
anything else. It uses O_EXCL, which is exclusive on local disks and on NFS (since version 3).

A killed job leaves the file behind. While a job is alive, a thread touches the file every 15 seconds, so the file's age
tells whether its owner is alive. The age is measured by the file system's clock (the server's clock on NFS), so the
clocks of the hosts may differ. A job takes over a lock

- immediately, if the owner ran on this host and its process is gone. Process numbers are reused, so start times are
  compared, too. Process numbers are only valid within their PID namespace, for example within a container;
- immediately, if the owner was an earlier attempt of this job, which Slurm or torchrun has restarted;
- immediately, if the owner was a replica that the other replicas have lost (`takes_over`), unless that replica is still
  writing before it leaves (`busy`);
- otherwise, once the owner's last heartbeat is 2 minutes old. An attempt of the same job on another host waits for
  this: the job may have been started anew, with its restarts counted from 0, because the owner's host is gone.

In object storage, the file is created by a conditional PUT, which succeeds for only one of several writers, and is
touched by writing it again. Object storage has no renames, so a job that takes over a lock there checks after 3 seconds
that it still owns the lock.

Limit: an owner that hangs for more than 2 minutes (a suspended process, a stalled file system) may lose the lock while
it is alive. It notices this by the token in the file before it next changes the folder, and stops.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import os
import socket
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from megafp8.checkpoint.errors import FolderInUse, group_or_world, on_all_ranks
from megafp8.checkpoint.files import to_json
from megafp8.host.object_store import AnyPath, ObjectPath, ObjectStoreError, as_path
from megafp8.host.processes import pid_namespace, process_start
from megafp8.host.strict_json import parse_json
from megafp8.parallel import collectives

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
HEARTBEAT_SECONDS = 15.0
STALE_SECONDS = 120.0
_SETTLING_SECONDS = 3.0


def describe_this_process() -> dict[str, Any]:
    """Return the content of the lock file that this process writes."""
    environment = os.environ
    token = environment.get("MEGAFP8_LIGHTHOUSE_TOKEN")  # shared by all replicas of this job, and by no other job
    elastic = environment.get("TORCHELASTIC_RUN_ID", "")
    job = environment.get("SLURM_JOB_ID") or ("" if elastic == "none" else elastic)
    restarts = (environment.get(name, "0") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_namespace": pid_namespace(),
        "process_start": process_start("self"),
        "job": job,
        "replicas": hashlib.sha256(token.encode()).hexdigest()[:16] if token else None,
        "restart": sum(int(number) for number in restarts if number.isdigit()),
        "since": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "token": uuid.uuid4().hex,
    }


def is_over(owner: dict[str, Any], us: dict[str, Any]) -> bool:
    """Return whether process `us` knows that `owner` has ended. Both are given as a lock file describes them."""
    if us["job"] and owner.get("job") == us["job"] and owner.get("restart", us["restart"]) < us["restart"]:
        return True
    return _is_here(owner, us) and process_start(owner["pid"]) != owner.get("process_start")


def is_replica(owner: dict[str, Any], us: dict[str, Any]) -> bool:
    """Return whether `owner` and `us` belong to replicas of the same job."""
    return us["replicas"] is not None and owner.get("replicas") == us["replicas"]


def _is_here(owner: dict[str, Any], us: dict[str, Any]) -> bool:
    """Return whether `owner` runs on the host and in the PID namespace of `us`."""
    this_host = (us["host"], us["pid_namespace"])
    return us["pid_namespace"] is not None and (owner.get("host"), owner.get("pid_namespace")) == this_host


def may_be_restarted(owner: dict[str, Any], us: dict[str, Any]) -> bool:
    """Return whether `owner` may be an earlier attempt of this job, on a host that is gone."""
    return bool(us["job"]) and owner.get("job") == us["job"] and not _is_here(owner, us)


def _read(file: AnyPath) -> dict[str, Any]:
    """Return the owner that a lock file names; empty if unreadable. Raises FileNotFoundError if there is no file."""
    try:
        owner = parse_json(file.read_bytes())
    except (FileNotFoundError, ObjectStoreError):
        raise
    except (ValueError, OSError):
        return {}
    return owner if isinstance(owner, dict) and {"host", "pid", "token"} <= owner.keys() else {}


def _age(file: AnyPath) -> float:
    """Return the seconds since `file` was last touched, measured by the file system's clock."""
    if isinstance(file, ObjectPath):
        probe_object = file.with_name(f".now-{uuid.uuid4().hex}")
        probe_object.write_bytes(b"")
        try:
            return max(0.0, (probe_object.modified() - file.modified()).total_seconds())
        finally:
            probe_object.unlink()
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".now-") as probe:
        return max(0.0, os.fstat(probe.fileno()).st_mtime - file.stat().st_mtime)


class FolderLock:
    """Context manager that holds the lock of a folder. Collective over the world; rank 0 locks.

    Entering the context raises

    - FolderInUse, with the owner and the lock's age, if another job holds the lock. Nothing is changed;
    - ValueError if the lock's path exists and is not a regular file;
    - RuntimeError if the folder is not writable.
    """

    def __init__(self, folder: AnyPath | str, *, takes_over: bool = False) -> None:
        """Describe the lock without taking it.

        Args:
            folder: Folder to lock.
            takes_over: Whether to take over, without waiting, the lock of another replica of this job that has been
                lost (`megafp8.parallel.replicas`).
        """
        self._takes_over = takes_over
        self.file = as_path(folder) / LOCK_FILE
        self._group = group_or_world()
        self._is_rank0 = collectives.rank(self._group) == 0
        self._us = describe_this_process()
        self._released = threading.Event()

    def __enter__(self) -> FolderLock:
        on_all_ranks(lambda: self._take() if self._is_rank0 else None, self._group)
        if self._is_rank0:
            threading.Thread(target=self._beat, name="checkpoint lock", daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._released.set()
        if self._is_rank0:
            with contextlib.suppress(OSError):
                if self.is_ours():
                    self.file.unlink()

    def check(self) -> None:
        """Raise RuntimeError on rank 0 if the lock was taken over or removed. Call this before changing the folder."""
        if not self._is_rank0 or self.is_ours():
            return
        try:
            owner = _read(self.file)
        except FileNotFoundError:
            owner = {}
        who = f"host {owner['host']}, process {owner['pid']}, took it over" if owner else "it was removed"
        raise RuntimeError(
            f"{self.file} is no longer ours: {who}. Two jobs must not write to one folder, so this one stops"
        )

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Return a context for writing, in which no replica takes over the lock while this process is alive."""
        self._describe(busy=True)
        try:
            yield
        finally:
            self._describe(busy=False)

    def _describe(self, *, busy: bool) -> None:
        if self._is_rank0 and self.is_ours():
            self._us["busy"] = busy
            if isinstance(self.file, ObjectPath):
                self.file.write_bytes(to_json(self._us))
                return
            new = self.file.with_name(f"{LOCK_FILE}.{self._us['token']}.new")
            new.write_bytes(to_json(self._us))
            os.replace(new, self.file)

    def is_ours(self) -> bool:
        """Return whether the lock file is still the one that this process created. Rank 0 only."""
        try:
            return bool(_read(self.file).get("token") == self._us["token"])
        except FileNotFoundError:
            return False

    def _take(self) -> None:
        if isinstance(self.file, Path):
            self.file.parent.mkdir(parents=True, exist_ok=True)
        deadline, taken_over = None, False
        while not self._create() or (taken_over and not self._is_settled()):
            with contextlib.suppress(FileNotFoundError):  # the owner may release the lock at any time
                self._check_is_file()
                owner, age = _read(self.file), _age(self.file)
                replaces = self._takes_over and is_replica(owner, self._us)
                if (replaces and not owner.get("busy")) or (owner and is_over(owner, self._us)) or age >= STALE_SECONDS:
                    self._remove(owner)
                    taken_over = isinstance(self.file, ObjectPath)
                elif (replaces or may_be_restarted(owner, self._us)) and (
                    deadline is None or time.monotonic() < deadline
                ):
                    if deadline is None:
                        deadline = time.monotonic() + STALE_SECONDS + HEARTBEAT_SECONDS
                        logger.warning(
                            f"{self.file} is held by this job on {owner['host']}; waiting until "
                            f"{STALE_SECONDS:.0f} s after its last heartbeat"
                        )
                    time.sleep(min(1.0, STALE_SECONDS / 10))
                else:
                    raise FolderInUse(self._refusal(owner, age))

    def _check_is_file(self) -> None:
        """Raise ValueError if the lock's path is a folder or a symlink, which no job has created.

        A dangling symlink exists but has no owner or age, so the job would wait for it forever.
        """
        if isinstance(self.file, Path) and not stat.S_ISREG(self.file.lstat().st_mode):
            kind = "a symbolic link" if self.file.is_symlink() else "not a regular file"
            raise ValueError(f"{self.file} is {kind}, but jobs create locks as regular files; remove it")

    def _is_settled(self) -> bool:
        """Wait until no competitor that saw the former owner can still remove the lock; return whether it is ours."""
        time.sleep(_SETTLING_SECONDS)
        return self.is_ours()

    def _create(self) -> bool:
        if isinstance(self.file, ObjectPath):
            # A request that got no response is repeated, and may have written the file the first time.
            return self.file.create(to_json(self._us)) or self.is_ours()
        try:
            handle = os.open(self.file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with open(handle, "wb") as stream:
            stream.write(to_json(self._us))
            stream.flush()
            os.fsync(handle)
        return True

    def _remove(self, owner: dict[str, Any]) -> None:
        """Remove the lock of `owner`. The file is first renamed, which succeeds for only one of several competitors."""
        if isinstance(self.file, ObjectPath):
            if _read(self.file).get("token") == owner.get("token"):
                self.file.unlink()
            return
        aside = self.file.with_name(f"{LOCK_FILE}.{self._us['token']}")
        os.rename(self.file, aside)
        try:
            if _read(aside).get("token") != owner.get("token"):  # another job has taken it over: restore its lock
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self.file)
        finally:
            aside.unlink()

    def _refusal(self, owner: dict[str, Any], age: float) -> str:
        who = "an unknown owner"
        if owner:
            job = f" of job {owner['job']}" if owner.get("job") else ""
            who = f"process {owner['pid']} on {owner['host']}{job}, since {owner.get('since')}"
        return (
            f"{self.file.parent} is in use by another job: {who}; last heartbeat {age:.0f} s ago. Choose another "
            f"name for this run, or stop that job. If it is dead, its lock is taken over {STALE_SECONDS:.0f} s after "
            f"its last heartbeat; or remove {self.file} yourself"
        )

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # the next heartbeat may succeed; check() reports a lost lock
                if not self.is_ours():
                    continue
                if isinstance(self.file, ObjectPath):
                    self.file.write_bytes(to_json(self._us))
                else:
                    os.utime(self.file)
