"""Measure the host cost of one rank in worlds of many ranks, in one process.

    python -m benchmarks.bench_scale --worlds 8 1024 16384

torch's fake process group replaces the other ranks: its collectives return immediately and move nothing. Only the host
code is measured: building the groups, planning the pipeline, building the trainer, launching a step. All of it should
cost the same in any world, because a rank communicates only with members of its groups and stores nothing about other
ranks. Columns, for a rank in the middle of the world:

    groups s, plan s, trainer s   start-up: `initialize_model_parallel`; checks of the config and the schedule; the
                                  model with its buffers
    start calls, step calls       Python and C functions called from Python in a second start-up and in a step; they
                                  explain the times without their noise
    step s                        the median, including the arithmetic of the tiny model, which is equal in every world
    groups                        process groups that this process built
    RSS MiB                       resident memory gained since before the start-up

Communicators are not built: NCCL connects at a group's first use, to neighbors in rings and trees. Each world runs in a
separate process. Layout: tensor 2 (sequence-parallel) × pipeline 2, the rest data parallel, ZeRO stage 1, delayed
scaling, 4 micro-batches per rank.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bench_step import random_batches
from benchmarks.common import Table, new_parser, timed, write_json
from megafp8.config import Config, check_layout
from megafp8.data.sampler import sample_indices
from megafp8.parallel.parallel_state import ParallelState, destroy_model_parallel, initialize_model_parallel
from megafp8.training.pipeline import num_microbatches, plan_pipeline
from megafp8.training.trainer import RankTrainer

TENSOR, PIPELINE, MICRO_BATCHES = 2, 2, 4
WARMUP = 2


@dataclass(frozen=True)
class Cost:
    """Cost of one rank of a world, with the columns described at the top of this module."""

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
    """Return the config of a tiny model in the measured layout."""
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


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _calls(function: Callable[[], Any]) -> int:
    """Return the number of Python and C functions that `function` calls, including itself."""
    count = 0

    def count_call(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(count_call)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def cost(world_size: int, steps: int) -> Cost:
    """Measure the first rank of the last pipeline stage in a world of `world_size`. Call it in a fresh process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    torch.empty = torch.zeros  # then tensors that are never received are finite, and no step is skipped
    settings = config(world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=world_size // 2, world_size=world_size)
    before = _rss_mib()
    known = len(dist.distributed_c10d._world.pg_map)

    def plan() -> None:
        check_layout(settings, world_size)
        plan_pipeline(settings, num_microbatches(settings, world_size))

    def groups() -> ParallelState:
        return initialize_model_parallel(TENSOR, PIPELINE, backend="fake")

    plan_seconds, _ = timed(plan)
    groups_seconds, parallel = timed(groups)
    trainer_seconds, trainer = timed(lambda: RankTrainer(settings, parallel))
    batches = random_batches(settings, parallel)
    t, place = settings.training, (parallel.data.rank, parallel.data.size)

    def step(number: int) -> None:
        sample_indices(number * t.global_batch_size, t.global_batch_size, t.micro_batch_size, *place)
        _, result = trainer.train_step(number, batches)
        assert not result.skipped

    seconds = [timed(lambda number=number: step(number))[0] for number in range(WARMUP + steps)][WARMUP:]
    found = Cost(
        world_size=world_size,
        groups_seconds=groups_seconds,
        plan_seconds=plan_seconds,
        trainer_seconds=trainer_seconds,
        step_seconds=statistics.median(seconds),
        groups_built=len(dist.distributed_c10d._world.pg_map) - known,
        rss_mib=_rss_mib() - before,
        calls_of_a_step=_calls(lambda: step(WARMUP + steps)),
        calls_of_start_up=_calls(lambda: (plan(), groups(), RankTrainer(settings, parallel))),
    )
    destroy_model_parallel()
    return found


def costs(world_sizes: list[int], steps: int) -> list[Cost]:
    """Measure each world in a fresh process, one after the other."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        return [pool.apply(cost, (world_size, steps)) for world_size in world_sizes]


COLUMNS = {  # heading: field of Cost, format
    "groups s": ("groups_seconds", ".4f"),
    "plan s": ("plan_seconds", ".4f"),
    "trainer s": ("trainer_seconds", ".3f"),
    "start calls": ("calls_of_start_up", ","),
    "step s": ("step_seconds", ".4f"),
    "step calls": ("calls_of_a_step", ","),
    "groups": ("groups_built", ""),
    "RSS MiB": ("rss_mib", ".1f"),
}


def main() -> int:
    """Run the benchmark, print the table, and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--worlds", nargs="+", type=int, default=[8, 1024, 16384], help="multiples of 4 ranks")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    arguments = parser.parse_args()
    unfit = [size for size in arguments.worlds if size < 4 or size % 4]
    if unfit:
        parser.error(f"--worlds: {unfit[0]} is not a multiple of tensor {TENSOR} × pipeline {PIPELINE} = 4 ranks")
    found = costs(arguments.worlds, arguments.steps)
    print(f"torch {torch.__version__}, {os.cpu_count()} CPU cores, one thread")
    table = Table("ranks", 8, {name: spec for name, (_, spec) in COLUMNS.items()})
    print(table.heading())
    for x in found:
        print(table.row(f"{x.world_size:,}", *(getattr(x, name) for name, _ in COLUMNS.values())))
    write_json(arguments.json, [asdict(x) for x in found])
    return 0


if __name__ == "__main__":
    sys.exit(main())
