"""Time whole training steps for several layouts and precisions.

    torchrun --nproc-per-node 4 -m benchmarks.bench_step --config configs/llama3-8b.yaml --micro-batches 8 \
        --layouts "tensor=1 pipeline=1 zero=1" "tensor=2 pipeline=2 schedule=zb-h1" --variants bf16,delayed,delayed+fast

A layout is a list of keys of `parallel`; other keys are taken from the config. A variant is bf16, fp32 or an FP8
recipe, with +fast (fast accumulation in all three GEMMs), +eager (training.cuda_graphs=false), +documents (documents of
random lengths, 1,000 tokens on average, with attention within them: data.reset_at_documents) and +deterministic. Either
all variants are deterministic or none, because libraries read that setting once per process. The variant `compiled` is
a baseline: the same model in plain torch, with bf16 autocast, torch.compile and fused AdamW
(`benchmarks.compiled_step`); each rank trains alone. The tokens are random: no data set is read. `--micro-batches` is
the number on each data-parallel rank, whatever the layout.

Each variant of each layout is built, warmed up and timed in turn, `--rounds` times, so that a drift of the clock
affects all of them equally. Columns:

    step ms     the median
    varies      standard deviation of the steps, as a fraction of the median
    tok/s/gpu   and TFLOP/s: model FLOPs, 6·N_matmul + 6·L·s·h_attn per token (causal attention as half, windows by
                their visible part, documents not subtracted, output layer included, embedding lookup excluded); MFU
                relative to the precision's dense peak, 989 bf16, 1979 fp8 on H100 and H200
    update      milliseconds of the optimizer's step, which is part of the step
    exposed     exposed communication as a fraction of a step (see benchmarks/profiling.py), mean of all ranks
    bubble      for pipelines: measured in a traced step, and simulated with the mean times of each stage's actions
    GiB         the largest peak of torch's allocator on any rank, and the prediction of megafp8.planner.memory

A line that cannot run (a layout that does not fit the ranks, a recipe without an option, a `compiled` line of a model
that the baseline cannot build) says why, and the others go on. Running out of memory on one rank is handled likewise.
With several ranks it ends the program, because the ranks with enough memory would wait for the others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import Table, machine, milliseconds, new_parser, now, release, write_json
from benchmarks.compiled_step import CompiledTrainer, why_not
from benchmarks.profiling import Kernel, StepProfile, by_name, record, step_profile
from megafp8.batch import Batch
from megafp8.config import Config, check_layout, load_config
from megafp8.data.samples import next_token_batch
from megafp8.host.gpus import peak_flops
from megafp8.parallel.collectives import all_gather_objects
from megafp8.parallel.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    initialize_distributed,
)
from megafp8.parallel.pipeline.simulate import Timeline, mean_times, simulate
from megafp8.parallel.pipeline.trace import write_timeline
from megafp8.planner.flops import flops_per_token
from megafp8.planner.memory import pipeline_memory
from megafp8.planner.outline import model_outline
from megafp8.training.determinism import make_deterministic
from megafp8.training.fp8_config import build_fp8, check_recipe
from megafp8.training.metrics import memory_gib
from megafp8.training.parallel import build_parallel
from megafp8.training.pipeline import PipelinePlan
from megafp8.training.process import garbage_collected_after_steps
from megafp8.training.trainer import RankTrainer
from megafp8.training.validate import choose_device

DOCUMENT_LENGTH = 1000
COMPILED = "compiled"
OPTIONS = {
    "fast": "fp8.fast_accumulation=[true,true,true]",
    "eager": "training.cuda_graphs=false",
    "deterministic": "deterministic=true",
    "documents": None,
}


@dataclass
class Result:
    """Measurements of one variant of one layout. `failure` says why there are none."""

    layout: str
    variant: str
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    memory_gib: float = 0.0
    predicted_gib: float = 0.0
    bubble: float | None = None
    simulated_bubble: float | None = None
    profile: StepProfile | None = None
    update_ms: float | None = None
    kernels: list[Kernel] = field(default_factory=list)
    failure: str = ""


def variant_overrides(variant: str) -> list[str]:
    """Return the config overrides of `recipe+option+option`, or raise ValueError for an unknown option."""
    name, *options = variant.split("+")
    unknown = [option for option in options if option not in OPTIONS]
    if unknown:
        raise ValueError(
            f"--variants: {variant!r} has the option {unknown[0]!r}, which is none of {', '.join(OPTIONS)}"
        )
    high = {"bf16": "bf16", "fp32": "fp32", COMPILED: "bf16"}
    precision, recipe = (high[name], "none") if name in high else ("bf16", name)
    found = [OPTIONS[option] for option in options]
    return [f"training.precision={precision}", f"fp8.recipe={recipe}", *(key for key in found if key is not None)]


def layout_overrides(layout: str) -> list[str]:
    """Return the config overrides of `key=value key=value`. Keys without a section belong to `parallel`."""
    return [part if "." in part.split("=")[0] else f"parallel.{part}" for part in layout.split()]


def resolve(arguments: argparse.Namespace, layout: str, variant: str, world_size: int) -> Config:
    """Return the config of one line of the table, or raise ValueError if it cannot run."""
    overrides = [*arguments.overrides, *layout_overrides(layout), *variant_overrides(variant)]
    config = load_config(arguments.config, overrides)
    if arguments.micro_batches:
        p = config.parallel
        data = max(1, world_size // (p.tensor * p.pipeline * p.context))
        size = arguments.micro_batches * config.training.micro_batch_size * data
        config = load_config(arguments.config, [*overrides, f"training.global_batch_size={size}"])
    check_layout(config, world_size, arguments.config)
    check_recipe(config, arguments.config)
    if variant.split("+")[0] == COMPILED and (reason := why_not(config)):
        raise ValueError(reason)
    if config.model.vocab_size is None:
        raise ValueError("model.vocab_size: no tokenizer is read here; give it, as in --set model.vocab_size=50257")
    return config


def one_line(error: Exception) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split())


def failure_line(result: Result) -> str:
    """Return the line for a variant that could not run, with the reason."""
    return f"{result.layout} {result.variant}: {result.failure}".strip()


def random_batches(config: Config, parallel: ParallelState, documents: bool = False) -> list[Batch]:
    """Create the random micro-batches of one step, equal on all ranks of one data-parallel rank."""
    t = config.training
    generator = torch.Generator().manual_seed(config.seed + parallel.data.rank)
    count = t.global_batch_size // (t.micro_batch_size * parallel.data.size)
    shape = (t.micro_batch_size, t.seq_length + 1)
    assert config.model.vocab_size is not None
    rows = [torch.randint(config.model.vocab_size, shape, generator=generator) for _ in range(count)]
    if not documents:
        return [next_token_batch(row, reset_at_documents=False, mask_eod_loss=False) for row in rows]
    begins = [torch.rand(shape, generator=generator) < 1 / DOCUMENT_LENGTH for _ in rows]
    return [
        next_token_batch(row, begin.cumsum(1), reset_at_documents=True, mask_eod_loss=True)
        for row, begin in zip(rows, begins)
    ]


def simulated_bubble(plan: PipelinePlan, measured: Timeline) -> float:
    """Return the bubble of `plan` if each action takes the mean time of its kind on its stage in `measured`."""
    return simulate(plan.train, plan.placement, mean_times(measured, plan.placement)).bubble_fraction


def time_steps(
    trainer: RankTrainer | CompiledTrainer, batches: list[Batch], warmup: int, steps: int, result: Result
) -> None:
    """Run steps; add the seconds of those after warm-up, all losses, memory and a profile to `result`."""
    parallel = trainer.parallel
    for step in range(warmup + steps):
        start = time.perf_counter()
        loss, _ = trainer.train_step(
            step, batches
        )  # waits for the norm; work queued after the norm counts for the next step
        if step >= warmup:
            result.seconds.append(time.perf_counter() - start)
        result.losses.append(loss.mean)
    result.memory_gib = max(all_gather_objects(memory_gib(parallel.device), parallel.world.group))
    if parallel.device.type == "cuda":
        events, duration = record(lambda: trainer.train_step(warmup + steps, batches), on_cuda=True)
        result.kernels = by_name(events)
        profiles = all_gather_objects(step_profile(events, duration), parallel.world.group)
        result.profile = StepProfile(*(statistics.fmean(x) for x in zip(*(asdict(p).values() for p in profiles))))
    trainer.train_step(warmup + steps + 1, batches)
    if isinstance(trainer, RankTrainer):
        result.update_ms = statistics.median(update_ms(trainer) for _ in range(3))
    if trainer.timeline is not None:
        result.bubble = trainer.timeline.bubble_fraction
        result.simulated_bubble = simulated_bubble(trainer.plan, trainer.timeline)


def update_ms(trainer: RankTrainer) -> float:
    """Return the milliseconds of the optimizer's step with the last gradients.

    The learning rate is 0, so the weights do not change.
    """
    device = trainer.parallel.device
    start = now(device)
    trainer.optimizer.step(0.0)
    end = now(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return milliseconds(start, end)


def measure(
    config: Config, parallel: ParallelState, warmup: int, steps: int, result: Result, trace: Path | None
) -> None:
    """Build a trainer, time its steps, and add the measurements to `result`.

    `trace` is a file for the pipeline's timeline of the traced step, or None.
    """
    if parallel.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(parallel.device)
    trace_step = warmup + steps + 2  # steps count from 1 in the config
    if config.parallel.pipeline > 1:
        logging = config.logging.model_copy(update={"pipeline_trace_step": trace_step})
        config = config.model_copy(update={"logging": logging})
    compiled = result.variant == COMPILED
    trainer = CompiledTrainer(config, parallel) if compiled else RankTrainer(config, parallel)
    batches = random_batches(config, parallel, "documents" in result.variant.split("+"))
    with garbage_collected_after_steps(config.training.gc_interval):  # as in a run
        time_steps(trainer, batches, warmup, steps, result)
    if trace is not None and trainer.timeline is not None and parallel.rank == 0:
        write_timeline(trainer.timeline, trainer.plan.placement, trace)
    trainer.close()
    if isinstance(trainer, CompiledTrainer):
        return
    outline = model_outline(config, build_fp8(config, None)).with_expert_room(trainer.expert_room)
    memories = pipeline_memory(outline, parallel.world_size, trainer.plan.placement, trainer.plan.train)
    result.predicted_gib = max(memory.total for memory in memories) / 2**30


class Groups:
    """Process groups of each layout of ranks, built once and kept until the end.

    torch names a group that only its members build by its ranks and the number of groups that a rank has. After an
    embedding group, which does not contain every rank, members of the next group may use different names, and hang.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._built: dict[tuple[int, ...], ParallelState] = {}

    def of(self, config: Config) -> ParallelState:
        """Return the process groups of the config's layout. This is a collective."""
        p = config.parallel
        sizes = (p.tensor, p.pipeline, p.context, p.expert, p.expert_tensor, p.fsdp_replicas)
        if sizes not in self._built:
            self._built[sizes] = build_parallel(config, self._device)
        return self._built[sizes]


