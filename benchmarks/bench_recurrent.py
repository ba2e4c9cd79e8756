"""Time the recurrences of state spaces and the delta rule: `python -m benchmarks.bench_recurrent --kinds mamba2`.

The benchmark measures forward and backward of one layer's recurrence, without projections and convolution, in bf16 on a
GPU: "megafp8" as a layer computes it, "kernels" by megafp8's Triton kernels if that differs, and fla's kernel if `fla`
can be imported (`pip install flash-linear-attention`). "y" and "grads" are the largest errors of outputs and of any
gradient, relative to the largest value. They are measured against the reference in chunks in fp32 with equal inputs.

Times are medians of interleaved rounds from a cold L2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.common import (
    Table,
    add_device_flag,
    chosen_device,
    machine,
    names,
    new_parser,
    release,
    require_positive,
    write_json,
)
from megafp8.fp8.speed_measurement import time_round_robin
from megafp8.layers.delta_rule import op as delta_rule
from megafp8.layers.mamba2.op import state_space
from megafp8.layers.mamba2.reference import in_chunks

TABLE = Table("recurrence", 44, {"fwd ms": ".3f", "bwd ms": ".3f", "y": ".1e", "grads": ".1e"})

Compute = Callable[..., Tensor]
"""Function that computes outputs, `[s, b, a, w]`, from a recurrence's inputs."""


@dataclass(frozen=True)
class Recurrence:
    """Recurrence of one kind: inputs, fp32 reference, and the implementations to compare."""

    inputs: Sequence[Tensor]
    reference: Compute
    contenders: Mapping[str, Compute]


@dataclass(frozen=True)
class Record:
    """Row of the table."""

    kind: str
    name: str
    forward_ms: float
    backward_ms: float
    output_error: float
    gradient_error: float


