"""Time whole training steps: one table over layouts and precisions, all in one run.

    torchrun --nproc-per-node 4 -m benchmarks.bench_step --config configs/llama3-8b.yaml --micro-batches 8 \
        --layouts "tensor=1 pipeline=1 zero=1" "tensor=2 pipeline=2 schedule=zb-h1" --variants bf16,delayed,delayed+fast

A layout is a list of keys of `parallel`; what it does not name is as in the config. A variant is bf16, fp32 or an FP8
recipe, with +fast (fast accumulation in all three GEMMs), +graphs (training.cuda_graphs) and +deterministic where
wanted; what is deterministic is so for a whole process, so either all variants are or none. The tokens are random: no
data set is read. `--micro-batches` is the number on each data-parallel rank, whatever the layout.

Each variant of each layout is built, warmed up and timed in turn, `--rounds` times over, so that a drift of the clock
touches all alike; the table gives

    step ms     the median
    tok/s/gpu   and TFLOP/s: model FLOPs, 6·N_matmul + 6·L·s·h_attn per token (causal attention as half, output layer
                in, embedding look-up out); MFU against the precision's dense peak, 989 bf16, 1979 fp8 on H100 and H200
    exposed     communication that nothing hides, of a step (see benchmarks/step_profile.py), mean of all ranks
    bubble      of pipelines: measured in a traced step, and simulated with the mean times of each stage's actions
    GiB         the fullest rank's peak of torch's allocator, and what megafp8.planner.memory predicts

What cannot run (a layout that does not fit, memory) is a line that says so, and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.step_profile import Kernel, StepProfile, profile_step
from megafp8.config import Config, check_layout, load_config
from megafp8.data.samples import Batch
from megafp8.distributed.collectives import all_gather_objects
from megafp8.models.flops import PEAK_FLOPS, flops_per_token
from megafp8.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    initialize_distributed,
    initialize_model_parallel,
)
from megafp8.pipeline_parallel.simulate import Timeline, mean_times, simulate
from megafp8.pipeline_parallel.trace import write_timeline
from megafp8.planner.memory import pipeline_memory
from megafp8.training.determinism import make_deterministic
from megafp8.training.fp8_config import build_fp8
from megafp8.training.metrics import memory_gib
from megafp8.training.pipeline import PipelinePlan
from megafp8.training.process import garbage_collected_after_steps
from megafp8.training.trainer import Trainer
from megafp8.training.validate import choose_device

OPTIONS = {
    "fast": "fp8.fast_accumulation=[true,true,true]",
    "graphs": "training.cuda_graphs=true",
    "deterministic": "deterministic=true",
}


@dataclass
class Result:
    """What was measured of one variant of one layout; `failure` where it could not run."""

    layout: str
    variant: str
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    memory_gib: float = 0.0
    predicted_gib: float = 0.0
    bubble: float | None = None
    simulated_bubble: float | None = None
    profile: StepProfile | None = None
    kernels: list[Kernel] = field(default_factory=list)
    failure: str = ""


def variant_overrides(variant: str) -> list[str]:
    """Of `recipe+option+option`. Raises ValueError for an option there is none of."""
    name, *options = variant.split("+")
    unknown = [option for option in options if option not in OPTIONS]
    if unknown:
        raise ValueError(
            f"--variants: {variant!r} has the option {unknown[0]!r}, which is none of {', '.join(OPTIONS)}"
        )
    precision, recipe = (name, "none") if name in ("bf16", "fp32") else ("bf16", name)
    return [f"training.precision={precision}", f"fp8.recipe={recipe}", *(OPTIONS[option] for option in options)]


def layout_overrides(layout: str) -> list[str]:
    """Of `key=value key=value`; keys without a section are those of `parallel`."""
    return [part if "." in part.split("=")[0] else f"parallel.{part}" for part in layout.split()]


def resolve(arguments: argparse.Namespace, layout: str, variant: str, world_size: int) -> Config:
    """The config of one line of the table. Raises ValueError where it cannot run."""
    overrides = [*arguments.overrides, *layout_overrides(layout), *variant_overrides(variant)]
    config = load_config(arguments.config, overrides)
    if arguments.micro_batches:
        p = config.parallel
        data = max(1, world_size // (p.tensor * p.pipeline * p.context))
        size = arguments.micro_batches * config.training.micro_batch_size * data
        config = load_config(arguments.config, [*overrides, f"training.global_batch_size={size}"])
    check_layout(config, world_size, arguments.config)
    return config


def random_batches(config: Config, parallel: ParallelState) -> list[Batch]:
    """One step's micro-batches of random tokens, the same on the ranks that must see the same."""
    t = config.training
    generator = torch.Generator().manual_seed(config.seed + parallel.data.rank)
    count = t.global_batch_size // (t.micro_batch_size * parallel.data.size)
    shape = (t.micro_batch_size, t.seq_length + 1)
    assert config.model.vocab_size is not None
    rows = [torch.randint(config.model.vocab_size, shape, generator=generator) for _ in range(count)]
    return [Batch(tokens=r[:, :-1].contiguous(), labels=r[:, 1:].contiguous()) for r in rows]


