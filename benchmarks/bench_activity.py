"""Cost of recording what a rank does (`megafp8.distributed.activity`): nanoseconds of each mark.

    python benchmarks/bench_activity.py

With a group of one process, whose collective does nothing, so that the difference is the record's.
"""

from __future__ import annotations

import argparse
import sys
import timeit
from collections.abc import Callable

import torch.distributed as dist

from megafp8.distributed import activity
from megafp8.distributed.activity import blocking, enter, started
from megafp8.distributed.collectives import DONE

REPEATS, NUMBER = 400, 500  # short, so that some are not interrupted by other processes


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD

    def section() -> None:
        enter("update")

    def begun_and_waited() -> None:
        started("all_reduce", group, DONE).wait()

    def blocked() -> None:
        with blocking("all_gather", group):
            pass

    cases: dict[str, Callable[[], None]] = {
        "a section": section,
        "a collective, begun and waited for": begun_and_waited,
        "a collective that blocks": blocked,
    }

    def nanoseconds(function: Callable[[], None]) -> float:
        return min(timeit.repeat(function, number=NUMBER, repeat=REPEATS)) / NUMBER * 1e9

    plain = {name: nanoseconds(function) for name, function in cases.items()}
    with activity.recorded():
        recorded = {name: nanoseconds(function) for name, function in cases.items()}
    print("| mark | ns without a record | ns with |\n|---|---|---|")
    for name in cases:
        print(f"| {name} | {plain[name]:.0f} | {recorded[name]:.0f} |")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
