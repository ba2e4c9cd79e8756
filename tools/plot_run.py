"""Draw one or more runs: an interactive page for the browser, and a picture.

    megafp8 plot-run runs/llama3-8b
    megafp8 plot-run runs/a runs/b --html compared.html [--png compared.png]

The first command writes run.html and run.png into the run folder. The page is a single file that needs no network. It
shows loss, learning rate, gradient norm, throughput, times, memory, FP8 health, expert load, goodput, events and sample
texts. Curves of more than 1,500 points keep the smallest and largest value of each of 750 buckets, and their mean for
smoothing; numbers have seven digits.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megafp8.host.arguments import ArgumentParser
from megafp8.host.tool import run_tool


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER", help="one or more runs")
    parser.add_argument("--html", type=Path, metavar="FILE", help="page to write")
    parser.add_argument("--png", type=Path, metavar="FILE", help="picture to write")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    from megafp8.training.plot_run import show

    return run_tool(lambda: show(arguments))


if __name__ == "__main__":
    sys.exit(main())
