"""Check a schedule and time it, without a process group.

`check_schedule` takes what the engine takes, a schedule with its communication, and proves it fit to run: the right
actions in a right order on each rank, neighbours that agree on the order of what passes between them, and an execution
that comes to its end. It assumes the least that any backend grants: a rank's transfers in one direction are one queue
in issue order, a transfer happens when both ends have reached the head of their queues, a compute action waits for what
it receives, and a send waits until the one before it in that direction is through (the engine keeps one send in flight
a direction). A schedule that ends under these rules also ends where transfers may overtake one another.

`simulate` is a model for planning and plots: uniform stages, and transfers that take a fixed time and occupy nobody.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from megafp8.pipeline_parallel.schedules import RECEIVE_BEFORE, SEND_AFTER, Action, Kind, Schedule, peer

_COMPUTE = (Kind.FORWARD, Kind.BACKWARD)
_ORDER = (
    (Kind.FORWARD, Kind.BACKWARD, "a backward comes after its forward"),
    (Kind.RECV_FORWARD, Kind.FORWARD, "the input must be received before the forward that needs it"),
    (Kind.RECV_BACKWARD, Kind.BACKWARD, "the gradient must be received before the backward that needs it"),
    (Kind.FORWARD, Kind.SEND_FORWARD, "an activation is sent after the forward that makes it"),
    (Kind.BACKWARD, Kind.SEND_BACKWARD, "a gradient is sent after the backward that makes it"),
)


def check_schedule(schedule: Schedule) -> None:
    """Raise ValueError, naming rank, position, action and the rule, where `schedule` is not fit to run.

    `schedule` includes communication. Without any backward it is an evaluation: forwards only. With backwards, rank r
    may hold at most p - r micro-batches at a time, the promise of 1F1B on which memory is planned.
    """
    everything = [action for actions in schedule for action in actions]
    if not everything:
        raise ValueError("the schedule has no actions")
    num_microbatches = max(action.microbatch for action in everything) + 1
    trains = any(action.kind is Kind.BACKWARD for action in everything)
    for rank, actions in enumerate(schedule):
        _check_once_each(rank, actions, len(schedule), num_microbatches, trains)
        _check_order(rank, actions)
        if trains:
            _check_in_flight(rank, actions, len(schedule) - rank)
    for rank in range(len(schedule) - 1):
        _check_neighbours(schedule, Kind.FORWARD, sender=rank, receiver=rank + 1)
        _check_neighbours(schedule, Kind.BACKWARD, sender=rank + 1, receiver=rank)
    _check_ends(schedule)


def _error(rank: int, position: int, action: Action, rule: str) -> ValueError:
    return ValueError(f"rank {rank}, position {position}, {action}: {rule}")


def _check_once_each(rank: int, actions: list[Action], num_stages: int, num_microbatches: int, trains: bool) -> None:
    """Exactly the actions that stage `rank` must take, once each."""
    kinds = [compute for compute in _COMPUTE if trains or compute is Kind.FORWARD]
    transfers = [table[compute] for compute in kinds for table in (RECEIVE_BEFORE, SEND_AFTER)]
    kinds += [kind for kind in transfers if 0 <= peer(kind, rank) < num_stages]
    seen = set()
    for position, action in enumerate(actions):
        if action.kind not in kinds and not 0 <= peer(action.kind, rank) < num_stages:
            raise _error(rank, position, action, f"stage {rank} of {num_stages} has no neighbour on that side")
        if action.kind not in kinds:
            raise _error(rank, position, action, "an evaluation has no backward, so no gradient to pass")
        if action.chunk != 0:
            raise _error(rank, position, action, f"chunk is {action.chunk}, but a rank holds one stage: chunk 0")
        if action.microbatch < 0:
            raise _error(rank, position, action, "micro-batches are numbered from 0")
        if action in seen:
            raise _error(rank, position, action, "every micro-batch has exactly one of these on a stage, not two")
        seen.add(action)
    for microbatch in range(num_microbatches):
        for kind in kinds:
            if (missing := Action(kind, microbatch)) not in seen:
                raise _error(rank, len(actions), missing, "missing at the end: every micro-batch has exactly one")


def _check_order(rank: int, actions: list[Action]) -> None:
    position = {(action.kind, action.microbatch): i for i, action in enumerate(actions)}
    for earlier, later, rule in _ORDER:
        for i, action in enumerate(actions):
            if action.kind is later and position.get((earlier, action.microbatch), -1) > i:
                raise _error(rank, i, action, rule)


def _in_flight(actions: list[Action]) -> list[int]:
    """Micro-batches held for their backward after each action."""
    held, counts = 0, []
    for action in actions:
        held += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD)
        counts.append(held)
    return counts


def _check_in_flight(rank: int, actions: list[Action], limit: int) -> None:
    for position, (action, held) in enumerate(zip(actions, _in_flight(actions), strict=True)):
        if held > limit:
            raise _error(rank, position, action, f"{held} micro-batches in flight; at most p - r = {limit} may be")


def _check_neighbours(schedule: Schedule, compute: Kind, sender: int, receiver: int) -> None:
    """What follows `compute` from `sender` to `receiver` is the same micro-batches in the same order at both ends."""
    sent = [action.microbatch for action in schedule[sender] if action.kind is SEND_AFTER[compute]]
    received = [(i, a) for i, a in enumerate(schedule[receiver]) if a.kind is RECEIVE_BEFORE[compute]]
    for microbatch, (position, action) in zip(sent, received, strict=True):
        if microbatch != action.microbatch:
            rule = f"rank {sender} sends micro-batch {microbatch} here; receives follow the order of the sends"
            raise _error(receiver, position, action, rule)


def _check_ends(schedule: Schedule) -> None:
    """Run the schedule under the assumptions of the module docstring until it ends or nobody can move."""
    positions = [0] * len(schedule)
    queues = {(rank, compute): deque[Action]() for rank in range(len(schedule)) for compute in _COMPUTE}
    through: set[tuple[int, Action]] = set()  # transfers that have happened, by the rank that took part

    def can_pass(rank: int, action: Action) -> bool:
        if action.kind in _COMPUTE:
            receive = RECEIVE_BEFORE[action.kind]
            has_input = (rank, Action(receive, action.microbatch)) in through
            return has_input or not 0 <= peer(receive, rank) < len(schedule)
        sends = action.kind in SEND_AFTER.values()
        return not (sends and any(a.kind is action.kind for a in queues[rank, _direction(action)]))

    def advance(rank: int) -> bool:
        start = positions[rank]
        while positions[rank] < len(schedule[rank]):
            action = schedule[rank][positions[rank]]
            if not can_pass(rank, action):
                break
            if action.kind not in _COMPUTE:
                queues[rank, _direction(action)].append(action)
            positions[rank] += 1
        return positions[rank] > start

    def transfer(sender: int, receiver: int, compute: Kind) -> bool:
        out, into = queues[sender, compute], queues[receiver, compute]
        ready = out and into and out[0].kind is SEND_AFTER[compute] and into[0].kind is RECEIVE_BEFORE[compute]
        if ready:
            through.update({(sender, out.popleft()), (receiver, into.popleft())})
        return bool(ready)

    moved = True
    while moved:
        moves = [advance(rank) for rank in range(len(schedule))]
        for rank in range(len(schedule) - 1):
            moves += [transfer(rank, rank + 1, Kind.FORWARD), transfer(rank + 1, rank, Kind.BACKWARD)]
        moved = any(moves)
    for rank, (position, actions) in enumerate(zip(positions, schedule, strict=True)):
        if position < len(actions):
            waiting = [str(action) for compute in _COMPUTE for action in queues[rank, compute]]
            rule = f"deadlock: waits for ever; transfers issued and not through: {', '.join(waiting) or 'none'}"
            raise _error(rank, position, actions[position], rule)


def _direction(transfer: Action) -> Kind:
    return Kind.FORWARD if transfer.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD) else Kind.BACKWARD


@dataclass(frozen=True)
class Span:
    """One compute action and when it runs, in the unit of the times given to `simulate`."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated schedule: for each rank its compute actions in time, and what they hold in memory.

    `peak_in_flight` counts, for each rank, the most micro-batches held for their backward; 0 in an evaluation.
    """

    spans: list[list[Span]]
    peak_in_flight: list[int]

    @property
    def duration(self) -> float:
        return max(span.end for spans in self.spans for span in spans)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time, from the first start to the last end, in which they compute nothing."""
        busy = sum(span.end - span.start for spans in self.spans for span in spans)
        return 1.0 - busy / (len(self.spans) * self.duration)


