"""Actions as short text: F, B or W and the micro-batch, s or r in front of transfers, `.1` behind for chunk 1."""

from __future__ import annotations

import re

from megafp8.parallel.pipeline.actions import Action, Kind, Schedule

KINDS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "W": Kind.WEIGHT,
    "sF": Kind.SEND_FORWARD,
    "rF": Kind.RECV_FORWARD,
    "sB": Kind.SEND_BACKWARD,
    "rB": Kind.RECV_BACKWARD,
}


def schedule_of(*lines: str) -> Schedule:
    """The actions of each rank, from a line such as "rF0 F0 F0.1" for each."""
    found = [[re.fullmatch(r"([sr]?[FBW])(\d+)(?:\.(\d+))?", word) for word in line.split()] for line in lines]
    return [[Action(KINDS[part[1]], int(part[2]), int(part[3] or 0)) for part in parts if part] for parts in found]


def lines_of(schedule: Schedule) -> list[str]:
    """The inverse of `schedule_of`."""
    short = {kind: text for text, kind in KINDS.items()}
    return [
        " ".join(f"{short[a.kind]}{a.microbatch}" + (f".{a.chunk}" if a.chunk else "") for a in actions)
        for actions in schedule
    ]


def csv_of(schedule: Schedule) -> str:
    """A schedule of compute actions as a CSV file for `parallel.schedule`."""
    return "\n".join(line.replace(" ", ",") for line in lines_of(schedule))
