"""Compare loss curves of runs: a table of deviations from the first run, and a plot.

    megafp8 compare runs/one-gpu runs/tp2 runs/pp2 [--png curves.png]

Each argument is a run folder with a metrics.jsonl file. Deviations are relative, over the steps that both runs have.
Runs are named by the shortest unique end of their path.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from megafp8.host.arguments import ArgumentParser
from megafp8.host.tool import file_of_run, names_of, pyplot, run_tool, text_table

Run = dict[int, dict[str, Any]]


def read_run(folder: Path) -> Run:
    """Return the run's steps by number. Raises ValueError if there is no metrics.jsonl with steps."""
    from megafp8.training.metrics import read_metrics

    path = file_of_run(folder, "metrics.jsonl", "it is not a run folder, or no step has finished yet")
    records = read_metrics(path)
    if not records:
        raise ValueError(f"{path} has no step")
    return {record["step"]: record for record in records}


def largest_deviation(run: Run, reference: Run, key: str) -> float:
    """Return the largest relative difference of `key` over the common steps in which it is finite in both runs."""
    common = [step for step in run if step in reference and None not in (run[step][key], reference[step][key])]
    if not common:
        raise ValueError("the runs have no common step in which both are finite")
    return max(_relative(run[step][key], reference[step][key]) for step in common)


def _relative(value: float, reference: float) -> float:
    if value == reference:
        return 0.0
    return abs(value / reference - 1) if reference else math.inf


def _number(value: float | None) -> float:
    """Return a value, or NaN for null, which metrics.jsonl has for values that are not finite."""
    return math.nan if value is None else value


def plot(runs: dict[str, Run], path: Path) -> None:
    """Plot loss curves above, and deviations from the first run below."""
    plt = pyplot()
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=[2, 1], layout="constrained")
    reference = next(iter(runs.values()))
    for name, run in runs.items():
        steps = [step for step in run if step in reference]
        losses = [_number(run[s]["loss"]) for s in steps]
        top.plot(steps, losses, linewidth=1.2, label=name)
        references = [_number(reference[s]["loss"]) for s in steps]
        bottom.plot(steps, [loss / other - 1 for loss, other in zip(losses, references)], linewidth=1.0)
    top.set_ylabel("loss (nats per token)")
    top.legend(fontsize="small", ncols=2)
    bottom.set_ylabel(f"relative to {next(iter(runs))}")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def compare(arguments: argparse.Namespace) -> None:
    """Print the table for the runs that the arguments name, and plot their curves."""
    runs = dict(zip(names_of(arguments.runs), map(read_run, arguments.runs)))
    reference = next(iter(runs.values()))
    rows = []
    for name, run in runs.items():
        first, last = (_number(run[step]["loss"]) for step in (min(run), max(run)))
        loss, norm = (largest_deviation(run, reference, key) for key in ("loss", "grad_norm"))
        rows.append([name, str(len(run)), f"{first:.5f}", f"{last:.5f}", f"{loss:.1e}", f"{norm:.1e}"])
    print(text_table(["run", "steps", "first loss", "last loss", "max |Δloss|", "max |Δnorm|"], rows))
    if arguments.png:
        plot(runs, arguments.png)
        print(f"plot: {arguments.png}")


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN_FOLDER", help="runs to compare; the first is the reference"
    )
    parser.add_argument("--png", type=Path, help="picture to write")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    return run_tool(lambda: compare(arguments))


if __name__ == "__main__":
    sys.exit(main())
