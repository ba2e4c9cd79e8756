"""Jobs that are asked to stop at many moments: every rank ends with exit code 0 after a complete save.

    python benchmarks/clean_stops.py --stops 100 --folder /tmp/clean_stops

Trains a small model on two CPU processes, in turn with tensor parallelism, ZeRO and FSDP, with a save every five steps.
After at least three steps each rank gets SIGTERM or SIGINT by itself, up to 50 ms apart, at a random moment of a step.
Checked: both processes end with exit code 0 within a minute, and the last checkpoint is that of the last step that was
taken. Exit code 1 if not. Logs of failures are printed.

Needs the quickstart's data (`megafp8 quickstart` makes it), or `--data PREFIX --tokenizer MODEL --vocabulary N`.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import time
from collections.abc import Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path

from tqdm import tqdm

from benchmarks.full_disk import RANKS, SECONDS, SMALL, add_data_flags, attempt, data_options, losses_of
from megafp8.checkpoint.store import complete_checkpoints
from megafp8.training.errors import DONE

LAYOUTS = {
    "tensor": ["parallel.tensor=2", "parallel.zero=0"],
    "zero": ["parallel.zero=1"],
    "fsdp": ["parallel.zero=0", "parallel.fsdp=true"],
}
STEPS_BEFORE = 3
LAST_STEP = 5000  # which no job reaches


def stop(ranks: Sequence[ForkProcess], run: Path, rng: random.Random) -> None:
    """Send each rank a signal when the run in the folder `run` has taken `STEPS_BEFORE` steps."""
    deadline = time.monotonic() + SECONDS
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < STEPS_BEFORE:
        if time.monotonic() > deadline or not all(rank.is_alive() for rank in ranks):
            return
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.5))
    number = rng.choice([signal.SIGTERM, signal.SIGINT])
    for rank in rng.sample(list(ranks), len(ranks)):
        assert rank.pid is not None
        os.kill(rank.pid, number)
        time.sleep(rng.uniform(0, 0.05))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=100)
    parser.add_argument("--folder", type=Path, required=True, help="made, and removed in the end")
    add_data_flags(parser)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    rng = random.Random(arguments.seed)
    options = [
        *SMALL,
        f"run_dir={arguments.folder}",
        f"training.steps={LAST_STEP}",
        "checkpoint.interval=5",
        *data_options(arguments),
    ]
    failed, run = 0, arguments.folder / "run"
    for number in tqdm(range(arguments.stops), mininterval=5):
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        done = attempt(
            [*options, *LAYOUTS[layout]], arguments.folder / "output.txt", lambda ranks: stop(ranks, run, rng)
        )
        saved = [step for step, _ in complete_checkpoints(run / "checkpoints")] if run.exists() else []
        last = losses_of(run)[-1][0] if run.exists() else None
        if done.codes != [DONE] * RANKS or not saved or max(saved) != last:
            failed += 1
            tqdm.write(f"{layout}: exit codes {done.codes}, step {last}, saved {saved}\n{done.text[-3000:]}")
        shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(arguments.folder)
    print(f"{arguments.stops - failed} of {arguments.stops} stops: exit codes 0, the last step saved")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
