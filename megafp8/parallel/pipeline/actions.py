"""Pipeline schedules as data: for each rank, the list of its actions in the order in which they run.

Pure functions build schedules (`schedules/`). Schedules are checked (`check.py`), simulated (`simulate.py`), drawn, and
used for memory planning without a process group. `engine.py` executes the same lists.

The model is split into stages, and a `StagePlacement` says which rank holds which stages. The stages of one rank are
its chunks. Micro-batches are numbered from 0. p is the number of ranks, v the number of chunks per rank, m the number
of micro-batches.

A BACKWARD computes the gradients of a stage's input and of its weights, unless the same rank has a WEIGHT action for
that micro-batch and chunk: in that case, the WEIGHT computes the weight gradients of linear layers. A schedule may
split some backwards and not others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class Kind(Enum):
    """Kinds of actions: compute for one micro-batch, or pass a tensor to or from a neighboring stage."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"  # the weight gradients of a split backward
    SEND_FORWARD = "send_forward"  # output activation, to the next stage
    RECV_FORWARD = "recv_forward"  # input activation, from the previous stage
    SEND_BACKWARD = "send_backward"  # gradient of the input, to the previous stage
    RECV_BACKWARD = "recv_backward"  # gradient of the output, from the next stage

    __hash__ = object.__hash__  # faster than Enum's, which is Python code; schedule checks hash millions of actions


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
RECEIVE_BEFORE = {Kind.FORWARD: Kind.RECV_FORWARD, Kind.BACKWARD: Kind.RECV_BACKWARD}
SEND_AFTER = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD}
DIRECTION = {transfer: compute for table in (RECEIVE_BEFORE, SEND_AFTER) for compute, transfer in table.items()}
"""Direction of each transfer: FORWARD for activations, BACKWARD for gradients. Each has its own communicator."""


class Action(NamedTuple):
    """Action of one rank, for micro-batch `microbatch` on the rank's chunk `chunk`."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        return f"{self.kind.name}({self.microbatch}{chunk})"


Schedule = list[list[Action]]
"""Actions of each rank."""


def split_backwards(actions: Iterable[Action]) -> set[tuple[int, int]]:
    """Return the (micro-batch, chunk) of the backwards in a rank's `actions` that have a separate WEIGHT action."""
    return {(action.microbatch, action.chunk) for action in actions if action.kind is Kind.WEIGHT}


@dataclass(frozen=True)
class StagePlacement:
    """Placement of stages: rank r holds `stages[r]`, its chunks 0, 1, ... in order. All ranks hold the same number."""

    stages: tuple[tuple[int, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.stages)

    @property
    def num_chunks(self) -> int:
        """Number of stages per rank."""
        return len(self.stages[0])

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return self.num_ranks * self.num_chunks

    @cached_property
    def homes(self) -> tuple[tuple[int, int], ...]:
        """Rank and chunk of each stage."""
        homes = {stage: (r, c) for r, stages in enumerate(self.stages) for c, stage in enumerate(stages)}
        return tuple(homes[stage] for stage in range(self.num_stages))

    def neighbour(self, transfer: Kind, rank: int, chunk: int) -> tuple[int, int] | None:
        """Return the (rank, chunk) at the other end of chunk `chunk`'s `transfer` on `rank`.

        Return None at the ends of the model. The other rank may be `rank` itself; the tensor is then passed on without
        a transfer.
        """
        return self._neighbours[transfer][rank][chunk]

    @cached_property
    def _neighbours(self) -> dict[Kind, list[list[tuple[int, int] | None]]]:
        """Results of `neighbour` as a table."""
        neighbours: dict[Kind, list[list[tuple[int, int] | None]]] = {}
        for transfer in DIRECTION:
            step = -1 if transfer in (Kind.RECV_FORWARD, Kind.SEND_BACKWARD) else 1
            neighbours[transfer] = [
                [self.homes[s + step] if 0 <= s + step < self.num_stages else None for s in row] for row in self.stages
            ]
        return neighbours

    def peer(self, transfer: Kind, rank: int, chunk: int) -> int | None:
        """Return the other rank of chunk `chunk`'s `transfer` on `rank`; None if nothing is transferred."""
        neighbour = self.neighbour(transfer, rank, chunk)
        return None if neighbour is None or neighbour[0] == rank else neighbour[0]


def loop_placement(num_ranks: int, num_chunks: int = 1) -> StagePlacement:
    """Place stage c·p + r as chunk c on rank r; raise ValueError for a size below 1."""
    for name, size in {"num_ranks": num_ranks, "num_chunks": num_chunks}.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; a pipeline needs at least 1")
    return StagePlacement(tuple(tuple(c * num_ranks + r for c in range(num_chunks)) for r in range(num_ranks)))


def v_placement(num_ranks: int) -> StagePlacement:
    """Place two stages per rank: rank r holds stages r and 2p - 1 - r, so the first rank holds the last stage."""
    first = loop_placement(num_ranks)
    return StagePlacement(tuple((r, 2 * num_ranks - 1 - r) for (r,) in first.stages))
