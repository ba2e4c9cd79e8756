"""A pipeline schedule is data: for each rank, the list of actions it takes, in order.

The functions here are pure and build those lists; `engine.py` runs them, `simulate.py` checks and times them, and the
planner and the plots read the same lists. What a schedule is decided to do can therefore be read, tested and drawn
without a process group.

Stages are ranks of the pipeline group, p in all; micro-batches are numbered from 0, m in all. A schedule is written in
two steps. First the compute actions: `one_f_one_b` for training (PipeDream-Flush, Narayanan et al. 2021,
arXiv:2104.04473, section 2.2) and `forward_only` for evaluation. Then `with_communication` adds the sends and receives,
which follow from the stage numbers alone.

Where a receive is posted matters. A rank's transfers in one direction (activations forward, or gradients backward) pass
through one queue in the order they were issued: so it is on NCCL, where a process group that was connected at start-up
has one communicator and one stream for all its point-to-point calls. Hence two rules: a receive is posted one compute
action before the one that needs it, so that it overlaps; but where the compute action in between will itself send in
the same direction, the receive goes behind that send, for in front it would hold the send back until the neighbour had
delivered. The second case arises in warm-up and cool-down only; in the steady state every receive overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a rank does: compute for one micro-batch, or pass a tensor to or from a neighbouring stage."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND_FORWARD = "send_forward"  # output activation, to the next stage
    RECV_FORWARD = "recv_forward"  # input activation, from the previous stage
    SEND_BACKWARD = "send_backward"  # gradient of the input, to the previous stage
    RECV_BACKWARD = "recv_backward"  # gradient of the output, from the next stage


RECEIVE_BEFORE = {Kind.FORWARD: Kind.RECV_FORWARD, Kind.BACKWARD: Kind.RECV_BACKWARD}
SEND_AFTER = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD}


@dataclass(frozen=True)
class Action:
    """One step of one rank. `chunk` counts the model chunks a rank holds; with one stage a rank it is 0."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.name}({self.microbatch})"


Schedule = list[list[Action]]


def peer(kind: Kind, rank: int) -> int:
    """The stage at the other end of a transfer of stage `rank`; outside 0 .. p - 1 where there is none."""
    return rank - 1 if kind in (Kind.RECV_FORWARD, Kind.SEND_BACKWARD) else rank + 1


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Compute actions of 1F1B: rank r runs p - r - 1 forwards, then one forward and one backward in turn, then drains.

    Rank r never holds more than p - r micro-batches for their backward, however many there are; the bubble is
    (p - 1) / (m + p - 1) of the time. Fewer micro-batches than stages are fine. Raises ValueError where p or m is < 1.
    """
    _check_sizes(num_stages, num_microbatches)
    schedule = []
    for rank in range(num_stages):
        ahead = min(num_stages - rank - 1, num_microbatches)
        actions = _run(Kind.FORWARD, range(ahead))
        for microbatch in range(ahead, num_microbatches):
            actions += [Action(Kind.FORWARD, microbatch), Action(Kind.BACKWARD, microbatch - ahead)]
        schedule.append(actions + _run(Kind.BACKWARD, range(num_microbatches - ahead, num_microbatches)))
    return schedule


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Compute actions of an evaluation: every micro-batch forward, in order. Raises ValueError where p or m is < 1."""
    _check_sizes(num_stages, num_microbatches)
    return [_run(Kind.FORWARD, range(num_microbatches)) for _ in range(num_stages)]


def with_communication(compute: Schedule) -> Schedule:
    """`compute` with every send and receive added: sends directly after what they send, receives as early as is good.

    The first stage receives no activation and sends no gradient, the last sends no activation and receives no gradient,
    so one stage alone communicates nothing.
    """
    return [_communicate(actions, rank, len(compute)) for rank, actions in enumerate(compute)]


def _communicate(compute: Sequence[Action], rank: int, num_stages: int) -> list[Action]:
    def transfer(kinds: dict[Kind, Kind], action: Action) -> list[Action]:
        kind = kinds[action.kind]
        exists = 0 <= peer(kind, rank) < num_stages
        return [Action(kind, action.microbatch, action.chunk)] if exists else []

    actions = transfer(RECEIVE_BEFORE, compute[0])
    for action, following in zip(compute, [*compute[1:], None], strict=True):
        send = transfer(SEND_AFTER, action)
        receive = transfer(RECEIVE_BEFORE, following) if following else []
        if send and following and following.kind is action.kind:  # the same queue: not in front of the send
            actions += [action, *send, *receive]
        else:
            actions += [*receive, action, *send]
    return actions


def _run(kind: Kind, microbatches: Sequence[int]) -> list[Action]:
    return [Action(kind, microbatch) for microbatch in microbatches]


def _check_sizes(num_stages: int, num_microbatches: int) -> None:
    for name, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ValueError(f"{name} is {value}; a pipeline schedule needs at least 1")
