"""What each strategy of data parallelism holds on a rank and sends in a step, as functions of sizes and ranks alone.

The planner and the check of memory ask these before a run; `megafp8.parallel.data.strategy` carries them out. A plan is
that of parameters whose gradients are summed over the same ranks: experts' parameters have one of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from megafp8.parallel.data.buckets import BufferLayout, bucket_layout
from megafp8.plan import WeightStorage

Ints = Sequence[int]


class HeldElements(NamedTuple):
    """Elements that a rank holds of all parameters together, the fullest rank where ranks differ.

    `values`: of weights in the dtype of the model; `fp8`: of those that are FP8 data and nothing else. `masters`: what
    the rank updates; `released`: of that, what has its values in the masters only. `updated`: what it updates by
    tensor, with the number of moments of each.
    """

    values: int
    fp8: int
    gradients: int
    masters: int
    released: int
    updated: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class DataParallelPlan:
    """Each of `ranks` ranks, `stride` apart, holds and updates all of the parameters (`Replicated`).

    `bucket_elements`: of gradients that are sent together. `replicas`: of the shards, under FSDP. `state_shards`,
    `weight_shards`: parts into which the optimizer's state, and between uses weights and gradients, are divided.
    """

    weight_storage: ClassVar[WeightStorage] = "resident"
    #: Weights are gathered, and quantized, for each block and micro-batch, and gradients reduced; else once a step.
    gathers_blocks: ClassVar[bool] = False
    #: Collectives once a step, over gradients and over weights. An all-reduce is a reduce-scatter and an all-gather.
    reductions: ClassVar[int] = 2
    gathers: ClassVar[int] = 0

    ranks: int
    stride: int
    bucket_elements: int
    replicas: int

    @property
    def state_shards(self) -> int:
        return 1

    @property
    def weight_shards(self) -> int:
        return 1

    @property
    def step_group(self) -> tuple[int, int]:
        """Size and stride of the groups of the collectives that run once a step."""
        return self.ranks, self.stride

    def received(self, elements: float) -> float:
        """How much of `elements`, a number or bytes, a rank receives in a collective that runs once a step."""
        return elements * (self.ranks - 1) / self.ranks

    def gathered(self, elements: float) -> float:
        """How much of a block's `elements`, a number or bytes, a rank receives when they are gathered or reduced."""
        return elements * (self.weight_shards - 1) / self.weight_shards

    def held(self, numels: Ints, moments: Ints, *, own_bucket: Ints, fp8: Ints) -> HeldElements:
        """Elements that a rank holds of parameters with `numels` elements and `moments` moments each.

        `own_bucket`, `fp8`: indices of those that several stages share, and of those that are gathered in FP8.
        """
        count, gradients = sum(numels), self._buckets(numels, own_bucket, fp8).numel
        return HeldElements(count, 0, gradients, count, 0, [*zip(moments, numels, strict=True)])

    def _buckets(self, numels: Ints, own_bucket: Ints, fp8: Ints) -> BufferLayout:
        ranks = self.state_shards
        return bucket_layout(numels, self.bucket_elements, ranks=ranks, own_bucket=own_bucket, fp8_bucket=fp8)


class Zero1Plan(DataParallelPlan):
    """Each rank updates a shard of the parameters, which all ranks then gather (`Zero1`)."""

    weight_storage = "zero"
    reductions = gathers = 1

    @property
    def state_shards(self) -> int:
        return self.ranks

    def held(self, numels: Ints, moments: Ints, *, own_bucket: Ints, fp8: Ints) -> HeldElements:
        layout = self._buckets(numels, own_bucket, fp8)
        in_fp8 = sum(bucket.end - bucket.start for bucket in layout.buckets if bucket.params[0] in fp8)
        masters = min(sum(numels), layout.numel // self.ranks)
        released = min(sum(numels[i] for i in fp8), in_fp8 // self.ranks)
        updated = [*_with_most_moments(zip(moments, numels, strict=True), masters)]
        return HeldElements(layout.numel - in_fp8, in_fp8, layout.numel, masters, released, updated)


class FullyShardedPlan(DataParallelPlan):
    """Each rank holds a shard of everything; replicas sum their shards' gradients once a step (`FullySharded`)."""

    weight_storage = "fsdp"
    gathers_blocks = True

    @property
    def state_shards(self) -> int:
        return self.weight_shards

    @property
    def weight_shards(self) -> int:
        return max(1, self.ranks // self.replicas)

    @property
    def step_group(self) -> tuple[int, int]:
        return self.replicas, self.stride * self.weight_shards

    def received(self, elements: float) -> float:
        return elements / self.weight_shards

    def held(self, numels: Ints, moments: Ints, *, own_bucket: Ints, fp8: Ints) -> HeldElements:
        shards = [-(-count // self.weight_shards) for count in numels]
        count, gradients = sum(shards), sum(-(-count // 64) * 64 for count in shards)
        updated = [*zip(moments, shards, strict=True)]
        return HeldElements(0, sum(shards[i] for i in fp8), gradients, count, count, updated)


def _with_most_moments(tensors: Iterable[tuple[int, int]], count: int) -> Iterator[tuple[int, int]]:
    """`count` of the elements of tensors, given with their numbers of moments: those with most moments first."""
    elements: Counter[int] = Counter()
    for moments, numel in tensors:
        elements[moments] += numel
    for moments in sorted(elements, reverse=True):
        taken = min(count, elements[moments])
        yield moments, taken
        count -= taken


def plan_type(zero: int, fsdp: bool) -> type[DataParallelPlan]:
    """The plan of the strategy that parallel.zero and parallel.fsdp say; FSDP replaces ZeRO's stage 1."""
    return FullyShardedPlan if fsdp else Zero1Plan if zero else DataParallelPlan
