"""Prove that a schedule is fit to run, before anything runs.

`check_compute` takes what a user or a builder writes, compute actions alone: exactly the right ones on each rank, in an
order that can be carried out.

`check_schedule` takes what the engine takes, a schedule with its communication: the right transfers beside the compute
actions that need or make them, neighbours that agree on the order of what passes between them, and an execution that
comes to its end. It assumes the least that any backend grants: a rank's transfers in one direction are one queue in
issue order, whatever ranks they go to or come from; a transfer happens when both ends have reached the head of their
queues; a compute action waits for what it receives; and a send waits until the one before it in that direction is
through (the engine keeps one send in flight a direction). A schedule that ends under these rules also ends where
transfers may overtake one another.
"""

from __future__ import annotations

from collections import deque

from megafp8.pipeline_parallel.schedules import (
    COMPUTE,
    DIRECTION,
    RECEIVE_BEFORE,
    SEND_AFTER,
    Action,
    Kind,
    Placement,
    Schedule,
)
from megafp8.pipeline_parallel.simulate import schedule_error, simulate

_ORDER = (
    (Kind.FORWARD, Kind.BACKWARD, "a backward comes after its forward"),
    (Kind.BACKWARD, Kind.WEIGHT, "weight gradients come after their backward"),
    (Kind.RECV_FORWARD, Kind.FORWARD, "the input must be received before the forward that needs it"),
    (Kind.RECV_BACKWARD, Kind.BACKWARD, "the gradient must be received before the backward that needs it"),
    (Kind.FORWARD, Kind.SEND_FORWARD, "an activation is sent after the forward that makes it"),
    (Kind.BACKWARD, Kind.SEND_BACKWARD, "a gradient is sent after the backward that makes it"),
)


def check_compute(compute: Schedule, placement: Placement, num_microbatches: int) -> None:
    """Raise ValueError, naming rank, position, action and the rule, where compute actions are not fit to run.

    Without any backward it is an evaluation: forwards only.
    """
    if len(compute) != placement.num_ranks:
        raise ValueError(f"the schedule is for {len(compute)} ranks, the pipeline has {placement.num_ranks}")
    for rank, actions in enumerate(compute):
        for position, action in enumerate(actions):
            if action.kind not in COMPUTE:
                raise schedule_error(rank, position, action, "transfers follow from the placement and are added later")
    _check_ranks(compute, placement, num_microbatches)
    simulate(compute, placement)


def check_schedule(schedule: Schedule, placement: Placement) -> None:
    """Raise ValueError, naming rank, position, action and the rule, where `schedule` is not fit to run.

    `schedule` includes communication. Without any backward it is an evaluation: forwards only.
    """
    everything = [action for actions in schedule for action in actions]
    if not everything:
        raise ValueError("the schedule has no actions")
    assert len(schedule) == placement.num_ranks
    _check_ranks(schedule, placement, max(action.microbatch for action in everything) + 1, transfers=True)
    _check_neighbours(schedule, placement)
    _Execution(schedule, placement).check()


def _check_ranks(schedule: Schedule, placement: Placement, num_microbatches: int, *, transfers: bool = False) -> None:
    trains = any(
        action.kind is not Kind.FORWARD for actions in schedule for action in actions if action.kind in COMPUTE
    )
    for rank, actions in enumerate(schedule):
        _check_once_each(rank, actions, placement, num_microbatches, trains, transfers)
        _check_order(rank, actions)


def _check_once_each(
    rank: int, actions: list[Action], placement: Placement, num_microbatches: int, trains: bool, transfers: bool
) -> None:
    """Exactly the actions that a rank must take, once each; weight gradients apart are as the schedule likes."""
    kinds = [Kind.FORWARD, Kind.BACKWARD] if trains else [Kind.FORWARD]
    seen = set()
    for position, action in enumerate(actions):
        if not 0 <= action.chunk < placement.num_chunks:
            rule = f"a rank of this pipeline holds {placement.num_chunks} chunks, numbered from 0"
            raise schedule_error(rank, position, action, rule)
        if not 0 <= action.microbatch < num_microbatches:
            rule = f"there are {num_microbatches} micro-batches, numbered from 0"
            raise schedule_error(rank, position, action, rule)
        if action.kind in DIRECTION and placement.peer(action.kind, rank, action.chunk) is None:
            stage = placement.stages[rank][action.chunk]
            rule = f"stage {stage} of {placement.num_stages} has no neighbour on that side, or has it on its own rank"
            raise schedule_error(rank, position, action, rule)
        if not trains and DIRECTION.get(action.kind, Kind.FORWARD) is not Kind.FORWARD:
            raise schedule_error(rank, position, action, "an evaluation has no backward, so no gradient to pass")
        if action in seen:
            rule = "every micro-batch has exactly one of these on a stage, not two"
            raise schedule_error(rank, position, action, rule)
        seen.add(action)
    for microbatch in range(num_microbatches):
        for chunk in range(placement.num_chunks):
            needed = list(kinds)
            if transfers:
                around = [table[kind] for kind in kinds for table in (RECEIVE_BEFORE, SEND_AFTER)]
                needed += [kind for kind in around if placement.peer(kind, rank, chunk) is not None]
            for kind in needed:
                if (missing := Action(kind, microbatch, chunk)) not in seen:
                    rule = "missing at the end: every micro-batch has exactly one"
                    raise schedule_error(rank, len(actions), missing, rule)


