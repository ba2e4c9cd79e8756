"""Train with random faults under the elastic agent: is each fault detected, named and recovered from, and how fast?

    python benchmarks/fault_soak.py --faults 100 --processes 4 --folder /tmp/soak

The soak trains a small model on CPU processes twice: undisturbed, and with `--faults` faults of random kinds on random
ranks. Each rank counts as a node with separate memory (`checkpoint.memory_interval`). For each fault it prints a line
with the seconds from the fault to the message that names the rank, the seconds to the next completed step, and the
number of repeated steps; then a table by kind. The exit code is 1 unless every fault is named, and the losses of all
steps are bitwise equal. The same command continues an interrupted soak.

Limit: until 2026-11-24, a save on a full disk could hang the job, and this soak did not detect it, although `fail_save`
was among its faults. `fail_save` limits the size of files to 16 KiB, so torch.save always met the error inside its
archive of tensors, and raised another error. The error of a full disk, met by a small file or by the last flush of a
buffer, was raised from itself, and the walk along its causes did not end. tests/checkpoint/test_full_disk.py fills the
disk.

The soak needs the quickstart's data (`megafp8 quickstart` creates it), or `--data PREFIX --tokenizer MODEL --vocabulary
N`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

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
    "full_disk": r"error: saving \S+ failed: rank \d+: OSError: \[Errno 28\] No space left on device|"
    r"metrics.jsonl cannot be written: \[Errno 28\]",  # if no save happens while the disk is full
    "damage_checkpoint": r"is damaged",
    "lose_memory": r"error: rank {rank} on \S+ \(process \d+\) was ended by SIGKILL",
}
"""Regular expression of the message after a fault of each kind, with its rank and step."""
SAME_DATA = [kind for kind in EXPECTED if kind not in ("nan_gradient", "loss_spike")]
"""Kinds of faults after which the run has the same losses as an undisturbed run."""
DEFAULT = [kind for kind in SAME_DATA if kind != "full_disk"]
"""Kinds of faults used by default. `full_disk` is left out, because it needs a small separate disk at `--folder`:
`mount -t tmpfs -o size=200m none FOLDER`."""
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
    "training.consistency_check_interval=2",
    "optimizer.warmup_steps=1",
    "checkpoint.keep_last=3",
    "fp8.recipe=none",
    "logging.tensorboard=false",
    "resilience.hang_seconds=8",
    "resilience.straggler_interval=2",
    "resilience.recompute_interval=2",
]
EVERY = 6  # steps between faults
SAVE_EVERY = 3
MEMORY_EVERY = 2
SPARE_RESTARTS = 10
START = "--- start"


@dataclass(frozen=True)
class Line:
    """Line that a job printed, with its time."""

    time: float
    text: str


def fault(number: int, kind: str, rank: int) -> dict[str, Any]:
    """Return fault `number` of a run.

    It occurs after the checkpoints that it needs, in an even step, which is recomputed.
    """
    return {"kind": kind, "rank": rank, "step": EVERY * (number + 1) + 2, "seconds": 0.3, "steps": 4}


def run(name: str, options: Sequence[str], arguments: argparse.Namespace, faults: list[dict[str, Any]]) -> list[Line]:
    """Run a job to its end, unless it has run before, and return its output; raise RuntimeError if it fails."""
    printed = arguments.folder.parent / f"{arguments.folder.name}-{name}.out"  # outside the disk that becomes full
    if (arguments.folder / name / "loss.png").exists():
        return read_lines(printed)
    command = ["bash", str(ROOT / "launch" / "single_node.sh"), str(ROOT / "configs" / "quickstart.yaml"), *options]
    command += [f"name={name}", f"run_dir={arguments.folder}", f"resilience.inject={json.dumps(faults)}"]
    environment = {
        "NPROC_PER_NODE": str(arguments.processes),
        "MAX_RESTARTS": str(len(faults) + SPARE_RESTARTS),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    job = subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert job.stdout is not None
    with printed.open("a") as output, tqdm(total=len(faults), desc=f"{name}, faults", mininterval=10) as bar:
        output.write(f"{time.time():.2f} {START}\n")
        for text in job.stdout:
            output.write(f"{time.time():.2f} {text}")
            output.flush()
            bar.update(len(list((arguments.folder / name / "faults").glob("*.json"))) - bar.n)
    lines = read_lines(printed)
    if job.wait() != 0:
        raise RuntimeError(f"{name} ended with {job.returncode}:\n" + "\n".join(line.text for line in lines[-40:]))
    return lines


def read_lines(path: Path) -> list[Line]:
    """Read the output of a job, with times, from its file."""
    parted = (line.partition(" ") for line in path.read_text().splitlines())
    return [Line(float(when), text) for when, _, text in parted]


def seconds_of(lines: Sequence[Line]) -> float:
    """Return the running time of a job, without the time between an interruption and its continuation."""
    return sum(now.time - before.time for before, now in itertools.pairwise(lines) if now.text != START)


def repeated_steps(lines: Sequence[Line], step: int, start: float, end: float) -> int | None:
    """Return how many steps before `step` a resume between these times repeated; None if there was no resume."""
    resumed = [re.search(r"resumed from step (\d+)", line.text) for line in lines if start <= line.time < end]
    steps = [int(found[1]) for found in resumed if found]
    return step - 1 - min(steps) if steps else None


def step_times(path: Path) -> list[tuple[int, float]]:
    """Return step and end time of each line of a metrics.jsonl, including repeated steps, without truncated lines."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            found.append((record["step"], datetime.datetime.fromisoformat(record["time"]).timestamp()))
    return found


