"""Matrix products by every backend, the quantize kernels against a copy, and the sizes from which FP8 pays.

    python -m benchmarks.bench_gemm                                       # the twelve GEMMs of a Llama-3-8B layer,
    and casts
    python -m benchmarks.bench_gemm --shapes llama3-70b-tp8,4096x8192x16384 --parts gemms --json gemms.json
    python -m benchmarks.bench_gemm --sweep --png speed.png               # whole FP8 linears over bf16 by size
    python -m benchmarks.bench_gemm --sweep --predicted-only --ceilings "NVIDIA H200"      # no GPU needed

A shape is a layer of a model (see `benchmarks.reference_layers`), whose linears are taken in turn, or one linear as
tokens x inputs x outputs. `benchmarks.gemm_variants` says what each GEMM is and what each variant does; FP8 operands
are
quantized beforehand. In the table of GEMMs wgrad adds to an fp32 sum; what adding in place is worth is printed below
it.

All times are medians over `--rounds`. Variants take turns in every round, so a drift of the clock touches all alike;
rounds to warm up come before. On a GPU L2 is cold: it is overwritten before each run (casts too). A chip that is
measured pauses between runs and clocks higher than one that trains. Each GEMM's first result is held against torch's in
bf16; a difference above 15% is WRONG, and the exit code is 1.

The sweep runs a whole layer, forward and backward: three GEMMs, and in FP8 the casts of x, of dy, and of w once every
`--micro-batches`. The prediction is that of `megafp8.fp8.speed_model`, which `fp8.auto_filter: predicted` goes by.

Shapes: m tokens, k inputs, n outputs.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import speed_map
from benchmarks.gemm_variants import BASELINE, GEMMS, SCALINGS, Operands, Run, Variant, operands_of, variants
from benchmarks.reference_layers import SHAPES, Shape
from megafp8.fp8 import RECIPES
from megafp8.fp8.speed_measurement import time_round_robin
from megafp8.fp8.speed_model import CEILINGS, LinearSize, ceilings_of, device_name

LARGEST_DIFFERENCE = 0.15  # E5M2 times E4M3 is off by 8%
SWEPT_RECIPES = ("delayed", "current", "rowwise", "blockwise")
TOKENS, WIDTHS = "1024,2048,4096,8192,16384", "1024,2048,4096,8192,16384,28672"


@dataclass
class Result:
    """A variant's times of one GEMM, or why it has none."""

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
        return statistics.median(self.samples_ms)

    @property
    def wrong(self) -> bool:
        """Also where the difference is NaN, with which no comparison holds."""
        return self.difference is not None and not self.difference <= LARGEST_DIFFERENCE

    def record(self) -> dict[str, Any]:
        measured = bool(self.samples_ms)
        figures = {"ms": self.ms, "tflops": self.flops / self.ms / 1e9} if measured else {}
        return {**asdict(self), "size": list(self.size), "wrong": self.wrong, **figures}


# --- GEMMs -----------------------------------------------------------------------------------------------------------


def linears(shape: Shape, tokens: int) -> dict[str, LinearSize]:
    """The linear layers of a transformer block."""
    h, f = shape.hidden_size, shape.ffn_hidden_size
    return {
        "qkv": LinearSize(tokens, h, shape.qkv_size),
        "proj": LinearSize(tokens, shape.heads * shape.head_dim, h),
        "gate_up": LinearSize(tokens, h, 2 * f),
        "down": LinearSize(tokens, f, h),
    }


def relative_difference(y: Tensor, expected: Tensor) -> float:
    return ((y.float() - expected.float()).norm() / expected.float().norm()).item()


def prepare(operands: Operands, results: list[Result], known: dict[str, Variant]) -> list[tuple[Result, Run]]:
    """Each variant's run, tried once and held against the baseline, which comes first; what fails gets a note."""
    ready: list[tuple[Result, Run]] = []
    expected: Tensor | None = None
    for result in results:
        try:
            run = known[result.variant](operands)
            y = run().clone()
        except Exception as error:  # of torch, cuBLASLt or Triton: the other variants are measured all the same
            result.note = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        expected = y if expected is None else expected
        result.difference = relative_difference(y, expected)
        ready.append((result, run))
    return ready


def bench_linear(
    layer: str, size: LinearSize, known: dict[str, Variant], device: torch.device, rounds: int
) -> list[Result]:
    """The three GEMMs of one layer by all variants."""
    found = []
    for operands in operands_of(size, device):
        results = [Result(layer, size, operands.gemm, name, operands.flops) for name in known]
        ready = prepare(operands, results, known)
        for (result, _), seconds in zip(ready, time_round_robin([run for _, run in ready], device, rounds=rounds)):
            result.samples_ms = [second * 1e3 for second in seconds]
        found += results
    return found


