"""Time of hyper-connections: `python -m benchmarks.bench_hyper_connections --streams 4 --hidden 4096`.

Forward and backward of the hyper-connections of one part of a layer, in bf16 on a GPU: the weights of the streams, what
the part reads, and the streams after it; the part itself does nothing. Beside the kernels PyTorch's operations, which
compute the same. "GB/s" is of the bytes that the kernels move, each tensor once for each kernel. "share %" is that of
a training step of a layer of `--layer-parameters` weights that a token is multiplied with, whose 6 FLOPs a weight run
at `--tflops`, with two parts, when the kernels' time comes on top. "y" and "grads" are the largest errors of outputs
and of any gradient, relative to the largest value, against PyTorch's operations in fp32.

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
from megafp8.numerics.hyper_connections_reference import Rule, mixed, project, read, weights
from megafp8.ops.hyper_connections import connect, mix

TABLE = Table(
    "hyper-connections", 24,
    {"fwd ms": ".3f", "bwd ms": ".3f", "GB/s": ".0f", "share %": ".1f", "y": ".1e", "grads": ".1e"},
)  # fmt: skip
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Record:
    """A row of the table."""

    name: str
    forward_ms: float
    backward_ms: float
    gigabytes_per_second: float
    share_percent: float
    output_error: float
    gradient_error: float


def by_kernels(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rule: Rule) -> Tensor:
    x, y, post, comb = connect(x, fn, base, scale, rule)
    return mix(x, y, post, comb)


def by_pytorch(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rule: Rule) -> Tensor:
    """In the dtype of its inputs where it is written out, sums in fp32."""
    w = weights(project(x, fn, rule.norm_eps)[0], base, scale, rule)
    return mixed(x, read(x, w.pre), w.post, w.comb)


def inputs_of(tokens: int, n: int, hidden: int, device: torch.device) -> Inputs:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    products = n * (n + 2)
    x = torch.randn(tokens, n * hidden, device=device, dtype=dtype)
    fn = torch.randn(products, n * hidden, device=device, dtype=dtype) * 0.02
    base, scale = (torch.randn(size, device=device, dtype=dtype) for size in (products, 3))
    return x, fn, base, scale


def measure(inputs: Inputs, rule: Rule, device: torch.device, rounds: int, layer_ms: float) -> list[Record]:
    """`layer_ms`: of a step of the layer without hyper-connections."""
    inputs = tuple(x.requires_grad_() for x in inputs)  # type: ignore[assignment]
    dy = torch.randn_like(inputs[0])

    def results(compute: Callable[..., Tensor], given: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
        y = compute(*given, rule)
        return y.detach(), *torch.autograd.grad(y, given, dy)

    expected = results(by_pytorch, [x.detach().float().requires_grad_() for x in inputs], dy.float())
    release()
    contenders = {"megafp8": by_kernels, "PyTorch": by_pytorch}
    runs: list[Callable[[], object]] = []
    errors = []
    for compute in contenders.values():
        found = results(compute, inputs, dy)
        errors.append([_error(x, y) for x, y in zip(found, expected, strict=True)])
        y = compute(*inputs, rule)
        runs.append(partial(compute, *inputs, rule))
        runs.append(partial(torch.autograd.grad, y, inputs, dy, retain_graph=True))
    times = [statistics.median(t) * 1e3 for t in time_round_robin(runs, device, rounds=rounds)]
    n, records = rule.streams, []
    moved = (11 * n + 6) * inputs[0].nbytes / n  # as `HyperConnection.work` counts them, forward and backward
    for i, (name, error) in enumerate(zip(contenders, errors, strict=True)):
        total = times[2 * i] + times[2 * i + 1]
        share = 100 * 2 * total / (layer_ms + 2 * total)
        records.append(
            Record(name, times[2 * i], times[2 * i + 1], moved / total / 1e6, share, error[0], max(error[1:]))
        )
    return records


def _error(x: Tensor, expected: Tensor) -> float:
    return float((x.double() - expected.double()).abs().max() / expected.double().abs().max())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_device_flag(parser)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--layer-parameters", type=float, default=2.8e8, help="default: of DeepSeek-V4 Flash, about")
    parser.add_argument("--tflops", type=float, default=450.0, help="model TFLOP/s of the rest of a step")
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        require_positive(arguments, "tokens", "streams", "hidden", "iterations", "layer_parameters", "tflops", "rounds")
        device = chosen_device(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    tokens, n, hidden = arguments.tokens, arguments.streams, arguments.hidden
    layer_ms = 6 * arguments.layer_parameters * tokens / arguments.tflops / 1e9
    about = f"{tokens} tokens, {n} streams of {hidden}; the rest of a layer {layer_ms:.2f} ms"
    print(f"{machine(device)}, torch {torch.__version__}; {about}")
    print(TABLE.heading())
    rule = Rule(n, arguments.iterations, 1e-6, 1e-6)
    records = measure(inputs_of(tokens, n, hidden, device), rule, device, arguments.rounds, layer_ms)
    for record in records:
        name, *values = asdict(record).values()
        print(TABLE.row(name, *values), flush=True)
    write_json(arguments.json, [asdict(record) for record in records])
    return 0


if __name__ == "__main__":
    sys.exit(main())
