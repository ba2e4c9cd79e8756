"""Checkpoints in object storage: what others read, layouts, saves that are killed, damage, locks."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from megafp8.checkpoint import (
    BackgroundSaver,
    CheckpointReader,
    DamagedCheckpoint,
    Destination,
    FolderInUse,
    FolderLock,
    clean_incomplete,
    complete_checkpoints,
    load,
    lock,
    newest_good,
    read_metadata,
    save,
)
from megafp8.checkpoint.files import CHECKSUMS_FILE
from megafp8.conversion.formats import fetched
from megafp8.host.object_store import ObjectPath, ObjectStoreError
from tests.checkpoint import toy
from tests.checkpoint.killing import start
from tests.object_server import ObjectServer
from tests.world import World
from tools import average_checkpoints

NAMES = [f"layers.{i}.weight" for i in range(5)]
_folders = itertools.count()


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Tensors that tell the step they were saved at."""
    return {name: torch.full((8, 8), float(step)) for name in NAMES}


def memory() -> ObjectPath:
    return ObjectPath(f"memory://checkpoints/{next(_folders)}")


def check_all_load(folder: ObjectPath) -> list[int]:
    """Load every visible checkpoint, compare it with what its step must hold; returns the steps."""
    found = complete_checkpoints(folder)
    for step, path in found:
        state = {name: torch.zeros(8, 8) for name in NAMES}
        assert load(path, state)["step"] == step
        assert all(bool((tensor == step).all()) for tensor in state.values())
    return [step for step, _ in found]


def test_the_objects_are_the_files_of_a_local_save(s3: ObjectServer, tmp_path: Path) -> None:
    state = {"a": torch.randn(300, 7), "b": torch.tensor(3)}
    remote, local = (save(to, 5, state, {}, files={"tokenizer/x": b"1"}) for to in (s3.folder(), tmp_path))
    assert isinstance(remote, ObjectPath)
    assert isinstance(local, Path)
    files = {str(file.relative_to(local)): file.read_bytes() for file in local.rglob("*") if file.is_file()}
    assert remote.sizes().keys() == files.keys()
    differing = {name for name in files if (remote / name).read_bytes() != files[name]}
    assert differing <= {"metadata.json", CHECKSUMS_FILE, ".metadata"}, "beside the date"
    found = {name: torch.zeros_like(values) for name, values in state.items()}
    dcp_load(found, storage_reader=FsspecReader(str(remote)), no_dist=True)
    assert all(torch.equal(found[name], values) for name, values in state.items())
    reader = CheckpointReader(str(remote))
    assert torch.equal(reader.read("a", (10, 2), (100, 3), verify=True), state["a"][10:110, 2:5])
    assert read_metadata(str(remote))["step"] == 5


def _save_and_load(environment: dict[str, str], folder: str, saved: tuple[int, int], loaded: tuple[int, int]) -> bool:
    """Save in one layout, load in another; whether all is equal on this rank."""
    os.environ.update(environment)
    rank = int(os.environ["RANK"])
    path = save(folder, 3, toy.make(rank, *saved, torch.bfloat16).state(), toy.METADATA)
    expected = toy.make(rank, *loaded, torch.bfloat16)
    found = expected.zeroed()
    load(path, found.state())
    return found.equals(expected)


def test_any_layout_loads_what_any_other_saved(s3: ObjectServer, world2: World) -> None:
    assert world2.run(_save_and_load, s3.environment, str(s3.folder()), (2, 1), (1, 2)) == [True, True]


class Killed(BaseException):
    """The process is dead: nothing that it does afterwards has an effect."""


@pytest.fixture
def dies(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Callable[[], None]]:
    """Let this process die right before its n-th change of object storage; what is returned brings it back to life.

    A tree is removed object by object.
    """
    left = [10**9]

    def remove_tree(path: ObjectPath) -> None:
        for name in sorted(path.sizes()):
            (path / name).unlink()

    def wrap(name: str) -> None:
        change = getattr(ObjectPath, name)

        def call(*args: Any) -> Any:
            if name != "open" or args[1:] == ("wb",):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return change(*args)

        monkeypatch.setattr(ObjectPath, name, call)

    monkeypatch.setattr(ObjectPath, "remove_tree", remove_tree)
    for name in ("write_bytes", "create", "copy_to", "unlink", "open"):
        wrap(name)

    def set_left(changes: int) -> Callable[[], None]:
        left[0] = changes
        return lambda: left.__setitem__(0, 10**9)

    return set_left


def test_killed_at_each_change(dies: Callable[[int], Callable[[], None]]) -> None:
    seen = []
    for change in range(100):
        folder = memory()
        save(folder, 1, tensors(1), {})
        alive = dies(change)
        try:
            save(folder, 2, tensors(2), {}, keep_last=1)
            break
        except Killed:
            pass
        finally:
            alive()
        seen.append(check_all_load(folder))
        opened = newest_good(folder)
        assert opened is not None
        assert opened.metadata["step"] == seen[-1][-1]
        save(folder, 3, tensors(3), {}, keep_last=1)
        assert check_all_load(folder) == [3]
        assert [path.name for path in folder.iterdir()] == ["step_00000003"]
    assert seen == sorted(seen)
    assert [seen.count([1]) >= 5, seen.count([1, 2]), seen.count([2]) >= 3] == [True, 1, True]


def _save_slowly(environment: dict[str, str], folder: str) -> None:
    """Save large tensors until killed."""
    os.environ.update(environment)
    write = ObjectPath.write_bytes

    def slow(path: ObjectPath, content: bytes) -> None:
        time.sleep(0.3)
        write(path, content)

    ObjectPath.write_bytes = slow  # type: ignore[method-assign]
    for step in itertools.count(2):
        save(folder, step, tensors(step), {}, keep_last=1)


