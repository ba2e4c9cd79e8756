"""What a rank's host code costs in worlds of many ranks: one process plays one rank of each.

    python -m benchmarks.bench_scale --worlds 8 1024 16384

torch's fake process group takes the others' place: its collectives return at once and move nothing. So what is seen is
what our own code, and torch's, do on the host: cutting the groups, planning the pipeline, building the trainer, and the
launches of a step. All of that should be the same in any world, since a rank talks to the members of its groups and
keeps nothing about the rest. The table gives, for a rank in the middle of the world,

    groups, plan, trainer   seconds of start-up: `initialize_model_parallel`; checks of the config and the schedule; the
                            model with its buffers
    step ms                 the median, tiny model and all (on a CPU its arithmetic is in it, the same in each world)
    calls                   of Python and C functions, from Python, in the start-up (a second one) and in a step: what
                            seconds come from, without the noise
    built                   process groups that this process made
    RSS MiB                 resident memory gained since before the start-up

Communicators are not seen: NCCL connects at a group's first use, to neighbours in rings and trees.
Each world gets a process of its own. Layout: tensor 2 (sequence-parallel) × pipeline 2, data parallelism takes the
rest, ZeRO stage 1, delayed scaling; always 4 micro-batches a rank.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bench_step import random_batches
from megafp8.config import Config, check_layout
from megafp8.data.sampler import sample_indices
from megafp8.parallel_state import ParallelState, destroy_model_parallel, initialize_model_parallel
from megafp8.training.pipeline import num_microbatches, plan_pipeline
from megafp8.training.trainer import Trainer

TENSOR, PIPELINE, MICRO_BATCHES = 2, 2, 4
WARMUP = 2


@dataclass(frozen=True)
class Cost:
    """Of one rank of a world; see the text at the top."""

    world_size: int
    groups_seconds: float
    plan_seconds: float
    trainer_seconds: float
    step_seconds: float
    calls_of_start_up: int
    calls_of_a_step: int
    groups_built: int
    rss_mib: float


def config(world_size: int) -> Config:
    """A tiny model in the layout that is measured."""
    model = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128, "vocab_size": 256}
    parallel = {"tensor": TENSOR, "pipeline": PIPELINE, "zero": 1, "bucket_mib": 0.1}
    training = {
        "steps": 100,
        "seq_length": 32,
        "global_batch_size": MICRO_BATCHES * world_size // (TENSOR * PIPELINE),
        "precision": "fp32",
    }
    return Config.model_validate({
        "name": "scale", "device": "cpu", "model": model, "parallel": parallel, "fp8": {"recipe": "delayed"},
        "training": training, "optimizer": {"learning_rate": 1e-3}, "data": {"train": ["none"]},
    })  # fmt: skip


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    value = function()
    return time.perf_counter() - start, value


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _calls(function: Callable[[], Any]) -> int:
    """How many Python and C functions `function` makes Python call, itself included."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def cost(world_size: int, steps: int) -> Cost:
    """Play the first rank of the last pipeline stage of `world_size`; for a process in which nothing has run yet."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    torch.empty = torch.zeros  # what nobody sends is a number then, and no step is skipped
    settings = config(world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=world_size // 2, world_size=world_size)
    before = _rss_mib()
    known = len(dist.distributed_c10d._world.pg_map)

    def plan() -> None:
        check_layout(settings, world_size)
        plan_pipeline(settings, num_microbatches(settings, world_size))

    def groups() -> ParallelState:
        return initialize_model_parallel(TENSOR, PIPELINE, backend="fake")

    plan_seconds, _ = _timed(plan)
    groups_seconds, parallel = _timed(groups)
    trainer_seconds, trainer = _timed(lambda: Trainer(settings, parallel))
    batches = random_batches(settings, parallel)
    t, place = settings.training, (parallel.data.rank, parallel.data.size)

    def step(number: int) -> None:
        sample_indices(number * t.global_batch_size, t.global_batch_size, t.micro_batch_size, *place)
        _, result = trainer.train_step(number, batches)
        assert not result.skipped

    seconds = [_timed(lambda number=number: step(number))[0] for number in range(WARMUP + steps)][WARMUP:]
    found = Cost(
        world_size=world_size,
        groups_seconds=groups_seconds,
        plan_seconds=plan_seconds,
        trainer_seconds=trainer_seconds,
        step_seconds=statistics.median(seconds),
        groups_built=len(dist.distributed_c10d._world.pg_map) - known,
        rss_mib=_rss_mib() - before,
        calls_of_a_step=_calls(lambda: step(WARMUP + steps)),
        calls_of_start_up=_calls(lambda: (plan(), groups(), Trainer(settings, parallel))),
    )
    destroy_model_parallel()
    return found


def costs(world_sizes: list[int], steps: int) -> list[Cost]:
    """Of each world, in a fresh process each, one after the other."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return [pool.apply(cost, (world_size, steps)) for world_size in world_sizes]


def table(found: list[Cost]) -> str:
    """As text."""
    head = f"{'ranks':>8}{'groups s':>10}{'plan s':>9}{'trainer s':>11}{'calls':>9}{'step ms':>9}{'calls':>9}"
    lines = [f"{head}{'built':>7}{'RSS MiB':>9}"]
    for x in found:
        lines.append(
            f"{x.world_size:>8,}{x.groups_seconds:>10.4f}{x.plan_seconds:>9.4f}{x.trainer_seconds:>11.3f}"
            f"{x.calls_of_start_up:>9,}{x.step_seconds * 1e3:>9.1f}{x.calls_of_a_step:>9,}"
            f"{x.groups_built:>7}{x.rss_mib:>9.1f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", type=int, default=[8, 1024, 16384], help="multiples of 4 ranks")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    unfit = [size for size in arguments.worlds if size < 4 or size % 4]
    if unfit:
        parser.error(f"--worlds: {unfit[0]} is not a multiple of tensor {TENSOR} × pipeline {PIPELINE} = 4 ranks")
    found = costs(arguments.worlds, arguments.steps)
    print(f"torch {torch.__version__}, {os.cpu_count()} CPU cores, one thread")
    print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(x) for x in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
