"""Checks, before anything runs, that a schedule can run.

`check_compute` takes compute actions, as a user or a schedule function writes them. It checks that each rank has
exactly the right actions, in an order that can be executed.

`check_schedule` takes the engine's input, with communication. It checks that the right transfers accompany the compute
actions that need or produce their tensors, that neighbors agree on the order of transfers between them, and that the
execution does not deadlock. It assumes only what every backend guarantees: a rank's transfers in one direction form one
queue in issue order, whatever their peers; a transfer happens when it is at the head of the queue at both ends; a
compute action waits for the tensors that it receives; and a send waits for the previous send in its direction (the
engine keeps one in flight per direction). A schedule that ends under these rules also ends if transfers may overtake
one another.
"""

from __future__ import annotations

from collections import deque

from megafp8.parallel.pipeline.actions import (
    COMPUTE,
    DIRECTION,
    RECEIVE_BEFORE,
    SEND_AFTER,
    Action,
    Kind,
    Schedule,
    StagePlacement,
)
from megafp8.parallel.pipeline.simulate import schedule_error, simulate

_BEFORE: dict[Kind, dict[Kind, str]] = {
    Kind.FORWARD: {Kind.RECV_FORWARD: "the input must be received before the forward that needs it"},
    Kind.BACKWARD: {
        Kind.FORWARD: "a backward comes after its forward",
        Kind.RECV_BACKWARD: "the gradient must be received before the backward that needs it",
    },
    Kind.WEIGHT: {Kind.BACKWARD: "weight gradients come after their backward"},
    Kind.SEND_FORWARD: {Kind.FORWARD: "an activation is sent after the forward that produces it"},
    Kind.SEND_BACKWARD: {Kind.BACKWARD: "a gradient is sent after the backward that produces it"},
}
"""Kinds of action that come before each kind, with the rule that requires it."""


def check_compute(compute: Schedule, placement: StagePlacement, num_microbatches: int) -> None:
    """Raise ValueError, naming rank, position, action and rule, if compute actions cannot run.

    A schedule without backwards is an evaluation.
    """
    if len(compute) != placement.num_ranks:
        raise ValueError(f"the schedule is for {len(compute)} ranks, but the pipeline has {placement.num_ranks}")
    for rank, actions in enumerate(compute):
        for position, action in enumerate(actions):
            if action.kind not in COMPUTE:
                raise schedule_error(rank, position, action, "transfers follow from the placement and are added later")
    _check_ranks(compute, placement, num_microbatches, transfers=False)
    simulate(compute, placement)


def check_schedule(schedule: Schedule, placement: StagePlacement) -> None:
    """Raise ValueError, naming rank, position, action and rule, if `schedule`, with communication, cannot run.

    A schedule without backwards is an evaluation.
    """
    microbatches = [action.microbatch for actions in schedule for action in actions]
    if not microbatches:
        raise ValueError("the schedule has no actions")
    assert len(schedule) == placement.num_ranks
    _check_ranks(schedule, placement, max(microbatches) + 1, transfers=True)
    _check_neighbours(schedule, placement)
    _Execution(schedule, placement).check()


def _check_ranks(schedule: Schedule, placement: StagePlacement, num_microbatches: int, *, transfers: bool) -> None:
    """Check that each rank has exactly the actions it needs, once each and in order.

    Splitting a backward is optional.
    """
    trains = any(action.kind in (Kind.BACKWARD, Kind.WEIGHT) for actions in schedule for action in actions)
    needed = [Kind.FORWARD, Kind.BACKWARD] if trains else [Kind.FORWARD]
    if transfers:
        needed += [table[kind] for kind in needed for table in (RECEIVE_BEFORE, SEND_AFTER)]
    for rank, actions in enumerate(schedule):
        positions: dict[Action, int] = {}
        for position, action in enumerate(actions):
            rule = _invalid(rank, action, placement, num_microbatches, trains)
            if action in positions:
                rule = rule or "every micro-batch has exactly one such action on a stage, not two"
            if rule:
                raise schedule_error(rank, position, action, rule)
            positions[action] = position
        for microbatch in range(num_microbatches):
            for chunk in range(placement.num_chunks):
                for kind in needed:
                    exists = kind in COMPUTE or placement.peer(kind, rank, chunk) is not None
                    if exists and (missing := Action(kind, microbatch, chunk)) not in positions:
                        rule = "missing at the end: every micro-batch has exactly one"
                        raise schedule_error(rank, len(actions), missing, rule)
        for position, action in enumerate(actions):
            for earlier, rule in _BEFORE.get(action.kind, {}).items():
                if positions.get(Action(earlier, action.microbatch, action.chunk), -1) > position:
                    raise schedule_error(rank, position, action, rule)


