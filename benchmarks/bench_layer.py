"""Time forward + backward of transformer layers on one rank: torch, megafp8, torchao and Transformer Engine side by
side.

    python -m benchmarks.bench_layer                                      # everything, four layers of Llama-3-8B
    python -m benchmarks.bench_layer --shapes llama3-8b,llama3-70b-tp8 --variants compiled,megafp8:delayed --json
    out.json
    python -m benchmarks.bench_layer --profile megafp8:delayed            # kernel by kernel, and how busy the GPU is
    python -m benchmarks.bench_layer --shapes small --variants megafp8:delayed,megafp8:delayed+graph

An iteration is what a rank does between two optimizer steps: `--micro-batches` times forward and backward, then the end
of the step, after which FP8 copies of the weights are stale. One micro-batch, the default, is the least favourable to
FP8. Times are per micro-batch. Forgetting the gradients belongs to the optimizer and is not timed.

All variants are built and warmed up first, then timed in turn, `--rounds` times over, so that a drift of the clock
touches all alike; the table gives medians, ratios are to `compiled`. At its power limit a chip lowers its clock, for
FP8 more than for bf16; `--rest 1 --steps 2` shows bursts instead, which no training run consists of. TFLOP/s count
6·N·tokens and causal attention as half. "peak" is the most that an iteration has allocated above what was there before
the variant was built, "kept" what the forward pass of a second micro-batch leaves for its backward (so that copies of
weights, made once, are not counted). Memory that CUDA graphs keep for themselves is in neither.

A fast layer that is wrong is worth nothing. So every variant starts from the weights of the eager reference and its
gradients are held against the reference's: "dx" is |dx - dx'| / |dx'|, "dw" the largest such difference of any weight.
Rows above 0.15·√layers, about twice what FP8 costs, or with a NaN, are marked WRONG and the exit code is 1. The output
gradient is as small as that of a mean loss, so FP8 without proper scales shows up as zeros.

Shapes: s sequence, b micro-batch (one sample), h hidden.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.clock import milliseconds, now
from benchmarks.layer_profile import kernel_times, print_kernels
from benchmarks.layer_variants import ALONE, GRAPH, build_eager, variants
from benchmarks.layers import Layers, NotInstalledError, Problem
from benchmarks.reference_layers import SHAPES, random_weights
from megafp8.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    initialize_distributed,
    initialize_model_parallel,
)

BASELINE = "compiled"
WARM_UP = 4  # delayed scaling needs three: an amax becomes known only once what lies behind it no longer underflows
LARGEST_DIFFERENCE = 0.15  # of the gradients of one layer; rounding errors of several add up like a random walk
GRADIENT_STD = 1e-6  # below E5M2's least subnormal, 1.5e-5


@dataclass(frozen=True)
class Work:
    """What is run and what must come out: input and output gradient `[s, b, h]`, the reference's dx and dw by name."""

    x_sbh: Tensor
    dy_sbh: Tensor
    micro_batches: int
    dx_sbh: Tensor
    dw: dict[str, Tensor]


@dataclass
class Result:
    """A row of the table; `note` says why it has no figures. Memory stays None on a CPU, where torch counts none."""

    variant: str
    note: str = ""
    failed: bool = False
    samples_ms: list[float] = field(default_factory=list)
    dx_difference: float | None = None
    dw_difference: float | None = None
    peak_gib: float | None = None
    kept_gib_per_layer: float | None = None

    @property
    def ms(self) -> float:
        return statistics.median(self.samples_ms)

    def wrong(self, layers: int) -> bool:
        """Also where a difference is NaN, with which no comparison holds, or was never taken."""
        limit, differences = LARGEST_DIFFERENCE * layers**0.5, (self.dx_difference, self.dw_difference)
        return not all(value is not None and value <= limit for value in differences)


# --- running ---------------------------------------------------------------------------------------------------------


def iteration(layers: Layers, x_sbh: Tensor, dy_sbh: Tensor, micro_batches: int) -> Tensor:
    """The micro-batches of one optimizer step, all of the same data; gives back dx."""
    for index in range(micro_batches):
        dx_sbh = layers.micro_batch(x_sbh, dy_sbh, index == 0)
    layers.end_step()
    return dx_sbh


def reference_work(problem: Problem, micro_batches: int) -> Work:
    """Random input and output gradient, and what the eager reference makes of them."""
    generator = torch.Generator(problem.device).manual_seed(2)
    shape = (problem.seq_length, 1, problem.shape.hidden_size)
    x, dy = (torch.randn(shape, generator=generator, device=problem.device).bfloat16() for _ in range(2))
    dy *= GRADIENT_STD
    layers = build_eager(problem)
    dx = iteration(layers, x, dy, 1)
    dw = {name: grad for name, grad in layers.gradients().items() if grad is not None}
    return Work(x, dy, micro_batches, dx, dw)


