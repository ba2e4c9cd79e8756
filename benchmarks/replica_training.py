"""Training by two replicas of one GPU each: seconds of a step beside those of data parallelism, and of a lost replica.

    python -m benchmarks.replica_training configs/llama3-8b.yaml model.num_layers=4 ... --steps 60

Runs launch/replicas.sh twice, and launch/single_node.sh with two ranks in between, with the same config and data:

    undisturbed     all steps by both replicas
    killed          SIGKILL of the rank of replica 1 after a third of the steps; its agent starts it again
    data parallel   one job of two ranks, gradients summed by NCCL

and prints the median step, the time from SIGKILL until the next step of replica 0, the time until the lost one takes
part again, the steps of replica 0 around that (the copy of the state is in one), how far the losses are apart, and
whether replica 0 kept its process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def start(script: str, config: str, overrides: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("wb") as output:
        return subprocess.Popen(
            ["bash", f"launch/{script}", config, *overrides],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path} | environment,
            stdout=output,
            stderr=output,
        )


def records(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics.jsonl."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def rank_of(replica: int) -> int:
    """The process that trains `replica`."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if {f"MEGAFP8_REPLICA={replica}".encode(), b"LOCAL_RANK=0"} <= set(variables):
                return int(folder.name)
    raise RuntimeError(f"replica {replica} has no rank")


def when(record: dict[str, Any]) -> float:
    return datetime.fromisoformat(record["time"]).timestamp()


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.wait() != 0:
        raise RuntimeError(f"{process.args!r}: exit code {process.returncode}\n{log.read_text()[-6000:]}")


def step_seconds(steps: Sequence[dict[str, Any]]) -> float:
    """The median, without the first steps, in which kernels are compiled and graphs captured."""
    return statistics.median(x["step_seconds"] for x in steps[8:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder for runs and logs")
    options = parser.parse_intermixed_args()
    folder, third = options.folder, options.steps // 3

    def overrides(name: str, steps: int | None = None) -> list[str]:
        run = folder / name
        run.mkdir(parents=True)
        more = [f"run_dir={run}", "name=run", f"training.steps={options.steps}", "checkpoint.interval=0"]
        more += [] if steps is None else [f"training.stop_after={steps}"]
        return [*options.overrides, *more, "parallel.tensor=1", "parallel.pipeline=1", "parallel.zero=0"]

    variables = {"REPLICAS": "2", "HEARTBEAT_SECONDS": "1"}
    logs = {name: folder / f"{name}.log" for name in ("undisturbed", "killed", "parallel")}
    print(f"{'run':14} {'ms a step':>10} {'last loss':>10}")

    finish(start("replicas.sh", options.config, overrides("undisturbed", third), logs["undisturbed"], **variables),
           logs["undisturbed"])  # fmt: skip
    undisturbed = records(folder / "undisturbed" / "run" / "replica-0" / "metrics.jsonl")
    print(f"{'undisturbed':14} {step_seconds(undisturbed) * 1e3:10.1f} {undisturbed[-1]['loss']:10.5f}", flush=True)

    finish(start("single_node.sh", options.config, overrides("parallel", third), logs["parallel"], NPROC_PER_NODE="2"),
           logs["parallel"])  # fmt: skip
    parallel = records(folder / "parallel" / "run" / "metrics.jsonl")
    print(f"{'data parallel':14} {step_seconds(parallel) * 1e3:10.1f} {parallel[-1]['loss']:10.5f}", flush=True)

    killed = start("replicas.sh", options.config, overrides("killed"), logs["killed"], **variables)
    path = folder / "killed" / "run" / "replica-0" / "metrics.jsonl"

    def wait_for(condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        while not condition(records(path)):
            if killed.poll() is not None:
                raise RuntimeError(
                    f"it ended before: exit code {killed.returncode}\n{logs['killed'].read_text()[-6000:]}"
                )
            time.sleep(0.01)

    wait_for(lambda steps: len(steps) >= third)
    other, began = rank_of(0), time.time()
    os.kill(rank_of(1), signal.SIGKILL)
    wait_for(lambda steps: steps[-1]["replicas"] == [0])
    wait_for(lambda steps: steps[-1]["replicas"] == [0, 1])
    kept = rank_of(0) == other
    finish(killed, logs["killed"])
    steps = records(path)
    after = next(i for i, x in enumerate(steps) if when(x) > began and x["replicas"] == [0])
    again = next(i for i, x in enumerate(steps) if i > after and x["replicas"] == [0, 1])
    gaps = [when(b) - when(a) for a, b in zip(steps[after:], steps[after + 1 :])]
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(undisturbed, steps[:third]))
    print(f"{'killed':14} {step_seconds(steps[:third]) * 1e3:10.1f} {steps[third - 1]['loss']:10.5f}")
    print(f"next step of replica 0 after {when(steps[after]) - began:.2f} s; its process is the same: {kept}")
    print(f"alone for {again - after} steps of {statistics.median(gaps[: again - after - 1]) * 1e3:.0f} ms")
    print(f"all again after {when(steps[again]) - began:.1f} s; steps around that: "
          + " ".join(f"{x * 1e3:.0f}" for x in gaps[again - after - 4 : again - after + 4]) + " ms")  # fmt: skip
    print(f"losses of {third} steps: undisturbed and killed {apart:.2e} apart, undisturbed and data parallel "
          f"{max(abs(a['loss'] - b['loss']) for a, b in zip(undisturbed, parallel)):.2e}")  # fmt: skip
    print([line for line in logs["killed"].read_text().splitlines() if "copied from" in line])
    return 0


if __name__ == "__main__":
    sys.exit(main())
