"""Layout of the flat gradient buffer: where each gradient lies, and the buckets that are reduced together.

Backward produces gradients roughly from the last parameter to the first. Parameters are laid out in that order, so the
buckets, consecutive ranges of the buffer, complete one after another: the first is being reduced while the rest of the
backward pass still computes. Larger buckets use the network better; smaller ones start earlier and leave less for the
end. A parameter is never split between buckets. Every parameter starts on a multiple of `align` elements (64 fp32
elements are 256 bytes, as CUDA's allocator, vector loads and cuBLASLt prefer); the gaps stay zero.

Sharded over the `ranks` of data parallelism (ZeRO stage 1), every bucket is padded to equal, aligned slices: rank r
sums, updates and sends the r-th. Slices ignore parameter boundaries; what a rank owns of one parameter, if anything, is
one flat range. A parameter that other layouts share, as the tied weights of the first and last pipeline stage, has a
bucket of its own (`own_bucket`): then it is sliced alike in all of them, and the owners in each can communicate. A
bucket's slices are equal in bytes only if all of it has one dtype, so parameters that are gathered in FP8
(`fp8_bucket`) fill separate buckets. Two buckets are then open at a time, ordered by when they are complete.

Pure arithmetic: the layout of any model can be computed and checked anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Slot(NamedTuple):
    """Elements `[start, end)` of the buffer."""

    start: int
    end: int


class Bucket(NamedTuple):
    """Elements `[start, end)` of the buffer, padding included, and the indices of its parameters in buffer order."""

    start: int
    end: int
    params: tuple[int, ...]


class ParamRange(NamedTuple):
    """Elements `[start, end)` of parameter `param` in row-major order."""

    param: int
    start: int
    end: int


@dataclass(frozen=True)
class BufferLayout:
    """`slots[i]` is where parameter `i` lies, without padding; `buckets` cover the buffer without gaps.

    The length of each bucket is a multiple of `ranks`, over which it is split evenly.
    """

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    ranks: int = 1

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.buckets[-1].end if self.buckets else 0

    @property
    def gaps(self) -> list[Slot]:
        """The padding, in buffer order."""
        ends = [0, *(slot.end for slot in sorted(self.slots))]
        starts = [*(slot.start for slot in sorted(self.slots)), self.numel]
        return [Slot(end, start) for end, start in zip(ends, starts) if end < start]

    def owned(self, rank: int) -> list[Slot]:
        """The slice of each bucket that `rank` owns, padding included."""
        assert 0 <= rank < self.ranks
        lengths = [(bucket.end - bucket.start) // self.ranks for bucket in self.buckets]
        starts = [bucket.start + rank * length for bucket, length in zip(self.buckets, lengths)]
        return [Slot(start, start + length) for start, length in zip(starts, lengths)]

    def shards(self, rank: int) -> list[ParamRange]:
        """What `rank` owns of the parameters, in buffer order."""
        shards = []
        for bucket, owned in zip(self.buckets, self.owned(rank)):
            for index in bucket.params:
                slot = self.slots[index]
                start, end = max(owned.start, slot.start), min(owned.end, slot.end)
                if start < end:
                    shards.append(ParamRange(index, start - slot.start, end - slot.start))
        return shards


def bucket_layout(
    numels: Sequence[int],
    bucket_elements: int,
    align: int = 64,
    *,
    ranks: int = 1,
    own_bucket: Collection[int] = (),
    fp8_bucket: Collection[int] = (),
) -> BufferLayout:
    """The layout, in backward order, of parameters of `numels` elements, given in forward order.

    A bucket is closed as soon as it holds `bucket_elements` or more; only the last, and those next to a parameter in
    `own_bucket`, may hold fewer. Parameters in `fp8_bucket` share buckets with each other only. The length of a bucket
    is a multiple of `align * ranks`. Raises ValueError where `bucket_elements` is not positive.
    """
    if bucket_elements < 1:
        raise ValueError(f"bucket_elements is {bucket_elements}; a gradient bucket needs at least 1 element")
    assert min([align, ranks, *numels]) >= 1
    slots = [Slot(0, 0)] * len(numels)
    buckets: list[Bucket] = []
    aligned = [_round_up(n, align) for n in numels]
    for members in _members(aligned, bucket_elements, set(own_bucket), set(fp8_bucket)):
        start = end = buckets[-1].end if buckets else 0
        for index in members:
            slots[index] = Slot(end, end + numels[index])
            end += aligned[index]
        buckets.append(Bucket(start, start + _round_up(end - start, align * ranks), tuple(members)))
    return BufferLayout(tuple(slots), tuple(buckets), ranks)


def _members(
    numels: Sequence[int], bucket_elements: int, own_bucket: set[int], fp8_bucket: set[int]
) -> list[list[int]]:
    """The parameters of each bucket, in the order in which backward completes the buckets."""
    closed: list[list[int]] = []
    opened: dict[bool, list[int]] = {True: [], False: []}  # by whether it is an FP8 bucket
    for index in reversed(range(len(numels))):
        kind = index in fp8_bucket
        if index in own_bucket and opened[kind]:
            closed.append(opened[kind])
            opened[kind] = []
        opened[kind].append(index)
        if index in own_bucket or sum(numels[i] for i in opened[kind]) >= bucket_elements:
            closed.append(opened[kind])
            opened[kind] = []
    closed += [members for members in opened.values() if members]
    return sorted(closed, key=lambda members: -members[-1])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
