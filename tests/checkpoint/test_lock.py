"""The folder's lock: one job at a time, and locks of dead jobs are taken over."""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.checkpoint import FolderInUse, FolderLock, complete_checkpoints, save
from megafp8.checkpoint import lock as lock_module
from megafp8.checkpoint.lock import LOCK_FILE, STALE_SECONDS, describe_this_process
from tests.world import World

W = {"w": torch.ones(3)}


def _write_lock(folder: Path, age: float = 0.0, **changes: Any) -> Path:
    """The lock of an owner that is this process but for `changes`, last touched `age` seconds ago."""
    file = folder / LOCK_FILE
    file.write_text(json.dumps({**describe_this_process(), **changes}))
    os.utime(file, (time.time() - age, time.time() - age))
    return file


def _is_taken(folder: Path) -> bool:
    try:
        with FolderLock(folder):
            return True
    except FolderInUse:
        return False


def test_a_second_job_is_refused_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with FolderLock(tmp_path / "checkpoints") as lock:
        before = lock.file.read_bytes()
        with pytest.raises(FolderInUse) as error, FolderLock(tmp_path / "checkpoints"):
            pass
        message = str(error.value)
        assert f"{tmp_path}/checkpoints is in use by another job: process {os.getpid()} on " in message
        assert " of job 4711, since 20" in message
        assert "last heartbeat 0 s ago" in message
        assert f"or remove {lock.file} yourself" in message
        assert [(file.name, file.read_bytes()) for file in lock.file.parent.iterdir()] == [(LOCK_FILE, before)]
        lock.check()
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert _is_taken(tmp_path / "checkpoints")


def _hold_and_die(folder: str) -> None:
    FolderLock(folder).__enter__()
    os._exit(9)


def test_the_lock_of_a_killed_process_of_this_host_is_taken_over_at_once(tmp_path: Path) -> None:
    process = mp.get_context("fork").Process(target=_hold_and_die, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert (tmp_path / LOCK_FILE).exists()
    assert _is_taken(tmp_path)


@pytest.mark.parametrize(
    ("changes", "age", "taken"),
    [
        ({}, 0, False),
        ({}, STALE_SECONDS + 5, True),  # it lives, but has not moved for long
        ({"process_start": "1"}, 0, True),  # another process had this number
        ({"pid": 2**22 + 1}, 0, True),
        ({"pid": 2**22 + 1, "host": "elsewhere"}, 0, False),
        ({"pid": 2**22 + 1, "host": "elsewhere"}, STALE_SECONDS - 20, False),
        ({"pid": 2**22 + 1, "host": "elsewhere"}, STALE_SECONDS + 5, True),
        ({"pid": 2**22 + 1, "pid_namespace": "pid:[1]"}, 0, False),  # a container's number
        ({"host": "elsewhere", "job": "17", "restart": 0}, 0, True),  # an earlier attempt of this job
        ({"host": "elsewhere", "job": "17", "restart": 1}, 0, False),
        ({"host": "elsewhere", "job": "18", "restart": 0}, 0, False),
    ],
)
def test_which_locks_are_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], age: float, taken: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(lock_module, "may_be_restarted", lambda *_: False)  # which would only wait
    file = _write_lock(tmp_path, age, **changes)
    assert _is_taken(tmp_path) == taken
    assert file.exists() != taken
    assert not [other for other in tmp_path.iterdir() if other != file]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', "[" * 100_000])
def test_an_unreadable_lock_is_taken_over_by_its_age(tmp_path: Path, content: str) -> None:
    file = _write_lock(tmp_path)
    file.write_text(content)
    with pytest.raises(FolderInUse, match="in use by another job: an unknown owner; last heartbeat"):
        FolderLock(tmp_path).__enter__()
    os.utime(file, (time.time() - STALE_SECONDS - 5,) * 2)
    assert _is_taken(tmp_path)


@pytest.mark.parametrize("kind", ["link", "link to nothing", "folder"])
def test_what_has_the_name_of_a_lock_and_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    """A link to nothing exists without an owner or an age, and was waited for without end."""
    if kind == "folder":
        (tmp_path / LOCK_FILE).mkdir()
    else:
        target = _write_lock(tmp_path, age=1e6).rename(tmp_path / "target")
        (tmp_path / LOCK_FILE).symlink_to(target if kind == "link" else tmp_path / "missing")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"\.lock is (a symbolic link|not a regular file), but jobs create"):
        FolderLock(tmp_path).__enter__()
    assert sorted(tmp_path.iterdir()) == before


