"""Pipeline schedules, one file each: a function that builds the compute actions, and its `SCHEDULE` record.

To add a schedule, add a file here that defines `SCHEDULE = ScheduleRecord("its-name", its_function, ...)`; the registry
(`host/registry.py`) finds it, and `parallel.schedule: its-name` selects it. Sends and receives are added afterwards by
`communication.py`, and `check.py` checks every schedule before it runs. This package has what such a file imports.

F, B and W in the files here are the times of a stage's forward, input gradients and weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megafp8.parallel.pipeline.actions import Action, Kind, Schedule, StagePlacement

__all__ = ["Action", "Kind", "RankActions", "Schedule", "ScheduleRecord", "StagePlacement", "truncated"]


@dataclass(frozen=True)
class ScheduleRecord:
    """What config checks, the planner, the engine and the plots know of a schedule.

    `build(placement, m)` returns the compute actions of each rank. `chunks`: stages per rank, None for any number from
    2 up. `placement`: of these stages. `splits_wgrad`: some backwards leave their weight gradients to WEIGHT actions.
    """

    name: str
    build: Callable[[StagePlacement, int], Schedule]
    chunks: int | None = 1
    placement: Literal["loop", "v"] = "loop"
    splits_wgrad: bool = False

    @property
    def least_chunks(self) -> int:
        return self.chunks or 2

    def allows(self, chunks: int) -> bool:
        """Whether the schedule runs with `chunks` stages per rank."""
        return chunks == self.chunks if self.chunks else chunks >= self.least_chunks


class RankActions:
    """Builds one rank's list. Micro-batches of each kind and chunk are numbered in order of their calls."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._counts: dict[tuple[Kind, int], int] = {}
        self._pending: list[tuple[int, int]] = []  # (micro-batch, chunk) of weight gradients not yet computed

    def _append(self, kind: Kind, chunk: int) -> int:
        number = self._counts.get((kind, chunk), 0)
        self._counts[kind, chunk] = number + 1
        self.actions.append(Action(kind, number, chunk))
        return number

    def forward(self, chunk: int = 0) -> None:
        self._append(Kind.FORWARD, chunk)

    def backward(self, chunk: int = 0) -> None:
        """The chunk's next backward, weight gradients included."""
        self._append(Kind.BACKWARD, chunk)

    def split_backward(self, chunk: int = 0) -> None:
        """The chunk's next backward, without its weight gradients."""
        self._pending.append((self._append(Kind.BACKWARD, chunk), chunk))

    def weight(self, chunk: int | None = None) -> None:
        """The weight gradients, of `chunk` or of any, that have been pending longest."""
        oldest = next(entry for entry in self._pending if chunk in (None, entry[1]))
        self._pending.remove(oldest)
        self.actions.append(Action(Kind.WEIGHT, *oldest))

    def pending_weights(self) -> None:
        """All weight gradients that are pending, the oldest first."""
        while self._pending:
            self.weight()

    def num_forwards(self, chunk: int = 0) -> int:
        """The number of forwards of `chunk` so far."""
        return self._counts.get((Kind.FORWARD, chunk), 0)


def truncated(schedule: Schedule, num_microbatches: int) -> Schedule:
    """`schedule` without micro-batches `num_microbatches` and later.

    Some patterns need a minimum or a multiple of micro-batches: they are built for the next number that fits and the
    rest is removed. Removing whole micro-batches from an order that can be executed leaves one that can.
    """
    return [[action for action in actions if action.microbatch < num_microbatches] for actions in schedule]
