"""Registry of the built-in pipeline schedules, and loader of a user's own schedules for `parallel.schedule`.

    1f1b, ...                     the `SCHEDULE` of a file in `schedules/`
    folder/mine.csv               one row per rank, one action per cell; empty cells are skipped
    mypackage.schedules:mine      mine(placement, num_microbatches) -> a list of actions for each rank

A cell is F, B or W and the micro-batch, followed by a point and the chunk if a rank holds several chunks: F3, B3, W3,
F3.1. A file is for one number of ranks and micro-batches, a function for any numbers. All schedules define only compute
actions, which are checked before anything runs. This module does not import torch, so that config checks can read the
registry.
"""

from __future__ import annotations

import csv
import importlib
import re
from pathlib import Path
from typing import Literal

from megafp8.host.registry import records_of
from megafp8.host.suggestions import near_name
from megafp8.parallel.pipeline import schedules
from megafp8.parallel.pipeline.actions import Action, Kind, Schedule, StagePlacement, loop_placement, v_placement
from megafp8.parallel.pipeline.check import check_compute
from megafp8.parallel.pipeline.schedules import ScheduleRecord

_LETTERS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "W": Kind.WEIGHT}
_CELL = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")


def _discover() -> dict[str, ScheduleRecord]:
    """Return the record of each file in `schedules/`, sorted by name."""
    records: dict[str, ScheduleRecord] = {}
    for record in records_of(schedules, "SCHEDULE"):
        assert record.name not in records, f"two schedules are called {record.name}"
        records[record.name] = record
    return dict(sorted(records.items()))


SCHEDULES = _discover()


def unsplit_schedule(chunks: int) -> str:
    """Return the name of a built-in schedule for `chunks` stages per rank that does not split backwards."""
    return next(name for name, record in SCHEDULES.items() if record.allows(chunks) and not record.splits_wgrad)


def place_stages(
    source: str, num_ranks: int, num_chunks: int, kind: Literal["loop", "v"] | None = None
) -> StagePlacement:
    """Return the placement of schedule `source`.

    `kind` overrides the placement in the schedule's record, or "loop" for a user's own schedule.
    """
    scheduled = SCHEDULES[source].placement if source in SCHEDULES else "loop"
    return v_placement(num_ranks) if (kind or scheduled) == "v" else loop_placement(num_ranks, num_chunks)


def training_schedule(source: str, placement: StagePlacement, num_microbatches: int) -> Schedule:
    """Return the compute actions of schedule `source`.

    Raises:
        ValueError: If the file or function does not exist, or the actions cannot run; names the first wrong action.
    """
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}; a pipeline schedule needs at least 1")
    if source in SCHEDULES:
        schedule = SCHEDULES[source].build(placement, num_microbatches)
    elif source.endswith(".csv"):
        schedule = read_csv(Path(source))
    else:
        schedule = _call(source, placement, num_microbatches)
    try:
        check_compute(schedule, placement, num_microbatches)
    except ValueError as error:
        raise ValueError(f"schedule {source}: {error}") from None
    return schedule


def read_csv(path: Path) -> Schedule:
    """Read the schedule in a CSV file; raise ValueError if it cannot be read or a cell is not an action."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"schedule {path} could not be read: {error}") from None
    return [
        [parse_cell(cell, f"schedule {path}, row {r}, cell {i}") for i, cell in enumerate(row, 1) if cell.strip()]
        for r, row in enumerate(rows, 1)
    ]


def parse_cell(cell: str, where: str) -> Action:
    """Return the compute action that `cell` names; raise ValueError, which quotes `where`, if it names none."""
    match = _CELL.fullmatch(cell.strip())
    if match is None:
        raise ValueError(f"{where}: {cell.strip()!r} is not an action; write F3, B3 or W3, or F3.1 for chunk 1")
    letter, microbatch, chunk = match.groups()
    return Action(_LETTERS[letter], int(microbatch), int(chunk or 0))


def cell(action: Action) -> str:
    """Format a compute action as a cell: F3, or F3.1 for chunk 1."""
    letter = next(letter for letter, kind in _LETTERS.items() if kind is action.kind)
    return f"{letter}{action.microbatch}" + (f".{action.chunk}" if action.chunk else "")


def _call(source: str, placement: StagePlacement, num_microbatches: int) -> Schedule:
    """Import the function `source` and return its schedule; raise ValueError if this fails."""
    module_name, colon, function_name = source.partition(":")
    if not colon:
        near = near_name(source, SCHEDULES)
        works = f"did you mean {near}?" if near else f"choose {', '.join(SCHEDULES)}, a .csv file or module:function"
        raise ValueError(f"schedule {source}: no schedule has this name; {works}")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"schedule {source}: {error}; write a function as module:function, importable from here"
        ) from None
    schedule = function(placement, num_microbatches)
    if not isinstance(schedule, list) or not all(isinstance(a, Action) for actions in schedule for a in actions):
        raise ValueError(f"schedule {source}: the function must return a list of Actions for each rank")
    return schedule
