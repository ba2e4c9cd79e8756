"""Time refits between ranks, and check them: by NCCL between GPUs, by gloo on the CPU.

    python -m benchmarks.bench_refit_ranks               # on all GPUs of this machine, Llama-3-8B's shape
    python -m benchmarks.bench_refit_ranks --ranks 2 --device cpu --shapes small

Each case is TRAINER:GENERATOR, layouts such as tp2, pp2, dp2+tp2, fsdp2 or zero2 (those shard over data parallelism):

    one job    both on the same ranks, the generator by `live_model`, which shares the memory of what is equal
    two jobs   the generator on further ranks, by `TwoJobs` as `send_weights` does; also the seconds until the received
               weights are in use (`apply`)

The trainer has random weights, which change their sign before each refit. A refit is exact if sums over the bits of all
tensors, each bit pattern times an odd number of its place, are the same in trainer and generator, and so are those of
replicas. `shapes`: "small" trains all weights of a small model, "config" adapters of that of --config. `first`: seconds
of the first refit with its plan and connections; `seconds`: of later ones, the median of the slowest rank. `GB`: what
the rank that gets most got, by messages and by copies within its memory.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.bench_refit import ADAPTERS, ONE_GPU
from benchmarks.common import (
    Table,
    add_device_flag,
    chosen_device,
    machine,
    new_parser,
    release,
    require_positive,
    seconds,
    write_json,
)
from megafp8.checkpoint import Rectangles
from megafp8.checkpoint.rectangles import as_rectangles
from megafp8.config import Config, load_config
from megafp8.distributed.sharding import Shape
from megafp8.dtypes import DTYPES
from megafp8.inference.load import Layout, build_model, config_of, live_model
from megafp8.inference.refit import Copies, Refit
from megafp8.inference.staged_weights import StagedWeights, tensors_of
from megafp8.inference.weight_transfer import TwoJobs
from megafp8.parallel_state import initialize_distributed
from megafp8.prove.local_ranks import LocalRanks, RanksFailed
from megafp8.training.parallel import build_parallel
from megafp8.training.state import weights
from megafp8.training.trainer import Trainer
from megafp8.training.weights_digest import sums_of_bits

CASES = {
    1: ([], []),
    2: (["tp2:tp1", "dp2:tp2", "pp2:tp2", "fsdp2:tp2"], ["tp1:tp1"]),
    3: ([], ["tp2:tp1", "tp1:tp2"]),
    4: (["tp4:tp2", "dp2+tp2:tp4", "pp2+tp2:tp1", "fsdp4:tp2"], ["tp2:tp2", "dp2:tp2", "tp2:pp2"]),
}
"""Cases of one job and of two, by the ranks that they have together."""
SMALL = [
    *("model.num_layers=4", "model.hidden_size=256", "model.num_attention_heads=8", "model.num_query_groups=4"),
    *("model.ffn_hidden_size=512", "model.vocab_size=1000", "training.seq_length=32"),
]
TABLE = Table(
    "case",
    30,
    {"ranks": ".0f", "exact": ".0f", "GB": ".3f", "first": ".3f", "seconds": ".4f", "GB/s": ".1f", "apply": ".4f"},
)

Sums = Mapping[tuple[str, Shape, Shape], int]


class Sizes(NamedTuple):
    """A layout. `sharding`: fsdp, zero, or empty."""

    tensor: int
    pipeline: int
    data: int
    sharding: str

    @classmethod
    def of(cls, text: str) -> Sizes:
        """Raises ValueError for what is no layout."""
        given = {"tp": 1, "pp": 1, "dp": 1}
        sharding = ""
        for word in text.split("+"):
            found = re.fullmatch(r"(tp|pp|dp|fsdp|zero)(\d+)", word)
            if found is None:
                raise ValueError(
                    f"{text}: {word!r} is no axis with its size; tp2, pp2, dp2+tp2, fsdp2 or zero2 would do"
                )
            axis, size = found[1], int(found[2])
            if axis in ("fsdp", "zero"):
                axis, sharding = "dp", axis
            given[axis] = size
        return cls(given["tp"], given["pp"], given["dp"], sharding)

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def layout(self) -> Layout:
        return Layout(self.tensor, self.pipeline)

    def overrides(self) -> list[str]:
        keys = [f"parallel.tensor={self.tensor}", f"parallel.pipeline={self.pipeline}"]
        keys += [f"training.global_batch_size={self.data}"]
        keys += {"fsdp": ["parallel.fsdp=true"], "zero": ["parallel.zero=1"]}.get(self.sharding, [])
        return keys


class Measured(NamedTuple):
    """Measurements of a rank: seconds of the first refit, of each later one, and of `apply`; what one copied; sums of
    the bits of the trainer's tensors and of the generator's, as far as it has them."""

    first: float
    later: Sequence[float]
    apply: float | None
    copies: Copies
    trained: Sums
    generated: Sums


def _released(function: Callable[..., Measured], *given: Any) -> Measured:
    """Call `function` and free the models that it has made; returns its result."""
    measured = function(*given)
    release()
    return measured


def _one_job(config: Config, layout: Layout, rounds: int) -> Measured:
    device = initialize_distributed(config.device)
    trainer = Trainer(config, build_parallel(config, device))
    begin = time.perf_counter()
    model, live = live_model(trainer, layout)
    refit = _timed(lambda: live(always=True), device, dist.barrier)
    refit()
    first, later = time.perf_counter() - begin, []
    for _ in range(rounds):
        _negate(trainer)
        later.append(refit())
    result = Measured(first, later, None, live.copies, _sums(_has(trainer), config), _sums(tensors_of(model), config))
    trainer.close()
    return result


def _two_jobs(config: Config, sender: Sizes, receiver: Sizes, port: int, rounds: int, limit: float) -> Measured:
    """The first ranks are the trainer's job, the others the generator's."""
    rank, size, within = dist.get_rank(), dist.get_world_size(), timedelta(seconds=limit)
    trains = rank < sender.ranks
    initialize_distributed(config.device)  # sets the device of the barrier
    dist.barrier()
    dist.destroy_process_group()
    store = dist.TCPStore("localhost", port, size, is_master=rank == 0, timeout=within)
    first_rank, ranks = (0, sender.ranks) if trains else (sender.ranks, receiver.ranks)
    os.environ.update(RANK=str(rank - first_rank), WORLD_SIZE=str(ranks))
    backend = "cpu:gloo,cuda:nccl" if config.device == "cuda" else "gloo"
    own = dist.PrefixStore(f"job of {first_rank}", store)
    dist.init_process_group(backend, store=own, rank=rank - first_rank, world_size=ranks, timeout=within)
    device = initialize_distributed(config.device)
    meetings = 0

    def meet() -> None:
        nonlocal meetings
        meetings += 1
        if store.add(f"meeting {meetings}", 1) == size:
            store.set(f"all are at meeting {meetings}", "")
        store.wait([f"all are at meeting {meetings}"])

    has: Callable[[], dict[str, Rectangles]] = dict
    wants: dict[str, Rectangles] = {}
    trainer = staged = None
    if trains:
        trainer = Trainer(config, build_parallel(config, device))
        has = partial(_has, trainer)
    else:
        dtype = DTYPES[config.training.precision]
        described = config_of(config.model, receiver.layout, config.fp8, dtype, cuda=device.type == "cuda")
        staged = StagedWeights(build_model(described))
        wants = staged.tensors
    meet()
    begin = time.perf_counter()
    with TwoJobs(dist.PrefixStore("refit", store), rank, size, device, within) as peers:
        refit = Refit(has(), wants, peers)
        run = _timed(lambda: refit.run(has(), wants), device, meet)
        run()
        first, later = time.perf_counter() - begin, []
        for _ in range(rounds):
            if trainer is not None:
                _negate(trainer)
            later.append(run())
        copies = refit.run(has(), wants)
    sums, apply = _sums(has() if trains else wants, config), None
    if staged is not None:
        apply = seconds(staged.apply, device, 1)[0]
    meet()
    if trainer is not None:
        trainer.close()
    return Measured(first, later, apply, copies, *((sums, {}) if trains else ({}, sums)))


def _timed(action: Callable[[], object], device: torch.device, meet: Callable[[], object]) -> Callable[[], float]:
    """`action` of all ranks at once, and its seconds on this rank."""

    def call() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        meet()
        return seconds(action, device, 1)[0]

    return call


def _has(trainer: Trainer) -> dict[str, Rectangles]:
    return weights(trainer) | as_rectangles(trainer.fp8.state_dict())


@torch.no_grad()
def _negate(trainer: Trainer) -> None:
    for tensor in weights(trainer).values():
        for part in tensor.parts:
            if part.view.is_floating_point():
                part.view.neg_()


def _sums(tensors: Mapping[str, Rectangles], config: Config) -> Sums:
    return sums_of_bits(tensors, DTYPES[config.training.precision])


def _totals(sums: Sequence[Sums]) -> dict[str, int] | None:
    """Sums of whole tensors by name; None where replicas differ."""
    everything: dict[tuple[str, Shape, Shape], int] = {}
    totals: dict[str, int] = {}
    for of_rank in sums:
        for key, value in of_rank.items():
            if everything.setdefault(key, value) != value:
                return None
    for (name, _, _), value in everything.items():
        totals[name] = (totals.get(name, 0) + value) % 2**64
    return totals


def summary(ranks: Sequence[Measured]) -> dict[str, Any]:
    """Row of the table for a case. `exact`: 1 if all tensors of the generator are the trainer's."""
    trained, generated = _totals([x.trained for x in ranks]), _totals([x.generated for x in ranks])
    exact = trained is not None and generated and all(trained.get(name) == x for name, x in generated.items())
    later = statistics.median(max(times) for times in zip(*(x.later for x in ranks), strict=True))
    size = max(x.copies.nbytes for x in ranks)
    return {
        "ranks": len(ranks),
        "exact": int(bool(exact)),
        "GB": size / 1e9,
        "first": max(x.first for x in ranks),
        "seconds": later,
        "GB/s": size / 1e9 / later,
        "apply": max((x.apply for x in ranks if x.apply is not None), default=None),
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
    return port


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_device_flag(parser)
    parser.add_argument("--ranks", type=int, help="most ranks of a case; default: the GPUs of this machine, else 2")
    parser.add_argument("--one-job", nargs="*", metavar="CASE", help="default: those for --ranks")
    parser.add_argument("--two-jobs", nargs="*", metavar="CASE", help="default: those for --ranks")
    parser.add_argument("--shapes", nargs="+", choices=("small", "config"), default=["small", "config"])
    parser.add_argument("--config", type=Path, default=Path("configs/llama3-8b.yaml"))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes of the config")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a case has failed")
    arguments = parser.parse_args(argv)
    require_positive(arguments, "rounds", "ranks")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    device = chosen_device(arguments)
    most = arguments.ranks or (torch.cuda.device_count() if device.type == "cuda" else 2)
    one_job, two_jobs = CASES[max(n for n in CASES if n <= most)]
    cases = [("one job", case) for case in (one_job if arguments.one_job is None else arguments.one_job)]
    cases += [("two jobs", case) for case in (two_jobs if arguments.two_jobs is None else arguments.two_jobs)]
    print(f"{machine(device)}, torch {torch.__version__}, {most} ranks")
    print(TABLE.heading(), flush=True)
    rows, begin = [], time.perf_counter()
    with LocalRanks(on_gpus=device.type == "cuda") as processes:
        for shape in arguments.shapes:
            for jobs, case in cases:
                sender, receiver = map(Sizes.of, case.split(":"))
                label = f"{shape} {jobs} {case}"
                if shape == "config" and sender.sharding:
                    continue  # trains all weights
                overrides = [*ONE_GPU, f"device={device.type}", *(SMALL if shape == "small" else ADAPTERS)]
                config = load_config(arguments.config, [*overrides, *arguments.set, *sender.overrides()])
                ranks = sender.ranks
                function: Callable[..., Measured] = _one_job
                given: tuple[Any, ...] = (config, receiver.layout, arguments.rounds)
                if jobs == "two jobs":
                    ranks += receiver.ranks
                    function = _two_jobs
                    given = (config, sender, receiver, _free_port(), arguments.rounds, arguments.limit)
                try:
                    row = summary(processes.run(_released, (function, *given), ranks, arguments.limit))
                except RanksFailed as failure:
                    print(f"{label}: {failure}", file=sys.stderr, flush=True)
                    row = dict.fromkeys(TABLE.columns, None) | {"exact": 0, "cause": failure.cause}
                rows.append({"case": label} | row)
                print(TABLE.row(label, *(row[x] for x in TABLE.columns), note=row.get("cause", "")), flush=True)
    print(f"{time.perf_counter() - begin:.0f} s in all; exact: {sum(x['exact'] for x in rows)} of {len(rows)}")
    write_json(arguments.json, {"machine": machine(device), "torch": torch.__version__, "rows": rows})
    return 0 if all(x["exact"] for x in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
