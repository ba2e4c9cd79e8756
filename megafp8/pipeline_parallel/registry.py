"""Schedules by name, from a CSV file, or from a Python function of the user's.

    1f1b, interleaved, zb-h1, zb-v, dualpipev      built in
    schedules/mine.csv                             a row a rank, a cell an action, empty cells are nothing
    mypackage.schedules:mine                       mine(placement, num_microbatches) -> a list of actions for each rank

A cell is F, B or W and the micro-batch, and after a point the chunk where a rank holds several: F3, B3, W3, F3.1. A
file is for one number of ranks and micro-batches; a function is for any. Whatever its source, a schedule is compute
actions only, and is checked before anything runs.
"""

from __future__ import annotations

import csv
import importlib
import re
from pathlib import Path

from megafp8.pipeline_parallel.check import check_compute
from megafp8.pipeline_parallel.schedules import Action, Builder, Kind, Placement, Schedule, interleaved, one_f_one_b
from megafp8.pipeline_parallel.zero_bubble import dualpipev, zb_h1, zb_v

BUILT_IN: dict[str, Builder] = {
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "dualpipev": dualpipev,
}
_LETTERS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "W": Kind.WEIGHT}
_CELL = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")


def training_schedule(source: str, placement: Placement, num_microbatches: int) -> Schedule:
    """The compute actions of the schedule `source`, fit to run.

    Raises ValueError, naming the first wrong action, where it is not; and where there is no such file or function.
    """
    if source in BUILT_IN:
        schedule = BUILT_IN[source](placement, num_microbatches)
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
    """The schedule in a CSV file. Raises ValueError where there is none, naming the first cell that is no action."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"schedule {path} could not be read: {error}") from None
    return [
        [
            action_of(cell.strip(), f"schedule {path}, row {r + 1}, cell {i + 1}")
            for i, cell in enumerate(row)
            if cell.strip()
        ]
        for r, row in enumerate(rows)
    ]


def action_of(cell: str, where: str) -> Action:
    """The compute action that `cell` names. Raises ValueError, which says `where` it stands, if it names none."""
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ValueError(f"{where}: {cell!r} is no action; F3, B3 and W3 are, and F3.1 for chunk 1")
    letter, microbatch, chunk = match.groups()
    return Action(_LETTERS[letter], int(microbatch), int(chunk or 0))


def write_csv(schedule: Schedule, path: Path) -> None:
    """Write compute actions as `read_csv` reads them."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([[cell(action) for action in actions] for actions in schedule])


def cell(action: Action) -> str:
    """A compute action in short: F3, or F3.1 for chunk 1."""
    letter = next(letter for letter, kind in _LETTERS.items() if kind is action.kind)
    return f"{letter}{action.microbatch}" + (f".{action.chunk}" if action.chunk else "")


def _call(source: str, placement: Placement, num_microbatches: int) -> Schedule:
    module_name, _, function_name = source.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"schedule {source}: {error}; a function is module:function, importable from here") from None
    made = function(placement, num_microbatches)
    if not isinstance(made, list) or not all(isinstance(a, Action) for actions in made for a in actions):
        raise ValueError(f"schedule {source}: it must return a list of Actions for each rank")
    return made
