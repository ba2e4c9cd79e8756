"""Background saves: values are those at the call, errors reach all ranks, the rest is as with `save`."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafp8.checkpoint import BackgroundSaver, Destination, SavedCheckpoint, complete_checkpoints, load, save
from megafp8.checkpoint import dcp as dcp_module
from megafp8.checkpoint.dcp import plan_save, write_items
from megafp8.checkpoint.rectangles import Rectangle, Rectangles
from megafp8.checkpoint.saving import StagingBuffer
from tests.checkpoint import toy
from tests.world import World

CPU = torch.device("cpu")


def _saver(folder: Path, reports: list[SavedCheckpoint], **options: Any) -> BackgroundSaver:
    return BackgroundSaver(Destination(folder, options.pop("group", None), **options), CPU, reports.append)


def _loaded(path: Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(path, found)
    return found


class _Held:
    """Lets a function of the thread wait until `go` is set."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.go, self.reached, original = threading.Event(), threading.Event(), getattr(owner, name)

        def wait(*args: Any, **options: Any) -> Any:
            self.reached.set()
            assert self.go.wait(30)
            return original(*args, **options)

        patch.setattr(owner, name, wait)


def test_saved_values_are_those_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"model.w": torch.ones(5, 3), "fp8.scale": torch.tensor(2.0), "fp8.history": torch.arange(4.0)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    held, reports = _Held(monkeypatch, StagingBuffer, "copy_on_side_stream"), []
    with _saver(tmp_path, reports) as saver:
        saver.save(1, state, {}, changes_early=lambda name: name.startswith("fp8."))
        for name in ("fp8.scale", "fp8.history"):  # the next forward pass
            state[name].fill_(7)
        waiting = threading.Thread(target=saver.wait_copied)
        waiting.start()
        assert held.reached.wait(10)
        waiting.join(0.05)
        assert waiting.is_alive()  # the update waits
        held.go.set()
        waiting.join(10)
        assert not waiting.is_alive()
        state["model.w"].fill_(7)
    found = _loaded(tmp_path / "step_00000001", state)
    assert all(torch.equal(found[name], expected[name]) for name in state)
    assert [saved.path for saved in reports] == [tmp_path / "step_00000001"]
    assert 0.05 <= reports[0].stalled_seconds <= reports[0].total_seconds


def test_one_save_at_a_time_and_each_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, reports = _Held(monkeypatch, dcp_module, "write_data"), []
    state = {"w": torch.zeros(4)}
    with _saver(tmp_path, reports, keep_last=2) as saver:
        saver.save(1, state, {})
        saver.wait_copied()
        saver.poll()
        assert reports == []
        state["w"] += 1
        threading.Timer(0.1, held.go.set).start()
        saver.save(2, state, {})  # waits for the first
        assert [saved.path.name for saved in reports] == ["step_00000001"]
        assert reports[0].stalled_seconds < 0.1 <= reports[0].total_seconds
        for step in (3, 4):
            saver.wait_copied()
            state["w"] += 1
            saver.save(step, state, {})
    assert [saved.path.name for saved in reports] == [f"step_0000000{step}" for step in (1, 2, 3, 4)]
    assert reports[1].stalled_seconds > 0.05
    assert [(step, _loaded(path, state)["w"][0].item()) for step, path in complete_checkpoints(tmp_path)] == [
        (3, 2.0),
        (4, 3.0),
    ]


def test_the_staging_buffer_is_reused_and_nothing_is_cloned() -> None:
    whole = torch.arange(48.0).view(6, 8).to(torch.bfloat16)
    parts = [Rectangle((0, 0), whole[:, :4]), Rectangle((0, 4), whole[:, 4:])]
    state = {
        "w": Rectangles((6, 8), torch.bfloat16, parts),
        "n": Rectangles.whole(torch.tensor(5)),
        "e": Rectangles.whole(torch.zeros(0, 3)),
    }
    shares, memory = plan_save(write_items(state), None).plan, StagingBuffer(CPU)
    first, second = memory.assign(state, shares), memory.assign(state, shares)
    assert [slot.target.data_ptr() for slot in first] == [slot.target.data_ptr() for slot in second]
    assert sorted(slot.target.shape for slot in first) == [(), (0, 3), (6, 4), (6, 4)]
    for slot in first:  # what else torch.distributed.checkpoint would clone
        assert slot.target.untyped_storage().size() == slot.target.nbytes
    memory.copy(first[:1])
    memory.copy_on_side_stream(first[1:])
    assert all(torch.equal(slot.target, slot.source) for slot in first)


def test_errors_are_raised_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, reports = {"w": torch.zeros(4)}, []
    save(tmp_path, 1, state, {"consumed_samples": 1})
    saver = _saver(tmp_path, reports)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dcp_module, "write_data", full)
        saver.save(2, state, {})
        with pytest.raises(RuntimeError, match=r"step_00000002 failed: rank 0: OSError: .*No space left .*untouched"):
            saver.finish()
        saver.save(2, state, {})
        with pytest.raises(RuntimeError, match="No space left"):
            saver.save(3, state, {})
    with pytest.raises(ValueError, match="consumed_samples is 1 there and 2 here"):  # noqa: SIM117
        with saver:
            saver.save(1, state, {"consumed_samples": 2})
    with saver:
        saver.save(4, state, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000004"]
    assert len(reports) == 1


def test_a_running_save_is_finished_where_training_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), _saver(tmp_path, []) as saver:  # noqa: PT012
        saver.save(1, {"w": torch.zeros(4)}, {})
        raise ZeroDivisionError
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [1]


