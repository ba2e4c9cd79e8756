"""Record of what this process is doing: step, section, own time, and the collectives that it has begun.

Problem: when a job makes no progress, all ranks wait for each other, and only one of them is at fault. Who it is
follows from how many collectives of each group every rank has begun, and from which of them it waits for. A thread that
watches the process reads this record (`megafp8.training.resilience.hangs`); `collectives` and the training loop write
it.

Cost: a collective adds one dictionary lookup and one object, a section one reading of the clock; nothing is locked and
nothing is sent (docs/resilience.md has the figures). Without a record (`record` is None) a collective tests one global.

Calls are counted for each group, and messages for each direction between two ranks, separately for sender and receiver.
A rank that waits for call n is waiting for those that have begun fewer than n: members of the group, or its peer.

Not counted: collectives that torch's own libraries call (FSDP's gathers), and those inside a replayed CUDA graph. All
ranks replay the same ones, so counts still tell who is behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from time import perf_counter
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import ProcessGroup


class CollectiveWork(Protocol):
    """A running collective."""

    def wait(self) -> Any: ...


class Calls:
    """The calls of one group, or the messages between two ranks in one direction, that this rank has begun.

    `key`: names them, the same on all members. `peer_key`: names what the others count for the same call. `others`:
    global ranks of the others. `begun`: number of calls, of which `op` is the last. `waiting`: number of the call that
    is waited for, or 0.
    """

    __slots__ = ("begun", "key", "op", "others", "peer_key", "waiting")

    def __init__(self, key: str, peer_key: str, others: tuple[int, ...]) -> None:
        self.key, self.peer_key, self.others = key, peer_key, others
        self.begun, self.op, self.waiting = 0, "", 0


class Activity:
    """The record of one process.

    `marks` grows with whatever is recorded: as long as it grows, there is progress. `step` is counted from 1, `section`
    names the part of the step. `first_step` is the first step of the loop, None before it. `own_seconds`: by section,
    its time without what was spent waiting in collectives. `listeners`: called with each section that is entered.
    """

    def __init__(self) -> None:
        self.marks = 0
        self.step = 0
        self.first_step: int | None = None
        self.section = "start"
        self.own_seconds: dict[str, float] = {}
        self.listeners: list[Callable[[str], None]] = []
        self.device_waits: set[int] = set()  # threads that wait for the device
        self._calls: dict[Any, Calls] = {}
        self._thread = get_ident()
        self._since, self._waited = perf_counter(), 0.0

    def calls(self) -> list[Calls]:
        """All groups and directions in which something was begun."""
        return list(self._calls.values())

    def waits(self) -> list[tuple[Calls, int]]:
        """The calls that are waited for."""
        return [(calls, calls.waiting) for calls in self.calls() if calls.waiting]

    def enter(self, section: str) -> None:
        """The main thread enters `section`, which ends the one before."""
        now = perf_counter()
        computing = now - self._since - self._waited
        self.own_seconds[self.section] = self.own_seconds.get(self.section, 0.0) + computing
        self._since, self._waited = now, 0.0
        self.section = section
        self.marks += 1
        for listener in self.listeners:
            listener(section)

    def begin_step(self, step: int) -> None:
        """Enter `step`, which begins with its data."""
        self.first_step = step if self.first_step is None else self.first_step
        self.step = step
        self.enter("data")

    def take_own_seconds(self) -> dict[str, float]:
        """`own_seconds` since the last call."""
        taken, self.own_seconds = self.own_seconds, {}
        return taken

    def begin(self, op: str, group: ProcessGroup | None, peer: int | None = None, sends: bool = False) -> Calls:
        """A call of `op` begins; `peer`: the rank in the group to which a message is sent, or from which it comes."""
        key = group if peer is None else (group, peer, sends)
        calls = self._calls.get(key)
        if calls is None:
            calls = self._calls[key] = _calls_of(group, peer, sends)
        calls.begun += 1
        calls.op = op
        self.marks += 1
        return calls

    def work(
        self, op: str, group: ProcessGroup | None, work: CollectiveWork, peer: int | None = None
    ) -> CollectiveWork:
        """`work`, whose waiting is recorded."""
        calls = self.begin(op, group, peer, sends=op == "send")
        return _RecordedWork(self, work, calls, calls.begun)

    def blocking(self, op: str, group: ProcessGroup | None) -> AbstractContextManager[None]:
        """Context of a call that returns when it is done."""
        calls = self.begin(op, group)
        return _Blocking(self, calls)

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """Context in which the host waits for the device, and so for collectives that are queued there."""
        self.device_waits.add(get_ident())
        start = perf_counter()
        try:
            yield
        finally:
            self.device_waits.discard(get_ident())
            self._waited += perf_counter() - start
            self.marks += 1

    def wait_ended(self, calls: Calls, start: float) -> None:
        """A wait for a call of `calls` that began at `start` has ended."""
        calls.waiting = 0
        self.marks += 1
        if get_ident() == self._thread:
            self._waited += perf_counter() - start


class _RecordedWork:
    """A running collective whose waiting is recorded."""

    __slots__ = ("_activity", "_calls", "_number", "_work")

    def __init__(self, activity: Activity, work: CollectiveWork, calls: Calls, number: int) -> None:
        self._activity, self._work, self._calls, self._number = activity, work, calls, number

    def wait(self) -> Any:
        start, self._calls.waiting = perf_counter(), self._number
        try:
            return self._work.wait()
        finally:
            self._activity.wait_ended(self._calls, start)


class _Blocking:
    """Context of a call that returns when it is done.."""

    __slots__ = ("_activity", "_calls", "_start")

    def __init__(self, activity: Activity, calls: Calls) -> None:
        self._activity, self._calls = activity, calls

    def __enter__(self) -> None:
        self._start, self._calls.waiting = perf_counter(), self._calls.begun

    def __exit__(self, *_: object) -> None:
        self._activity.wait_ended(self._calls, self._start)


def _calls_of(group: ProcessGroup | None, peer: int | None, sends: bool) -> Calls:
    assert group is not None, "a group of one rank has no collectives"
    ranks, me, name = dist.get_process_group_ranks(group), dist.get_rank(), group.group_name
    if peer is None:
        return Calls(name, name, tuple(rank for rank in ranks if rank != me))
    other = ranks[peer]
    source, target = (me, other) if sends else (other, me)
    kind, others = ("sent", "received") if sends else ("received", "sent")
    message = f"{name} {source}>{target}"
    return Calls(f"{message} {kind}", f"{message} {others}", (other,))


_NOTHING = nullcontext()
record: Activity | None = None
"""The record of this process while it is watched. The process, not a module, has one, as it has one main thread."""


@contextmanager
def recorded() -> Iterator[Activity]:
    """Context in which this process's activity is recorded."""
    global record
    assert record is None, "this process is recorded already"
    record = Activity()
    try:
        yield record
    finally:
        record = None


def enter(section: str) -> None:
    """The main thread enters `section` of a step."""
    if record is not None:
        record.enter(section)


def begin_step(step: int) -> None:
    """Enter `step` of the training loop, which begins with its data."""
    if record is not None:
        record.begin_step(step)


def mark() -> None:
    """There is progress within a section: an action of the pipeline schedule is done, or queued."""
    if record is not None:
        record.marks += 1


def started(op: str, group: ProcessGroup | None, work: Any, peer: int | None = None) -> CollectiveWork:
    """`work`, which `op` on `group` has returned; its waiting is recorded if this process is."""
    assert work is not None
    return work if record is None else record.work(op, group, work, peer)


def blocking(op: str, group: ProcessGroup | None) -> AbstractContextManager[None]:
    """Context of a call that returns when it is done."""
    return _NOTHING if record is None else record.blocking(op, group)


def waiting_for_device() -> AbstractContextManager[None]:
    """Context in which the host waits for the device."""
    return _NOTHING if record is None else record.waiting_for_device()
