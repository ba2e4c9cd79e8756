"""Time of sparse attention and of dense attention beside it: `python -m benchmarks.bench_sparse_attention`.

First our kernels are compared with the reference in PyTorch, on sequences of `--check-length` tokens: the choice of
keys by given scores bit for bit, all else relative to the largest value. Then one layer of `--seq-length` tokens is
timed, bf16 on a GPU: the parts of sparse attention, the whole of it, forward and backward, and causal attention of as
many heads by cuDNN through torch, with the same widths of queries, keys and values. Projections are left out on both
sides, but for those that sparse attention applies to queries and outputs. Peak memory is what a pass allocates beside
its inputs.

The default is a layer of DeepSeek-V3.2. `--tile` changes the tiles and options of kernels
(`SCORES`, `CHOOSE`, `ATTEND`, ... of `megafp8.kernels.sparse_attention`). Exit code 1 if a kernel differs from the
reference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common import Table, add_device_flag, chosen_device, machine, milliseconds, new_parser, now, write_json
from megafp8.kernels import sparse_attention as kernels
from megafp8.models.context import PlannedGroup
from megafp8.numerics import sparse_attention_reference as reference
from megafp8.numerics.sparse_attention_reference import Index, Keys
from megafp8.ops.sparse_attention import IndexLoss, SparseAttention

TABLE = Table("one layer", 44, {"ms": ",.2f", "of dense": ".3f", "peak GiB": ".2f"})
TOLERANCE = 2e-2
"""The largest error that bf16 may cause, relative to the largest value."""
_CHECKED_QUERIES = 32


class Sizes(NamedTuple):
    """Heads, their channels without and with rotary positions and of values, latent, and those of the indexer."""

    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    index_heads: int
    index_dim: int
    top_k: int

    @property
    def scale(self) -> float:
        return (self.nope + self.rope) ** -0.5


class Inputs(NamedTuple):
    """The tensors of one sequence that sparse attention reads, sequence first."""

    q: Tensor
    kv: Tensor
    index: Index
    up: Tensor
    first: Tensor
    stop: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.kv, *self.index, self.up]


def random_inputs(s: int, z: Sizes, device: torch.device) -> Inputs:
    """Random tensors whose scores depend on the tokens, as in a trained model."""
    generator = torch.Generator(device).manual_seed(s)

    def noise(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device, generator=generator, dtype=torch.float32) * scale).to(dtype)

    index = Index(
        noise(s, 1, z.index_heads, z.index_dim), noise(s, 1, z.index_dim),
        noise(s, 1, z.index_heads, dtype=torch.float32, scale=(z.index_heads * z.index_dim) ** -0.5),
    )  # fmt: skip
    position = torch.arange(s, device=device)[None]
    return Inputs(
        noise(s, 1, z.heads, z.nope + z.rope), noise(s, 1, z.latent + z.rope), index,
        noise(z.heads * (z.nope + z.value), z.latent, scale=z.latent**-0.5), torch.zeros_like(position), position + 1,
    )  # fmt: skip


def compared(s: int, z: Sizes, device: torch.device) -> Iterator[tuple[str, float]]:
    """What is compared, and the largest difference relative to the largest value; 0 or 1 of what must be equal."""
    x = random_inputs(s, z, device)
    index = Index(*(y.transpose(0, 1).contiguous() for y in x.index))
    scores = kernels.index_scores(index, x.first, x.stop)
    visible = Keys(None, x.first, x.stop).visible(s)
    exact = reference.index_scores(Index(*(y.double() for y in index)))
    yield "index scores", _difference(scores.masked_fill(~visible, 0), exact.masked_fill(~visible, 0))
    for name, given in (("choice of keys", scores), ("choice among equal scores", scores.mul(4).round().div(4))):
        chosen = kernels.choose(given.contiguous(), x.first, x.stop, z.top_k)
        best = given.masked_fill(~visible, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
        best = best[..., : z.top_k].masked_fill(~visible.gather(-1, best[..., : z.top_k]), s).sort(dim=-1).values
        yield name, float(not torch.equal(chosen[..., : best.shape[-1]], best.masked_fill(best == s, -1).int()))
    keys = Keys(kernels.choose(scores, x.first, x.stop, z.top_k), x.first, x.stop)
    rows = slice(s - _CHECKED_QUERIES, s)  # the reference gathers all keys of these
    keys = Keys(*(None if y is None else y[:, rows].contiguous() for y in keys))
    generator = torch.Generator(device).manual_seed(1)
    q, do = (
        torch.randn(1, _CHECKED_QUERIES, z.heads, width, device=device, generator=generator).bfloat16()
        for width in (z.latent + z.rope, z.latent)
    )
    kv = x.kv.transpose(0, 1).contiguous()
    o, lse = kernels.attend(q, kv, keys, z.latent, z.scale)
    expected_o, expected_lse = reference.attend(q.double(), kv.double(), keys, z.latent, z.scale)
    yield "o", _difference(o, expected_o)
    yield "log-sum-exps", _difference(lse, expected_lse)
    ours, theirs = (torch.zeros_like(kv, dtype=dtype) for dtype in (torch.float32, torch.float64))
    dq, p = kernels.attend_backward(do, q, kv, keys, o, lse, z.scale, ours)
    wide = [y.double() for y in (do, q, kv)]
    expected_dq, expected_p = reference.attend_backward(*wide, keys, expected_o, expected_lse, z.scale, theirs)
    yield from (("dq", _difference(dq, expected_dq)), ("probabilities", _difference(p, expected_p)))
    yield "dkv", _difference(ours, theirs)
    own = Index(index.q[:, rows], index.k, index.weights[:, rows])
    ours, theirs = (torch.zeros_like(own.k, dtype=dtype) for dtype in (torch.float32, torch.float64))
    target, factor = p / z.heads, torch.ones((), device=device)
    found = kernels.index_loss_backward(own, keys, target, factor, ours)
    exact_index = Index(*(y.double() for y in own))
    expected = reference.index_loss_backward(exact_index, keys, target.double(), factor.double(), theirs)
    for name, mine, other in zip(("indexer's dq", "dweights", "loss"), found, expected, strict=True):
        yield name, _difference(mine, other)
    yield "indexer's dk", _difference(ours, theirs)


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


class Timed(NamedTuple):
    ms: float
    peak_gib: float


def timed(function: Callable[[], object], device: torch.device, rounds: int) -> Timed:
    """The fastest of `rounds` calls after one more, and what the last allocates at most."""
    function()
    found, peak = [], 0.0
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            held = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        start = now(device)
        function()
        end = now(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            peak = (torch.cuda.max_memory_allocated(device) - held) / 2**30
        found.append(milliseconds(start, end))
    return Timed(min(found), peak)


def sparse(s: int, z: Sizes, device: torch.device, rounds: int) -> dict[str, Timed]:
    x = random_inputs(s, z, device)
    loss = IndexLoss(1.0 / s, None, torch.zeros(1, dtype=torch.float64, device=device))
    attend = SparseAttention(z.top_k, z.scale, PlannedGroup(), loss)  # type: ignore[arg-type]
    found = parts(x, z, device, rounds)
    for leaf in x.leaves:
        leaf.requires_grad_()

    def forward() -> Tensor:
        return attend(x.q, x.kv, x.index, x.up, x.first, x.stop)

    with torch.no_grad():
        found["sparse: forward"] = timed(forward, device, rounds)
    o = forward()
    do = torch.randn_like(o)
    found["sparse: backward"] = timed(lambda: torch.autograd.grad(o, x.leaves, do, retain_graph=True), device, rounds)
    return found


def parts(x: Inputs, z: Sizes, device: torch.device, rounds: int, queries: int = 1024) -> dict[str, Timed]:
    """Kernels of a block of queries in the middle of the sequence, scaled to all queries."""
    s = x.q.shape[0]
    queries = min(queries, s)
    rows = slice((s - queries) // 2, (s - queries) // 2 + queries)
    factor = s / queries
    index = Index(
        *(y.transpose(0, 1).contiguous() for y in (x.index.q[rows], x.index.k, x.index.weights[rows]))
    )  # fmt: skip
    first, stop, kv = x.first[:, rows], x.stop[:, rows], x.kv.transpose(0, 1).contiguous()
    scores = kernels.index_scores(index, first, stop)
    keys = Keys(kernels.choose(scores, first, stop, z.top_k), first, stop)
    q, do = (
        torch.randn(1, queries, z.heads, width, device=device, dtype=torch.bfloat16)
        for width in (z.latent + z.rope, z.latent)
    )
    o, lse = kernels.attend(q, kv, keys, z.latent, z.scale)
    dkv, dk = torch.zeros_like(kv, dtype=torch.float32), torch.zeros_like(index.k, dtype=torch.float32)
    p = torch.full((1, queries, z.top_k), 1 / z.top_k, device=device)
    one = torch.ones((), device=device)
    calls: dict[str, Callable[[], object]] = {
        "index scores": lambda: kernels.index_scores(index, first, stop),
        "choice of keys": lambda: kernels.choose(scores, first, stop, z.top_k),
        "attention to chosen keys": lambda: kernels.attend(q, kv, keys, z.latent, z.scale),
        "its backward": lambda: kernels.attend_backward(do, q, kv, keys, o, lse, z.scale, dkv),
        "the indexer's loss and gradient": lambda: kernels.index_loss_backward(index, keys, p, one, dk),
    }
    found = {name: timed(call, device, rounds) for name, call in calls.items()}
    return {f"  {name}": Timed(x.ms * factor, x.peak_gib) for name, x in found.items()}


def dense(s: int, z: Sizes, device: torch.device, rounds: int) -> dict[str, Timed]:
    """By cuDNN through torch; values padded to the width of keys where it does not take them narrower."""
    for width, name in ((z.value, "dense"), (z.nope + z.rope, "dense (padded values)")):
        q, k, v = (
            torch.randn(1, z.heads, s, d, device=device, dtype=torch.bfloat16).requires_grad_()
            for d in (z.nope + z.rope, z.nope + z.rope, width)
        )
        backends = [SDPBackend.CUDNN_ATTENTION] if device.type == "cuda" else [SDPBackend.MATH]
        try:
            with sdpa_kernel(backends):
                forward = lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
                with torch.no_grad():
                    found = {f"{name}: forward": timed(forward, device, rounds)}
                o = forward()
                do = torch.randn_like(o)
                backward = lambda q=q, k=k, v=v, o=o, do=do: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)  # noqa: E731
                return found | {f"{name}: backward": timed(backward, device, rounds)}
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}")
    raise SystemExit("cuDNN has no attention of these sizes here")


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--seq-length", type=int, default=131072)
    parser.add_argument("--check-length", type=int, default=4096)
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--index-heads", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--tile", action="append", default=[], metavar="ATTEND.N=64", help="another tile of a kernel")
    add_device_flag(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    device = chosen_device(args)
    for tile in args.tile:
        name, value = tile.split("=")
        kernel, key = name.split(".")
        getattr(kernels, kernel)[key] = int(value)
    z = Sizes(args.heads, 128, 64, 128, 512, args.index_heads, 128, args.top_k)
    print(f"{machine(device)}, torch {torch.__version__}, {z}")
    differences = dict(compared(args.check_length, z, device))
    for name, value in differences.items():
        print(f"  {name:32} {'equal' if value == 0 else f'{value:.1e}'}")
    if bad := [name for name, value in differences.items() if not value < TOLERANCE]:
        print(f"differ from the reference: {', '.join(bad)}")
        return 1
    if args.check:
        return 0
    found = dense(args.seq_length, z, device, args.rounds)
    whole = sum(x.ms for x in found.values())
    found |= sparse(args.seq_length, z, device, args.rounds)
    print(TABLE.heading())
    for name, x in found.items():
        print(TABLE.row(name, x.ms, x.ms / whole, x.peak_gib))
    ours = sum(x.ms for name, x in found.items() if name.startswith("sparse:"))
    print(TABLE.row("sparse: forward and backward", ours, ours / whole, None))
    report = {name: x._asdict() for name, x in found.items()}
    write_json(
        args.json, {"sizes": z._asdict(), "seq_length": args.seq_length, "differences": differences, "ms": report}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