def _check_order(rank: int, actions: list[Action]) -> None:
    position = {action: i for i, action in enumerate(actions)}
    for i, action in enumerate(actions):
        for earlier, later, rule in _ORDER:
            if action.kind is later and position.get(Action(earlier, action.microbatch, action.chunk), -1) > i:
                raise schedule_error(rank, i, action, rule)


def _check_neighbours(schedule: Schedule, placement: Placement) -> None:
    """What one rank sends another in one direction is received in the order in which it is sent."""
    sent: dict[tuple[int, int, Kind], deque[Action]] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.kind in SEND_AFTER.values():
                target = placement.neighbour(action.kind, rank, action.chunk)
                assert target is not None
                direction = DIRECTION[action.kind]
                passed = Action(RECEIVE_BEFORE[direction], action.microbatch, target[1])
                sent.setdefault((rank, target[0], direction), deque()).append(passed)
    for rank, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            if action.kind in RECEIVE_BEFORE.values():
                source = placement.peer(action.kind, rank, action.chunk)
                assert source is not None
                passed = sent[source, rank, DIRECTION[action.kind]].popleft()
                if passed != action:
                    rule = f"rank {source} sends what {passed} receives here; receives follow the order of the sends"
                    raise schedule_error(rank, position, action, rule)


class _Execution:
    """The schedule run under the assumptions of the module docstring until it ends or nobody can move."""

    def __init__(self, schedule: Schedule, placement: Placement) -> None:
        self.schedule, self.placement = schedule, placement
        self.positions = [0] * len(schedule)
        self.queues = {
            (rank, direction): deque[Action]() for rank in range(len(schedule)) for direction in RECEIVE_BEFORE
        }
        self.done: set[tuple[int, Action]] = set()  # compute actions, and transfers by the rank that took part

    def check(self) -> None:
        """Raise ValueError where the execution does not come to its end."""
        moved = True
        while moved:
            moves = [self._advance(rank) for rank in range(len(self.schedule))]
            moves += [self._transfer(rank, direction) for rank, direction in self.queues]
            moved = any(moves)
        for rank, (position, actions) in enumerate(zip(self.positions, self.schedule, strict=True)):
            if position < len(actions):
                waiting = [str(action) for kind in RECEIVE_BEFORE for action in self.queues[rank, kind]]
                rule = f"deadlock: waits for ever; transfers issued and not through: {', '.join(waiting) or 'none'}"
                raise schedule_error(rank, position, actions[position], rule)

    def _can_pass(self, rank: int, action: Action) -> bool:
        if action.kind in DIRECTION:
            sends = action.kind in SEND_AFTER.values()
            return not (sends and any(a.kind is action.kind for a in self.queues[rank, DIRECTION[action.kind]]))
        if action.kind is Kind.WEIGHT:
            return True  # its backward is earlier in the same list
        receive = RECEIVE_BEFORE[action.kind]
        source = self.placement.neighbour(receive, rank, action.chunk)
        if source is None:
            return True
        if source[0] == rank:
            return (rank, Action(action.kind, action.microbatch, source[1])) in self.done
        return (rank, Action(receive, action.microbatch, action.chunk)) in self.done

    def _advance(self, rank: int) -> bool:
        start, actions = self.positions[rank], self.schedule[rank]
        while self.positions[rank] < len(actions):
            action = actions[self.positions[rank]]
            if not self._can_pass(rank, action):
                break
            if action.kind in DIRECTION:
                self.queues[rank, DIRECTION[action.kind]].append(action)
            else:
                self.done.add((rank, action))
            self.positions[rank] += 1
        return self.positions[rank] > start

    def _transfer(self, sender: int, direction: Kind) -> bool:
        """Let what stands first in a sender's queue pass, if it stands first at its receiver too."""
        out = self.queues[sender, direction]
        if not out or out[0].kind is not SEND_AFTER[direction]:
            return False
        target = self.placement.neighbour(out[0].kind, sender, out[0].chunk)
        assert target is not None
        into = self.queues[target[0], direction]
        if not into or into[0] != Action(RECEIVE_BEFORE[direction], out[0].microbatch, target[1]):
            return False
        self.done |= {(sender, out.popleft()), (target[0], into.popleft())}
        return True
