"""Compare predictions of megafp8.planner with recorded runs, as a Markdown table. Needs no GPU.

    python -m benchmarks.planner_errors

Reads docs/measurements/2026-11-23-planner/runs.yaml. A run in that file that misses a tolerance states by how much, and
why. tests/planner/test_predict.py checks the planner against the file.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.bench_step import resolve
from benchmarks.common import new_parser
from megafp8.config import Config
from megafp8.host.cluster import Cluster
from megafp8.host.gpus import GPUS
from megafp8.planner.outline import model_outline
from megafp8.planner.predict import Prediction, predict
from megafp8.training.fp8_config import build_fp8

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "docs/measurements/2026-11-23-planner/runs.yaml"
TIME, MEMORY = 0.10, 0.05
"""Tolerances of step time and memory, relative to the measurement."""
BY_CUDNN = replace(
    GPUS["h200-141gb"], attention_forward=605e12, attention_backward=385e12, narrow_heads=0.78, deterministic=2.45
)
"""GPU of the recorded runs, whose attention cuDNN and torch's flash kernel computed."""
BEFORE = replace(BY_CUDNN, optimizer=0.483, fp8_moment=114)
"""Adjustment for runs recorded before the optimizer's step became one pass over memory."""


@dataclass(frozen=True)
class Run:
    """Line of a recorded `bench_step`: medians of steps, and the largest peak of any rank.

    Attributes:
        one_pass: Whether the optimizer makes one pass over memory.
        time_error: Expected error of the predicted step time, if it exceeds the tolerance.
        memory_error: Expected error of the predicted memory, if it exceeds the tolerance.
        reason: Reason for the error.
    """

    source: str
    config: str
    gpus: int
    micro_batches: int
    overrides: tuple[str, ...]
    layout: str
    variant: str
    milliseconds: float
    gib: float | None
    one_pass: bool
    time_error: float | None = None
    memory_error: float | None = None
    reason: str = ""

    def resolved(self) -> Config:
        """Return the config of the run."""
        arguments = Namespace(
            config=str(ROOT / self.config), overrides=list(self.overrides), micro_batches=self.micro_batches
        )
        return resolve(arguments, self.layout, self.variant, self.gpus)

    def errors(self, prediction: Prediction) -> tuple[float, float | None]:
        """Return the relative errors of predicted step time and memory."""
        memory = None if self.gib is None else prediction.peak / 2**30 / self.gib - 1
        return prediction.seconds * 1e3 / self.milliseconds - 1, memory


def recorded() -> Iterator[Run]:
    """Yield all runs of the file, in its order."""
    for group in yaml.safe_load(RUNS.read_text(encoding="utf-8")):
        common = {key: group[key] for key in ("source", "config", "gpus", "micro_batches")}
        for row in group["runs"]:
            layout, variant, milliseconds, gib, *miss = row
            found: dict[str, Any] = miss[0] if miss else {}
            yield Run(**common, overrides=tuple(group["set"]), layout=layout, variant=variant,
                      milliseconds=milliseconds, gib=gib, one_pass=group.get("one_pass", False), **found)  # fmt: skip


def predictions(runs: list[Run]) -> list[Prediction]:
    """Return the prediction for each run. Equal configs are predicted once."""
    known: dict[tuple[Any, ...], Prediction] = {}
    found = []
    for run in runs:
        key = (run.config, run.overrides, run.gpus, run.micro_batches, run.layout, run.variant, run.one_pass)
        if key not in known:
            config = run.resolved()
            cluster = Cluster(BY_CUDNN if run.one_pass else BEFORE, run.gpus)
            known[key] = predict(model_outline(config, build_fp8(config, None)), cluster)
        found.append(known[key])
    return found


def main() -> int:
    """Print the table and the mean errors, and return the exit code."""
    new_parser(__doc__).parse_args()
    runs = list(recorded())
    print("| run | model | GPUs | layout | variant | ms | predicted | | GiB | predicted | | |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    times, memories = [], []
    for run, prediction in zip(runs, predictions(runs)):
        time_error, memory_error = run.errors(prediction)
        model = [Path(run.config).stem, *(x.removeprefix("model.") for x in run.overrides if "num_layers" in x)]
        cells: list[object] = [run.source, ", ".join(model), run.gpus, run.layout, run.variant]
        cells += [f"{run.milliseconds:.1f}", f"{prediction.seconds * 1e3:.1f}", f"{time_error:+.1%}"]
        times.append(abs(time_error))
        if memory_error is not None:
            memories.append(abs(memory_error))
            cells += [f"{run.gib:.2f}", f"{prediction.peak / 2**30:.2f}", f"{memory_error:+.1%}"]
        else:
            cells += ["", "", ""]
        print("| " + " | ".join(map(str, [*cells, run.reason])) + " |")
    for name, errors, tolerance in (("step time", times, TIME), ("memory", memories, MEMORY)):
        within = sum(error <= tolerance for error in errors)
        mean, worst = statistics.fmean(errors), max(errors)
        print(f"\n{name}: {within} of {len(errors)} within {tolerance:.0%}; mean error {mean:.1%}, largest {worst:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