def test_an_attempt_of_the_same_job_waits_for_one_on_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restarts are counted anew where the agent is new, so they do not tell that the other attempt has ended."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setattr(lock_module, "STALE_SECONDS", 1.0)
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.2)
    _write_lock(tmp_path, host="elsewhere")
    start = time.monotonic()
    assert _is_taken(tmp_path)
    assert 0.5 < time.monotonic() - start < 30
    other = _write_lock(tmp_path, host="elsewhere")
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.1):
            os.utime(other)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert not _is_taken(tmp_path)  # it lives: two jobs of one name
    finally:
        stop.set()
        thread.join()
    os.utime(other)
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    assert not _is_taken(tmp_path)  # another job does not wait


def test_the_heartbeat_touches_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_SECONDS", 0.01)
    with FolderLock(tmp_path) as lock:
        os.utime(lock.file, (0, 0))
        deadline = time.monotonic() + 10
        while lock.file.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_job_that_lost_the_lock_stops_before_changing_anything(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        save(tmp_path, 1, W, {}, lock=lock)
        lock.file.unlink()
        with pytest.raises(RuntimeError, match=r"step_00000002 failed: .*no longer ours: it was removed"):
            save(tmp_path, 2, W, {}, lock=lock)
        other = FolderLock(tmp_path)
        other.__enter__()
        (tmp_path / ".step_00000002.incomplete").mkdir()  # of the other's save
        with pytest.raises(RuntimeError, match=rf"no longer ours: host .*, process {os.getpid()}, took it over"):
            save(tmp_path, 2, W, {}, lock=lock)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [1]
    assert (tmp_path / ".step_00000002.incomplete").exists()
    assert other.is_ours()  # leaving the first did not remove it


def test_one_of_many_competitors_holds_the_lock(tmp_path: Path) -> None:
    for case in range(20):
        folder = tmp_path / str(case)
        folder.mkdir()
        if case % 2:
            _write_lock(folder, pid=2**22 + 1)
        locks = [FolderLock(folder) for _ in range(8)]

        def take(lock: FolderLock) -> None:
            with contextlib.suppress(FolderInUse):
                lock.__enter__()

        threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(lock.is_ours() for lock in locks) == 1
        for lock in locks:
            lock.__exit__(None, None, None)
        assert list(folder.iterdir()) == []


def _enter(folder: str) -> str:
    try:
        with FolderLock(folder):
            return "entered"
    except FolderInUse as error:
        return str(error)


def test_all_ranks_are_refused_together(world2: World, tmp_path: Path) -> None:
    assert world2.run(_enter, str(tmp_path)) == ["entered"] * 2
    _write_lock(tmp_path)
    first, second = world2.run(_enter, str(tmp_path))
    assert first == second
    assert "is in use by another job" in first


def test_a_replica_takes_the_lock_of_another_one_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"host": "elsewhere", "pid": 1, "token": "of the lost one"}
    _write_lock(tmp_path, **other)
    monkeypatch.setenv("MEGAFP8_LIGHTHOUSE_TOKEN", "a token of this job")
    with pytest.raises(FolderInUse), FolderLock(tmp_path, takes_over=True):
        pass  # the owner is no replica of this job
    _write_lock(tmp_path, **other)
    assert "a token" not in (tmp_path / LOCK_FILE).read_text(), "only a digest of it"
    with FolderLock(tmp_path, takes_over=True) as lock:
        lock.check()
    _write_lock(tmp_path, **other)
    assert not _is_taken(tmp_path), "only where the caller knows that it is lost"


def test_a_replica_that_writes_before_it_leaves_keeps_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAFP8_LIGHTHOUSE_TOKEN", "a token of this job")
    owner, taken = FolderLock(tmp_path), threading.Event()
    owner.__enter__()

    def take() -> None:
        with FolderLock(tmp_path, takes_over=True):
            taken.set()

    with owner.busy():
        thread = threading.Thread(target=take)
        thread.start()
        assert not taken.wait(1.5)
        owner.check()
    owner.__exit__(None, None, None)
    thread.join(20)
    assert taken.is_set()