COLUMNS = {  # heading: key of a row, format
    "step ms": ("step_ms", ".1f"),
    "varies": ("variation", ".1%"),
    "tok/s/gpu": ("tokens_per_second_per_gpu", ",.0f"),
    "TFLOP/s": ("tflops_per_gpu", ".1f"),
    "MFU": ("mfu", ".1%"),
    "update": ("update_ms", ".1f"),
    "exposed": ("exposed", ".1%"),
    "bubble": ("bubble", ".1%"),
    "simulated": ("simulated_bubble", ".1%"),
    "GiB": ("memory_gib", ".2f"),
    "predicted": ("predicted_gib", ".2f"),
    "first loss": ("first_loss", ".4f"),
    "last loss": ("last_loss", ".4f"),
}


def row_of(result: Result, config: Config, world_size: int) -> dict[str, Any]:
    """Return one line of the table as a record."""
    t = config.training
    seconds = statistics.median(result.seconds)
    rate = t.global_batch_size * t.seq_length / seconds / world_size
    flops = rate * flops_per_token(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = peak_flops(device, t.precision, fp8=config.fp8.recipe != "none")
    return {
        "layout": result.layout,
        "variant": result.variant,
        "step_ms": seconds * 1e3,
        "variation": statistics.stdev(result.seconds) / statistics.fmean(result.seconds)
        if result.seconds[1:]
        else None,
        "tokens_per_second_per_gpu": rate,
        "tflops_per_gpu": flops / 1e12,
        "mfu": flops / peak if peak else None,
        "update_ms": result.update_ms,
        "exposed": result.profile and result.profile.exposed,
        "bubble": result.bubble,
        "simulated_bubble": result.simulated_bubble,
        "memory_gib": result.memory_gib,
        "predicted_gib": result.predicted_gib,
        "first_loss": result.losses[0],
        "last_loss": result.losses[-1],
    }


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--layouts", nargs="+", default=[""], metavar='"key=value ..."', help="keys of `parallel`")
    parser.add_argument("--variants", default="bf16,current,delayed", help="recipe+option, comma-separated")
    parser.add_argument("--micro-batches", type=int, help="micro-batches of each data-parallel rank; default: config")
    parser.add_argument("--warmup", type=int, default=4, help="steps before timing, in each round")
    parser.add_argument("--steps", type=int, default=8, help="timed steps in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--traces", type=Path, help="folder for the pipeline timeline of line n as n.json (see tools/plot_schedule.py)"
    )
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="key=value", help="of the config")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark, print the table, and return the exit code."""
    arguments = parse_arguments(argv)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    lines = [(layout, variant) for layout in arguments.layouts for variant in arguments.variants.split(",")]
    results, configs = {key: Result(*key) for key in lines}, {}
    for key in lines:
        try:
            configs[key] = resolve(arguments, *key, world_size)
        except ValueError as error:
            results[key].failure = one_line(error)
    if not configs:
        print("\n".join(f"error: {failure_line(result)}" for result in results.values()), file=sys.stderr)
        return 2
    some = next(iter(configs.values()))
    if any(config.deterministic != some.deterministic for config in configs.values()):
        print("error: --variants: +deterministic is a setting of the process: all must be or none", file=sys.stderr)
        return 2
    if arguments.traces is not None:
        arguments.traces.mkdir(parents=True, exist_ok=True)
    if some.deterministic:
        make_deterministic(choose_device(some))
    device = initialize_distributed(choose_device(some), some.timeout_seconds)
    log = print if dist.get_rank() == 0 else lambda *_, **__: None
    groups = Groups(device)
    table = Table(
        "layout, variant",
        max(len(" ".join(key)) for key in lines) + 2,
        {name: spec for name, (_, spec) in COLUMNS.items()},
    )
    m, t = some.model, some.training
    log(f"{some.name}: {m.num_layers} layers, s = {t.seq_length}, {world_size} × {machine(device)}, "
        f"torch {torch.__version__}\n{table.heading()}")  # fmt: skip
    rows: list[dict[str, Any]] = []
    for round_ in range(arguments.rounds):
        for number, (key, config) in enumerate(configs.items()):
            trace, result = None if arguments.traces is None else arguments.traces / f"{number}.json", results[key]
            if result.failure:
                continue
            try:
                measure(config, groups.of(config), arguments.warmup, arguments.steps, result, trace)
            except ValueError as error:  # errors of this package occur on all ranks
                result.failure = one_line(error)
            except torch.cuda.OutOfMemoryError as error:
                result.failure = f"out of memory: {one_line(error)[:200]}"
                if world_size > 1:  # if only some ranks failed, the others would wait forever
                    print(f"rank {dist.get_rank()}, {failure_line(result)}", flush=True)
                    os._exit(1)
            release()
            if round_ == arguments.rounds - 1 and not result.failure:
                rows.append(row_of(results[key], config, world_size))
                log(table.row(" ".join(key), *(rows[-1][name] for name, _ in COLUMNS.values())), flush=True)
    for result in results.values():
        if result.failure:
            rows.append({"layout": result.layout, "variant": result.variant, "failure": result.failure})
            log(failure_line(result))
    if dist.get_rank() == 0:
        write_json(arguments.json, {"rows": rows, "samples": [asdict(result) for result in results.values()]})
    destroy_model_parallel()
    return 0


if __name__ == "__main__":
    sys.exit(main())