def simulate(
    schedule: Schedule, forward_time: float = 1.0, backward_time: float = 2.0, p2p_time: float = 0.0
) -> Timeline:
    """When every compute action of `schedule` runs, each as early as its rank and its input allow.

    `forward_time` and `backward_time` are for one micro-batch on one stage, `p2p_time` for one tensor to the next
    stage, in any one unit; transfers overlap with compute. Communication actions are not needed and not looked at.
    Raises ValueError where the compute actions wait for one another for ever.
    """
    compute = [[action for action in actions if action.kind in _COMPUTE] for actions in schedule]
    times = {Kind.FORWARD: forward_time, Kind.BACKWARD: backward_time}
    spans: list[list[Span]] = [[] for _ in schedule]
    ends: dict[tuple[int, Kind, int], float] = {}

    def arrival(rank: int, action: Action) -> float | None:
        source = peer(RECEIVE_BEFORE[action.kind], rank)
        if not 0 <= source < len(schedule):
            return 0.0
        end = ends.get((source, action.kind, action.microbatch))
        return None if end is None else end + p2p_time

    def advance(rank: int) -> bool:
        done = len(spans[rank])
        for action in compute[rank][done:]:
            arrived = arrival(rank, action)
            if arrived is None:
                break
            start = max(arrived, spans[rank][-1].end if spans[rank] else 0.0)
            spans[rank].append(Span(action, start, start + times[action.kind]))
            ends[rank, action.kind, action.microbatch] = spans[rank][-1].end
        return len(spans[rank]) > done

    while any(advance(rank) for rank in range(len(schedule))):
        pass
    for rank, actions in enumerate(compute):
        if len(spans[rank]) < len(actions):
            raise _error(rank, len(spans[rank]), actions[len(spans[rank])], "deadlock: its input never comes")
    trains = any(action.kind is Kind.BACKWARD for actions in compute for action in actions)
    return Timeline(spans, [max(_in_flight(actions)) if trains else 0 for actions in compute])
