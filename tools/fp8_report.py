"""Show a run's FP8 report: the tensors with the largest quantization error, a summary, advice and a heat map.

    megafp8 report runs/llama3-8b [--step 4000] [--worst 20] [--png fp8.png]

A run writes the report if its config has fp8.report_interval=100 (one sample every 100 steps). The table and the
summary describe one sampled step, by default the last one. The advice considers all steps up to it. The heat map shows
all steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megafp8.host.arguments import ArgumentParser, at_least
from megafp8.host.tool import run_tool


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER", help="run with fp8.report_interval")
    parser.add_argument("--step", default="last", metavar="N", help="sampled step to show, or last")
    parser.add_argument("--worst", type=at_least(1), default=20, metavar="K", help="number of rows in the table")
    parser.add_argument("--png", type=Path, metavar="FILE", help="picture of the heat map to write")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    from megafp8.training.fp8_report import show

    return run_tool(lambda: show(arguments))


if __name__ == "__main__":
    sys.exit(main())