def main() -> int:
    """Run the soak, print the report, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--memory", default="/dev/shm/fault_soak", help="folder for checkpoints in memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=SAME_DATA, default=DEFAULT)
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
        f"checkpoint.memory_interval={MEMORY_EVERY}",
        f"checkpoint.memory_folder={arguments.memory}/$LOCAL_RANK",
    ]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    run("undisturbed", options, arguments, [])
    folder = arguments.folder / "faults"
    lines = run("faults", options, arguments, faults)
    found = dict[str, list[tuple[float, float, int | None]]]()
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
        repeated = repeated_steps(lines, own["step"], at, until)
        found.setdefault(own["kind"], []).append((named - at, again - at, repeated))
        text = f"{label}  named after {named - at:5.1f} s, next step after {again - at:5.1f} s"
        print(text if repeated is None else f"{text}, {repeated} steps repeated")
    expected, curve = (
        {record["step"]: record["loss"] for record in read_metrics(arguments.folder / name / "metrics.jsonl")}
        for name in ("undisturbed", "faults")
    )
    unwritten = expected.keys() - curve.keys()  # a full disk has no room for a record
    equal = curve.items() <= expected.items() and (not unwritten or "full_disk" in kinds)
    columns = ["fault", "number", "named after, s (median, max)", "next step after, s (median)", "steps repeated (max)"]
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for kind, figures in sorted(found.items()):
        detected, recovered, counts = zip(*figures)
        most = max((count for count in counts if count is not None), default=0)
        values = f"{statistics.median(detected):.1f}, {max(detected):.1f} | {statistics.median(recovered):.1f} | {most}"
        print(f"| {kind} | {len(figures)} | {values} |")
    sources = Counter(
        where for line in lines for where in re.findall(r"resumed from step \d+, (in memory|on disk)", line.text)
    )
    print(f"\nresumed {sources['in memory']} times in memory, {sources['on disk']} times on disk")
    print(f"\n{len(faults) - missed} of {len(faults)} faults named and recovered from, in {seconds_of(lines):.0f} s")
    print(
        f"losses of {len(curve)} steps {'equal' if equal else 'DIFFER'} to the last bit; {len(unwritten)} not written"
    )
    return int(bool(missed) or not equal)


if __name__ == "__main__":
    sys.exit(main())