@pytest.mark.parametrize("moment", [0.2, 0.7, 1.3])
@pytest.mark.slow
def test_killed_while_uploading(s3: ObjectServer, moment: float) -> None:
    folder = s3.folder()
    save(folder, 1, tensors(1), {})
    process = start(_save_slowly, s3.environment, str(folder))
    while not len(list(folder.iterdir())) > 1:
        time.sleep(0.01)
    time.sleep(moment)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    steps = check_all_load(folder)
    assert steps
    save(folder, steps[-1] + 1, tensors(steps[-1] + 1), {}, keep_last=1)
    assert check_all_load(folder) == [steps[-1] + 1]


def test_an_interrupted_save_is_never_loaded(s3: ObjectServer) -> None:
    folder = s3.folder()
    for step in (1, 2):
        save(folder, step, tensors(step), {})
    newest = folder / "step_00000002"
    (newest / CHECKSUMS_FILE).unlink()
    assert check_all_load(folder) == [1]
    with pytest.raises(DamagedCheckpoint, match=f"{newest / CHECKSUMS_FILE} is missing"):
        load(newest, tensors(0))
    assert clean_incomplete(folder) == [newest]
    assert not newest.exists()
    with pytest.raises(
        ValueError, match=f"there is no checkpoint {newest}; newest complete checkpoints in {folder}: step_0"
    ):
        read_metadata(newest)


def test_a_save_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = memory()
    save(folder, 1, tensors(1), {})
    with monkeypatch.context() as patch:
        patch.setattr("megafp8.checkpoint.files.ChecksummedObject.write", lambda *_: 1 / 0)
        with pytest.raises(RuntimeError, match=r"saving memory://.*failed.*Earlier checkpoints are untouched"):
            save(folder, 2, tensors(2), {})
    assert [path.name for path in folder.iterdir()] == ["step_00000001"]
    assert check_all_load(folder) == [1]


@pytest.mark.parametrize("name", ["__0_0.distcp", "metadata.json"])
def test_a_damaged_one_is_set_aside(name: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = memory()
    for step in (1, 2):
        save(folder, step, tensors(step), {})
    file = folder / "step_00000002" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    opened = newest_good(folder)
    assert opened is not None
    assert opened.metadata["step"] == 1
    assert "step_00000002 is damaged" in caplog.text
    kept = folder / "step_00000002.damaged"
    assert (kept / name).read_bytes() == content
    save(folder, 2, tensors(2), {})
    assert check_all_load(folder) == [1, 2]


def test_an_outage_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that cannot reach object storage falls back to no older checkpoint, and may be started again."""
    folder = memory()
    for step in (1, 2):
        save(folder, step, tensors(step), {})

    def fail(path: ObjectPath, *_: object) -> bytes:
        raise ObjectStoreError(f"{path} cannot be used: no network")

    for method in ("read_bytes", "read_range"):
        with monkeypatch.context() as patch:
            patch.setattr(ObjectPath, method, fail)
            with pytest.raises(RuntimeError, match="no network"):
                load(folder / "step_00000002", tensors(0), verify=False)
            with pytest.raises(RuntimeError, match="no network"):
                newest_good(folder)
    assert check_all_load(folder) == [1, 2]


def test_in_the_background_and_pruned() -> None:
    folder, reported = memory(), []
    to = Destination(folder, None, keep_last=2)
    with BackgroundSaver(to, torch.device("cpu"), reported.append) as saver:
        for step in (1, 2, 3):
            saver.save(step, tensors(step), {})
            saver.wait_copied()
    assert [saved.path.name for saved in reported] == ["step_00000001", "step_00000002", "step_00000003"]
    assert check_all_load(folder) == [2, 3]
    save(folder, 3, tensors(4), {})  # the same step of the same run, which is left as it is
    assert check_all_load(folder) == [2, 3]
    with pytest.raises(ValueError, match="already exists and holds something else: tokens is None there and 7 here"):
        save(folder, 3, tensors(4), {"tokens": 7})


def test_lock(s3: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = s3.folder()
    monkeypatch.setattr(lock, "_SETTLING_SECONDS", 0.01)
    with FolderLock(folder) as first:
        first.check()
        with pytest.raises(FolderInUse, match=rf"{folder} is in use by another job: process \d+"), FolderLock(folder):
            pass
        monkeypatch.setattr(lock, "STALE_SECONDS", 0.0)
        with FolderLock(folder) as second:
            second.check()
            with pytest.raises(RuntimeError, match=rf"{folder}/\.lock is no longer ours: host"):
                first.check()
    assert list(folder.iterdir()) == []


def test_local_copy_of_a_run(s3: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = s3.folder()
    for step in (1, 2):
        save(folder, step, tensors(step), {}, files={"tokenizer/x": b"1"})
    copy = fetched(str(folder))
    assert CheckpointReader(copy).metadata["step"] == 2
    assert (copy / "tokenizer" / "x").read_bytes() == b"1"
    assert fetched(str(folder)) == copy
    assert fetched(copy) == copy
    shutil.rmtree(copy)
    assert sorted(x.name for x in fetched(str(folder / "step_00000002")).iterdir()) == sorted(
        {name.partition("/")[0] for name in (folder / "step_00000002").sizes()}
    )
    copies = average_checkpoints.checkpoints([folder], 2, 2)
    assert [CheckpointReader(path).metadata["step"] for path in copies] == [1, 2]
    with pytest.raises(ValueError, match="there is no s3://bucket/nothing"):
        fetched("s3://bucket/nothing")