def _cells(results: Sequence[Result]) -> tuple[str, float | None]:
    """Milliseconds and TFLOP/s of all `results` together, and the former as a number; dashes if one has no time."""
    if not all(result.samples_ms for result in results):
        return f"{'-':>10}{'-':>9}", None
    ms, flops = sum(result.ms for result in results), sum(result.flops for result in results)
    return f"{ms:>10.3f}{flops / ms / 1e9:>9.3g}", ms


def print_layer(results: Sequence[Result], title: str) -> None:
    """A row a variant: each GEMM, summed over the layers in `results`, and all three."""
    heads = "".join(f"{gemm + ' ms':>10}{'TFLOP/s':>9}" for gemm in (*GEMMS, "sum"))
    print(f"\n{title}\n{'variant':<30}{heads}{'vs ' + BASELINE:>15}")
    baseline = None
    for name in dict.fromkeys(result.variant for result in results):
        own = [result for result in results if result.variant == name]
        notes: dict[str, list[str]] = {}
        for result in own:
            if result.note and result.gemm not in notes.setdefault(result.note, []):
                notes[result.note].append(result.gemm)
        if any(result.samples_ms for result in own):
            columns = [_cells([result for result in own if result.gemm == gemm]) for gemm in GEMMS]
            total, ms = _cells(own)
            baseline = ms if name == BASELINE else baseline
            ratio = f"{baseline / ms:.2f}" if baseline and ms else "-"
            wrong = "  WRONG" if any(result.wrong for result in own) else ""
            print(f"{name:<30}{''.join(text for text, _ in columns)}{total}{ratio:>15}{wrong}")
        for note, gemms in notes.items():
            print(f"{name:<30}  left out, {', '.join(gemms)}: {note[:100]}")


def print_wgrad_gain(results: Sequence[Result]) -> None:
    """What cuBLASLt's addition in place is worth over `scaled_mm` and `add_`, layer by layer and in all."""
    wgrad = {(r.layer, r.variant): r.ms for r in results if r.gemm == "wgrad" and r.samples_ms}
    layers = list(dict.fromkeys(result.layer for result in results))
    for scaling in SCALINGS:
        for backend in ("cublaslt", "cublaslt tuned"):
            pairs = {
                layer: (wgrad.get((layer, f"scaled_mm {scaling}")), wgrad.get((layer, f"{backend} {scaling}")))
                for layer in layers
            }
            found = {layer: (apart, in_place) for layer, (apart, in_place) in pairs.items() if apart and in_place}
            if found:
                each = ", ".join(f"{layer} {apart / in_place:.2f}" for layer, (apart, in_place) in found.items())
                whole = sum(apart for apart, _ in found.values()) / sum(in_place for _, in_place in found.values())
                print(f"wgrad, {scaling}: {backend} in place over scaled_mm + add_ {whole:.2f}x ({each})")


def bench_gemms(shapes: dict[str, dict[str, LinearSize]], device: torch.device, rounds: int) -> list[Result]:
    """Every shape's linears: tables, and all results."""
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
        print_wgrad_gain(results)
        found += results
    bar.close()
    return found


# --- casts -----------------------------------------------------------------------------------------------------------


def bench_quantize(device: torch.device) -> list[dict[str, Any]]:
    """The quantize kernels of `benchmarks.bench_casts`: TB/s, and the share of what a copy reaches."""
    if device.type != "cuda":
        print("left out, quantize kernels: they are measured on a GPU")
        return []
    from benchmarks import bench_casts

    ceiling = bench_casts.copy_bandwidth()
    print(f"\nquantize kernels; copy {ceiling:.2f} TB/s\n{'kernel':<34}{'ms':>8}{'TB/s':>8}{'of copy':>9}")
    records = []
    for case in tqdm(bench_casts.cases(), desc="casts", disable=None):
        ms = bench_casts.milliseconds(case.run)
        rate = case.bytes / ms / 1e9
        tqdm.write(f"{case.name:<34}{ms:>8.3f}{rate:>8.2f}{rate / ceiling:>9.1%}")
        records.append(
            {"kernel": case.name, "bytes": case.bytes, "ms": ms, "tb_per_s": rate, "of_copy": rate / ceiling}
        )
    return records


# --- sweep -----------------------------------------------------------------------------------------------------------


def real_sizes() -> list[LinearSize]:
    """Layers of Llama-3-8B, and of a rank of eight of Llama-3-70B, at their own number of tokens."""
    shapes = [SHAPES["llama3-8b"], SHAPES["llama3-70b-tp8"]]
    return [size for shape in shapes for size in linears(shape, shape.seq_length).values()]


