"""Time the GEMMs of linear layers with every backend.

    python -m benchmarks.bench_gemm                                       # the twelve GEMMs of a Llama-3-8B layer
    python -m benchmarks.bench_gemm --shapes llama3-70b-tp8,4096x8192x16384 --json gemms.json

A shape is a transformer layer of `benchmarks.blocks`, measured linear by linear, or one linear as tokens x inputs x
outputs. The GEMMs of a linear layer are:

    fprop  y  = x · wᵀ          x [m, k], w [n, k], bf16 result
    dgrad  dx = dy · w          dy [m, n], bf16 result; E5M2 gradients with one scale per tensor, else E4M3
    wgrad  dw += dyᵀ · x        added to an fp32 sum: in place by cuBLASLt (and by torch in bf16), else by `add_`

bf16 operands have the strides that they have in a layer. FP8 operands are quantized and transposed beforehand, which is
not timed. All operands are random, because the values affect the power that a GEMM draws, and thereby the clock.

Times are medians over `--rounds`, after warm-up, from a cold L2. Variants take turns in every round, so that a drift of
the clock affects all of them equally. A GPU that pauses between runs has higher clocks than in training. The first
result of each GEMM is compared with torch's result in bf16. A difference above 15% is marked WRONG, and the exit code
is 1.

Shapes: m tokens, k inputs, n outputs of the layer. For a GEMM, r and c are the dims of the result, and s is the summed
dim.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.blocks import SHAPES
from benchmarks.common import Table, add_device_flag, chosen_device, machine, new_parser, require_positive, write_json
from megafp8.fp8.speed_measurement import time_round_robin
from megafp8.fp8.speed_model import LinearSize
from megafp8.gemm.cublaslt import CublasLt, available
from megafp8.gemm.dispatch import Fp8Gemm, GemmBackend, algorithm_file, gemm
from megafp8.numerics.recipes import BlockwiseScaling, CurrentScaling, RowwiseScaling
from megafp8.numerics.recipes.base import Fp8Tensor, OperandName
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity, ScaledTensor

LARGEST_DIFFERENCE = 0.15  # E5M2 times E4M3 is off by 8%
GEMMS = ("fprop", "dgrad", "wgrad")
ALIGNMENT = 16
BASELINE = "bf16 torch"
# Granularities of both operands, and whether to accumulate in the tensor cores' 14 bits.
SCALINGS: dict[str, tuple[Granularity, Granularity, bool]] = {
    "tensor fast": (TENSOR, TENSOR, True),
    "tensor split": (TENSOR, TENSOR, False),
    "row fast": (ROW, ROW, True),
    "1x128·128x128": (BLOCK_1X128, BLOCK_128X128, False),
    "1x128·1x128": (BLOCK_1X128, BLOCK_1X128, False),
}
_FP8_BACKENDS: dict[str, tuple[GemmBackend, bool]] = {  # backend, and whether to time algorithms
    "scaled_mm": ("scaled_mm", False),
    "cublaslt": ("cublaslt", False),
    "cublaslt tuned": ("cublaslt", True),
    "emulated": ("emulated", False),
}


# --- variants --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operands:
    """bf16 operands of one GEMM, `a [r, s]` and `b [s, c]`, with the strides of a layer."""

    gemm: str
    a_rs: Tensor
    b_sc: Tensor
    _cast: dict[tuple[str, Granularity], ScaledTensor] = field(default_factory=dict)

    @property
    def accumulates(self) -> bool:
        """Whether the result is added to an fp32 sum."""
        return self.gemm == "wgrad"

    @property
    def flops(self) -> float:
        """FLOPs of the GEMM."""
        return 2.0 * self.a_rs.shape[0] * self.a_rs.shape[1] * self.b_sc.shape[1]

    def quantized(self, which: str, granularity: Granularity) -> ScaledTensor:
        """Return operand "a" as `[r, s]` or "b" as `[c, s]`, quantized once for all variants."""
        is_gradient = which == "a" and self.gemm != "fprop"
        operand: OperandName = "grad_output" if is_gradient else "weight" if granularity is BLOCK_128X128 else "input"
        key = (which, granularity)
        if key not in self._cast:
            values = self.a_rs if which == "a" else self.b_sc.t()
            tensor = Fp8Tensor(which, operand, None, None)
            source = Plain(values.contiguous())
            cast = _RECIPES[granularity].bound_cast(tensor, values.device)
            quantized = cast(source, rowwise=True, columnwise=False)
            self._cast[key] = quantized.required_rowwise
        return self._cast[key]

    def new_result(self) -> Tensor:
        """Return a tensor of zeros for the result."""
        dtype = torch.float32 if self.accumulates else torch.bfloat16
        return torch.zeros(self.a_rs.shape[0], self.b_sc.shape[1], dtype=dtype, device=self.a_rs.device)


_RECIPES = {
    TENSOR: CurrentScaling(),
    ROW: RowwiseScaling(),
    BLOCK_1X128: BlockwiseScaling(),
    BLOCK_128X128: BlockwiseScaling(),
}


def operands_of(size: LinearSize, device: torch.device) -> list[Operands]:
    """Return the three GEMMs of a layer of this size, or raise ValueError if cuBLASLt would need padding."""
    if any(dim % ALIGNMENT for dim in size):
        raise ValueError(f"{size}: FP8 GEMMs take multiples of {ALIGNMENT}; other sizes are padded first")
    m, k, n = size
    generator = torch.Generator(device).manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=generator, device=device).bfloat16() for shape in ((m, k), (n, k), (m, n)))
    pairs = ((x, w.t()), (dy, w), (dy.t(), x))
    return [Operands(gemm, a, b) for gemm, (a, b) in zip(GEMMS, pairs, strict=True)]


Run = Callable[[], Tensor]  # runs one GEMM and returns its result; for wgrad the sum so far
Variant = Callable[[Operands], Run]


def variants(device: torch.device) -> tuple[dict[str, Variant], list[str]]:
    """Return all variants on `device` by name, baseline first, and a message for each variant that is left out."""
    found: dict[str, Variant] = {BASELINE: _torch_bf16}
    left_out = []
    if available(device):
        found["bf16 cublaslt tuned"] = _cublaslt_bf16(CublasLt(device, autotune=True, cache_file=algorithm_file()))
    else:
        left_out.append("bf16 cublaslt tuned: needs nvmath-python and a Hopper GPU")
    for name, (backend, autotune) in _FP8_BACKENDS.items():
        if backend == "emulated" and device.type == "cuda":
            continue  # this backend is for machines without FP8 tensor cores
        try:
            product = Fp8Gemm(backend, device, autotune=autotune)
        except ValueError as error:
            left_out.append(f"{name}: {error}")
            continue
        found |= {f"{name} {scaling}": _fp8(product, *SCALINGS[scaling]) for scaling in SCALINGS}
    return found, left_out


def _torch_bf16(operands: Operands) -> Run:
    a, b, total = operands.a_rs, operands.b_sc, operands.new_result()

    def accumulate() -> Tensor:
        if a.is_cuda:
            return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        return total.add_(gemm(a, b, torch.float32))

    return accumulate if operands.accumulates else lambda: gemm(a, b, torch.bfloat16)


def _cublaslt_bf16(product: CublasLt) -> Variant:
    def prepare(operands: Operands) -> Run:
        result = operands.new_result()

        def run() -> Tensor:
            product.matmul(operands.a_rs, operands.b_sc, result, accumulate=operands.accumulates)
            return result

        return run

    return prepare


def _fp8(product: Fp8Gemm, a_granularity: Granularity, b_granularity: Granularity, fast: bool) -> Variant:
    def prepare(operands: Operands) -> Run:
        a, b = operands.quantized("a", a_granularity), operands.quantized("b", b_granularity)
        if not operands.accumulates:
            return lambda: product.tn(a, b, torch.bfloat16, use_fast_accum=fast)
        total = operands.new_result()

        def accumulate() -> Tensor:
            product.accumulate_tn(a, b, total, use_fast_accum=fast)
            return total

        return accumulate

    return prepare


# --- measurement -----------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """Times of one GEMM with one variant, or the reason why there are none."""

    layer: str
    size: LinearSize
    gemm: str
    variant: str
    flops: float
    note: str = ""
    difference: float | None = None
    samples_ms: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples_ms)

    @property
    def wrong(self) -> bool:
        """Whether the difference is too large or NaN."""
        return self.difference is not None and not self.difference <= LARGEST_DIFFERENCE

    def record(self) -> dict[str, Any]:
        """Return the result as JSON."""
        measured = bool(self.samples_ms)
        figures = {"ms": self.ms, "tflops": self.flops / self.ms / 1e9} if measured else {}
        return {**asdict(self), "size": list(self.size), "wrong": self.wrong, **figures}


def relative_difference(y: Tensor, expected: Tensor) -> float:
    """Return |y - expected| / |expected|."""
    return ((y.float() - expected.float()).norm() / expected.float().norm()).item()


def prepare(operands: Operands, results: list[Result], known: dict[str, Variant]) -> list[tuple[Result, Run]]:
    """Run each variant once and compare it with the first, the baseline; return the runs that work.

    A variant that fails gets a note in its result instead.
    """
    ready: list[tuple[Result, Run]] = []
    expected: Tensor | None = None
    for result in results:
        try:
            run = known[result.variant](operands)
            y = run().clone()
        except Exception as error:  # an error of torch, cuBLASLt or Triton; the other variants are still measured
            result.note = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        expected = y if expected is None else expected
        result.difference = relative_difference(y, expected)
        ready.append((result, run))
    return ready


def bench_linear(
    layer: str, size: LinearSize, known: dict[str, Variant], device: torch.device, rounds: int
) -> list[Result]:
    """Measure the three GEMMs of one layer with all variants."""
    found = []
    for operands in operands_of(size, device):
        results = [Result(layer, size, operands.gemm, name, operands.flops) for name in known]
        ready = prepare(operands, results, known)
        for (result, _), seconds in zip(ready, time_round_robin([run for _, run in ready], device, rounds=rounds)):
            result.samples_ms = [second * 1e3 for second in seconds]
        found += results
    return found


COLUMNS = {f"{gemm} {unit}": spec for gemm in (*GEMMS, "sum") for unit, spec in (("ms", ".3f"), ("TFLOP/s", ".3g"))}
TABLE = Table("variant", 30, {**COLUMNS, f"vs {BASELINE}": ".2f"})


def _total(results: Sequence[Result]) -> tuple[float | None, float | None]:
    """Return milliseconds and TFLOP/s of all `results` together; None if one has no time."""
    if not all(result.samples_ms for result in results):
        return None, None
    ms, flops = sum(result.ms for result in results), sum(result.flops for result in results)
    return ms, flops / ms / 1e9


def print_layer(results: Sequence[Result], title: str) -> None:
    """Print one row per variant: each GEMM, summed over the layers in `results`, and the sum of all three."""
    print(f"\n{title}\n{TABLE.heading()}")
    baseline = None
    for name in dict.fromkeys(result.variant for result in results):
        own = [result for result in results if result.variant == name]
        notes: dict[str, list[str]] = {}
        for result in own:
            if result.note and result.gemm not in notes.setdefault(result.note, []):
                notes[result.note].append(result.gemm)
        if any(result.samples_ms for result in own):
            gemms = [figure for gemm in GEMMS for figure in _total([r for r in own if r.gemm == gemm])]
            ms, rate = _total(own)
            baseline = ms if name == BASELINE else baseline
            ratio = baseline / ms if baseline and ms else None
            print(TABLE.row(name, *gemms, ms, rate, ratio, note="WRONG" * any(result.wrong for result in own)))
        for note, failed in notes.items():
            print(f"{name:<30}  left out, {', '.join(failed)}: {note[:100]}")


def print_wgrad_speedup(results: Sequence[Result]) -> None:
    """Print the speedup of cuBLASLt's in-place accumulation over `scaled_mm` and `add_`, by layer and in total."""
    wgrad = {(r.layer, r.variant): r.ms for r in results if r.gemm == "wgrad" and r.samples_ms}
    layers = list(dict.fromkeys(result.layer for result in results))
    for scaling in SCALINGS:
        for backend in ("cublaslt", "cublaslt tuned"):
            pairs = {layer: (wgrad.get((layer, f"scaled_mm {scaling}")), wgrad.get((layer, f"{backend} {scaling}")))
                     for layer in layers}  # fmt: skip
            found = {layer: (torch_ms, ms) for layer, (torch_ms, ms) in pairs.items() if torch_ms and ms}
            if found:
                each = ", ".join(f"{layer} {torch_ms / ms:.2f}" for layer, (torch_ms, ms) in found.items())
                torch_sum, own_sum = (sum(times) for times in zip(*found.values()))
                print(f"wgrad, {scaling}: {backend} in place over scaled_mm + add_ {torch_sum / own_sum:.2f}x ({each})")