def simulated_bubble(plan: PipelinePlan, measured: Timeline) -> float:
    """What `plan` would lose if each action took the mean time of its kind on its stage in `measured`."""
    return simulate(plan.train, plan.placement, mean_times(measured, plan.placement)).bubble_fraction


def time_steps(trainer: Trainer, batches: list[Batch], warmup: int, steps: int, result: Result) -> None:
    """Run steps, and add to `result` the seconds of those after the first, all losses, memory, and a profile."""
    parallel = trainer.parallel
    for step in range(warmup + steps):
        start = time.perf_counter()
        loss, _ = trainer.train_step(step, batches)  # waits for the norm; what is queued then is the next step's time
        if step >= warmup:
            result.seconds.append(time.perf_counter() - start)
        result.losses.append(loss.mean)
    result.memory_gib = max(all_gather_objects(memory_gib(parallel.device), parallel.world.group))
    trainer.train_step(warmup + steps, batches)
    if trainer.timeline is not None:
        result.bubble = trainer.timeline.bubble_fraction
        result.simulated_bubble = simulated_bubble(trainer.plan, trainer.timeline)
    own = profile_step(lambda: trainer.train_step(warmup + steps + 1, batches))
    if own is not None:
        profiles = all_gather_objects(own[0], parallel.world.group)
        result.kernels = own[1]
        result.profile = StepProfile(*(statistics.fmean(x) for x in zip(*(asdict(p).values() for p in profiles))))


def measure(
    config: Config, parallel: ParallelState, warmup: int, steps: int, result: Result, trace: Path | None
) -> None:
    """Build a trainer, run it, and add to `result` the seconds of its timed steps, losses, memory, and its profile.

    `trace`: where to write what a pipeline did in the step that is traced.
    """
    if parallel.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(parallel.device)
    trace_step = warmup + steps + 1  # steps count from 1 in the config
    if config.parallel.pipeline > 1:
        logging = config.logging.model_copy(update={"pipeline_trace_step": trace_step})
        config = config.model_copy(update={"logging": logging})
    trainer = Trainer(config, parallel)
    batches = random_batches(config, parallel)
    with garbage_collected_after_steps(config.training.gc_interval):  # as in a run
        time_steps(trainer, batches, warmup, steps, result)
    if trace is not None and trainer.timeline is not None and parallel.rank == 0:
        write_timeline(trainer.timeline, trainer.plan.placement, trace)
    trainer.wait_for_weights()  # a gathering that nobody waits for keeps them alive
    memories = pipeline_memory(
        config, build_fp8(config, None), parallel.world_size, trainer.plan.placement, trainer.plan.train
    )
    result.predicted_gib = max(memory.total for memory in memories) / 2**30


def release() -> None:
    """Give a finished variant's memory back before the next is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Groups:
    """The groups of each grid, built once, whatever stages lie on them, and kept to the end. torch names a group that
    its members build alone by its ranks and by how many groups the rank has: after an embedding group, which is not on
    every rank, the members of the next one may disagree on its name, and wait for each other in vain."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._built: dict[tuple[int, int, int], ParallelState] = {}

    def of(self, config: Config) -> ParallelState:
        """Collective."""
        p = config.parallel
        tensor, pipeline, context = sizes = (p.tensor, p.pipeline, p.context)
        if sizes not in self._built:
            self._built[sizes] = initialize_model_parallel(
                tensor,
                pipeline,
                context_parallel_size=context,
                device=self._device,
                timeout_seconds=config.timeout_seconds,
            )
        return replace(self._built[sizes], virtual_pipeline_size=p.virtual_pipeline)


def rows_of(results: Sequence[Result], configs: dict[tuple[str, str], Config], world_size: int) -> list[dict]:
    """One row a line of the table."""
    rows = []
    for result in results:
        if result.failure:
            rows.append({"layout": result.layout, "variant": result.variant, "failure": result.failure})
            continue
        config = configs[result.layout, result.variant]
        t = config.training
        seconds = statistics.median(result.seconds)
        rate = t.global_batch_size * t.seq_length / seconds / world_size
        flops = rate * flops_per_token(config.model, t.seq_length)
        peak = PEAK_FLOPS["bf16" if config.fp8.recipe == "none" else "fp8"] if torch.cuda.is_available() else None
        rows.append({
            "layout": result.layout,
            "variant": result.variant,
            "step_ms": seconds * 1e3,
            "tokens_per_second_per_gpu": rate,
            "tflops_per_gpu": flops / 1e12,
            "mfu": flops / peak if peak else None,
            "exposed": result.profile and result.profile.exposed,
            "bubble": result.bubble,
            "simulated_bubble": result.simulated_bubble,
            "memory_gib": result.memory_gib,
            "predicted_gib": result.predicted_gib,
            "first_loss": result.losses[0],
            "last_loss": result.losses[-1],
        })  # fmt: skip
    return rows


