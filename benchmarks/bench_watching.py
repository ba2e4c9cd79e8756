"""Cost of all that watches a run (docs/resilience.md): steps with it and without it, alternated in one process.

    torchrun --nproc-per-node 2 -m benchmarks.bench_watching --config configs/quickstart.yaml \
        --set parallel.pipeline=1 model.hidden_size=384 model.ffn_hidden_size=1024 training.seq_length=256

With: the record of sections and collectives, the thread that watches for hangs, and the limit for loss spikes, as the
training loop uses them; each of these is repeated `--repeat` times, and the difference divided by that, as one alone is
less than steps vary. `--steps` of each kind, in random order. What happens at an interval
(comparison of the ranks' times, consistency check, recomputed step) is timed by itself, and its time divided by its
default interval; 1000 for recomputation, which is off by default.

CPU time is that of all threads of the process. Other processes only add to times, by the caches and cores that they
share, so the fastest tenth of the steps is compared: its slowest, with and without. The interval is that of 95%
confidence, from resampled steps. Random tokens: no data set is read.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch.distributed as dist
from torch.distributed import ProcessGroup

from benchmarks.bench_step import random_batches
from benchmarks.common import new_parser, require_positive, write_json
from megafp8.config import check_layout, load_config
from megafp8.distributed import activity
from megafp8.distributed.activity import Work
from megafp8.parallel_state import initialize_distributed
from megafp8.training.consistency import check_consistency
from megafp8.training.parallel import build_parallel
from megafp8.training.process import garbage_collected_after_steps
from megafp8.training.resilience.hangs import StepMarks, progress_watched
from megafp8.training.resilience.recompute import check_recompute
from megafp8.training.resilience.spikes import LossSpikes
from megafp8.training.resilience.stragglers import SECTIONS, Stragglers
from megafp8.training.trainer import Trainer
from megafp8.training.validate import choose_device

CLOCKS = {"CPU": time.process_time, "wall": time.perf_counter}
WARM_UP = 20  # steps
LOSSES = 128  # of the limit's window
CALLS = 5  # of what happens at an interval


class Repeated(activity.Activity):
    """A record that does all its work `times` times."""

    times = 1

    def enter(self, section: str) -> None:
        for _ in range(self.times):
            super().enter(section)

    def work(self, op: str, group: ProcessGroup | None, work: Work, peer: int | None = None) -> Work:
        for _ in range(self.times - 1):
            super().work(op, group, work, peer)
        return super().work(op, group, work, peer)

    def blocking(self, op: str, group: ProcessGroup | None) -> AbstractContextManager[None]:
        for _ in range(self.times - 1):
            super().blocking(op, group)
        return super().blocking(op, group)

    def wait_ended(self, calls: activity.Calls, start: float) -> None:
        for _ in range(self.times):
            super().wait_ended(calls, start)


def difference(with_: Sequence[float], without: Sequence[float]) -> float:
    """Relative difference of the first deciles."""
    return statistics.quantiles(with_, n=10)[0] / statistics.quantiles(without, n=10)[0] - 1


def confidence(with_: Sequence[float], without: Sequence[float]) -> tuple[float, float]:
    """95% of the differences of resampled steps lie between these."""
    chosen = random.Random(0)
    found = sorted(
        difference(*(chosen.choices(steps, k=len(steps)) for steps in (with_, without))) for _ in range(1000)
    )
    return found[25], found[974]


def milliseconds(call: Callable[[], object]) -> float:
    """CPU time of a call, the median of some."""
    found = []
    for _ in range(CALLS + 1):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return statistics.median(found[1:]) * 1e3


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="key=value", help="of the config")
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--steps", type=int, default=250, help="of each kind")
    arguments: argparse.Namespace = parser.parse_args()
    require_positive(arguments, "steps", "repeat")
    spikes = "resilience.loss_spike={action: skip}"
    config = load_config(arguments.config, [*arguments.overrides, spikes])
    check_layout(config, int(os.environ.get("WORLD_SIZE", "1")), arguments.config)
    device = initialize_distributed(choose_device(config), config.timeout_seconds)
    parallel = build_parallel(config, device)
    trainer, batches = Trainer(config, parallel), random_batches(config, parallel)
    figures: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in CLOCKS}
    kinds = [True, False] * arguments.steps
    random.Random(0).shuffle(kinds)
    with tempfile.TemporaryDirectory() as run, garbage_collected_after_steps(config.training.gc_interval) as collect:
        steps, spikes = 0, LossSpikes(config, Path(run), parallel.rank, None)
        observers = [StepMarks(), spikes]
        compared = Stragglers(1, parallel)

        def watched() -> None:
            for observer in observers:
                observer.before_step(steps + 1)
            limit = [spikes.limit for _ in range(Repeated.times)][-1]
            loss, result = trainer.train_step(steps, batches, loss_limit=limit)
            for observer in observers:
                observer.after_step(steps + 1, loss.mean, result.skipped)

        def bare() -> None:
            trainer.train_step(steps, batches)

        def compare_times() -> None:
            assert record is not None
            record.own_seconds = dict.fromkeys(SECTIONS, 1.0)
            compared.after_step(1, 0.0, False)

        for i in range(LOSSES):
            spikes.after_step(1, 100.0 + i % 7, skipped=False)  # there is a limit from the first step on
        activity.Activity = Repeated  # type: ignore[misc]
        with progress_watched(config, Path(run), parallel, lambda message: None):
            record = activity.record
            for watches in [True] * WARM_UP + kinds:
                activity.record = record if watches else None
                begun = {name: clock() for name, clock in CLOCKS.items()}
                (watched if watches else bare)()
                for name, clock in CLOCKS.items():
                    if steps >= WARM_UP:
                        figures[name][watches].append(clock() - begun[name])
                steps += 1
                Repeated.times = 1 if steps < WARM_UP else arguments.repeat
                collect(steps)
            Repeated.times = 1
            activity.record = record
            assert record is not None
            marks = record.marks
            watched()
            marks = record.marks - marks
            at_intervals = {
                "comparison of times": (milliseconds(compare_times), 100),
                "consistency check": (milliseconds(lambda: check_consistency(trainer, steps)), 100),
                "recomputed step": (milliseconds(lambda: check_recompute(trainer, steps, batches)), 1000),
            }
    cpu, wall = (statistics.quantiles(figures[name][False], n=10)[0] * 1e3 for name in CLOCKS)
    if dist.get_rank() == 0:
        print(
            f"{parallel.world_size} ranks, {cpu:.1f} ms of CPU time a step ({wall:.1f} ms of wall time), {marks} marks "
            f"a step; {arguments.steps} steps of each kind, each mark {arguments.repeat} times"
        )
        for name, found in figures.items():
            low, high = confidence(found[True], found[False])
            parts = (part / arguments.repeat for part in (difference(found[True], found[False]), low, high))
            print("{} time of a step with watching: {:+.3%} ({:+.3%} to {:+.3%})".format(name, *parts))
        for name, (own, interval) in at_intervals.items():
            print(f"{name}: {own:.2f} ms, every {interval} steps: {own / interval / cpu:.3%} of a step")
        write_json(arguments.json, {"steps": figures, "at_intervals": at_intervals, "marks": marks})
    trainer.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
