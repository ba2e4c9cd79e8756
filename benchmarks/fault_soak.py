"""A run with random faults under the elastic agent: is each detected, named and recovered from, and how fast?

    python benchmarks/fault_soak.py --faults 100 --processes 4 --folder /tmp/soak

Trains a small model on CPU processes twice: undisturbed, and with `--faults` faults of random kinds on random ranks.
Prints a line for each fault: seconds from the fault to the message that names the rank, and until the next step is
done; then a table by kind. Exit code 1 unless every fault is named, and the losses of all steps are equal to the last
bit.

Needs the quickstart's data (`make quickstart` makes it), or `--data PREFIX --tokenizer MODEL --vocabulary N`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megafp8.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = {
    "kill": r"error: rank {rank} on \S+ \(process \d+\) was ended by SIGKILL",
    "stop": r"rank {rank} on \S+ \(process \d+\) is stopped",
    "hang": r"rank {rank} on \S+ \(process \d+\) hangs in step {step}, data, outside of collectives: .*faults\.py",
    "leave_out_collective": r"rank {rank} on \S+ \(process \d+\) waits in .*, which the others have not begun",
    "exception": r"error: rank {rank} on \S+ failed:",
    "nan_gradient": r"step +{step}/.*SKIPPED: gradients not finite",
    "flip_weight": r"rank {rank} on \S+: other than ranks",
    "flip_gradient": r"rank {rank} on \S+: other gradients",
    "slow": r"slow rank: rank {rank} on ",
    "loss_spike": r"step +{step}/.*SKIPPED: loss above ",
    "fail_save": r"rank {rank}: OSError: \[Errno 27\]|rank {rank} on \S+ failed:",
    "damage_checkpoint": r"is damaged",
}
"""What is printed after a fault of each kind, as a regular expression of its rank and step."""
SAME_DATA = [kind for kind in EXPECTED if kind not in ("nan_gradient", "loss_spike")]
"""Kinds after which the run has the losses of an undisturbed one."""
SMALL = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.vocab_multiple=128",
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "training.seq_length=16",
    "training.micro_batch_size=1",
    "training.eval_interval=0",
    "training.evaluate=null",
    "training.replica_check_interval=2",
    "optimizer.warmup_steps=1",
    "checkpoint.keep_last=3",
    "fp8.recipe=none",
    "logging.tensorboard=false",
    "resilience.hang_seconds=8",
    "resilience.straggler_interval=2",
    "resilience.recompute_interval=2",
]
EVERY = 10  # steps between faults
SAVE_EVERY = 5


@dataclass(frozen=True)
class Line:
    """A line that a job printed, and when."""

    time: float
    text: str


def fault(number: int, kind: str, rank: int) -> dict[str, Any]:
    """Fault `number` of a run: after the checkpoints that it needs, in an even step, which is recomputed."""
    return {"kind": kind, "rank": rank, "step": EVERY * (number + 1) + 2, "seconds": 0.3, "steps": 4}


def run(name: str, options: Sequence[str], arguments: argparse.Namespace, faults: list[dict[str, Any]]) -> list[Line]:
    """Run a job to its end and return what it printed. Raises RuntimeError if it fails."""
    command = ["bash", str(ROOT / "launch" / "single_node.sh"), str(ROOT / "configs" / "quickstart.yaml"), *options]
    command += [f"name={name}", f"run_dir={arguments.folder}", f"resilience.inject={json.dumps(faults)}"]
    environment = {
        "NPROC_PER_NODE": str(arguments.processes),
        "MAX_RESTARTS": str(len(faults)),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    lines: list[Line] = []
    job = subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert job.stdout is not None
    with (arguments.folder / f"{name}.out").open("w") as output:
        for text in job.stdout:
            lines.append(Line(time.time(), text.rstrip()))
            output.write(f"{lines[-1].time:.2f} {text}")
            output.flush()
    if job.wait() != 0:
        raise RuntimeError(f"{name} ended with {job.returncode}:\n" + "\n".join(line.text for line in lines[-40:]))
    return lines


def step_times(path: Path) -> list[tuple[int, float]]:
    """Step and end of each line of a metrics.jsonl, repeated steps too. Lines that a kill truncated are left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            found.append((record["step"], datetime.datetime.fromisoformat(record["time"]).timestamp()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=SAME_DATA, default=SAME_DATA)
    parser.add_argument("--data", default="data/quickstart/stdlib")
    parser.add_argument("--tokenizer", default="data/quickstart/tokenizer.model")
    parser.add_argument("--vocabulary", type=int, default=2048)
    arguments = parser.parse_args()
    chosen = random.Random(arguments.seed)
    kinds = [arguments.kinds[i % len(arguments.kinds)] for i in range(arguments.faults)]
    chosen.shuffle(kinds)
    faults = [fault(i, kind, chosen.randrange(arguments.processes)) for i, kind in enumerate(kinds)]
    options = [
        *SMALL,
        f"data.train=[{arguments.data}]",
        f"data.tokenizer.path={arguments.tokenizer}",
        f"model.vocab_size={arguments.vocabulary}",
        f"training.global_batch_size={arguments.processes}",
        f"training.steps={EVERY * (arguments.faults + 2)}",
        f"checkpoint.interval={SAVE_EVERY}",
    ]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    run("undisturbed", options, arguments, [])
    folder, began = arguments.folder / "faults", time.time()
    lines = run("faults", options, arguments, faults)
    took, found = time.time() - began, dict[str, list[tuple[float, float]]]()
    done = step_times(folder / "metrics.jsonl")
    missed = 0
    for i, own in enumerate(faults):
        at = json.loads((folder / "faults" / f"{i}.json").read_text())["time"]
        until = json.loads((folder / "faults" / f"{i + 1}.json").read_text())["time"] if i + 1 < len(faults) else 1e18
        pattern = EXPECTED[own["kind"]].format(**own)
        named = next((line.time for line in lines if at <= line.time < until and re.search(pattern, line.text)), None)
        again = next((t for step, t in done if step >= own["step"] and named is not None and t > named), None)
        label = f"{own['kind']:22} rank {own['rank']} step {own['step']:4}"
        if named is None or again is None:
            missed += 1
            print(f"{label}  NOT {'named' if named is None else 'recovered'}")
            continue
        found.setdefault(own["kind"], []).append((named - at, again - at))
        print(f"{label}  named after {named - at:5.1f} s, next step after {again - at:5.1f} s")
    curves = [
        [(record["step"], record["loss"]) for record in read_metrics(arguments.folder / name / "metrics.jsonl")]
        for name in ("undisturbed", "faults")
    ]
    equal = curves[0] == curves[1]
    print(f"\n| fault | number | named after, s (median, max) | next step after, s (median) |\n{'|---' * 4}|")
    for kind, figures in sorted(found.items()):
        detected, recovered = zip(*figures)
        values = f"{statistics.median(detected):.1f}, {max(detected):.1f} | {statistics.median(recovered):.1f}"
        print(f"| {kind} | {len(figures)} | {values} |")
    print(f"\n{len(faults) - missed} of {len(faults)} faults named and recovered from, in {took:.0f} s")
    print(f"losses of all {len(curves[0])} steps {'equal' if equal else 'DIFFER'} to the last bit")
    return int(bool(missed) or not equal)


if __name__ == "__main__":
    sys.exit(main())
