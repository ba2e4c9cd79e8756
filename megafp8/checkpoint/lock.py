"""Lock file that lets one job at a time write to a run's checkpoints.

    <folder>/.lock   {"host": ..., "pid": ..., "pid_namespace": ..., "process_start": ..., "job": ...,
                      "replicas": ..., "restart": ..., "since": ..., "token": ...}

Two jobs in one folder would delete each other's incomplete checkpoints. So rank 0 creates this file before anything
else is changed, with O_EXCL, which is exclusive on local disks and on NFS (since version 3).

A killed job leaves the file behind. While a job lives, a thread touches the file every 15 seconds, so the file's age
tells whether its owner lives. The age is measured by the file system's clock (the server's on NFS), so clocks of hosts
may differ. A lock is taken over

- at once where the owner ran on this host and its process is gone (process numbers are reused, so the start time is
  compared too; they are valid within their PID namespace only, e.g. that of a container);
- at once where the owner was an earlier attempt of this very job, restarted by Slurm or torchrun;
- at once where the owner was a replica that the others have lost (`takes_over`), unless it writes before it leaves
  (`busy`);
- otherwise when its heartbeat is 2 minutes old. An attempt of the same job on another host waits for that: it may have
  been started, with restarts counted anew, because the owner's host is gone.

In object storage the file is created by a conditional PUT, which one of several writers succeeds in, and is touched by
writing it again. A job that takes over a lock there, without renames, checks after 3 seconds that it still has it.

Limit: an owner that hangs for longer (a suspended process, a stalled file system) may lose the lock while it lives. It
detects that by the token in the file before it next changes the folder, and stops.
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
    """Content of the lock file that this process writes."""
    environment = os.environ
    token = environment.get("MEGAFP8_LIGHTHOUSE_TOKEN")  # of all replicas of this job, and of no other
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
    """Whether process `us` knows that `owner`, both as lock files describe them, has ended."""
    if us["job"] and owner.get("job") == us["job"] and owner.get("restart", us["restart"]) < us["restart"]:
        return True
    return _is_here(owner, us) and process_start(owner["pid"]) != owner.get("process_start")


def is_replica(owner: dict[str, Any], us: dict[str, Any]) -> bool:
    """Whether `owner` and `us` are of replicas of one job."""
    return us["replicas"] is not None and owner.get("replicas") == us["replicas"]


def _is_here(owner: dict[str, Any], us: dict[str, Any]) -> bool:
    """Whether `owner` runs on the host and in the PID namespace of `us`."""
    this_host = (us["host"], us["pid_namespace"])
    return us["pid_namespace"] is not None and (owner.get("host"), owner.get("pid_namespace")) == this_host


def may_be_restarted(owner: dict[str, Any], us: dict[str, Any]) -> bool:
    """Whether `owner` may be an attempt of this job whose host is gone."""
    return bool(us["job"]) and owner.get("job") == us["job"] and not _is_here(owner, us)


def _read(file: AnyPath) -> dict[str, Any]:
    """The owner that a lock file names; empty where it is unreadable. FileNotFoundError where there is no file."""
    try:
        owner = parse_json(file.read_bytes())
    except (FileNotFoundError, ObjectStoreError):
        raise
    except (ValueError, OSError):
        return {}
    return owner if isinstance(owner, dict) and {"host", "pid", "token"} <= owner.keys() else {}


def _age(file: AnyPath) -> float:
    """Seconds since `file` was touched, both by the file system's clock."""
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
    """Context manager that holds the lock of `folder`. Collective over the world; rank 0 locks.

    Entering raises FolderInUse where another job holds it, naming owner and age, with nothing changed; ValueError where
    what has the lock's name is no file; RuntimeError where the folder cannot be written to.
    """

    def __init__(self, folder: AnyPath | str, *, takes_over: bool = False) -> None:
        """`takes_over`: from another replica of this job, which has been lost (`megafp8.parallel.replicas`), at
        once."""
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
        """Raise RuntimeError on rank 0 if the lock was taken over or removed; called before the folder is changed."""
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
        """Context in which no replica takes the lock over while this process lives: it writes."""
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
        """Whether the lock file is still the one that this process, rank 0, made."""
        try:
            return bool(_read(self.file).get("token") == self._us["token"])
        except FileNotFoundError:
            return False

    def _take(self) -> None:
        if isinstance(self.file, Path):
            self.file.parent.mkdir(parents=True, exist_ok=True)
        deadline, taken_over = None, False
        while not self._create() or (taken_over and not self._is_settled()):
            with contextlib.suppress(FileNotFoundError):  # released in between
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
        """ValueError where the lock's name is that of a folder or a symlink, which no job has made.

        A symlink to nothing exists, and yet has no owner or age: it would be waited for without end.
        """
        if isinstance(self.file, Path) and not stat.S_ISREG(self.file.lstat().st_mode):
            kind = "a symbolic link" if self.file.is_symlink() else "no file"
            raise ValueError(f"{self.file} is {kind}, and a lock is a file that a job has made; remove it")

    def _is_settled(self) -> bool:
        """Wait until no competitor that saw the former owner can remove the lock; whether it is ours then."""
        time.sleep(_SETTLING_SECONDS)
        return self.is_ours()

    def _create(self) -> bool:
        if isinstance(self.file, ObjectPath):
            # An attempt without an answer, which is made again, may have written it.
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
        """Remove the lock of `owner`: renamed first, in which one of several competitors succeeds."""
        if isinstance(self.file, ObjectPath):
            if _read(self.file).get("token") == owner.get("token"):
                self.file.unlink()
            return
        aside = self.file.with_name(f"{LOCK_FILE}.{self._us['token']}")
        os.rename(self.file, aside)
        try:
            if _read(aside).get("token") != owner.get("token"):  # somebody else took it over before: restore it
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self.file)
        finally:
            aside.unlink()

    def _refusal(self, owner: dict[str, Any], age: float) -> str:
        who = "an owner that it does not name"
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
            with contextlib.suppress(OSError):  # the next attempt may succeed; check() reports a lost lock
                if not self.is_ours():
                    continue
                if isinstance(self.file, ObjectPath):
                    self.file.write_bytes(to_json(self._us))
                else:
                    os.utime(self.file)