def run_sweep(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure and predict the grid; table, PNG, and the record."""
    known = arguments.ceilings or (device_name(device) if device_name(device) in CEILINGS else None)
    ceilings = None if known is None else ceilings_of(known)
    if ceilings is None:
        print(f"left out, prediction: the speeds of {device_name(device)!r} are not known")
    swept = speed_map.grid(*(numbers(arguments, option) for option in ("m", "k", "n")))
    sizes = list(dict.fromkeys([*swept, *([] if arguments.grid_only else real_sizes())]))
    recipe = RECIPES[arguments.recipe]()
    points = speed_map.sweep(
        sizes,
        recipe,
        None if arguments.predicted_only else device,
        ceilings,
        micro_batches=arguments.micro_batches,
        rounds=arguments.rounds,
    )
    speed_map.print_points(points)
    if arguments.png:
        where = known if arguments.predicted_only else machine(device)
        shared = f", a weight's cast shared by {arguments.micro_batches} micro-batches" * (arguments.micro_batches > 1)
        title = f"Linear layers in FP8 ({arguments.recipe}) over bf16, forward and backward{shared}: {where}"
        speed_map.plot([point for point in points if point.size in swept], arguments.png, title)
        print(f"heat maps: {arguments.png}")
    return {
        "recipe": arguments.recipe,
        "micro_batches": arguments.micro_batches,
        "ceilings": speed_map.ceilings_record(ceilings),
        "points": speed_map.records(points),
    }


# --- command line ----------------------------------------------------------------------------------------------------


def machine(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def numbers(arguments: argparse.Namespace, option: str) -> list[int]:
    """Positive whole numbers, comma-separated. ValueError for anything else."""
    text = getattr(arguments, option)
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ValueError(f"--{option}: {text!r} is no list of positive whole numbers; for example 1024,4096")
    return [int(number) for number in text.split(",")]


def chosen_shapes(wanted: str, tokens: int | None) -> dict[str, dict[str, LinearSize]]:
    """The linears of each shape named. ValueError for a name that is neither known nor three numbers."""
    found: dict[str, dict[str, LinearSize]] = {}
    for name in wanted.split(","):
        if name in SHAPES:
            found[name] = linears(SHAPES[name], tokens or SHAPES[name].seq_length)
        elif match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", name):
            found[name] = {"": LinearSize(*map(int, match.groups()))}
        else:
            raise ValueError(f"--shapes: {name!r} is none of {', '.join(SHAPES)}, nor a size such as 8192x4096x28672")
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", default="llama3-8b", help=f"of {', '.join(SHAPES)}, or sizes such as 8192x4096x6144"
    )
    parser.add_argument("--tokens", type=int, help="of a named shape. Default: the shape's own")
    parser.add_argument("--parts", default="gemms,casts", help="of gemms, casts")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, help="also write everything here")
    group = parser.add_argument_group("sweep")
    group.add_argument("--sweep", action="store_true", help="instead: whole FP8 linears over bf16 by size")
    group.add_argument("--m", default=TOKENS, help="tokens of the grid")
    group.add_argument("--k", default=WIDTHS, help="inputs of the grid")
    group.add_argument("--n", default=WIDTHS, help="outputs of the grid")
    group.add_argument("--grid-only", action="store_true", help="leave out the real layers beside the grid")
    group.add_argument("--recipe", choices=SWEPT_RECIPES, default="current")
    group.add_argument("--micro-batches", type=int, default=1, help="that share one cast of the weight")
    group.add_argument("--ceilings", choices=list(CEILINGS), help="whose to predict with. Default: this device's")
    group.add_argument("--predicted-only", action="store_true", help="run nothing")
    group.add_argument("--png", type=Path, help="also draw heat maps into this file")
    return parser.parse_args(argv)


def check(arguments: argparse.Namespace) -> torch.device:
    """The device. ValueError with one line for what cannot be."""
    for option in ("tokens", "rounds", "micro_batches"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ValueError(f"--{option.replace('_', '-')}: {value} is too few; 1 or more would work")
    if unknown := set(arguments.parts.split(",")) - {"gemms", "casts"}:
        raise ValueError(f"--parts: {sorted(unknown)[0]!r} is neither gemms nor casts")
    has_cuda = torch.cuda.is_available()
    if arguments.device == "cuda" and not has_cuda:
        raise ValueError("--device: torch sees no CUDA device here; cpu would work")
    device = torch.device("cuda", 0) if has_cuda and arguments.device != "cpu" else torch.device("cpu")
    if arguments.predicted_only and arguments.ceilings is None:
        ceilings_of(device_name(device))
    return device


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    report: dict[str, Any] = {"torch": torch.__version__}
    results: list[Result] = []
    try:
        device = check(arguments)
        report["device"] = machine(device)
        cold = ", L2 cold" if device.type == "cuda" else ""
        print(f"{report['device']}, torch {torch.__version__}: medians of {arguments.rounds} rounds{cold}")
        if arguments.sweep:
            report["sweep"] = run_sweep(arguments, device)
        else:
            parts = arguments.parts.split(",")
            if "gemms" in parts:
                results = bench_gemms(chosen_shapes(arguments.shapes, arguments.tokens), device, arguments.rounds)
                report["gemms"] = [result.record() for result in results]
            if "casts" in parts:
                report["casts"] = bench_quantize(device)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        strict = json.loads(json.dumps(report), parse_constant=lambda _: None)  # JSON knows neither NaN nor infinity
        arguments.json.write_text(json.dumps(strict, indent=1), encoding="utf-8")
    return 1 if any(result.wrong for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
