"""Time the attention of context-parallel ranks with packed documents: all documents cut, or placed by `placement`.

    python -m benchmarks.context_attention

One GPU computes what each of the ranks would compute, one after the other, in CUDA graphs; the slowest counts. Nothing
is sent: gathered keys are copies of a rank's own. Documents have log-normal lengths. The outputs and gradients of the
first sample of each kind are compared with attention on one rank.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import milliseconds, now, replayed
from megafp8.layers.attention import context_parallel
from megafp8.layers.attention.context_parallel import AttentionPlan, ContextAttention, plan
from megafp8.layers.attention.mask import causal_mask
from megafp8.layers.attention.op import attention
from megafp8.parallel.context import shard_positions
from megafp8.parallel.placement import place_documents

HEADS, GROUPS, WIDTH = 32, 8, 128
DEVICE = torch.device("cuda")


class EmulatedGroup:
    """Ranks of a group, of which this process computes one after the other.

    `shards` are the keys and values of all ranks, or None if nobody reads the results.
    """

    def __init__(self, rank: int, ranks: int, shards: Sequence[Sequence[Tensor]] | None = None) -> None:
        self._rank, self._ranks, self._shards = rank, ranks, shards
        self.gradients: list[Tensor] = []

    def rank(self) -> int:
        """Return the rank that this process computes."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._ranks

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what ranks gather: the last tokens of each rank, as many as this rank's tensors have."""
        if self._shards is None:
            return [x.repeat(self._ranks, 1, 1, 1) for x in tensors]
        return [torch.cat([shard[i][-len(x) :] for shard in self._shards]) for i, x in enumerate(tensors)]

    def reduce(self, x: Tensor) -> Tensor:
        """Keep the gradients of all ranks' tokens, and return zeros for those of this rank."""
        self.gradients.append(x)
        return torch.zeros_like(x.chunk(self._ranks)[self._rank])


class _Arrived:
    def wait(self) -> None:
        pass


def lengths_of_a_sample(s: int, mean: int, sigma: float, seed: int) -> list[int]:
    """Return lengths of documents that fill s tokens; the last is cut."""
    rng, lengths = np.random.default_rng(seed), list[int]()
    while sum(lengths) < s:
        length = int(np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma), 16, s))
        lengths.append(min(length, s - sum(lengths)))
    return lengths


def random(s: int, heads: int) -> Tensor:
    """Return normal numbers `[s, 1, heads, WIDTH]` with a gradient."""
    return torch.randn(s, 1, heads, WIDTH, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)


def milliseconds_of(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the mean time of a replay of `work`."""
    replay = replayed(work)
    replay()
    start = now(DEVICE)
    for _ in range(repeats):
        replay()
    end = now(DEVICE)
    torch.cuda.synchronize()
    return milliseconds(start, end) / repeats


def time_rank(rank: int, ranks: int, calls: AttentionPlan, s: int) -> tuple[float, float]:
    """Return the milliseconds of a rank: forward, and forward with backward."""
    inputs = [random(s // ranks, heads) for heads in (HEADS, GROUPS, GROUPS)]
    gradient, attend = random(s // ranks, HEADS).detach(), ContextAttention(EmulatedGroup(rank, ranks), calls)
    with torch.no_grad():
        forward = milliseconds_of(lambda: attend(*inputs))
    return forward, milliseconds_of(lambda: torch.autograd.grad(attend(*inputs), inputs, gradient))


def largest_error(positions: Sequence[Tensor], plans: Sequence[AttentionPlan], ends: Tensor, s: int) -> float:
    """Return the largest relative error of outputs and gradients of all ranks, to attention on one rank."""
    ranks, whole = len(plans), [random(s, heads) for heads in (HEADS, GROUPS, GROUPS)]
    gradient = random(s, HEADS).detach()
    expected = attention(*whole, mask=causal_mask(ends, None, s, DEVICE))
    expected_all = [expected, *torch.autograd.grad(expected, whole, gradient)]
    shards = [[x.detach()[mine].requires_grad_() for x in whole] for mine in positions]
    groups = [EmulatedGroup(rank, ranks, [shard[1:] for shard in shards]) for rank in range(ranks)]
    found = []
    for group, shard, mine, calls in zip(groups, shards, positions, plans, strict=True):
        o = ContextAttention(group, calls)(*shard)
        found.append([o, *torch.autograd.grad(o, shard, gradient[mine])])
    errors = []
    for rank, (mine, results, calls) in enumerate(zip(positions, found, plans, strict=True)):
        for i, (x, of_all) in enumerate(zip(results, expected_all, strict=True)):
            if i >= 2 and calls.gathered:  # dk and dv
                x[-calls.gathered :] += sum(group.gradients[i - 2].chunk(ranks)[rank] for group in groups)
            exact = of_all[mine].detach().double()
            errors.append(float((x.detach().double() - exact).norm() / exact.norm()))
    return max(errors)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=131072)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mean", type=int, default=4096, help="mean length of documents")
    parser.add_argument("--seeds", type=int, default=3)
    a = parser.parse_args()
    context_parallel.all_gather_async = lambda tensors, group: (group.gather(tensors), _Arrived())
    context_parallel.reduce_scatter = lambda x, group: group.reduce(x)
    torch.manual_seed(0)
    print("| σ, seed | documents, longest | whole | cut, ms | placed, ms | faster | keys gathered | error |")
    print("|:--|:--|--:|--:|--:|--:|--:|--:|")
    for sigma, seed in itertools.product((1.0, 1.5), range(a.seeds)):
        lengths = lengths_of_a_sample(a.seq_length, a.mean, sigma, seed)
        ends = torch.tensor([[0, *itertools.accumulate(lengths)]], dtype=torch.int32)
        placed = place_documents(ends, a.ranks)
        whole = float(placed.chunks_bml[0, :, 2 * a.ranks :].sum()) / a.seq_length
        times, errors = [], []
        for placement in (None, placed._replace(chunks_bml=placed.chunks_bml.to(DEVICE))):
            on_device, every = ends.to(DEVICE), range(a.ranks)
            chunks = None if placement is None else placement.chunks_bml
            positions = [shard_positions(on_device, a.seq_length, rank, a.ranks, DEVICE, chunks)[0] for rank in every]
            of_rank = partial(
                plan, a.seq_length, ranks=a.ranks, window=None, cu_seqlens_bm=on_device, device=DEVICE,
                placement=placement,
            )  # fmt: skip
            plans = [of_rank(rank=rank) for rank in every]
            if seed == 0:
                errors.append(largest_error(positions, plans, on_device, a.seq_length))
            of_ranks = [time_rank(rank, a.ranks, plans[rank], a.seq_length) for rank in every]
            times.append([max(x) for x in zip(*of_ranks, strict=True)])
        cells = [
            f"{sigma}, {seed}", f"{len(lengths)}, {max(lengths):,}", f"{whole:.0%}",
            *(f"{forward:.2f} + {both - forward:.2f}" for forward, both in times), f"{times[0][1] / times[1][1]:.2f}×",
            f"{a.ranks * placed.gathered / a.seq_length:.1%}", "; ".join(f"{error:.1e}" for error in errors),
        ]  # fmt: skip
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
