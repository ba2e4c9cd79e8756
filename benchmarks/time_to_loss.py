"""Compare runs by FP8 recipe: final validation loss with confidence intervals, and the time to reach bf16's loss.

    megafp8 sweep benchmarks/time_to_loss.yaml seed=1,2,3,4,5 fp8.recipe=none,delayed,current,blockwise
    python -m benchmarks.time_to_loss runs/time-to-loss-sweep/*/ --png loss.png

Runs with one seed have the same initial weights and read the same samples in the same order. Recipes are therefore
compared by the differences between runs with the same seed. There are two differences: of the validation loss after the
last step, and of the training loss, averaged over the last tenth of the steps. If data are read only once, no run has
seen the samples of these steps before. An interval is the 95% confidence interval of the mean difference by Student's
t. A gap with an interval that contains zero cannot be distinguished from noise with this number of seeds.

Time is the time of training steps, without evaluation and start-up: the median step time, multiplied by the step at
which the mean curve first reaches bf16's final loss. Run folders of several sweeps may be given together if they used
one kind of GPU, because times are compared. The exit code is 2 if a run has not ended.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev

import yaml

from megafp8.host.tool import pyplot
from megafp8.training.metrics import read_metrics

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for a two-sided 95% interval, by degrees of freedom from 1 on."""
BASELINE = "none"
"""Value of fp8.recipe in the baseline runs, which the others are compared with."""


@dataclass(frozen=True)
class Run:
    """Finished run.

    It contains validation losses by step, the mean training loss of the last tenth of the steps, and the median step
    time in seconds.
    """

    recipe: str
    seed: int
    losses: Mapping[int, float]
    training: float
    seconds: float

    @property
    def final(self) -> float:
        """Validation loss after the last step."""
        return self.losses[max(self.losses)]


def read(folder: Path) -> Run:
    """Read the run in a folder; raise ValueError if it has no validation losses, or none after its last step."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    steps = read_metrics(folder / "metrics.jsonl")
    losses = {x["step"]: x["validation_loss"] for x in steps if x["validation_loss"] is not None}
    if not losses:
        raise ValueError(f"{folder} has no validation loss; set training.eval_interval")
    if max(losses) < (steps_of_run := config["training"]["steps"]):
        raise ValueError(f"{folder} has a validation loss after step {max(losses)} of {steps_of_run}; leave it out")
    training = fmean(x["loss"] for x in steps[-max(1, steps_of_run // 10) :])
    return Run(config["fp8"]["recipe"], config["seed"], losses, training, median(x["step_seconds"] for x in steps))


def interval(values: Sequence[float]) -> float:
    """Return half of the 95% confidence interval of the mean; infinity for one value."""
    if len(values) < 2:
        return math.inf
    return T_95[min(len(values) - 1, len(T_95)) - 1] * stdev(values) / math.sqrt(len(values))


def mean_curve(runs: Iterable[Run]) -> dict[int, float]:
    """Return the mean loss at each step that all runs have."""
    curves = [run.losses for run in runs]
    return {step: fmean(x[step] for x in curves) for step in curves[0] if all(step in x for x in curves)}


def step_at(curve: Mapping[int, float], loss: float) -> float:
    """Return the step, interpolated on the curve, at which it first reaches `loss`; infinity if it never does."""
    steps = sorted(curve)
    if curve[steps[0]] <= loss:
        return steps[0]
    for a, b in pairwise(steps):
        if curve[b] <= loss:
            return a + (b - a) * (curve[a] - loss) / (curve[a] - curve[b])
    return math.inf


def table(runs: Sequence[Run]) -> str:
    """Return a Markdown table with a line for each recipe; raise ValueError without a run of the baseline."""
    by_recipe: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_recipe.setdefault(run.recipe, {})[run.seed] = run
    if BASELINE not in by_recipe:
        raise ValueError("no run has fp8.recipe none, with which the others are compared")
    baseline = by_recipe[BASELINE]
    target, seconds = fmean(x.final for x in baseline.values()), median(x.seconds for x in baseline.values())
    whole = max(next(iter(baseline.values())).losses) * seconds
    lines = [
        "| recipe | seeds | final loss | against bf16, same seeds | training loss | ms a step "
        "| time to bf16's final loss |"
    ]
    lines.append("|:--|--:|--:|--:|--:|--:|--:|")
    for recipe, of_seed in sorted(by_recipe.items(), key=lambda item: item[0] != BASELINE):
        finals = [run.final for run in of_seed.values()]
        pairs = (
            [] if recipe == BASELINE else [(run, baseline[seed]) for seed, run in of_seed.items() if seed in baseline]
        )
        gap = _gap([run.final / other.final - 1 for run, other in pairs])
        training_gap = _gap([run.training / other.training - 1 for run, other in pairs])
        step = median(run.seconds for run in of_seed.values())
        reached = step_at(mean_curve(of_seed.values()), target) * step
        share = "not reached" if math.isinf(reached) else f"{reached:.0f} s, {reached / whole:.2f} of bf16's run"
        name = "bf16" if recipe == BASELINE else recipe
        lines.append(
            f"| {name} | {len(of_seed)} | {fmean(finals):.4f} ± {interval(finals):.4f} | {gap} | {training_gap} "
            f"| {step * 1e3:.1f} | {share} |"
        )
    return "\n".join(lines)


def _gap(apart: Sequence[float]) -> str:
    """Return the mean of relative differences with its interval; empty if there are none."""
    return f"{fmean(apart):+.2%} ± {interval(apart):.2%}" if apart else ""


def plot(runs: Sequence[Run], png: Path) -> None:
    """Draw mean curves over the time of training steps, with the range of the seeds."""
    figure, axes = (plt := pyplot()).subplots(figsize=(8, 5))
    for recipe in dict.fromkeys(run.recipe for run in runs):
        same = [run for run in runs if run.recipe == recipe]
        curve, seconds = mean_curve(same), median(run.seconds for run in same)
        times = [step * seconds for step in curve]
        (line,) = axes.plot(times, [*curve.values()], label="bf16" if recipe == BASELINE else recipe)
        least, most = ([f(run.losses[step] for run in same) for step in curve] for f in (min, max))
        axes.fill_between(times, least, most, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="seconds of training steps", ylabel="validation loss", yscale="log")
    for written in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        written("{x:g}")  # not as powers of ten
    axes.legend()
    figure.savefig(png, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main() -> int:
    """Print the table, draw the curves if asked to, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="run folders")
    parser.add_argument("--png", type=Path, help="also draw curves over time into this file")
    options = parser.parse_args()
    try:
        runs = [read(folder) for folder in options.folders]
        print(table(runs))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.png is not None:
        plot(runs, options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