def difference(actual: Tensor | None, expected: Tensor) -> float:
    """|actual - expected| / |expected|; infinite where there is nothing."""
    if actual is None:
        return float("inf")
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def compare_gradients(layers: Layers, work: Work, result: Result) -> None:
    layers.zero_grad()
    result.dx_difference = difference(iteration(layers, work.x_sbh, work.dy_sbh, 1), work.dx_sbh)
    gradients = layers.gradients()
    differences = [difference(gradients[name], expected) for name, expected in work.dw.items()]
    result.dw_difference = torch.tensor(differences).max().item()  # unlike Python's max, lets a NaN through


def measure_memory(layers: Layers, work: Work, before: int, num_layers: int, result: Result) -> None:
    """Fill in `peak_gib` and `kept_gib_per_layer`; `before`: bytes allocated before the variant was built."""
    device = work.x_sbh.device
    layers.zero_grad()
    release()  # what is garbage already must not be collected while memory is counted
    torch.cuda.reset_peak_memory_stats(device)
    iteration(layers, work.x_sbh, work.dy_sbh, work.micro_batches)
    result.peak_gib = (torch.cuda.max_memory_allocated(device) - before) / 2**30
    layers.zero_grad()
    first = layers.forward(work.x_sbh.detach().requires_grad_(), True)
    allocated = torch.cuda.memory_allocated(device)
    second = layers.forward(work.x_sbh.detach().requires_grad_(), False)
    result.kept_gib_per_layer = (torch.cuda.memory_allocated(device) - allocated) / 2**30 / num_layers
    second.backward(work.dy_sbh)
    first.backward(work.dy_sbh)
    layers.end_step()


def prepare(build: Callable[[Problem], Layers], problem: Problem, work: Work, result: Result) -> Layers:
    """Build a variant, warm it up, check it and measure its memory."""
    on_cuda = problem.device.type == "cuda"
    before = torch.cuda.memory_allocated(problem.device) if on_cuda else 0
    layers = build(problem)
    for _ in range(WARM_UP):
        layers.zero_grad()
        iteration(layers, work.x_sbh, work.dy_sbh, work.micro_batches)
    compare_gradients(layers, work, result)
    if on_cuda:
        measure_memory(layers, work, before, problem.layers, result)
    return layers


def prepare_or_note(build: Callable[[Problem], Layers], problem: Problem, work: Work, result: Result) -> Layers | None:
    """`prepare`; whatever goes wrong in one variant becomes its note, and the others are measured all the same."""
    try:
        return prepare(build, problem, work, result)
    except NotInstalledError as error:
        result.note = str(error)
    except Exception as error:
        traceback.print_exc()
        result.note, result.failed = f"{type(error).__name__}: {error}".splitlines()[0], True
    release()
    return None


