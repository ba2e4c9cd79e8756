"""Prove random compositions of all that a config can say, for as long as one likes.

    python -m tests.compositions --out soak.jsonl --minutes 60              # goes on where the file ends
    python -m tests.compositions --out soak.jsonl --cases 1000 --seed 7
    python -m tests.compositions --out part0.jsonl --part 0 2               # every second case, beside part 1 2
    python -m tests.compositions --table *.jsonl                            # what was drawn, and what failed

A case is a config whose keys were drawn from the schema (`draw`), proven by the checks of `megafp8 prove`: losses,
gradients, optimizer steps, FP8 and the order of the data against one rank in float64, in every eighth case also
checkpoints, their resumption, and the export. What fails is made as small as it can be, and printed as a command.
Case n of a seed is always the same. Exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from megafp8.prove.local_ranks import LocalRanks
from tests.compositions.draw import Composition, draw
from tests.compositions.table import table
from tests.compositions.trial import PASSED, smallest, trial

WHOLE_EVERY = 8
"""Every so many cases checkpoints and exports are proven, too."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="file that a line of JSON is added to for each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10_000, help="number of the last case (%(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="no case begins after this time (%(default)s)")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every Nth from the Ith")
    parser.add_argument("--table", type=Path, nargs="+", help="print what these files have, and prove nothing")
    options = parser.parse_args()
    if options.table:
        print(table(line for path in options.table for line in _lines(path)))
        return 0
    if options.out is None:
        parser.error("--out: which file?")
    done = (
        [line["case"] for line in _lines(options.out) if line["seed"] == options.seed] if options.out.exists() else []
    )
    i, n = options.part
    numbers = [x for x in range(i, options.cases, n) if x not in {*done}]
    end, failed = time.monotonic() + 60 * options.minutes, 0
    with LocalRanks() as ranks:
        for number in tqdm(numbers, mininterval=10):
            if time.monotonic() > end:
                break
            line = _case(options.seed, number, ranks)
            failed += bool(line["failure"])
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    print(table(_lines(options.out)))
    return int(failed > 0)


def _case(seed: int, number: int, ranks: LocalRanks) -> dict[str, Any]:
    """The line of a case. A failure is made smaller, with its command on the console."""
    whole = number % WHOLE_EVERY == 0
    composition = draw(Random(f"{seed}/{number}"))
    found = trial(composition, ranks, whole=whole)
    line = {"seed": seed, "case": number, **asdict(found)}
    if found.failure != PASSED:

        def fails(smaller: Composition) -> bool:
            return trial(smaller, ranks, whole=whole).failure == found.failure

        least = smallest(composition, fails)
        line["smallest"] = asdict(least)
        tqdm.write(f"case {number} FAILED, {found.failure}\n{found.where}\n{least.command}", file=sys.stdout)
    return line


def _lines(path: Path) -> list[dict[str, Any]]:
    """Lines of a file of cases, which may not exist yet. A last line that a killed process has begun is cut off."""
    path.touch()
    with path.open("r+") as file:
        lines, end = [], 0
        for text in iter(file.readline, ""):
            if not text.endswith("\n"):
                file.truncate(end)
                break
            lines.append(json.loads(text))
            end = file.tell()
    return lines


if __name__ == "__main__":
    sys.exit(main())