def bench_gemms(shapes: dict[str, dict[str, LinearSize]], device: torch.device, rounds: int) -> list[Result]:
    """Measure the linears of every shape, and print tables."""
    known, left_out = variants(device)
    for line in left_out:
        print(f"left out, {line}")
    found = []
    bar = tqdm(total=sum(len(layers) for layers in shapes.values()), desc="linears", disable=None)
    for shape, layers in shapes.items():
        results = []
        for layer, size in layers.items():
            bar.set_postfix_str(f"{shape} {layer}")
            results += bench_linear(f"{shape} {layer}".strip(), size, known, device, rounds)
            bar.update()
        bar.clear()
        for layer, size in layers.items():
            own = [result for result in results if result.layer == f"{shape} {layer}".strip()]
            print_layer(own, f"{own[0].layer}: {size} (tokens x inputs x outputs)")
        if len(layers) > 1:
            print_layer(results, f"{shape}: all {3 * len(layers)} GEMMs")
        print_wgrad_speedup(results)
        found += results
    bar.close()
    return found


# --- command line ----------------------------------------------------------------------------------------------------


def chosen_shapes(wanted: str, tokens: int | None) -> dict[str, dict[str, LinearSize]]:
    """Return the linears of each named shape, or raise ValueError for an unknown name."""
    found: dict[str, dict[str, LinearSize]] = {}
    for name in wanted.split(","):
        if name in SHAPES:
            found[name] = SHAPES[name].linears(tokens or SHAPES[name].seq_length)
        elif match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", name):
            found[name] = {"": LinearSize(*map(int, match.groups()))}
        else:
            raise ValueError(f"--shapes: {name!r} is none of {', '.join(SHAPES)}, nor a size such as 8192x4096x28672")
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    add_device_flag(parser)
    parser.add_argument(
        "--shapes", default="llama3-8b", help=f"of {', '.join(SHAPES)}, or sizes such as 8192x4096x6144"
    )
    parser.add_argument("--tokens", type=int, help="of a named shape. Default: the shape's own")
    parser.add_argument("--rounds", type=int, default=11)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark, print the tables, and return the exit code."""
    arguments = parse(argv)
    try:
        require_positive(arguments, "tokens", "rounds")
        device = chosen_device(arguments)
        shapes = chosen_shapes(arguments.shapes, arguments.tokens)
        print(f"{machine(device)}, torch {torch.__version__}: medians of {arguments.rounds} rounds")
        results = bench_gemms(shapes, device, arguments.rounds)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = {"torch": torch.__version__, "device": machine(device), "gemms": [result.record() for result in results]}
    write_json(arguments.json, report)
    return 1 if any(result.wrong for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
