"""Record of the activity of this process: step, section, own time, and the collectives that it has begun.

Problem: when a job makes no progress, all ranks wait for each other, and only one of them is at fault. The number of
collectives of each group that every rank has begun, and the collective that it waits for, reveal which rank it is. A
thread that watches the process reads this record (`megafp8.training.resilience.hangs`); `collectives` and the training
loop write it.

Cost: a collective adds one dictionary lookup and one object; a section adds one clock reading. There are no locks and
no messages (docs/resilience.md has the figures). Without a record (`record` is None), a collective tests one global
variable.

Calls are counted for each group. Messages are counted for each direction between two ranks, separately for sender and
receiver. A rank that waits for call n is waiting for the ranks that have begun fewer than n calls: members of the
group, or its peer.

Collectives that torch's own libraries call (FSDP's gathers) and collectives inside a replayed CUDA graph are not
counted. All ranks replay the same ones, so the counts still tell which rank is behind.
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
    """Running collective."""

    def wait(self) -> Any:
        """Wait for the collective."""
        ...


class Calls:
    """Calls of one group, or messages between two ranks in one direction, that this rank has begun.

    Attributes:
        key: Name of the calls, equal on all members.
        peer_key: Name under which the other ranks count the same calls.
        others: Global ranks of the other members.
        begun: Number of calls that have begun.
        op: Operation of the last call.
        waiting: Number of the call that the rank waits for, or 0.
    """

    __slots__ = ("begun", "key", "op", "others", "peer_key", "waiting")

    def __init__(self, key: str, peer_key: str, others: tuple[int, ...]) -> None:
        self.key, self.peer_key, self.others = key, peer_key, others
        self.begun, self.op, self.waiting = 0, "", 0


class Activity:
    """Activity record of one process.

    Attributes:
        marks: Counter that grows with every recorded event: while it grows, there is progress.
        step: Current step, counted from 1.
        first_step: First step of the training loop; None before the loop.
        section: Name of the current part of the step.
        own_seconds: Time of each section, without time spent waiting in collectives.
        listeners: Functions that are called with each section that begins.
        device_waits: Ids of the threads that wait for the device.
    """

    def __init__(self) -> None:
        self.marks = 0
        self.step = 0
        self.first_step: int | None = None
        self.section = "start"
        self.own_seconds: dict[str, float] = {}
        self.listeners: list[Callable[[str], None]] = []
        self.device_waits: set[int] = set()
        self._calls: dict[Any, Calls] = {}
        self._thread = get_ident()
        self._since, self._waited = perf_counter(), 0.0

    def calls(self) -> list[Calls]:
        """Return all groups and directions in which a call has begun."""
        return list(self._calls.values())

    def waits(self) -> list[tuple[Calls, int]]:
        """Return the calls that this rank waits for, each with its number."""
        return [(calls, calls.waiting) for calls in self.calls() if calls.waiting]

    def enter(self, section: str) -> None:
        """Begin `section` on the main thread, and end the previous section."""
        now = perf_counter()
        computing = now - self._since - self._waited
        self.own_seconds[self.section] = self.own_seconds.get(self.section, 0.0) + computing
        self._since, self._waited = now, 0.0
        self.section = section
        self.marks += 1
        for listener in self.listeners:
            listener(section)

    def begin_step(self, step: int) -> None:
        """Begin `step` with its first section, data."""
        self.first_step = step if self.first_step is None else self.first_step
        self.step = step
        self.enter("data")

    def take_own_seconds(self) -> dict[str, float]:
        """Return `own_seconds` since the last call."""
        taken, self.own_seconds = self.own_seconds, {}
        return taken

    def begin(self, op: str, group: ProcessGroup | None, peer: int | None = None, sends: bool = False) -> Calls:
        """Record that a call of `op` begins.

        For messages, `peer` is the other rank's index in the group, and `sends` says whether this rank is the sender.
        """
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
        """Record the call that `work` runs, and return a wrapper that also records waits for it."""
        calls = self.begin(op, group, peer, sends=op == "send")
        return _RecordedWork(self, work, calls, calls.begun)

    def blocking(self, op: str, group: ProcessGroup | None) -> AbstractContextManager[None]:
        """Return the context of a call that returns when it is done."""
        calls = self.begin(op, group)
        return _Blocking(self, calls)

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """Record that the host waits for the device, and so for collectives that are queued there."""
        self.device_waits.add(get_ident())
        start = perf_counter()
        try:
            yield
        finally:
            self.device_waits.discard(get_ident())
            self._waited += perf_counter() - start
            self.marks += 1

    def wait_ended(self, calls: Calls, start: float) -> None:
        """Record the end of a wait for a call of `calls` that began at `start`."""
        calls.waiting = 0
        self.marks += 1
        if get_ident() == self._thread:
            self._waited += perf_counter() - start


class _RecordedWork:
    """Running collective that records waits for it."""

    __slots__ = ("_activity", "_calls", "_number", "_work")

    def __init__(self, activity: Activity, work: CollectiveWork, calls: Calls, number: int) -> None:
        self._activity, self._work, self._calls, self._number = activity, work, calls, number

    def wait(self) -> Any:
        """Wait for the collective and record the wait."""
        start, self._calls.waiting = perf_counter(), self._number
        try:
            return self._work.wait()
        finally:
            self._activity.wait_ended(self._calls, start)


class _Blocking:
    """Context of a call that returns when it is done."""

    __slots__ = ("_activity", "_calls", "_start")

    def __init__(self, activity: Activity, calls: Calls) -> None:
        self._activity, self._calls = activity, calls

    def __enter__(self) -> None:
        self._start, self._calls.waiting = perf_counter(), self._calls.begun

    def __exit__(self, *_: object) -> None:
        self._activity.wait_ended(self._calls, self._start)


def _calls_of(group: ProcessGroup | None, peer: int | None, sends: bool) -> Calls:
    """Return an empty `Calls` for a group, or for one direction between this rank and `peer`."""
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
"""Record of this process while it is watched. A global, because a process has one main thread."""


@contextmanager
def recorded() -> Iterator[Activity]:
    """Record this process's activity inside the context."""
    global record
    assert record is None, "this process is recorded already"
    record = Activity()
    try:
        yield record
    finally:
        record = None


def enter(section: str) -> None:
    """Begin `section` of a step on the main thread."""
    if record is not None:
        record.enter(section)


def begin_step(step: int) -> None:
    """Begin `step` of the training loop with its first section, data."""
    if record is not None:
        record.begin_step(step)


def mark() -> None:
    """Record progress within a section: an action of the pipeline schedule is done or queued."""
    if record is not None:
        record.marks += 1


def started(op: str, group: ProcessGroup | None, work: Any, peer: int | None = None) -> CollectiveWork:
    """Return the work of `op` on `group`, wrapped to record waits if this process is recorded."""
    assert work is not None
    return work if record is None else record.work(op, group, work, peer)


def blocking(op: str, group: ProcessGroup | None) -> AbstractContextManager[None]:
    """Return the context of a call that returns when it is done."""
    return _NOTHING if record is None else record.blocking(op, group)


def waiting_for_device() -> AbstractContextManager[None]:
    """Return the context in which the host waits for the device."""
    return _NOTHING if record is None else record.waiting_for_device()