def mamba2(s: int, b: int, heads: int, groups: int, device: torch.device) -> Recurrence:
    """Build Mamba-2's recurrence: heads of 64 channels, with a state of 128 numbers for each channel."""
    dtype, w, d = torch.bfloat16 if device.type == "cuda" else torch.float32, 64, 128

    def noise(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    x, keys, queries = noise(s, b, heads, w), noise(s, b, groups, d), noise(s, b, groups, d) * d**-0.5
    step = F.softplus(noise(s, b, heads, dtype=torch.float32) - 3)
    rate = -torch.empty(heads, device=device).uniform_(1, 16)
    skip, state = torch.ones(heads, device=device), torch.zeros(b, heads, d, w, device=device)

    def by_reference(x: Tensor, step: Tensor, rate: Tensor, keys: Tensor, queries: Tensor, skip: Tensor) -> Tensor:
        wide = (t.float() for t in (x, step, rate, keys, queries, skip))
        return in_chunks(*wide, state)[0]

    def ours(*inputs: Tensor) -> Tensor:
        return state_space(*inputs, state)[0]

    contenders = {"megafp8": ours}
    if device.type == "cuda" and (simple_gla := _fla("fla.ops.simple_gla", "chunk_simple_gla")) is not None:

        def by_fla(x: Tensor, step: Tensor, rate: Tensor, keys: Tensor, queries: Tensor, skip: Tensor) -> Tensor:
            """Compute the recurrence as gated linear attention, which needs separate keys and queries for each head."""
            k, q = (t.repeat_interleave(heads // groups, dim=2).transpose(0, 1) for t in (keys, queries))
            v, g = (x * step.unsqueeze(-1).to(x.dtype)).transpose(0, 1), (rate * step).transpose(0, 1)
            y = simple_gla(q=q, k=k, v=v, g=g, scale=1.0)[0]
            return y.transpose(0, 1) + skip.to(x.dtype).unsqueeze(-1) * x

        contenders["fla simple_gla"] = by_fla
    return Recurrence((x, step, rate, keys, queries, skip), by_reference, contenders)


def _fla(module: str, function: str) -> Any:
    """Return a function of fla, or None if it cannot be imported."""
    try:
        return getattr(__import__(module, fromlist=[function]), function)
    except ImportError:
        return None


def delta(kind: str, s: int, b: int, heads: int, groups: int, device: torch.device) -> Recurrence:
    """Build the delta rule with heads of 128 channels.

    Decays are per head (gated_delta_net, with `groups` key heads) or per channel.
    """
    per_channel, d = kind == "kimi_delta_attention", 128
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    key_heads = heads if per_channel else groups
    shape = (s, b, heads, d) if per_channel else (s, b, heads)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    q, k = (F.normalize(noise(s, b, key_heads, d), dim=-1).to(dtype) for _ in range(2))
    decay = -torch.empty(shape[2:], device=device).uniform_(1, 16) * F.softplus(noise(*shape) - 4)
    state = torch.zeros(b, heads, d, d, device=device)

    def of_head(*inputs: Tensor) -> Tensor:
        return delta_rule.in_chunks(*inputs, state[:, :1])[0]

    def by_reference(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Compute head by head: with decays per channel, chunks of c tokens need c times the memory of the keys."""
        q, k = (x.float().repeat_interleave(heads // key_heads, dim=2) for x in (q, k))
        parts = zip(*(x.split(1, dim=2) for x in (q * d**-0.5, k, v.float(), decay, beta)), strict=True)
        return torch.cat([checkpoint(of_head, *inputs, use_reentrant=False) for inputs in parts], dim=2)

    contenders: dict[str, Compute] = {"megafp8": lambda *x: delta_rule.delta_rule(*x, state)[0]}
    if device.type == "cuda":

        def by_kernels(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
            q, k = (x.repeat_interleave(heads // key_heads, dim=2) for x in (q, k))
            y: Tensor = delta_rule.InKernels.apply(q, k, v, decay.unsqueeze(-1).expand(*decay.shape, d), beta, state)[0]
            return y

        if not per_channel:
            contenders["kernels"] = by_kernels
        module, function = ("kda", "chunk_kda") if per_channel else ("gated_delta_rule", "chunk_gated_delta_rule")
        if (chunk := _fla(f"fla.ops.{module}", function)) is not None:

            def by_fla(*x: Tensor) -> Tensor:
                q, k, v, g, beta = (t.transpose(0, 1) for t in x)
                q, k = (t.repeat_interleave(heads // key_heads, dim=2) for t in (q, k))
                y: Tensor = chunk(q=q, k=k, v=v, g=g, beta=beta, initial_state=state, output_final_state=True)[0]
                return y.transpose(0, 1)

            contenders[f"fla {function}"] = by_fla
    inputs = (q, k, noise(s, b, heads, d).to(dtype), decay, noise(s, b, heads).sigmoid())
    return Recurrence(inputs, by_reference, contenders)


KINDS: dict[str, Callable[..., Recurrence]] = {
    "mamba2": mamba2,
    **{kind: partial(delta, kind) for kind in ("gated_delta_net", "kimi_delta_attention")},
}
"""Functions that build a recurrence from s, b, heads, groups and device, by kind."""


def measure(kind: str, recurrence: Recurrence, device: torch.device, rounds: int) -> Iterator[Record]:
    """Measure all implementations of a recurrence, and yield their rows."""
    inputs = [x.requires_grad_() for x in recurrence.inputs]

    def results(compute: Compute, dy: Tensor) -> tuple[Tensor, ...]:
        y = compute(*inputs)
        return y.detach(), *torch.autograd.grad(y, inputs, dy.to(y.dtype))

    with torch.no_grad():
        dy = torch.randn_like(recurrence.contenders["megafp8"](*inputs))
    expected = results(recurrence.reference, dy)
    release()
    runs: list[Callable[[], object]] = []
    errors = []
    for compute in recurrence.contenders.values():
        errors.append([_error(x, y) for x, y in zip(results(compute, dy), expected, strict=True)])
        y = compute(*inputs)
        runs.append(partial(compute, *inputs))
        runs.append(partial(torch.autograd.grad, y, inputs, dy.to(y.dtype), retain_graph=True))
    times = [statistics.median(t) * 1e3 for t in time_round_robin(runs, device, rounds=rounds)]
    for i, (name, error) in enumerate(zip(recurrence.contenders, errors, strict=True)):
        yield Record(kind, name, times[2 * i], times[2 * i + 1], error[0], max(error[1:]))


def _error(x: Tensor, expected: Tensor) -> float:
    return float((x.double() - expected.double()).abs().max() / expected.double().abs().max())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    add_device_flag(parser)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"comma-separated, of {', '.join(KINDS)}")
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print the table, and return the exit code."""
    arguments = parse(argv)
    try:
        require_positive(arguments, "seq_length", "batch", "heads", "groups", "rounds")
        kinds, device = names("kinds", arguments.kinds, KINDS), chosen_device(arguments)
        if arguments.heads % arguments.groups:
            raise ValueError(f"--groups: --heads ({arguments.heads}) is not a multiple of {arguments.groups}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    s, b, heads, groups = arguments.seq_length, arguments.batch, arguments.heads, arguments.groups
    print(f"{machine(device)}, torch {torch.__version__}; s = {s}, b = {b}, {heads} heads, {groups} groups")
    print(TABLE.heading())
    records = []
    for kind in kinds:
        for record in measure(kind, KINDS[kind](s, b, heads, groups, device), device, arguments.rounds):
            values = record.forward_ms, record.backward_ms, record.output_error, record.gradient_error
            print(TABLE.row(f"{kind}: {record.name}", *values), flush=True)
            records.append(record)
    write_json(arguments.json, [asdict(record) for record in records])
    return 0


if __name__ == "__main__":
    sys.exit(main())
