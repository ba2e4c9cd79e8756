"""Pipeline schedules, one file each: a function that builds the compute actions, and its `SCHEDULE` record.

To add a schedule, add a file here that defines `SCHEDULE = ScheduleRecord("its-name", its_function, ...)`. The registry
(`host/registry.py`) finds it, and `parallel.schedule: its-name` selects it. Later, `communication.py` adds sends and
receives, and `check.py` checks every schedule before it runs. This package provides everything that such a file
imports.

In the files here, F, B and W are the times of a stage's forward, input gradients and weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megafp8.parallel.pipeline.actions import Action, Kind, Schedule, StagePlacement

__all__ = ["Action", "Kind", "RankActions", "Schedule", "ScheduleRecord", "StagePlacement", "truncated"]


@dataclass(frozen=True)
class ScheduleRecord:
    """Properties of a schedule that config checks, the planner, the engine and the plots read.

    Attributes:
        name: Name in `parallel.schedule`.
        build: `build(placement, m)` returns the compute actions of each rank.
        chunks: Stages per rank; None for any number from 2 up.
        placement: Placement of the stages.
        splits_wgrad: Whether some backwards leave their weight gradients to WEIGHT actions.
    """

    name: str
    build: Callable[[StagePlacement, int], Schedule]
    chunks: int | None = 1
    placement: Literal["loop", "v"] = "loop"
    splits_wgrad: bool = False

    @property
    def least_chunks(self) -> int:
        """Minimum number of stages per rank."""
        return self.chunks or 2

    def allows(self, chunks: int) -> bool:
        """Return whether the schedule runs with `chunks` stages per rank."""
        return chunks == self.chunks if self.chunks else chunks >= self.least_chunks


class RankActions:
    """Builder of one rank's list of actions. Micro-batches of each kind and chunk are numbered in call order."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._counts: dict[tuple[Kind, int], int] = {}
        self._pending: list[tuple[int, int]] = []  # (micro-batch, chunk) of weight gradients not yet computed

    def _append(self, kind: Kind, chunk: int) -> int:
        """Append the next action of a kind and chunk, and return its micro-batch."""
        number = self._counts.get((kind, chunk), 0)
        self._counts[kind, chunk] = number + 1
        self.actions.append(Action(kind, number, chunk))
        return number

    def forward(self, chunk: int = 0) -> None:
        """Append the chunk's next forward."""
        self._append(Kind.FORWARD, chunk)

    def backward(self, chunk: int = 0) -> None:
        """Append the chunk's next backward, including its weight gradients."""
        self._append(Kind.BACKWARD, chunk)

    def split_backward(self, chunk: int = 0) -> None:
        """Append the chunk's next backward without its weight gradients."""
        self._pending.append((self._append(Kind.BACKWARD, chunk), chunk))

    def weight(self, chunk: int | None = None) -> None:
        """Append the weight gradients that have been pending longest, of `chunk` or of any chunk."""
        oldest = next(entry for entry in self._pending if chunk in (None, entry[1]))
        self._pending.remove(oldest)
        self.actions.append(Action(Kind.WEIGHT, *oldest))

    def pending_weights(self) -> None:
        """Append all pending weight gradients, oldest first."""
        while self._pending:
            self.weight()

    def num_forwards(self, chunk: int = 0) -> int:
        """Return the number of forwards of `chunk` so far."""
        return self._counts.get((Kind.FORWARD, chunk), 0)


def truncated(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Return `schedule` without micro-batches `num_microbatches` and later.

    Some patterns need a minimum or a multiple of micro-batches: they are built for the next number that fits, and the
    rest is removed. Removing whole micro-batches from an executable order leaves an executable order.
    """
    return [[action for action in actions if action.microbatch < num_microbatches] for actions in schedule]
