"""Time of the delta rule: `python -m benchmarks.bench_delta_rule --kinds kimi_delta_attention --seq-length 8192`.

Forward and backward of one layer's recurrence in bf16, without projections and convolution: "megafp8" as
`ops.delta_rule` computes it, "kernels" by megafp8's Triton kernels where that is something else, and fla's where it can
be imported (`pip install flash-linear-attention`). "y" and "grads" are the largest errors of outputs and of any
gradient, relative to the largest value, against `in_chunks` in fp32 from the same inputs.

On a GPU both directions are replayed from CUDA graphs; backward is the difference of both together and forward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.bench_recurrent import TABLE, Compute, Record
from benchmarks.common import (
    add_device_flag,
    chosen_device,
    machine,
    milliseconds,
    names,
    new_parser,
    now,
    release,
    replayed,
    require_positive,
    write_json,
)
from megafp8.ops.delta_rule import InKernels, delta_rule, in_chunks

KINDS = {"gated_delta_net": "chunk_gated_delta_rule", "kimi_delta_attention": "chunk_kda"}
"""By the kind of mixer the name of fla's function."""


def inputs_of(kind: str, s: int, heads: int, d: int, device: torch.device) -> list[Tensor]:
    """q, k, v, decays and β as a layer of `heads` has them at its start; Gated DeltaNet has half as many key heads."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    key_heads, shape = (heads, (s, 1, heads, d)) if kind == "kimi_delta_attention" else (heads // 2, (s, 1, heads))

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    q, k = (F.normalize(noise(s, 1, key_heads, d), dim=-1).to(dtype) for _ in range(2))
    decay = -torch.empty(shape[2:], device=device).uniform_(1, 16) * F.softplus(noise(*shape) - 4)
    return [q, k, noise(s, 1, heads, d).to(dtype), decay, noise(s, 1, heads).sigmoid()]


def contenders(kind: str, device: torch.device, state: Tensor) -> dict[str, Compute]:
    """Functions of q, k, v, decays and β."""
    found: dict[str, Compute] = {"megafp8": lambda *x: delta_rule(*x, state)[0]}
    if device.type != "cuda":
        return found
    if kind == "gated_delta_net":
        found["kernels"] = lambda q, k, v, g, beta: _by_kernels(q, k, v, g, beta, state)
    try:
        fla = getattr(__import__(f"fla.ops.{_FLA_MODULES[kind]}", fromlist=[KINDS[kind]]), KINDS[kind])
    except ImportError:
        return found

    def by_fla(*x: Tensor) -> Tensor:
        q, k, v, g, beta = (t.transpose(0, 1) for t in x)
        per_key = v.shape[2] // q.shape[2]
        q, k = (t.repeat_interleave(per_key, dim=2) if per_key > 1 else t for t in (q, k))
        y: Tensor = fla(q=q, k=k, v=v, g=g, beta=beta, initial_state=state, output_final_state=True)[0]
        return y.transpose(0, 1)

    return found | {f"fla {KINDS[kind]}": by_fla}


_FLA_MODULES = {"gated_delta_net": "gated_delta_rule", "kimi_delta_attention": "kda"}


def _by_kernels(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    y: Tensor = InKernels.apply(q, k, v, g.unsqueeze(-1).expand(*g.shape, q.shape[-1]), beta, state)[0]
    return y


def _reference(state: Tensor) -> Compute:
    """Head by head, as decays of channels take c times the memory of keys for chunks of c tokens."""

    def of_head(*inputs: Tensor) -> Tensor:
        return in_chunks(*inputs, state[:, :1])[0]

    def compute(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        per_key = v.shape[2] // q.shape[2]
        q, k = (x.float().repeat_interleave(per_key, dim=2) for x in (q, k))
        heads = zip(*(x.split(1, dim=2) for x in (q * q.shape[-1] ** -0.5, k, v.float(), decay, beta)), strict=True)
        return torch.cat([checkpoint(of_head, *inputs, use_reentrant=False) for inputs in heads], dim=2)

    return compute


def _time(function: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Milliseconds, the least of five times so many rounds."""
    if device.type == "cuda":
        function = replayed(function)
    function()
    times = []
    for _ in range(5):
        start = now(device)
        for _ in range(rounds):
            function()
        end = now(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(milliseconds(start, end) / rounds)
    return min(times)


def measure(kind: str, inputs: list[Tensor], device: torch.device, rounds: int) -> list[Record]:
    q, v = inputs[0], inputs[2]
    state = torch.zeros(1, v.shape[2], q.shape[-1], v.shape[-1], device=device)
    for x in inputs:
        x.requires_grad_()
    dy, records = torch.randn_like(v), []

    def both(compute: Compute) -> tuple[Tensor, ...]:
        y = compute(*inputs)
        return y, *torch.autograd.grad(y, inputs, dy.to(y.dtype))

    expected = [x.detach() for x in both(_reference(state))]
    release()
    for name, compute in contenders(kind, device, state).items():
        errors = [
            float((x.double() - y.double()).abs().max() / y.double().abs().max())
            for x, y in zip([y.detach() for y in both(compute)], expected, strict=True)
        ]
        forward = _time(lambda compute=compute: _without_gradients(compute, inputs), device, rounds)
        total = _time(lambda compute=compute: both(compute), device, rounds)
        records.append(Record(kind, name, forward, total - forward, errors[0], max(errors[1:])))
        release()
    return records


@torch.no_grad()
def _without_gradients(compute: Compute, inputs: list[Tensor]) -> None:
    compute(*inputs)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_device_flag(parser)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"comma-separated, of {', '.join(KINDS)}")
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=32, help="heads of values")
    parser.add_argument("--width", type=int, default=128, help="channels of a head")
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        require_positive(arguments, "seq_length", "heads", "width", "rounds")
        kinds, device = names("kinds", arguments.kinds, KINDS), chosen_device(arguments)
        if arguments.heads % 2:
            raise ValueError(f"--heads: {arguments.heads} is odd, and two heads share a key in gated_delta_net")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    s, heads, width = arguments.seq_length, arguments.heads, arguments.width
    print(f"{machine(device)}, torch {torch.__version__}; s = {s}, {heads} heads of {width}")
    print(TABLE.heading())
    records = []
    for kind in kinds:
        for record in measure(kind, inputs_of(kind, s, heads, width, device), device, arguments.rounds):
            values = record.forward_ms, record.backward_ms, record.output_error, record.gradient_error
            print(TABLE.row(f"{kind}: {record.name}", *values), flush=True)
            records.append(record)
    write_json(arguments.json, [asdict(record) for record in records])
    return 0


if __name__ == "__main__":
    sys.exit(main())
