"""The record of a process: calls counted alike on all members, waits by thread, own time without waiting."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafp8.parallel import activity, collectives
from tests.world import World


def _calls() -> dict[str, Any]:
    """Some of every kind of call between 2 ranks, and what was recorded."""
    group, me = dist.group.WORLD, dist.get_rank()
    assert group is not None
    collectives.all_reduce(torch.ones(2), group)  # not recorded
    with activity.recorded() as record:
        collectives.all_reduce(torch.ones(2), group)
        collectives.all_gather(torch.ones(2), group)
        collectives.reduce_scatter(torch.ones(2), group)
        collectives.all_gather_objects("x", group)
        collectives.barrier(group)
        if me == 0:
            collectives.send_async(torch.ones(2), group, 1).wait()
        else:
            collectives.recv_async(torch.ones(2), group, 0).wait()
        collectives.send_recv_async([torch.ones(1)], 1 - me, [torch.ones(1)], 1 - me, group).wait()
        seen = []
        if me == 0:
            time.sleep(0.3)
        else:  # a rank that waits, as seen by another thread
            timer = threading.Timer(0.1, lambda: seen.extend(record.waits()))
            timer.start()
        record.enter("one")
        collectives.all_reduce(torch.ones(2), group)
        record.enter("two")
    assert activity.record is None
    return {
        "calls": {call.key: (call.begun, call.peer_key, call.others) for call in record.calls()},
        "seen": [(call.op, number) for call, number in seen],
        "own": record.own_seconds["one"],
        "left": [call.op for call, _ in record.waits()],
    }


def test_calls_are_counted_alike_on_all_ranks(world2: World) -> None:
    first, second = world2.run(_calls)
    (group,) = {key for key, (_, peer_key, _) in first["calls"].items() if key == peer_key}
    assert first["calls"] == {
        group: (6, group, (1,)),
        f"{group} 0>1 sent": (2, f"{group} 0>1 received", (1,)),
        f"{group} 1>0 received": (1, f"{group} 1>0 sent", (1,)),
    }
    assert second["calls"] == {
        group: (6, group, (0,)),
        f"{group} 0>1 received": (2, f"{group} 0>1 sent", (0,)),
        f"{group} 1>0 sent": (1, f"{group} 1>0 received", (0,)),
    }
    assert second["seen"] == [("all_reduce", 6)]
    assert second["own"] < 0.15, "the time in which a rank waits is not its own"
    assert first["left"] == second["left"] == []


def test_own_time_is_that_of_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(activity, "perf_counter", lambda: now[0])
    record = activity.Activity()
    for section, seconds in (("data", 2.0), ("update", 3.0), ("data", 5.0)):
        record.enter(section)
        now[0] += seconds
        if section == "update":
            now[0] += 100.0
            record.wait_ended(activity.Calls("g", "g", (1,)), now[0] - 100.0)
    record.enter("after")
    assert record.take_own_seconds() == {"start": 0.0, "data": 7.0, "update": 3.0}
    assert record.take_own_seconds() == {}


def test_nothing_is_recorded_by_default() -> None:
    work = collectives.WaitFunction(lambda: 3)
    assert activity.started("all_reduce", None, work) is work