def time_iterations(layers: Layers, work: Work, steps: int) -> list[float]:
    """Milliseconds per micro-batch of `steps` iterations. On CUDA the queue is not drained between them."""
    device, spans = work.x_sbh.device, []
    for _ in range(steps):
        layers.zero_grad()
        start = now(device)
        iteration(layers, work.x_sbh, work.dy_sbh, work.micro_batches)
        spans.append((start, now(device)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [milliseconds(*span) / work.micro_batches for span in spans]


def release() -> None:
    """Give memory back before something else is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- report ----------------------------------------------------------------------------------------------------------


def rows(results: list[Result], flops: float, layers: int) -> list[dict[str, Any]]:
    """One record a variant, with the figures that follow from the samples. Null is what is not known."""
    baseline = next((r.ms for r in results if r.variant == BASELINE and r.samples_ms), None)
    records = []
    for result in results:
        record = dataclasses.asdict(result)
        if result.samples_ms:
            record |= {
                "ms": result.ms,
                "ms_min": min(result.samples_ms),
                "ms_max": max(result.samples_ms),
                "tflops": flops / result.ms / 1e9,
                "ratio": baseline / result.ms if baseline else None,
                "wrong": result.wrong(layers),
            }
        records.append(record)
    return records


def print_table(records: list[dict[str, Any]]) -> None:
    names = ("ms", "TFLOP/s", f"vs {BASELINE}", "peak GiB", "kept GiB/layer", "dx", "dw")
    keys = ("ms", "tflops", "ratio", "peak_gib", "kept_gib_per_layer", "dx_difference", "dw_difference")
    formats = ("12.3f", "10.3g", "14.3f", "10.2f", "16.3f", "10.4f", "10.4f")
    widths = [int(spec.split(".")[0]) for spec in formats]
    print(f"{'variant':<28}" + "".join(f"{name:>{width}}" for name, width in zip(names, widths)))
    for record in records:
        if not record["samples_ms"]:
            print(f"{record['variant']:<28}  {record['note']}")
            continue
        cells = (
            f"{'-':>{width}}" if record[key] is None else f"{record[key]:>{spec}}"
            for key, spec, width in zip(keys, formats, widths)
        )
        print(f"{record['variant']:<28}" + "".join(cells) + ("  WRONG" if record["wrong"] else ""))


def bench(
    arguments: argparse.Namespace, shape_name: str, names: list[str], profiled: list[str], parallel: ParallelState
) -> dict[str, Any]:
    """Measure `names` at one shape, print the table, profile some, and give back everything as one record."""
    shape, layers = SHAPES[shape_name], arguments.layers
    seq_length = arguments.seq_length or shape.seq_length
    weights = random_weights(shape, layers, parallel.device)
    problem = Problem(shape, layers, seq_length, weights, parallel)
    work = reference_work(problem, arguments.micro_batches)
    known, results = variants(), [Result(name) for name in names]
    ready: list[tuple[Result, Layers]] = []
    for result in results:
        say(f"{shape_name}: building {result.variant}")
        built = prepare_or_note(known[result.variant], problem, work, result)
        if built is not None:
            ready.append((result, built.to_time(work.x_sbh, work.dy_sbh)))
    for turn in range(arguments.rounds):
        say(f"{shape_name}: round {turn + 1} of {arguments.rounds}")
        for result, built in ready:
            time.sleep(arguments.rest)
            time_iterations(built, work, 1)  # what the previous variant left in caches and allocator is not its own
            result.samples_ms += time_iterations(built, work, arguments.steps)
    on_cuda = parallel.device.type == "cuda"
    report = {
        "shape": shape_name,
        **dataclasses.asdict(shape),
        "seq_length": seq_length,
        "layers": layers,
        "micro_batches": arguments.micro_batches,
        "tflop": shape.flops(layers, seq_length) / 1e12,
        "device": torch.cuda.get_device_name(parallel.device) if on_cuda else "CPU",
        "torch": torch.__version__,
        "rows": rows(results, shape.flops(layers, seq_length), layers),
    }
    print(
        f"{shape_name}: {layers} layers, s = {seq_length}, {report['tflop']:.4g} TFLOP forward + backward, "
        f"{arguments.micro_batches} micro-batch(es) a step, {report['device']}, torch {report['torch']}"
    )
    print_table(report["rows"])
    report["kernels"] = {
        result.variant: profile(built, work, result) for result, built in ready if result.variant in profiled
    }
    return report


def profile(layers: Layers, work: Work, result: Result) -> list[dict[str, Any]]:
    """Print where the time of an iteration goes, and give it back by kernel."""
    on_cuda, step = work.x_sbh.is_cuda, work.micro_batches
    layers.zero_grad()
    kernels = kernel_times(lambda: iteration(layers, work.x_sbh, work.dy_sbh, step), on_cuda)
    print_kernels(kernels, result.variant, result.ms * step, on_cuda)
    return [dataclasses.asdict(kernel) for kernel in kernels]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- command line ----------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join(variants())
    parser.add_argument("--variants", help=f"of {known}. Default: those to profile, or all but +graph and +alone")
    parser.add_argument("--shapes", default="llama3-8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-length", type=int, help="tokens. Default: the shape's own")
    parser.add_argument("--micro-batches", type=int, default=1, help="forward and backward passes per optimizer step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="timed iterations of each variant in a round")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds of rest before each variant's turn")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--profile", metavar="VARIANTS", help="also print the time of each kernel in one iteration")
    parser.add_argument("--json", type=Path, help="also write tables and all samples here")
    return parser.parse_args(argv)


def select(option: str, wanted: str, known: list[str]) -> list[str]:
    """The comma-separated names in `wanted`. ValueError for one that is not known."""
    names = wanted.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: {name!r} is none of {', '.join(known)}")
    return list(dict.fromkeys(names))


def check(arguments: argparse.Namespace) -> tuple[list[str], list[str], list[str], str]:
    """Shapes, variants, those to profile, and type of device. ValueError with one line for what cannot be."""
    known = list(variants())
    shapes = select("--shapes", arguments.shapes, list(SHAPES))
    usual = ",".join(name for name in known if not name.endswith((GRAPH, ALONE)))
    names = select("--variants", arguments.variants or arguments.profile or usual, known)
    profiled = select("--profile", arguments.profile, names) if arguments.profile else []
    for option in ("layers", "seq_length", "micro_batches", "rounds", "steps"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ValueError(f"--{option.replace('_', '-')}: {value} is too few; 1 or more would work")
    has_cuda = torch.cuda.is_available()
    if arguments.device == "cuda" and not has_cuda:
        raise ValueError("--device: torch sees no CUDA device here; cpu would work")
    device_type = "cuda" if has_cuda and arguments.device != "cpu" else "cpu"
    if device_type == "cpu" and any(name.endswith(GRAPH) for name in names):
        raise ValueError(f"--variants: a CPU has no CUDA graphs; the same without {GRAPH} would work")
    return shapes, names, profiled, device_type


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        shapes, names, profiled, device_type = check(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device = initialize_distributed(device_type)
    reports = []
    try:
        parallel = initialize_model_parallel(device=device)
        for shape in shapes:
            reports.append(bench(arguments, shape, names, profiled, parallel))
            torch.compiler.reset()  # the graphs of one shape would count against the limit of the next
            release()
    finally:
        destroy_model_parallel()
    if arguments.json:
        strict = json.loads(json.dumps(reports), parse_constant=lambda _: None)  # JSON knows neither NaN nor infinity
        arguments.json.write_text(json.dumps(strict, indent=1), encoding="utf-8")
    return 1 if any(row["failed"] or row.get("wrong", False) for report in reports for row in report["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
