"""A pipeline schedule as data: for each rank the list of its actions, in the order in which it takes them.

Schedules are built by pure functions (`schedules/`), checked (`check.py`), simulated (`simulate.py`), drawn, and used
for memory planning without a process group; `engine.py` executes the same lists.

The model is cut into stages, and a `StagePlacement` says which rank holds which. The stages of one rank are its chunks.
Micro-batches are numbered from 0. p is the number of ranks, v of chunks per rank, m of micro-batches.

A BACKWARD computes the gradients of a stage's input and of its weights, unless the same rank has a WEIGHT action for
that micro-batch and chunk: then the WEIGHT computes the weight gradients of linear layers. A schedule may split some
backwards and not others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class Kind(Enum):
    """What a rank does: compute for one micro-batch, or pass a tensor to or from a neighbouring stage."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"  # the weight gradients of a split backward
    SEND_FORWARD = "send_forward"  # output activation, to the next stage
    RECV_FORWARD = "recv_forward"  # input activation, from the previous stage
    SEND_BACKWARD = "send_backward"  # gradient of the input, to the previous stage
    RECV_BACKWARD = "recv_backward"  # gradient of the output, from the next stage

    __hash__ = object.__hash__  # Enum's own is written in Python, and checks of schedules hash millions of actions


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
RECEIVE_BEFORE = {Kind.FORWARD: Kind.RECV_FORWARD, Kind.BACKWARD: Kind.RECV_BACKWARD}
SEND_AFTER = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD}
DIRECTION = {transfer: compute for table in (RECEIVE_BEFORE, SEND_AFTER) for compute, transfer in table.items()}
"""FORWARD for transfers of activations, BACKWARD for those of gradients. Each direction has its own communicator."""


class Action(NamedTuple):
    """One action of one rank, for micro-batch `microbatch` on the rank's chunk `chunk`."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        return f"{self.kind.name}({self.microbatch}{chunk})"


Schedule = list[list[Action]]
"""The actions of each rank."""


def split_backwards(actions: Iterable[Action]) -> set[tuple[int, int]]:
    """(micro-batch, chunk) of the backwards among a rank's `actions` whose weight gradients have a WEIGHT action."""
    return {(action.microbatch, action.chunk) for action in actions if action.kind is Kind.WEIGHT}


@dataclass(frozen=True)
class StagePlacement:
    """The stages of each rank: rank r holds `stages[r]`, its chunks 0, 1, ... in order. All hold the same number."""

    stages: tuple[tuple[int, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.stages)

    @property
    def num_chunks(self) -> int:
        """Stages per rank."""
        return len(self.stages[0])

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    @cached_property
    def homes(self) -> tuple[tuple[int, int], ...]:
        """(rank, chunk) of each stage."""
        homes = {stage: (r, c) for r, stages in enumerate(self.stages) for c, stage in enumerate(stages)}
        return tuple(homes[stage] for stage in range(self.num_stages))

    def neighbour(self, transfer: Kind, rank: int, chunk: int) -> tuple[int, int] | None:
        """(rank, chunk) at the other end of chunk `chunk`'s `transfer` on `rank`; None at the ends of the model.

        The rank may be `rank` itself; then the tensor is passed without a transfer.
        """
        return self._neighbours[transfer][rank][chunk]

    @cached_property
    def _neighbours(self) -> dict[Kind, list[list[tuple[int, int] | None]]]:
        """`neighbour` as a table."""
        neighbours: dict[Kind, list[list[tuple[int, int] | None]]] = {}
        for transfer in DIRECTION:
            step = -1 if transfer in (Kind.RECV_FORWARD, Kind.SEND_BACKWARD) else 1
            neighbours[transfer] = [
                [self.homes[s + step] if 0 <= s + step < self.num_stages else None for s in row] for row in self.stages
            ]
        return neighbours

    def peer(self, transfer: Kind, rank: int, chunk: int) -> int | None:
        """The other rank of chunk `chunk`'s `transfer` on `rank`; None where nothing is transferred."""
        neighbour = self.neighbour(transfer, rank, chunk)
        return None if neighbour is None or neighbour[0] == rank else neighbour[0]


def loop_placement(num_ranks: int, num_chunks: int = 1) -> StagePlacement:
    """Chunk c of rank r is stage c·p + r. Raises ValueError for a size below 1."""
    for name, size in {"num_ranks": num_ranks, "num_chunks": num_chunks}.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; a pipeline needs at least 1")
    return StagePlacement(tuple(tuple(c * num_ranks + r for c in range(num_chunks)) for r in range(num_ranks)))


def v_placement(num_ranks: int) -> StagePlacement:
    """Two stages per rank: rank r holds stages r and 2p - 1 - r, so the first rank holds the last stage."""
    first = loop_placement(num_ranks)
    return StagePlacement(tuple((r, 2 * num_ranks - 1 - r) for (r,) in first.stages))
