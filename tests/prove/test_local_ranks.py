"""Ranks of tests: nothing of a case is left for the next one, and a case that fails or hangs says where."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megafp8.parallel.parallel_state import initialize_distributed, initialize_model_parallel
from tests.world import Ranks, World


@pytest.fixture(scope="module")
def own_world() -> Iterator[World]:
    ranks = Ranks()
    yield World(ranks, 3)
    ranks.close()


def _state() -> tuple[object, ...]:
    return (
        dist.get_rank(), dist.get_world_size(), os.environ.get("LEFT_BEHIND"),
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(),
        torch.get_num_threads(), torch.initial_seed(),
    )  # fmt: skip


def _leave_state() -> int:
    initialize_model_parallel(2, device=initialize_distributed("cpu"))
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.manual_seed(7)
    return os.getpid()


def test_a_case_finds_a_rank_as_new(own_world: World) -> None:
    before = own_world.run(_state, ranks=2)
    assert before == [(rank, 2, None, torch.float32, False, True, 1, 0) for rank in range(2)]
    processes = own_world.run(_leave_state, ranks=2)
    assert own_world.run(_state, ranks=2) == before
    assert own_world.run(os.getpid, ranks=2) == processes


def _gathered(own_group: bool) -> list[float]:
    """A DTensor whose rows lie on two ranks, gathered over the world's group or over a new one."""
    mesh = (
        DeviceMesh.from_group(dist.new_group([0, 1], use_local_synchronization=True), "cpu")
        if own_group
        else init_device_mesh("cpu", (2,))
    )
    rows = DTensor.from_local(torch.tensor([float(dist.get_rank())]), mesh, [Shard(0)])
    return (rows + 1).full_tensor().tolist()


def test_torch_forgets_the_groups_of_a_case_before(own_world: World) -> None:
    """Its caches compare device meshes by their ranks, and return one with the process groups of an earlier case."""
    for own_group in (True, False, True):
        assert own_world.run(_gathered, own_group, ranks=2) == [[1, 2]] * 2


def _hold_a_group() -> int:
    """Leave a group in a reference cycle, as a model does."""
    cycle: list[object] = [dist.new_group([0, 1])]
    cycle.append(cycle)
    return os.getpid()


def test_ranks_leave_the_groups_of_a_call(own_world: World) -> None:
    """A group's thread wakes up all the time; ranks that wait for a call have none."""

    def threads() -> set[str]:
        return {thread for pid in processes for thread in os.listdir(f"/proc/{pid}/task")}

    processes = own_world.run(os.getpid, ranks=2)
    before = threads()
    own_world.run(_hold_a_group, ranks=2)
    deadline = time.monotonic() + 60
    while threads() - before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_collections_of_a_rank_leave_out_what_it_imported(own_world: World) -> None:
    """Also after a training job, which thaws all objects at its end."""
    own_world.run(gc.unfreeze, ranks=1)
    assert own_world.run(gc.get_freeze_count, ranks=1)[0] > 100_000


def _sleep() -> str:
    time.sleep(30)
    return "late"


def test_a_case_that_is_interrupted_leaves_no_answers(own_world: World) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(TimeoutError):
            own_world.run(_sleep, ranks=2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert own_world.run(dist.get_rank, ranks=2) == [0, 1]


def _fault(kind: str) -> int:
    dist.barrier()
    time.sleep(0.5)  # until each rank has left it, so that none is still connecting
    if dist.get_rank() == 1:
        if kind == "raises":
            raise KeyError("the reason")
        if kind == "dies":
            os._exit(3)
        if kind == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)
    elif kind == "crashes":
        dist.barrier()
    return os.getpid()


@pytest.mark.parametrize(
    ("kind", "timeout", "messages"),
    [
        pytest.param("raises", 60, ["rank 1 failed:\nTraceback", "KeyError: 'the reason'"], marks=pytest.mark.slow),
        ("dies", 60, ["rank 1 failed:\nprocess died, exit code 3"]),
        pytest.param(
            "crashes",
            60,
            ["rank 1 failed:\nprocess died, exit code -11", "Segmentation fault", "in _fault"],
            marks=pytest.mark.slow,
        ),
        ("hangs", 6, ["rank 1 did not finish within 6 s; its stack was:", "in _fault"]),
    ],
)
def test_a_fault_is_located_and_its_ranks_are_started_afresh(
    own_world: World, kind: str, timeout: float, messages: list[str]
) -> None:
    before = own_world.run(os.getpid)
    start = time.monotonic()
    with pytest.raises(AssertionError) as error:
        own_world.run(_fault, kind, ranks=2, timeout=timeout)
    assert time.monotonic() - start < 30
    assert all(message in str(error.value) for message in messages), str(error.value)
    assert str(error.value).startswith("rank 1")
    assert kind == "crashes" or "rank 0" not in str(error.value)
    after = own_world.run(os.getpid)
    assert not {*before[:2]} & {*after}
    assert after[2] == before[2]
