"""Hold loss curves against each other: a table of deviations from the first run, and a plot.

    python tools/compare_runs.py runs/one-gpu runs/tp2 runs/pp2 [--png curves.png]

Each argument is a run folder (its metrics.jsonl is read). Deviations are relative, over the steps that both runs have.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megafp8.training.metrics import read_metrics

Run = dict[int, dict[str, Any]]


def read_run(folder: Path) -> Run:
    """The run's steps by number. ValueError where there is no metrics.jsonl."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{folder} is no run folder: it has no metrics.jsonl")
    return {record["step"]: record for record in read_metrics(path)}


def largest_deviation(run: Run, reference: Run, key: str) -> float:
    """Largest relative difference of `key` over common steps."""
    common = [step for step in run if step in reference and None not in (run[step][key], reference[step][key])]
    if not common:
        raise ValueError("the runs have no step in common")
    return max(abs(run[step][key] / reference[step][key] - 1) for step in common)


def plot(runs: dict[str, Run], path: Path) -> None:
    """Curves above, deviations from the first beneath."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=[2, 1], layout="constrained")
    reference = next(iter(runs.values()))
    for name, run in runs.items():
        steps = [step for step in run if step in reference]
        top.plot(steps, [run[s]["loss"] for s in steps], linewidth=1.2, label=name)
        bottom.plot(steps, [run[s]["loss"] / reference[s]["loss"] - 1 for s in steps], linewidth=1.0)
    top.set_ylabel("loss (nats per token)")
    top.legend(fontsize="small", ncols=2)
    bottom.set_ylabel(f"relative to {next(iter(runs))}")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--png", type=Path, help="also plot into this file")
    arguments = parser.parse_args(argv)
    try:
        runs = {folder.name: read_run(folder) for folder in arguments.runs}
        reference = next(iter(runs.values()))
        print(f"{'run':<28}{'steps':>6}{'first loss':>12}{'last loss':>12}{'max |Δloss|':>13}{'max |Δnorm|':>13}")
        for name, run in runs.items():
            first, last = run[min(run)]["loss"], run[max(run)]["loss"]
            loss, norm = (largest_deviation(run, reference, key) for key in ("loss", "grad_norm"))
            print(f"{name:<28}{len(run):>6}{first:>12.5f}{last:>12.5f}{loss:>13.1e}{norm:>13.1e}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.png:
        plot(runs, arguments.png)
        print(f"plot: {arguments.png}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