@pytest.mark.parametrize("lost", [True, False])
def test_a_failed_save_is_logged_unless_the_rank_that_it_ended_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: bool
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dcp_module, "write_data", full)
    with pytest.raises(RuntimeError, match="peer"), _saver(tmp_path, []) as saver:  # noqa: PT012
        saver.save(1, {"w": torch.zeros(4)}, {})
        raise RuntimeError("Connection closed by peer" if lost else "this rank's own error, not a peer's")
    assert ["No space left" in record.message for record in caplog.records] == ([] if lost else [True])


# --- several ranks ---


def _train_and_save(folder: str) -> list[Any]:
    """Saves beside other collectives; the seconds, what was written by this rank, and how often it was shared out."""
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    model, reports, shared = toy.make(rank, 2, 1, torch.float32), [], []
    patch, original = pytest.MonkeyPatch(), dcp_module.plan_save
    patch.setattr(dcp_module, "plan_save", lambda *args: (shared.append(1), original(*args))[1])
    with patch.context(), _saver(Path(folder), reports, group=group, keep_last=2) as saver:
        for step in range(1, 6):
            saver.save(step, model.state(), {**toy.METADATA, "consumed_samples": step})
            for _ in range(20):  # a forward and backward pass
                dist.all_reduce(torch.ones(10))
            saver.wait_copied()
            for param in model.params:
                param.data += 1
            saver.poll()
        held = sum(rectangle.view.nbytes for tensor in model.state().values() for rectangle in _parts(tensor))
    patch.undo()
    return [[saved.path.name for saved in reports], len(shared), saver._buffer._memory.numel(), held]


def _parts(tensor: Any) -> list[Rectangle]:
    return (tensor if isinstance(tensor, Rectangles) else Rectangles.whole(tensor)).parts


def test_ranks_save_together_and_stage_what_they_write(world4: World, tmp_path: Path) -> None:
    for names, shared, staged, held in world4.run(_train_and_save, str(tmp_path)):  # tp 2, dp 2
        assert names == [f"step_0000000{step}" for step in range(1, 6)]
        assert shared == 1
        assert staged < 0.8 * held
    whole = toy.make(0, 1, 1, torch.float32)
    for param in whole.params * 4:
        param.data += 1
    alone = whole.zeroed()
    load(tmp_path / "step_00000005", alone.state())
    assert alone.equals(whole)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [4, 5]


def _fail_on_rank_1(folder: str, where: str) -> str:
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    saver = _saver(Path(folder), [], group=group)
    patch = pytest.MonkeyPatch()
    if rank == 1:
        owner, name = {"copy": (StagingBuffer, "copy_on_side_stream"), "write": (dcp_module, "write_data")}[where]

        def fail(*_: Any) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(owner, name, fail)
    model = toy.make(rank, 2, 1, torch.float32)
    saver.save(2, model.state(), {})
    saver.wait_copied()
    try:
        saver.finish()
    except RuntimeError as error:
        return str(error)
    finally:
        patch.undo()
    return "no error"


@pytest.mark.parametrize("where", ["copy", "write"])
def test_errors_on_one_rank_are_raised_on_all(world4: World, tmp_path: Path, where: str) -> None:
    outcomes = world4.run(_fail_on_rank_1, str(tmp_path), where)
    assert set(outcomes) == {outcomes[0]}
    assert "rank 1: OSError: [Errno 5] Input/output error" in outcomes[0]
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_copies_from_the_gpu_overlap_with_computing(tmp_path: Path) -> None:
    device = torch.device("cuda")
    state = {f"model.{i}": torch.randn(2048, 2048, device=device) for i in range(8)}
    state |= {"fp8.scale": torch.ones(16, device=device), "model.turned": torch.randn(512, 256, device=device).T}
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    reports: list[SavedCheckpoint] = []
    with BackgroundSaver(Destination(tmp_path, None), device, reports.append) as saver:
        for step in range(1, 4):
            saver.save(step, state, {}, changes_early=lambda name: name.startswith("fp8."))
            state["fp8.scale"] += 1
            for _ in range(20):
                state["model.0"] @ state["model.1"]
            saver.wait_copied()
            for name in state:
                if name.startswith("model."):
                    state[name] += 1
    for step in range(1, 4):
        found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        load(tmp_path / f"step_0000000{step}", found)
        assert torch.equal(found["fp8.scale"], torch.full((16,), float(step)))
        for name in found:
            if name.startswith("model."):
                value = expected[name].cuda()
                for _ in range(step - 1):
                    value += 1
                assert torch.equal(found[name], value.cpu()), name
