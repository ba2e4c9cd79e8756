"""Time forward and backward of transformers' Llama layers: bf16, and converted by `megafp8.fp8.convert`.

    python -m benchmarks.bench_any_model                      # four layers of Llama-3-8B, all recipes, compiled or not
    python -m benchmarks.bench_any_model --variants compiled,compiled:current,compiled:blockwise --json a.json

Variants: `eager` and `compiled` are the model as it is, in bf16; `eager:RECIPE` and `compiled:RECIPE` the converted
one. "compiled" is `torch.compile(fullgraph=True)`.

An iteration is forward and backward of one micro-batch, after an optimizer step: weights are quantized anew and scales
advance. The step itself and clearing the gradients are not timed. Variants are built and warmed up one after the other,
then timed in turn, `--rounds` times; the table shows medians. Ratios are to `compiled`. "host" is the time that the
host takes to queue an iteration's work, measured from an empty queue.

"dw" is the median, over weights, of a gradient's relative difference from that of the model in fp32; the largest, of
queries' and keys', is little but noise in bf16 too. FP8 in E5M2 rounds 32 times as coarsely as bf16. So a row above 32
times `eager`'s difference is marked WRONG, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
from benchmarks.transformers_llama import SHAPES, fastest_kernels, llama
from megafp8 import fp8
from megafp8.numerics.recipes import RECIPES

MEASURED = ("delayed", "current", "rowwise", "blockwise")
WARM_UP = 4
GRADIENT_STD = 1e-6  # of a mean loss
COARSENESS = 32  # of FP8 in E5M2, with 3 significant bits, against bf16, with 8


@dataclass
class Result:
    """A row of the table."""

    variant: str
    samples_ms: list[float] = field(default_factory=list)
    host_ms: float = 0.0
    dw_difference: float = 0.0
    wrong: bool = False
    peak_gib: float | None = None

    @property
    def ms(self) -> float:
        return statistics.median(self.samples_ms)


class Variant:
    """A model with its work: `iteration` runs forward and backward."""

    def __init__(self, name: str, shape: str, layers: int, x_bsh: Tensor, dy_bsh: Tensor) -> None:
        how, _, recipe = name.partition(":")
        self.model = llama(shape, layers, x_bsh.shape[1], x_bsh.device, x_bsh.dtype)
        self.in_fp8 = bool(recipe)
        if recipe:
            fp8.convert(self.model, RECIPES[recipe](), skip=())
        self._run: Callable[..., Any] = torch.compile(self.model, fullgraph=True) if how == "compiled" else self.model
        self._x, self._dy = x_bsh, dy_bsh
        self._optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)  # its step says that weights changed

    def end_step(self) -> None:
        self._optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def iteration(self) -> None:
        with fp8.autocast(self.in_fp8), fastest_kernels():
            y = self._run(inputs_embeds=self._x.detach().requires_grad_(), use_cache=False).last_hidden_state
        y.backward(self._dy)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}


def _difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The median of |a - e| / |e| over 2-dim gradients; NaN if one is NaN."""
    found = [
        (actual[name].float() - e.float()).norm() / e.float().norm() for name, e in expected.items() if e.dim() == 2
    ]
    return torch.stack(found).median().item()


def _host_ms(variant: Variant, device: torch.device) -> float:
    variant.end_step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    variant.iteration()
    return (time.perf_counter() - start) * 1e3


def measure(arguments: argparse.Namespace, device: torch.device, variants: list[str]) -> list[Result]:
    """Build all variants, check and time them."""
    torch.manual_seed(1)
    x, dy = (
        torch.randn(1, arguments.seq_length, SHAPES[arguments.shape]["hidden_size"], device=device).bfloat16()
        for _ in range(2)
    )
    dy *= GRADIENT_STD
    reference = Variant("eager", arguments.shape, arguments.layers, x.float(), dy.float())
    reference.iteration()
    expected = reference.gradients()
    del reference
    in_bf16 = Variant("eager", arguments.shape, arguments.layers, x, dy)
    in_bf16.iteration()
    limit = COARSENESS * _difference(in_bf16.gradients(), expected)
    del in_bf16
    built, results = [], []
    for name in variants:
        release()
        on_cuda = device.type == "cuda"
        before = torch.cuda.memory_allocated() if on_cuda else 0
        variant, result = Variant(name, arguments.shape, arguments.layers, x, dy), Result(name)
        for _ in range(WARM_UP):
            variant.end_step()
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()
            variant.iteration()
        result.dw_difference = _difference(variant.gradients(), expected)
        result.wrong = not result.dw_difference <= limit
        if on_cuda:
            result.peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
        result.host_ms = statistics.median(_host_ms(variant, device) for _ in range(5))
        built.append(variant)
        results.append(result)
    for _ in range(arguments.rounds):
        for variant, result in zip(built, results, strict=True):
            spans = []
            for _ in range(arguments.steps):
                variant.end_step()
                start = now(device)
                variant.iteration()
                spans.append((start, now(device)))
            if device.type == "cuda":
                torch.cuda.synchronize()
            result.samples_ms += [milliseconds(*span) for span in spans]
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--variants", help="comma-separated; default all of delayed, current, rowwise, blockwise")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    add_device_flag(parser)
    parsed = parser.parse_args(arguments)
    ways = ("eager", "compiled")
    default = ",".join([*ways, *(f"{way}:{recipe}" for way in ways for recipe in MEASURED)])
    known = [*ways, *(f"{way}:{recipe}" for way in ways for recipe in RECIPES if recipe not in ("static", "custom"))]
    try:
        require_positive(parsed, "layers", "seq_length", "rounds", "steps")
        variants, device = names("--variants", parsed.variants or default, known), chosen_device(parsed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = measure(parsed, device, variants)
    baseline = next((result.ms for result in results if result.variant == "compiled"), None)
    columns = {
        "ms": ".2f",
        "min": ".2f",
        "max": ".2f",
        "ratio": ".3f",
        "host ms": ".2f",
        "peak GiB": ".2f",
        "dw": ".3f",
    }
    table = Table("variant", 22, columns)
    print(
        f"{machine(device)}, torch {torch.__version__}: {parsed.shape}, {parsed.layers} layers, s = {parsed.seq_length}"
    )
    print(table.heading())
    rows, wrong = [], False
    for result in results:
        ratio = None if baseline is None else baseline / result.ms
        wrong = wrong or result.wrong
        spread = (min(result.samples_ms), max(result.samples_ms))
        values = (result.ms, *spread, ratio, result.host_ms, result.peak_gib, result.dw_difference)
        print(table.row(result.variant, *values, note="WRONG" if result.wrong else ""))
        rows.append({**asdict(result), "ms": result.ms, "ratio": ratio})
    write_json(parsed.json, {"machine": machine(device), "torch": torch.__version__, "rows": rows})
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
