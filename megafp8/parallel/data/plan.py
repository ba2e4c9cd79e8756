"""Memory and traffic of each strategy of data parallelism, as functions of sizes and ranks.

The planner and the memory check use these before a run; `megafp8.parallel.data.strategy` implements the strategies. One
plan covers parameters with gradients that are summed over the same ranks, so experts' parameters have a separate plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from megafp8.parallel.data.buckets import ALIGN, BufferLayout, bucket_layout
from megafp8.plan import WeightStorage

Ints = Sequence[int]


class HeldElements(NamedTuple):
    """Numbers of elements that a rank holds of all parameters together; for the fullest rank if ranks differ.

    Attributes:
        values: Elements of weights in the model's dtype.
        fp8: Elements of weights that exist only as FP8 data.
        gradients: Elements of gradients.
        masters: Elements that the rank updates.
        released: Part of `masters` with values only in the masters.
        updated: Number of moments and of elements of each tensor that the rank updates.
    """

    values: int
    fp8: int
    gradients: int
    masters: int
    released: int
    updated: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class DataParallelPlan:
    """Plan in which each of `ranks` ranks, `stride` apart, holds and updates all parameters (`Replicated`).

    Attributes:
        weight_storage: Where weights are stored between steps.
        ranks, stride: Number of data-parallel ranks, and their distance.
        bucket_elements: Number of gradient elements that are sent together.
        replicas: Number of replicas of the shards, under FSDP.
    """

    weight_storage: ClassVar[WeightStorage] = "resident"
    #: Whether each block of each micro-batch gathers and quantizes weights and reduces gradients, not just each step.
    gathers_blocks: ClassVar[bool] = False
    #: Collectives per step over gradients and over weights. An all-reduce counts as reduce-scatter plus all-gather.
    reductions: ClassVar[int] = 2
    gathers: ClassVar[int] = 0

    ranks: int
    stride: int
    bucket_elements: int
    replicas: int

    @property
    def state_shards(self) -> int:
        """Number of parts into which the optimizer state is divided."""
        return 1

    @property
    def weight_shards(self) -> int:
        """Number of parts into which weights and gradients are divided between uses."""
        return 1

    @property
    def step_group(self) -> tuple[int, int]:
        """Size and stride of the groups of the collectives that run once per step."""
        return self.ranks, self.stride

    def received(self, elements: float) -> float:
        """Return the part of `elements` (a count or bytes) that a rank receives in a collective of the step."""
        return elements * (self.ranks - 1) / self.ranks

    def gathered(self, elements: float) -> float:
        """Return the part of a block's `elements` (a count or bytes) that a rank receives in a gather or reduction."""
        return elements * (self.weight_shards - 1) / self.weight_shards

    def held(self, numels: Ints, moments: Ints, *, own_bucket: Ints, fp8: Ints) -> HeldElements:
        """Return the elements that a rank holds of parameters with `numels` elements and `moments` moments each.

        `own_bucket` are the indices of parameters that several stages share, `fp8` of parameters that are gathered in
        FP8.
        """
        count, gradients = sum(numels), self._buckets(numels, own_bucket, fp8).numel
        return HeldElements(count, 0, gradients, count, 0, [*zip(moments, numels, strict=True)])

    def _buckets(self, numels: Ints, own_bucket: Ints, fp8: Ints) -> BufferLayout:
        """Return the layout of the gradient buffer."""
        ranks = self.state_shards
        return bucket_layout(numels, self.bucket_elements, ranks=ranks, own_bucket=own_bucket, fp8_bucket=fp8)


class Zero1Plan(DataParallelPlan):
    """Plan in which each rank updates a shard of the parameters, which all ranks then gather (`Zero1`)."""

    weight_storage = "zero"
    reductions = gathers = 1

    @property
    def state_shards(self) -> int:
        """Number of parts into which the optimizer state is divided: one per rank."""
        return self.ranks

    def held(self, numels: Ints, moments: Ints, *, own_bucket: Ints, fp8: Ints) -> HeldElements:
        """Return the elements that a rank holds; see `DataParallelPlan.held`."""
        layout = self._buckets(numels, own_bucket, fp8)
        in_fp8 = sum(bucket.end - bucket.start for bucket in layout.buckets if bucket.params[0] in fp8)
        masters = min(sum(numels), layout.numel // self.ranks)
        released = min(sum(numels[i] for i in fp8), in_fp8 // self.ranks)
        updated = [*_with_most_moments(zip(moments, numels, strict=True), masters)]
        return HeldElements(layout.numel - in_fp8, in_fp8, layout.numel, masters, released, updated)


class FullyShardedPlan(DataParallelPlan):
    """Plan in which each rank holds a shard of everything, and replicas of the shards divide the optimizer state.

    `FullySharded` is the strategy.
    """

    weight_storage = "fsdp"
    gathers_blocks = True
    reductions = gathers = 1

    @property
    def state_shards(self) -> int:
        """Number of parts into which the optimizer state is divided: one per rank."""
        return self.ranks

    @property
    def weight_shards(self) -> int:
        """Number of parts into which weights and gradients are divided: the ranks of one replica."""
        return max(1, self.ranks // self.replicas)

    @property
    def step_group(self) -> tuple[int, int]:
        """Size and stride of the groups of ranks that hold the same shard."""
        return self.replicas, self.stride * self.weight_shards

    def received(self, elements: float) -> float:
        """Return the part of `elements` that a rank receives from replicas in a collective of the step."""
        return elements / self.weight_shards * (self.replicas - 1) / self.replicas

    def held(self, numels: Ints, moments: Ints, *, own_bucket: Ints, fp8: Ints) -> HeldElements:
        """Return the elements that a rank holds; see `DataParallelPlan.held`.

        Without replicas, values are in the masters; with replicas, masters are of a slice of them.
        """
        shards, multiple = [-(-count // self.weight_shards) for count in numels], ALIGN * self.replicas
        rooms = [-(-count // multiple) * multiple for count in shards]
        count, room, in_fp8 = sum(shards), sum(rooms), sum(rooms[i] for i in fp8)
        if self.replicas == 1:
            return HeldElements(0, in_fp8, room, count, count, [*zip(moments, shards, strict=True)])
        masters, released = min(count, room // self.replicas), min(sum(shards[i] for i in fp8), in_fp8 // self.replicas)
        updated = [*_with_most_moments(zip(moments, shards, strict=True), masters)]
        return HeldElements(room - in_fp8, in_fp8, room, masters, released, updated)


def _with_most_moments(tensors: Iterable[tuple[int, int]], count: int) -> Iterator[tuple[int, int]]:
    """Yield (moments, elements) for `count` elements of the tensors, from the largest number of moments down."""
    elements: Counter[int] = Counter()
    for moments, numel in tensors:
        elements[moments] += numel
    for moments in sorted(elements, reverse=True):
        taken = min(count, elements[moments])
        yield moments, taken
        count -= taken


def plan_type(zero: int, fsdp: bool) -> type[DataParallelPlan]:
    """Return the plan class for parallel.zero and parallel.fsdp. FSDP replaces ZeRO stage 1."""
    return FullyShardedPlan if fsdp else Zero1Plan if zero else DataParallelPlan
