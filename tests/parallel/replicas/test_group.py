"""Sums, maxima and messages between replicas; what happens when one is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megafp8.parallel.replicas import group as group_module
from megafp8.parallel.replicas.group import Failed, ReplicaGroup, bounded
from tests.world import fork_server

SIZE = 3
SECONDS = 2.0


def _member(rank: int, port: int, body: Callable[[ReplicaGroup, int], Any], results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set(str(rank), "")
    store.wait([str(other) for other in range(SIZE)], timedelta(seconds=100))
    group = ReplicaGroup(store, "name", rank, SIZE, torch.device("cpu"), SECONDS)
    try:
        results.put((rank, body(group, rank)))
    except Failed as error:
        results.put((rank, error))
    time.sleep(0.5)
    group.close()


def run(body: Callable[[ReplicaGroup, int], Any], answers: int = SIZE) -> dict[int, Any]:
    """What `body` returns on each of `SIZE` processes."""
    context = fork_server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    processes = [context.Process(target=_member, args=(rank, store.port, body, results)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=60) for _ in range(answers))
    for process in processes:
        process.join(20)
        process.kill()
    return found


def values(rank: int, count: int) -> torch.Tensor:
    """Numbers whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator) * 10.0 ** torch.randint(-4, 5, (count,), generator=generator)


def _communicate(group: ReplicaGroup, rank: int) -> list[Any]:
    group_module.SLICE = 1000  # several slices, and a rest
    sums = []
    for ranks, count in (([0, 1, 2], 2501), ([0, 2], 2501), ([1], 7), ([0, 1, 2], 1)):
        x = values(rank, count)
        group.sum_(x, ranks)
        sums.append(x)
    largest = values(rank, 100)
    group.max_(largest)
    rows = group.gather(torch.tensor([rank, 10 * rank]))
    got = [torch.zeros(5, 3), torch.zeros(0), torch.zeros((), dtype=torch.int64)]
    text = None
    if rank == 0:
        group.send_object({"step": 3}, 2)
        group.send([torch.arange(15.0).view(5, 3), torch.zeros(0), torch.tensor(7)], 2)
    elif rank == 2:
        text = group.receive_object(0)
        group.receive(got, 0)
    return [sums, largest, rows, got, text]


def test_sums_are_in_the_order_of_members_whoever_else_is_there() -> None:
    found = run(_communicate)
    of_rank = {count: [values(rank, count) for rank in range(SIZE)] for count in (1, 7, 2501)}
    a, b, c = of_rank[2501]
    expected = [(a + b) + c, a + c, of_rank[7][1], (of_rank[1][0] + of_rank[1][1]) + of_rank[1][2]]
    assert not torch.equal(expected[0], a + (b + c)), "the order makes a difference"
    for rank in range(SIZE):
        sums, largest, rows, got, text = found[rank]
        for x, y in zip(sums, expected, strict=True):
            assert torch.equal(x, y)
        assert torch.equal(largest, torch.stack([values(r, 100) for r in range(SIZE)]).amax(0))
        assert rows.tolist() == [[0, 0], [1, 10], [2, 20]]
        if rank == 2:
            assert text == {"step": 3}
            assert torch.equal(got[0], torch.arange(15.0).view(5, 3))
            assert got[2] == 7


def _lose_a_member(group: ReplicaGroup, rank: int) -> float:
    group.watch_neighbour()
    group.max_(torch.zeros(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(Failed):
        group.sum_(torch.zeros(10), [0, 1, 2])
    group.close()
    with pytest.raises(ConnectionError):
        bounded(lambda: False, 60.0, group._lost.is_set)  # as a wait for NCCL
    return time.monotonic() - start


def test_a_member_that_is_killed_ends_the_waits_of_all_others() -> None:
    found = run(_lose_a_member, answers=2)
    assert set(found) == {0, 2}
    assert all(seconds < SECONDS for seconds in found.values())


def _close(group: ReplicaGroup, rank: int) -> tuple[float, list[str]]:
    group.watch_neighbour()
    group.max_(torch.zeros(1))
    start = time.monotonic()
    with patch.object(dist.ProcessGroupGloo, "abort", lambda _: None):  # in torch 2.11 it leaves connections open
        group.close()
    group_module.wait_for_watches()
    return time.monotonic() - start, [x.name for x in threading.enumerate() if x.name == group_module._WATCH]


def test_no_member_watches_another_once_all_have_closed() -> None:
    for seconds, watches in run(_close).values():
        assert not watches
        assert seconds < SECONDS


def _hang(group: ReplicaGroup, rank: int) -> float:
    start = time.monotonic()
    if rank == 1:
        time.sleep(3 * SECONDS)
        return 0.0
    with pytest.raises(Failed):
        group.gather(torch.zeros(1))
    return time.monotonic() - start


def test_a_member_that_hangs_is_waited_for_no_longer_than_the_limit() -> None:
    found = run(_hang)
    assert all(0.5 * SECONDS < found[rank] < 2.5 * SECONDS for rank in (0, 2))


def test_a_wait_is_bounded() -> None:
    with pytest.raises(TimeoutError, match=r"not answered for 0.01 s"):
        bounded(lambda: False, 0.01)
