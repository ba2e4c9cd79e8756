"""Incompatible or damaged checkpoints are refused on all ranks with one error, before a tensor has changed."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from megafp8.checkpoint import complete_checkpoints, dcp, load, save
from tests.checkpoint import toy
from tests.checkpoint.rewritten import make_old
from tests.world import World


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path, 3, toy.make(0, 1, 1, torch.float32).state(), toy.METADATA)


def _refusal(path: Path | str, tensors: dict | None = None) -> str:
    """The message with which `path` is refused; checks that nothing was loaded."""
    model = toy.make(0, 1, 1, torch.float32).zeroed()
    with pytest.raises(ValueError, match=r"step_") as error:
        load(path, model.state() if tensors is None else tensors)
    assert not any(bool(p.any()) for p in model.params)
    return str(error.value)


def test_differences_are_counted_and_named(saved: Path) -> None:
    state = toy.make(0, 1, 1, torch.float32).zeroed().state()
    for name in [name for name in state if ".q" in name or ".k" in name or ".v" in name]:
        state["new." + name] = state.pop(name)
    state["model.embedding"] = torch.zeros(16, 5)
    state["fp8.step"] = torch.tensor(0.0)
    message = _refusal(saved, state)
    assert str(saved) in message
    assert "12 tensors missing in the checkpoint: new.model.layers.0.k, new.model.layers.0.q" in message
    assert "12 tensors in the checkpoint but not in this model: model.layers.0.k" in message
    assert "and 7 more" in message
    assert "2 tensors of another shape or dtype" in message
    assert "model.embedding ([16, 4] float32 in the checkpoint, [16, 5] float32 here)" in message
    assert "fp8.step ([] int64 in the checkpoint, [] float32 here)" in message


def test_optional_names_may_be_missing_on_either_side(saved: Path) -> None:
    whole = toy.make(0, 1, 1, torch.float32)
    state = {n: t for n, t in whole.zeroed().state().items() if not n.startswith("fp8.")}
    state["fp8.new"] = torch.full((3,), 5.0)
    state["optimizer.new"] = torch.zeros(3)
    message = _refusal(saved, state)
    assert "2 tensors missing in the checkpoint: fp8.new, optimizer.new" in message
    with pytest.raises(ValueError, match=r"fit: 1 tensor missing in the checkpoint: optimizer.new$"):
        load(saved, state, optional=lambda name: name.startswith("fp8."))
    del state["optimizer.new"]
    load(saved, state, optional=lambda name: name.startswith("fp8."))
    assert state["fp8.new"].tolist() == [5.0] * 3
    assert torch.equal(state["model.embedding"].parts[0].view, whole.params[0])


def test_a_checkpoint_with_holes_is_refused(tmp_path: Path) -> None:
    half = toy.make(0, 2, 1, torch.float32)  # one process saves what one of two ranks holds
    path = save(tmp_path, 1, half.state(), {})
    assert "only partly in the checkpoint: model.embedding" in _refusal(path)


def test_damage_inside_a_data_file_is_found_while_reading(saved: Path) -> None:
    data = saved / "__0_0.distcp"
    size = data.stat().st_size
    make_old(saved)  # with checksums, the damage is found before
    for junk in (bytes(size), b"PK\x03\x04" + bytes(size - 4)):
        data.write_bytes(junk)
        message = _refusal(saved)
        assert f"{saved} could not be read: {data} " in message
        assert "weights_only" not in message


def test_a_missing_or_damaged_index_is_named(saved: Path) -> None:
    make_old(saved)  # with checksums, the damage is found before the index is read
    index = saved / ".metadata"
    content = index.read_bytes()
    for damaged in (content[: len(content) // 2], b"", pickle.dumps({"a": 1})):
        index.write_bytes(damaged)
        assert f"{index} is damaged: " in _refusal(saved)
    index.unlink()
    assert _refusal(saved) == f"{saved} is not a checkpoint: it has no .metadata"


class _Trap:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


def test_an_index_cannot_run_code(saved: Path, tmp_path: Path) -> None:
    make_old(saved)
    (saved / ".metadata").write_bytes(pickle.dumps(_Trap(f"touch {tmp_path}/trapped")))
    assert "is damaged: the index is not a Metadata" in _refusal(saved)
    assert not (tmp_path / "trapped").exists()


def test_a_single_process_sees_no_warnings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = toy.make(0, 1, 1, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(save(tmp_path, 1, model.state(), {}), model.zeroed().state())
    assert capfd.readouterr() == ("", "")


# --- several ranks ---


def _message(action: object, *args: object, **options: object) -> tuple[str, str]:
    try:
        action(*args, **options)  # type: ignore[operator]
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def _load_with_rank_1_wrong(path: str, what: str) -> tuple[str, str]:
    state = toy.make(dist.get_rank(), 1, 2, torch.float32).zeroed().state()  # two stages: other names on each rank
    if dist.get_rank() == 1:
        if what == "name":
            state["model.extra"] = torch.zeros(2)
        elif what == "shape":
            state["fp8.step"] = torch.zeros(2)
        elif what == "lost":
            del state["model.layers.1.norm"]
        elif what == "folder":
            path += "-not-mounted"
    return _message(load, path, state)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("nothing", ""),
        ("name", "1 tensor missing in the checkpoint: model.extra"),
        ("shape", "1 tensor of another shape or dtype: fp8.step ([] int64 in the checkpoint, [2] float32 here)"),
        ("lost", "1 tensor in the checkpoint but not in this model: model.layers.1.norm"),
        ("folder", "there is no checkpoint "),
    ],
)
def test_all_ranks_raise_the_same_error_of_a_load(world2: World, saved: Path, what: str, expected: str) -> None:
    outcomes = world2.run(_load_with_rank_1_wrong, str(saved), what)
    assert outcomes[0] == outcomes[1]
    kinds = {"nothing": "no error", "folder": "ValueError"}
    assert outcomes[0][0] == kinds.get(what, "IncompatibleCheckpoint")
    assert expected in outcomes[0][1]


def test_all_ranks_refuse_a_truncated_file(world2: World, saved: Path) -> None:
    (saved / "__0_0.distcp").write_bytes(b"short")
    outcomes = world2.run(_load_with_rank_1_wrong, str(saved), "nothing")
    assert outcomes[0] == outcomes[1] == ("DamagedCheckpoint", outcomes[0][1])
    assert "__0_0.distcp is truncated: 5 bytes" in outcomes[0][1]


def _save_with_a_failure(folder: str, where: str) -> tuple[str, str]:
    rank = dist.get_rank()
    patch = pytest.MonkeyPatch()

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "write on rank 1" and rank == 1:
        patch.setattr(FileSystemWriter, "write_data", full)
    if where == "rename" and rank == 0:
        patch.setattr(os, "rename", full)
    metadata = {"consumed_samples": float("nan")} if where == "metadata on rank 0" and rank == 0 else {}
    with patch.context():
        outcome = _message(save, folder, 4, toy.make(rank, 2, 1, torch.float32).state(), metadata)
    patch.undo()
    return outcome


@pytest.mark.parametrize(
    ("where", "kind", "expected"),
    [
        ("write on rank 1", "SaveFailed", "step_00000004 failed: rank 1: OSError: [Errno 28] No space left"),
        ("rename", "SaveFailed", "No space left on device"),
        ("metadata on rank 0", "ValueError", "cannot be written as JSON"),
    ],
)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_shows_nothing(
    world2: World, tmp_path: Path, where: str, kind: str, expected: str
) -> None:
    save(tmp_path, 3, toy.make(0, 1, 1, torch.float32).state(), {})
    outcomes = world2.run(_save_with_a_failure, str(tmp_path), where)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == kind
    assert expected in outcomes[0][1]
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [3]
    assert all(name == "no error" for name, _ in world2.run(_save_with_a_failure, str(tmp_path), "nowhere"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000003", "step_00000004"]


def _save_twice(folder: str) -> tuple[str, str]:
    state = toy.make(dist.get_rank(), 2, 1, torch.float32).state()
    save(folder, 1, state, {"consumed_samples": 8})
    save(folder, 1, state, {"consumed_samples": 8})
    return _message(save, folder, 1, state, {"consumed_samples": 9})


def test_all_ranks_agree_on_a_step_that_exists(world2: World, tmp_path: Path) -> None:
    outcomes = world2.run(_save_twice, str(tmp_path))
    assert outcomes[0] == outcomes[1]
    assert "consumed_samples is 8 there and 9 here" in outcomes[0][1]


def test_a_folder_deleted_while_saving_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1, {"x": torch.ones(2)}, toy.METADATA)
    write_data, error = dcp.write_data, r"saving .*step_00000002 failed: .* is gone, with earlier checkpoints in it"

    def deleted(*arguments: Any) -> Any:
        shutil.rmtree(folder)
        return write_data(*arguments)

    monkeypatch.setattr(dcp, "write_data", deleted)
    with pytest.raises(RuntimeError, match=error):
        save(folder, 2, {"x": torch.ones(2)}, toy.METADATA)
