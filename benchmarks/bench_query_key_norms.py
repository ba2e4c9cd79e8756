"""Time of norms of queries and keys before their rotation: `python -m benchmarks.bench_query_key_norms`.

From the packed [q | k | v] of a projection to queries and keys as attention reads them, and back to the packed
gradient, in bf16 and cast to FP8 with one scale. Beside the fused passes the separate operations that layers without
them run: norms, copies, rotation, concatenation and the projection's cast. "GB/s" is of the bytes that the fused passes
move, each tensor once for each kernel, forward and backward with the cast. "y" and "grads" are the largest errors of
queries and keys, and of any gradient, relative to the largest value, against the separate operations in float64.

Medians of interleaved rounds from a cold L2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import (
    Table,
    add_device_flag,
    chosen_device,
    machine,
    new_parser,
    release,
    require_positive,
    write_json,
)
from megafp8.fp8.speed_measurement import time_round_robin
from megafp8.linear.state import QuantizedGradHandoff
from megafp8.models.norms import RMSNorms
from megafp8.numerics.formats import E5M2
from megafp8.numerics.quantizers import casts
from megafp8.numerics.sources import Plain, Source
from megafp8.numerics.tensor import QuantizedTensor
from megafp8.ops.rotary import QKNorms, rotate_and_split, rotate_heads

TABLE = Table(
    "norms of q and k", 34,
    {"fwd ms": ".3f", "bwd ms": ".3f", "bwd+cast ms": ".3f", "GB/s": ".0f", "y": ".1e", "grads": ".1e"},
)  # fmt: skip
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """Query and key heads of width d; `together`: one norm of all of them."""

    heads: int
    groups: int
    d: int
    together: bool

    @property
    def bytes_of_a_token(self) -> int:
        """That fused kernels move, forward and backward with the cast, in bf16."""
        normed = 2 * (self.heads + self.groups) * self.d
        values = 2 * self.groups * self.d
        return (6 + self.together) * normed + normed + values + normed + values


SHAPES = {"Qwen3-30B-A3B": Shape(32, 4, 128, False), "OLMo-2-7B": Shape(32, 32, 128, True)}


@dataclass(frozen=True)
class Record:
    """A row of the table."""

    name: str
    forward_ms: float
    backward_ms: float
    cast_ms: float
    gigabytes_per_second: float | None
    output_error: float
    gradient_error: float


class OneScale:
    """Quantizer with a given scale."""

    def __init__(self, device: torch.device) -> None:
        self.scale, self.amax = torch.ones((), device=device), torch.zeros((), device=device)

    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        return casts(source).cast_tensor(
            source, self.scale, self.scale, E5M2, rowwise=rowwise, columnwise=columnwise, newest_amax=self.amax
        )


class Fused:
    """Norms and rotation by the fused kernels: one pass forward, two backward."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def forward(
        self, qkv: Tensor, weights: Sequence[Tensor], cos: Tensor, sin: Tensor, quantizer: OneScale | None = None
    ) -> tuple[Tensor, ...]:
        a, g, d = self.shape.heads, self.shape.groups, self.shape.d
        norms = QKNorms(*weights, EPS, sizes=(a * d, g * d) if self.shape.together else None)
        handoff = None if quantizer is None else QuantizedGradHandoff(quantizer)  # type: ignore[arg-type]
        return rotate_and_split(qkv, a, g, cos, sin, handoff, norms)

    def cast(self, gradient: Tensor, quantizer: OneScale) -> None:
        """Backward has done it."""


