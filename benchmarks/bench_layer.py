"""Time forward and backward of transformer layers on one GPU: torch, megafp8, torchao and Transformer Engine.

    python -m benchmarks.bench_layer                                      # all variants, four layers of Llama-3-8B
    python -m benchmarks.bench_layer --shapes llama3-8b,llama3-70b-tp8 --variants compiled,megafp8:delayed --json a.json
    python -m benchmarks.bench_layer --profile megafp8:delayed            # time by kernel, and how busy the GPU is
    python -m benchmarks.bench_layer --shapes small --variants megafp8:delayed,megafp8:delayed+graph

An iteration is the work of a rank between two optimizer steps: forward and backward of `--micro-batches`, then the end
of the step, after which FP8 copies of the weights are stale. One micro-batch, the default, is the least favorable case
for FP8. Times are per micro-batch. Clearing the gradients is not timed.

All variants are built and warmed up first, then timed in turn, `--rounds` times, so that a drift of the clock affects
all of them equally. The table shows medians; ratios are relative to `compiled`. At its power limit a GPU lowers its
clock, for FP8 more than for bf16; `--rest 1 --steps 2` measures short bursts instead. TFLOP/s count 6·N·tokens, and
causal attention as half. "peak" is the most memory that an iteration allocates above the memory allocated before the
variant was built. "saved" is the memory that the forward pass of a second micro-batch leaves for its backward, so
copies of weights, which are made once, are not counted. Neither includes the private pools of CUDA graphs.

Every variant starts from the weights of the eager reference, and its gradients are compared with the reference's
gradients: "dx" is |dx - dx'| / |dx'|, and "dw" is the largest such difference of any weight. Rows with a NaN or a
difference above 0.15·√layers (nvfp4: 0.5·√layers), about twice the difference of a correct cast, are marked WRONG, and
the exit code is 1. The output gradient is as small as the gradient of a mean loss, so FP8 without correct scales gives
zeros.

Shapes: s sequence, b micro-batch (one sample), h hidden.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.blocks import SHAPES, random_weights
from benchmarks.common import (
    Table,
    add_device_flag,
    chosen_device,
    machine,
    milliseconds,
    names,
    new_parser,
    now,
    release,
    require_positive,
    write_json,
)
from benchmarks.layer_variants import FLOOR, GRAPH, Layers, NotInstalledError, Problem, build_eager, floor_of, variants
from benchmarks.profiling import Kernel, by_name, record
from megafp8.parallel.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    initialize_distributed,
    initialize_model_parallel,
)

BASELINE = "compiled"
WARM_UP = 4  # delayed scaling needs three: an amax is known only when the gradients that it depends on do not underflow
LARGEST_DIFFERENCE = 0.15  # for one layer's gradients; rounding errors of several layers add up like a random walk
LARGEST_DIFFERENCE_OF_FOUR_BITS = 0.5
GRADIENT_STD = 1e-6  # below E5M2's smallest subnormal, 1.5e-5


@dataclass(frozen=True)
class Work:
    """Input and output gradient, `[s, b, h]`, of all variants, and the reference's dx and dw by name."""

    x_sbh: Tensor
    dy_sbh: Tensor
    micro_batches: int
    dx_sbh: Tensor
    dw: dict[str, Tensor]


@dataclass
class Result:
    """Row of the table. `note` says why it has no figures. Memory is None on a CPU, where torch does not count it."""

    variant: str
    note: str = ""
    failed: bool = False
    samples_ms: list[float] = field(default_factory=list)
    dx_difference: float | None = None
    dw_difference: float | None = None
    peak_gib: float | None = None
    saved_gib_per_layer: float | None = None

    @property
    def ms(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples_ms)

    def wrong(self, layers: int) -> bool:
        """Return whether a difference is too large, NaN or missing."""
        largest = LARGEST_DIFFERENCE_OF_FOUR_BITS if "nvfp4" in self.variant else LARGEST_DIFFERENCE
        limit, differences = largest * layers**0.5, (self.dx_difference, self.dw_difference)
        return not all(value is not None and value <= limit for value in differences)


# --- running ---------------------------------------------------------------------------------------------------------


def reference_work(problem: Problem, micro_batches: int) -> Work:
    """Create random input and output gradient, and compute the eager reference's results for them."""
    generator = torch.Generator(problem.device).manual_seed(2)
    shape = (problem.seq_length, 1, problem.shape.hidden_size)
    x, dy = (torch.randn(shape, generator=generator, device=problem.device).bfloat16() for _ in range(2))
    dy *= GRADIENT_STD
    layers = build_eager(problem)
    dx = layers.iteration(x, dy, 1)
    dw = {name: grad for name, grad in layers.gradients().items() if grad is not None}
    return Work(x, dy, micro_batches, dx, dw)