def _invalid(rank: int, action: Action, placement: StagePlacement, num_microbatches: int, trains: bool) -> str | None:
    """Return the rule that `action` breaks on `rank` in any position, or None."""
    if not 0 <= action.chunk < placement.num_chunks:
        return f"a rank of this pipeline holds {placement.num_chunks} chunks, numbered from 0"
    if not 0 <= action.microbatch < num_microbatches:
        return f"there are {num_microbatches} micro-batches, numbered from 0"
    if action.kind in DIRECTION and placement.peer(action.kind, rank, action.chunk) is None:
        stage = placement.stages[rank][action.chunk]
        return f"stage {stage} of {placement.num_stages} has no neighbor on that side, or has it on the same rank"
    if not trains and DIRECTION.get(action.kind, Kind.FORWARD) is not Kind.FORWARD:
        return "an evaluation has no backward, so no gradient to pass"
    return None


def _receive_of(send: Action, rank: int, placement: StagePlacement) -> tuple[int, Action]:
    """Return the receiving rank and the receive action that match a `send` of `rank`."""
    target = placement.neighbour(send.kind, rank, send.chunk)
    assert target is not None
    return target[0], Action(RECEIVE_BEFORE[DIRECTION[send.kind]], send.microbatch, target[1])


def _check_neighbours(schedule: Schedule, placement: StagePlacement) -> None:
    """Check that a rank receives from each neighbor, in each direction, in the order in which the neighbor sends."""
    sent: dict[tuple[int, int, Kind], deque[Action]] = {}  # by sender, receiver and kind of the receive
    for rank, actions in enumerate(schedule):
        for action in actions:
            if action.kind in SEND_AFTER.values():
                target, receive = _receive_of(action, rank, placement)
                sent.setdefault((rank, target, receive.kind), deque()).append(receive)
    for rank, actions in enumerate(schedule):
        for position, action in enumerate(actions):
            if action.kind in RECEIVE_BEFORE.values():
                source = placement.peer(action.kind, rank, action.chunk)
                assert source is not None
                receive = sent[source, rank, action.kind].popleft()
                if receive != action:
                    rule = f"rank {source} sends the tensor of {receive} first; receives follow the order of the sends"
                    raise schedule_error(rank, position, action, rule)


class _Execution:
    """Execution of a schedule under the assumptions of the module docstring."""

    def __init__(self, schedule: Schedule, placement: StagePlacement) -> None:
        self.schedule, self.placement = schedule, placement
        self.positions = [0] * len(schedule)
        self.queues = {
            (rank, direction): deque[Action]() for rank in range(len(schedule)) for direction in RECEIVE_BEFORE
        }
        self.done: set[tuple[int, Action]] = set()  # (rank, action); a transfer is in it for both ranks

    def check(self) -> None:
        """Execute until no rank can advance; raise ValueError if actions are left."""
        moved = True
        while moved:
            moves = [self._advance(rank) for rank in range(len(self.schedule))]
            moves += [self._transfer(rank, direction) for rank, direction in self.queues]
            moved = any(moves)
        for rank, (position, actions) in enumerate(zip(self.positions, self.schedule, strict=True)):
            if position < len(actions):
                waiting = [str(action) for kind in RECEIVE_BEFORE for action in self.queues[rank, kind]]
                rule = f"deadlock: waits forever; transfers issued but unfinished: {', '.join(waiting) or 'none'}"
                raise schedule_error(rank, position, actions[position], rule)

    def _is_ready(self, rank: int, action: Action) -> bool:
        """Return whether `rank` can take `action` now."""
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
        """Let `rank` take its next actions, and return whether it took any."""
        start, actions = self.positions[rank], self.schedule[rank]
        while self.positions[rank] < len(actions) and self._is_ready(rank, actions[self.positions[rank]]):
            action = actions[self.positions[rank]]
            if action.kind in DIRECTION:
                self.queues[rank, DIRECTION[action.kind]].append(action)
            else:
                self.done.add((rank, action))
            self.positions[rank] += 1
        return self.positions[rank] > start

    def _transfer(self, sender: int, direction: Kind) -> bool:
        """Perform the send at the head of a queue if its receive is at the head of the receiver's queue.

        Return whether the transfer happened.
        """
        sends = self.queues[sender, direction]
        if not sends or sends[0].kind is not SEND_AFTER[direction]:
            return False
        target, receive = _receive_of(sends[0], sender, self.placement)
        receives = self.queues[target, direction]
        if not receives or receives[0] != receive:
            return False
        self.done |= {(sender, sends.popleft()), (target, receives.popleft())}
        return True