class Separate(Fused):
    """Norms, copies and rotation one after the other."""

    def forward(
        self, qkv: Tensor, weights: Sequence[Tensor], cos: Tensor, sin: Tensor, quantizer: OneScale | None = None
    ) -> tuple[Tensor, ...]:
        a, g, d = self.shape.heads, self.shape.groups, self.shape.d
        q, k, v = (x.unflatten(-1, (-1, d)) for x in qkv.split([a * d, g * d, g * d], dim=-1))
        if self.shape.together:
            q, k = RMSNorms.apply(q, k, *weights, (a * d, g * d), EPS, None)
        else:
            q, k = (F.rms_norm(x, (d,), weight, EPS) for x, weight in zip((q, k), weights, strict=True))
        return rotate_heads(q, cos, sin), rotate_heads(k, cos, sin), v

    def cast(self, gradient: Tensor, quantizer: OneScale) -> None:
        quantizer(Plain(gradient.flatten(0, 1)), rowwise=True, columnwise=True)


def measure(shape: Shape, tokens: int, device: torch.device, rounds: int) -> list[Record]:
    """Rows of fused and of separate operations."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, g, d = shape.heads, shape.groups, shape.d
    qkv = torch.randn(tokens, 1, (a + 2 * g) * d, device=device, dtype=dtype, requires_grad=True)
    sizes = (a * d, g * d) if shape.together else (d, d)
    weights = [torch.randn(size, device=device, dtype=dtype, requires_grad=True) for size in sizes]
    dy = [torch.randn(tokens, 1, n, d, device=device, dtype=dtype) for n in (a, g, g)]
    angles = torch.rand(tokens, 1, 1, d // 2, device=device, dtype=torch.float64)
    tables = angles.cos().float(), angles.sin().float()

    def results(part: Fused, x: Tensor, w: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        q, k, v = part.forward(x, w, *tables)
        return [torch.cat([q, k], dim=2).detach(), *torch.autograd.grad((q, k, v), (x, *w), gradients)]

    exact = [x.detach().double().requires_grad_() for x in (qkv, *weights)]
    expected = results(Separate(shape), exact[0], exact[1:], [x.double() for x in dy])
    contenders, quantizer = {"fused": Fused(shape), "separate": Separate(shape)}, OneScale(device)
    errors = []
    for part in contenders.values():
        found = results(part, qkv, weights, dy)
        errors.append([_error(x, y) for x, y in zip(found, expected, strict=True)])
    del exact, expected, found
    release()
    runs: list[Callable[[], object]] = []
    for part in contenders.values():
        runs.append(partial(part.forward, qkv, weights, *tables))
        for cast in (None, quantizer):
            y = part.forward(qkv, weights, *tables, cast)
            runs.append(partial(_backward, part, y, (qkv, *weights), dy, cast))
    times = [statistics.median(t) * 1e3 for t in time_round_robin(runs, device, rounds=rounds)]
    records = []
    for i, (name, error) in enumerate(zip(contenders, errors, strict=True)):
        forward, backward, cast = times[3 * i : 3 * i + 3]
        rate = shape.bytes_of_a_token * tokens / (forward + cast) / 1e6 if name == "fused" else None
        records.append(Record(name, forward, backward, cast, rate, error[0], max(error[1:])))
    return records


def _backward(
    part: Fused, y: Sequence[Tensor], inputs: Sequence[Tensor], dy: Sequence[Tensor], quantizer: OneScale | None
) -> None:
    gradient = torch.autograd.grad(y, inputs, dy, retain_graph=True)[0]
    if quantizer is not None:
        part.cast(gradient, quantizer)


def _error(x: Tensor, expected: Tensor) -> float:
    return float((x.double() - expected).abs().max() / expected.abs().max())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_device_flag(parser)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        require_positive(arguments, "tokens", "rounds")
        device = chosen_device(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    print(f"{machine(device)}, torch {torch.__version__}; {arguments.tokens} tokens")
    print(TABLE.heading())
    report = []
    for model, shape in SHAPES.items():
        for record in measure(shape, arguments.tokens, device, arguments.rounds):
            name, *values = asdict(record).values()
            print(TABLE.row(f"{model} {name}", *values), flush=True)
            report.append({"model": model} | asdict(record))
    write_json(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