def difference(actual: Tensor | None, expected: Tensor) -> float:
    """Return |actual - expected| / |expected|, or infinity if `actual` is None."""
    if actual is None:
        return float("inf")
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def compare_gradients(layers: Layers, work: Work, result: Result) -> None:
    """Compare the gradients of a variant with the reference's gradients, and store the differences in `result`."""
    layers.zero_grad()
    result.dx_difference = difference(layers.iteration(work.x_sbh, work.dy_sbh, 1), work.dx_sbh)
    gradients = layers.gradients()
    differences = [difference(gradients[name], expected) for name, expected in work.dw.items()]
    result.dw_difference = torch.tensor(differences).max().item()  # unlike Python's max, propagates NaN


def measure_memory(layers: Layers, work: Work, before: int, num_layers: int, result: Result) -> None:
    """Fill in `peak_gib` and `saved_gib_per_layer`.

    `before` is the number of bytes allocated before the variant was built.
    """
    device = work.x_sbh.device
    layers.zero_grad()
    release()  # no garbage may be collected while memory is measured
    torch.cuda.reset_peak_memory_stats(device)
    layers.iteration(work.x_sbh, work.dy_sbh, work.micro_batches)
    result.peak_gib = (torch.cuda.max_memory_allocated(device) - before) / 2**30
    layers.zero_grad()
    first = layers.forward(work.x_sbh.detach().requires_grad_(), True)
    allocated = torch.cuda.memory_allocated(device)
    second = layers.forward(work.x_sbh.detach().requires_grad_(), False)
    result.saved_gib_per_layer = (torch.cuda.memory_allocated(device) - allocated) / 2**30 / num_layers
    second.backward(work.dy_sbh)
    first.backward(work.dy_sbh)
    layers.end_step()


def prepare(build: Callable[[Problem], Layers], problem: Problem, work: Work, result: Result) -> Layers | None:
    """Build a variant, warm it up, check it, and measure its memory.

    An error becomes the note of the variant's row, and the other variants go on.
    """
    on_cuda = problem.device.type == "cuda"
    before = torch.cuda.memory_allocated(problem.device) if on_cuda else 0
    try:
        layers = build(problem)
        for _ in range(WARM_UP):
            layers.zero_grad()
            layers.iteration(work.x_sbh, work.dy_sbh, work.micro_batches)
        compare_gradients(layers, work, result)
        if on_cuda:
            measure_memory(layers, work, before, problem.layers, result)
        return floor_of(layers, work.x_sbh, work.dy_sbh) if result.variant.endswith(FLOOR) else layers
    except NotInstalledError as error:
        result.note = str(error)
    except Exception as error:
        traceback.print_exc()
        result.note, result.failed = f"{type(error).__name__}: {error}".splitlines()[0], True
    return None


