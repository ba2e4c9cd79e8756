"""Show a run's FP8 report: the tensors with the largest quantization error, a summary, advice and a heat map.

    megafp8 report runs/llama3-8b [--step 4000] [--worst 20] [--png fp8.png]

A run writes the report if its config has fp8.report_interval=100 (a sample every 100 steps). The table and summary are
of one sampled step, the last by default; advice uses the steps up to it; the heat map shows all.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megafp8.host.arguments import ArgumentParser, at_least
from megafp8.host.tool import run_tool


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER", help="a run with fp8.report_interval")
    parser.add_argument("--step", default="last", metavar="N", help="the sampled step to show, or last")
    parser.add_argument("--worst", type=at_least(1), default=20, metavar="K", help="rows of the table")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the heat map into this file")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    from megafp8.training.fp8_report import show

    return run_tool(lambda: show(arguments))


if __name__ == "__main__":
    sys.exit(main())
