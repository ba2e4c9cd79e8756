"""A pipeline schedule is data: for each rank, the list of actions it takes, in order.

The functions here are pure and build those lists; `engine.py` runs them, `check.py` proves them fit to run,
`simulate.py` times them, and the planner and the plots read the same lists. What a schedule is decided to do can
therefore be read, tested and drawn without a process group.

The model is cut into stages. A `Placement` says which rank holds which: one stage a rank, several in turns (stage
c·p + r is chunk c of rank r), or in a V (rank r holds stages r and 2p - 1 - r, so that the last stage lies on the first
rank and its loss turns back at once). Micro-batches are numbered from 0, m in all.

A schedule is written in two steps. First the compute actions: here `one_f_one_b` (PipeDream-Flush) and `interleaved`
(both Narayanan et al. 2021, arXiv:2104.04473, section 2.2) for training, and `forward_only` for evaluation; in
`zero_bubble.py` those that compute weight gradients apart. Then `communication.py` adds the sends and receives.

A BACKWARD computes the gradients of a stage's input and of its weights, unless the same rank has a WEIGHT action for
that micro-batch and chunk: then the linear layers' weight gradients wait for it. So a schedule may split some backwards
and not others, and what a BACKWARD is can be seen from the list.

Patterns are made for a number of micro-batches that suits them, and what is beyond m is left out (`without`). That is
sound: an order in which all actions can be carried out stays one when whole micro-batches are taken out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class Kind(Enum):
    """What a rank does: compute for one micro-batch, or pass a tensor to or from a neighbouring stage."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"  # the weight gradients that a BACKWARD left for later
    SEND_FORWARD = "send_forward"  # output activation, to the next stage
    RECV_FORWARD = "recv_forward"  # input activation, from the previous stage
    SEND_BACKWARD = "send_backward"  # gradient of the input, to the previous stage
    RECV_BACKWARD = "recv_backward"  # gradient of the output, from the next stage

    __hash__ = object.__hash__  # Enum's own is written in Python, and checks of schedules hash millions of actions


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
RECEIVE_BEFORE = {Kind.FORWARD: Kind.RECV_FORWARD, Kind.BACKWARD: Kind.RECV_BACKWARD}
SEND_AFTER = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD}
DIRECTION = {transfer: compute for table in (RECEIVE_BEFORE, SEND_AFTER) for compute, transfer in table.items()}
"""FORWARD for transfers of activations, BACKWARD for those of gradients: each travel on a communicator of their own."""