def line(row: dict, width: int) -> str:
    """A row as text."""
    label = f"{row['layout']:<{width}}  {row['variant']:<14}"
    if "failure" in row:
        return f"{label} {row['failure']}"
    share = {
        key: "-" if row[key] is None else f"{row[key]:.1%}" for key in ("mfu", "exposed", "bubble", "simulated_bubble")
    }
    return (
        f"{label}{row['step_ms']:>9.1f}{row['tokens_per_second_per_gpu']:>11,.0f}{row['tflops_per_gpu']:>9.1f}"
        f"{share['mfu']:>7}{share['exposed']:>9}{share['bubble']:>8}{share['simulated_bubble']:>11}"
        f"{row['memory_gib']:>8.2f}{row['predicted_gib']:>11.2f}  {row['first_loss']:.4f} -> {row['last_loss']:.4f}"
    )


def heading(width: int) -> str:
    names = f"{'layout':<{width}}  {'variant':<14}{'step ms':>9}{'tok/s/gpu':>11}{'TFLOP/s':>9}{'MFU':>7}"
    return f"{names}{'exposed':>9}{'bubble':>8}{'simulated':>11}{'GiB':>8}{'predicted':>11}  loss"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--layouts", nargs="+", default=[""], metavar='"key=value ..."', help="keys of `parallel`")
    parser.add_argument("--variants", default="bf16,current,delayed", help="recipe+option, by commas")
    parser.add_argument("--micro-batches", type=int, help="of each data-parallel rank; default: as in the config")
    parser.add_argument("--warmup", type=int, default=4, help="steps before timing, in each round")
    parser.add_argument("--steps", type=int, default=8, help="timed steps in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the table, all samples and rank 0's kernels here")
    parser.add_argument(
        "--traces", type=Path, help="a folder, for the n-th line's pipeline as n.json (see tools/plot_schedule.py)"
    )
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="key=value", help="of the config")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    lines = [(layout, variant) for layout in arguments.layouts for variant in arguments.variants.split(",")]
    results, configs = {key: Result(*key) for key in lines}, {}
    for key in lines:
        try:
            configs[key] = resolve(arguments, *key, world_size)
        except ValueError as error:
            results[key].failure = " ".join(str(error).split())
    if not configs:
        print(f"error: {results[lines[0]].failure}", file=sys.stderr)
        return 2
    some = next(iter(configs.values()))
    if any(config.deterministic != some.deterministic for config in configs.values()):
        print("error: --variants: libraries read how to be deterministic once, so all must be or none", file=sys.stderr)
        return 2
    if arguments.traces is not None:
        arguments.traces.mkdir(parents=True, exist_ok=True)
    if some.deterministic:
        make_deterministic(choose_device(some))
    device = initialize_distributed(choose_device(some), some.timeout_seconds)
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    groups = Groups(device)
    width = max(len(layout) for layout, _ in lines)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    m, t = some.model, some.training
    say(f"{some.name}: {m.num_layers} layers, s = {t.seq_length}, {world_size} × {name}, torch {torch.__version__}")
    say(heading(width))
    for round_ in range(arguments.rounds):
        for number, (key, config) in enumerate(configs.items()):
            if results[key].failure:
                continue
            trace = None if arguments.traces is None else arguments.traces / f"{number}.json"
            try:
                measure(config, groups.of(config), arguments.warmup, arguments.steps, results[key], trace)
            except torch.cuda.OutOfMemoryError as error:  # on some ranks only: the others would wait for ever
                print(f"rank {dist.get_rank()}, {' '.join(key)}: out of memory: {str(error)[:200]}", flush=True)
                os._exit(1)
            release()
            if round_ == arguments.rounds - 1:
                say(line(rows_of([results[key]], configs, world_size)[0], width), flush=True)
    rows = rows_of(list(results.values()), configs, world_size)
    for row in rows:
        if "failure" in row:
            say(line(row, width))
    if arguments.json and dist.get_rank() == 0:
        samples = [asdict(result) for result in results.values()]
        arguments.json.write_text(json.dumps({"rows": rows, "samples": samples}, indent=1))
    destroy_model_parallel()
    return 0


if __name__ == "__main__":
    sys.exit(main())
