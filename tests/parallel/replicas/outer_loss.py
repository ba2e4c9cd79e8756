"""Loss of replicas with outer steps (DiLoCo) against replicas that exchange gradients in each step, at equal tokens.

    python -m tests.parallel.replicas.outer_loss --out results.json

Trains the quickstart's model on its data in small, by one rank for each replica, and prints the evaluation losses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.parallel.replicas.cluster import Cluster
from tests.quickstart_data import ROOT, QuickstartData


def train(
    folder: Path, data: QuickstartData, count: int, steps: int, interval: int, outer: str | None, more: Sequence[str]
) -> list[tuple[int, float]]:
    """Step and evaluation loss of a run of `count` replicas: the mean over these, whose FP8 scales are their own."""
    folder.mkdir(parents=True)
    arguments = [
        *data.overrides,
        *("parallel.tensor=1", "parallel.pipeline=1", "parallel.sequence_parallel=false"),
        *(f"training.steps={steps}", f"training.eval_interval={interval}", "training.eval_steps=12"),
        *("checkpoint.interval=0", "timeout_seconds=900", "training.consistency_check_interval=32"),
        *more,
    ]
    options = "" if outer is None else f"outer: {outer}"
    cluster = Cluster(folder, arguments, count, 1, min_replicas=count, options=options, exchange_seconds=60)
    try:
        for replica in range(count):
            cluster.start(replica)
        cluster.wait(lambda: all(cluster.newest(i)["step"] >= steps for i in range(count)), 1800, "the last step")
        time.sleep(2)
        cluster.stop()
    finally:
        cluster.kill()
    curves = [_evaluations(folder / "quickstart" / f"replica-{i}" / "metrics.jsonl") for i in range(count)]
    return [(own[0][0], sum(loss for _, loss in own) / count) for own in zip(*curves, strict=True)]


def _evaluations(path: Path) -> list[tuple[int, float]]:
    records: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return [(x["step"], x["validation_loss"]) for x in records if x.get("validation_loss") is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--steps", type=int, default=384)
    parser.add_argument("--inner-steps", type=int, default=32)
    parser.add_argument("--outer", nargs="*", default=["0.7,0.9"], help="learning rate and momentum of outer steps")
    parser.add_argument("--without", action="store_true", help="leave out the runs that exchange gradients")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the config of all runs")
    parser.add_argument("--data", type=Path, help="a folder with the data, which is made otherwise")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, list[tuple[int, float]]] = {}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megafp8-outer-")))
        folder = options.data or root / "data"
        if options.data is None:
            folder.mkdir()
            # In a process of its own: this one forks, and must have started no threads.
            script = (
                "import sys, pathlib, tests.quickstart_data as q; q.make_quickstart_data(pathlib.Path(sys.argv[1]))"
            )
            subprocess.run([sys.executable, "-c", script, folder], cwd=ROOT, check=True, capture_output=True)
        runs: list[tuple[str, int, str | None]] = []
        for count in options.replicas:
            runs += [] if options.without else [(f"{count} replicas, gradients in each step", count, None)]
            for chosen in options.outer:
                rate, momentum = chosen.split(",")
                outer = f"{{inner_steps: {options.inner_steps}, learning_rate: {rate}, momentum: {momentum}}}"
                runs.append(
                    (f"{count} replicas, H={options.inner_steps}, lr {rate}, momentum {momentum}", count, outer)
                )
        for number, (name, count, outer) in enumerate(runs):
            began, data = time.monotonic(), QuickstartData(folder)
            interval = options.inner_steps * max(1, options.steps // options.inner_steps // 6)
            curve = train(root / f"run-{number}", data, count, options.steps, interval, outer, options.set)
            results[name] = curve
            shown = "  ".join(f"{step}: {loss:.4f}" for step, loss in curve)
            print(f"{name:45} {shown}   ({time.monotonic() - began:.0f} s)", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