def time_iterations(layers: Layers, work: Work, steps: int) -> list[float]:
    """Return the milliseconds per micro-batch of `steps` iterations. On CUDA, the queue is not drained between them."""
    device, spans = work.x_sbh.device, []
    for _ in range(steps):
        layers.zero_grad()
        start = now(device)
        layers.iteration(work.x_sbh, work.dy_sbh, work.micro_batches)
        spans.append((start, now(device)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [milliseconds(*span) / work.micro_batches for span in spans]


# --- report ----------------------------------------------------------------------------------------------------------


def rows(results: list[Result], flops: float, layers: int) -> list[dict[str, Any]]:
    """Return one record per variant, with figures derived from the samples; None for unknown figures."""
    baseline = next((r.ms for r in results if r.variant == BASELINE and r.samples_ms), None)
    records = []
    for result in results:
        row = dataclasses.asdict(result)
        if result.samples_ms:
            row |= {
                "ms": result.ms,
                "ms_min": min(result.samples_ms),
                "ms_max": max(result.samples_ms),
                "tflops": flops / result.ms / 1e9,
                "ratio": baseline / result.ms if baseline else None,
                "wrong": result.wrong(layers),
            }
        records.append(row)
    return records


TABLE = Table(
    "variant",
    28,
    {
        "ms": ".3f",
        "TFLOP/s": ".3g",
        f"vs {BASELINE}": ".3f",
        "peak GiB": ".2f",
        "saved GiB/layer": ".3f",
        "dx": ".4f",
        "dw": ".4f",
    },
)
KEYS = ("ms", "tflops", "ratio", "peak_gib", "saved_gib_per_layer", "dx_difference", "dw_difference")


def print_table(records: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(TABLE.heading())
    for row in records:
        if row["samples_ms"]:
            print(TABLE.row(row["variant"], *(row[key] for key in KEYS), note="WRONG" if row["wrong"] else ""))
        else:
            print(f"{row['variant']:<28}  {row['note']}")


def bench(
    arguments: argparse.Namespace, shape_name: str, wanted: list[str], profiled: list[str], parallel: ParallelState
) -> dict[str, Any]:
    """Measure the variants `wanted` at one shape, print the table, profile some of them, and return the record."""
    shape, layers = SHAPES[shape_name], arguments.layers
    seq_length = arguments.seq_length or shape.seq_length
    weights = random_weights(shape, layers, parallel.device)
    problem = Problem(shape, layers, seq_length, weights, parallel)
    work = reference_work(problem, arguments.micro_batches)
    known, results = variants(), [Result(name) for name in wanted]
    ready: list[tuple[Result, Layers]] = []
    for result in results:
        log(f"{shape_name}: building {result.variant}")
        built = prepare(known[result.variant], problem, work, result)
        if built is None:
            release()
        else:
            ready.append((result, built))
    for number in range(arguments.rounds):
        log(f"{shape_name}: round {number + 1} of {arguments.rounds}")
        for result, built in ready:
            time.sleep(arguments.rest)
            time_iterations(
                built, work, 1
            )  # not measured, because caches and allocator are in the state of the previous variant
            result.samples_ms += time_iterations(built, work, arguments.steps)
    report = {
        "shape": shape_name,
        **dataclasses.asdict(shape),
        "seq_length": seq_length,
        "layers": layers,
        "micro_batches": arguments.micro_batches,
        "tflop": shape.flops(layers, seq_length) / 1e12,
        "device": machine(parallel.device),
        "torch": torch.__version__,
        "rows": rows(results, shape.flops(layers, seq_length), layers),
    }
    print(
        f"{shape_name}: {layers} layers, s = {seq_length}, {report['tflop']:.4g} TFLOP forward + backward, "
        f"{arguments.micro_batches} micro-batch(es) a step, {report['device']}, torch {report['torch']}"
    )
    print_table(report["rows"])
    report["kernels"] = {
        result.variant: [dataclasses.asdict(kernel) for kernel in profile(built, work, result)]
        for result, built in ready
        if result.variant in profiled
    }
    return report


def profile(layers: Layers, work: Work, result: Result) -> list[Kernel]:
    """Print the time of an iteration by kernel.

    The GPU's busy share is the kernels' time over the wall time without the profiler, which slows down the host but
    not the kernels. The rest is time in which the GPU waits for the host.
    """
    on_cuda, wall_ms = work.x_sbh.is_cuda, result.ms * work.micro_batches
    layers.zero_grad()
    events, _ = record(lambda: layers.iteration(work.x_sbh, work.dy_sbh, work.micro_batches), on_cuda)
    kernels = by_name(events)
    total, count = sum(kernel.microseconds for kernel in kernels), sum(kernel.count for kernel in kernels)
    where = "kernels" if on_cuda else "operations"
    print(f"\n{result.variant}: one iteration of {wall_ms:.3f} ms, {total / 1e3:.3f} ms in {count} {where}")
    if on_cuda:
        print(f"GPU busy {total / 1e3 / wall_ms:.1%}")
    print(f"{'µs':>12}{'share':>8}{'count':>7}  name")
    for kernel in kernels:
        share = kernel.microseconds / total if total else 0.0
        print(f"{kernel.microseconds:>12.1f}{share:>8.1%}{kernel.count:>7}  {kernel.name}")
    return kernels


def log(text: str) -> None:
    """Print a message to stderr."""
    print(text, file=sys.stderr, flush=True)


# --- command line ----------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    add_device_flag(parser)
    known = ", ".join(variants())
    parser.add_argument("--variants", help=f"of {known}; default: --profile, or all except {GRAPH} and {FLOOR}")
    parser.add_argument("--shapes", default="llama3-8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-length", type=int, help="tokens. Default: the shape's own")
    parser.add_argument("--micro-batches", type=int, default=1, help="forward and backward passes per optimizer step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="timed iterations of each variant in a round")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds of rest before each variant in a round")
    parser.add_argument("--profile", metavar="VARIANTS", help="also print the time of each kernel in one iteration")
    return parser.parse_args(argv)


def check(arguments: argparse.Namespace) -> tuple[list[str], list[str], list[str], str]:
    """Return shapes, variants, variants to profile, and device type; raise ValueError for a bad argument."""
    known = list(variants())
    shapes = names("--shapes", arguments.shapes, SHAPES)
    usual = ",".join(name for name in known if not name.endswith((GRAPH, FLOOR)))
    wanted = names("--variants", arguments.variants or arguments.profile or usual, known)
    profiled = names("--profile", arguments.profile, wanted) if arguments.profile else []
    require_positive(arguments, "layers", "seq_length", "micro_batches", "rounds", "steps")
    device_type = chosen_device(arguments).type
    if device_type == "cpu" and any(name.endswith(GRAPH) for name in wanted):
        raise ValueError(f"--variants: a CPU has no CUDA graphs; the same without {GRAPH} would work")
    return shapes, wanted, profiled, device_type


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark, print the tables, and return the exit code."""
    arguments = parse(argv)
    try:
        shapes, wanted, profiled, device_type = check(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device = initialize_distributed(device_type)
    reports = []
    try:
        parallel = initialize_model_parallel(device=device)
        for shape in shapes:
            reports.append(bench(arguments, shape, wanted, profiled, parallel))
            torch.compiler.reset()  # otherwise graphs of one shape would count against the limit of the next
            release()
    finally:
        destroy_model_parallel()
    write_json(arguments.json, reports)
    return 1 if any(row["failed"] or row.get("wrong", False) for report in reports for row in report["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