class Action(NamedTuple):
    """One step of one rank. `chunk` counts the stages that the rank holds; with one stage a rank it is 0."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        return f"{self.kind.name}({self.microbatch}{chunk})"


Schedule = list[list[Action]]


@dataclass(frozen=True)
class Placement:
    """Where the stages are: rank r holds `stages[r]`, its chunks 0, 1, ... in order. Every rank holds as many."""

    stages: tuple[tuple[int, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.stages)

    @property
    def num_chunks(self) -> int:
        """Stages a rank."""
        return len(self.stages[0])

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    @cached_property
    def homes(self) -> tuple[tuple[int, int], ...]:
        """(rank, chunk) of each stage."""
        found = {stage: (r, c) for r, stages in enumerate(self.stages) for c, stage in enumerate(stages)}
        return tuple(found[stage] for stage in range(self.num_stages))

    def neighbour(self, transfer: Kind, rank: int, chunk: int) -> tuple[int, int] | None:
        """(rank, chunk) of the stage with which chunk `chunk` of `rank` has this `transfer`; None at the model's ends.

        The rank may be `rank` itself; then nothing is sent.
        """
        return self._neighbours[transfer][rank][chunk]

    @cached_property
    def _neighbours(self) -> dict[Kind, list[list[tuple[int, int] | None]]]:
        """`neighbour`, as a table."""
        found: dict[Kind, list[list[tuple[int, int] | None]]] = {}
        for transfer in DIRECTION:
            step = -1 if transfer in (Kind.RECV_FORWARD, Kind.SEND_BACKWARD) else 1
            found[transfer] = [
                [self.homes[s + step] if 0 <= s + step < self.num_stages else None for s in own] for own in self.stages
            ]
        return found

    def peer(self, transfer: Kind, rank: int, chunk: int) -> int | None:
        """The other rank with which chunk `chunk` of `rank` has this `transfer`; None where there is none."""
        found = self.neighbour(transfer, rank, chunk)
        return None if found is None or found[0] == rank else found[0]


def in_turns(num_ranks: int, num_chunks: int = 1) -> Placement:
    """Stages dealt out in turns: chunk c of rank r is stage c·p + r. Raises ValueError where a number is < 1."""
    _check_sizes(num_ranks=num_ranks, num_chunks=num_chunks)
    return Placement(tuple(tuple(c * num_ranks + r for c in range(num_chunks)) for r in range(num_ranks)))


def in_a_v(num_ranks: int) -> Placement:
    """Two stages a rank, down the ranks and back: rank r holds stages r and 2p - 1 - r. ValueError where p is < 1."""
    _check_sizes(num_ranks=num_ranks)
    return Placement(tuple((r, 2 * num_ranks - 1 - r) for r in range(num_ranks)))


Builder = Callable[[Placement, int], Schedule]
"""The compute actions of a placement and a number of micro-batches."""


def one_f_one_b(placement: Placement, num_microbatches: int) -> Schedule:
    """1F1B on one stage a rank: rank r runs p - r - 1 forwards, then one forward and one backward in turn, then drains.

    Rank r never holds more than p - r micro-batches for their backward, however many there are; the bubble is
    (p - 1) / (m + p - 1) of the time. Fewer micro-batches than stages are fine. Raises ValueError where m is < 1.
    """
    _check_sizes(num_microbatches=num_microbatches)
    assert placement.num_chunks == 1
    schedule = []
    for rank in range(placement.num_ranks):
        ahead = min(placement.num_ranks - rank - 1, num_microbatches)
        forwards, backwards = (numbered(kind, num_microbatches) for kind in (Kind.FORWARD, Kind.BACKWARD))
        schedule.append(_alternating(forwards, backwards, ahead))
    return schedule


def interleaved(placement: Placement, num_microbatches: int) -> Schedule:
    """Interleaved 1F1B on v stages a rank, dealt out in turns.

    Each rank takes p micro-batches through a chunk before it turns to the next, and is 2(p - r - 1) + (v - 1)p forwards
    ahead of its backwards. The bubble is (p - 1) / (v·m + p - 1) of the time where p divides m; otherwise the last
    round has gaps. Raises ValueError where m is < 1.
    """
    _check_sizes(num_microbatches=num_microbatches)
    p, v = placement.num_ranks, placement.num_chunks
    rounds = -(-num_microbatches // p)

    def order(kind: Kind, chunks: Iterable[int]) -> list[Action]:
        chunks = list(chunks)
        return [Action(kind, n * p + i, c) for n in range(rounds) for c in chunks for i in range(p)]

    forwards, backwards = order(Kind.FORWARD, range(v)), order(Kind.BACKWARD, reversed(range(v)))
    schedule = []
    for rank in range(p):
        ahead = min(2 * (p - rank - 1) + (v - 1) * p, len(forwards))
        schedule.append(_alternating(forwards, backwards, ahead))
    return without(schedule, num_microbatches)


def forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    """An evaluation: every micro-batch forward through every stage. Raises ValueError where m is < 1.

    Played out with all stages equally fast: a rank takes the latest of its stages for which an input is there.
    """
    _check_sizes(num_microbatches=num_microbatches)
    schedule: Schedule = [[] for _ in placement.stages]
    finished = [0] * placement.num_stages  # micro-batches that each stage has done
    while finished[-1] < num_microbatches:
        inputs = [num_microbatches, *finished[:-1]]
        for rank, stages in enumerate(placement.stages):
            ready = [(stage, c) for c, stage in enumerate(stages) if finished[stage] < inputs[stage]]
            if ready:
                stage, chunk = max(ready)
                schedule[rank].append(Action(Kind.FORWARD, finished[stage], chunk))
                finished[stage] += 1
    return schedule


def numbered(kind: Kind, count: int, chunk: int = 0) -> list[Action]:
    """`kind` for micro-batches 0 .. count - 1."""
    return [Action(kind, microbatch, chunk) for microbatch in range(count)]


def without(schedule: Schedule, num_microbatches: int) -> Schedule:
    """`schedule` with micro-batches `num_microbatches` and later left out."""
    return [[action for action in actions if action.microbatch < num_microbatches] for actions in schedule]


def splits(actions: Iterable[Action]) -> set[tuple[int, int]]:
    """(micro-batch, chunk) of the backwards among a rank's `actions` that leave weight gradients for a WEIGHT."""
    return {(action.microbatch, action.chunk) for action in actions if action.kind is Kind.WEIGHT}


def _alternating(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    actions = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - ahead :]


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; a pipeline schedule needs at least 1")
