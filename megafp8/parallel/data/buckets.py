"""Layout of the flat gradient buffer: the place of each gradient, and the buckets that are reduced together.

Backward produces gradients roughly from the last parameter to the first. Parameters are laid out in that order, so the
buckets, consecutive ranges of the buffer, complete one after another: the first bucket is reduced while the rest of the
backward pass still computes. Larger buckets use the network better; smaller buckets start earlier and leave less for
the end. A parameter is never split between buckets. Every parameter starts on a multiple of `align` elements (64 fp32
elements are 256 bytes, which CUDA's allocator, vector loads and cuBLASLt prefer); the gaps stay zero.

If the buffer is sharded over the `ranks` of data parallelism (ZeRO stage 1), every bucket is padded to equal, aligned
slices: rank r sums, updates and sends the r-th slice. Slices ignore parameter boundaries; the part of a parameter that
a rank owns, if any, is one flat range. A parameter that other layers share, such as the tied weights of the first and
last pipeline stage, has its own bucket (`own_bucket`): all stages then slice it in the same way, and the owners in each
stage can communicate. A bucket's slices are equal in bytes only if the whole bucket has one dtype, so parameters that
are gathered in FP8 (`fp8_bucket`) fill separate buckets. Two buckets are then open at a time, ordered by when they are
complete.

The layout is pure arithmetic, so the layout of any model can be computed and checked anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ALIGN = 64
"""Number of elements to a multiple of which parameters are aligned."""


class Slot(NamedTuple):
    """Elements `[start, end)` of the buffer."""

    start: int
    end: int


class Bucket(NamedTuple):
    """Elements `[start, end)` of the buffer, including padding, and the indices of its parameters in buffer order."""

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
    """Layout of a gradient buffer.

    Attributes:
        slots: Place of each parameter, without padding.
        buckets: Buckets, which cover the buffer without gaps. The length of each is a multiple of `ranks`.
        ranks: Number of ranks over which each bucket is split evenly.
    """

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    ranks: int = 1

    @property
    def numel(self) -> int:
        """Number of elements of the whole buffer."""
        return self.buckets[-1].end if self.buckets else 0

    @property
    def gaps(self) -> list[Slot]:
        """Padding, in buffer order."""
        ends = [0, *(slot.end for slot in sorted(self.slots))]
        starts = [*(slot.start for slot in sorted(self.slots)), self.numel]
        return [Slot(end, start) for end, start in zip(ends, starts) if end < start]

    def owned(self, rank: int) -> list[Slot]:
        """Return the slice of each bucket that `rank` owns, including padding."""
        assert 0 <= rank < self.ranks
        lengths = [(bucket.end - bucket.start) // self.ranks for bucket in self.buckets]
        starts = [bucket.start + rank * length for bucket, length in zip(self.buckets, lengths)]
        return [Slot(start, start + length) for start, length in zip(starts, lengths)]

    def shards(self, rank: int) -> list[ParamRange]:
        """Return the parts of parameters that `rank` owns, in buffer order."""
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
    align: int = ALIGN,
    *,
    ranks: int = 1,
    own_bucket: Collection[int] = (),
    fp8_bucket: Collection[int] = (),
) -> BufferLayout:
    """Return the layout, in backward order, of parameters with `numels` elements, given in forward order.

    A bucket is closed as soon as it holds `bucket_elements` or more elements. Only the last bucket, and buckets next to
    a parameter in `own_bucket`, may hold fewer. Parameters in `fp8_bucket` share buckets only with each other. The
    length of a bucket is a multiple of `align * ranks`.

    Raises:
        ValueError: If `bucket_elements` is not positive.
    """
    if bucket_elements < 1:
        raise ValueError(f"bucket_elements is {bucket_elements}; a gradient bucket needs at least 1 element")
    assert min([align, ranks, *numels]) >= 1
    rooms = [_round_up(n, align) for n in numels]
    members = _members(rooms, bucket_elements, set(own_bucket), set(fp8_bucket))
    return packed(numels, rooms, members, align * ranks, ranks)


def packed(
    numels: Sequence[int], rooms: Sequence[int], members: Sequence[Sequence[int]], multiple: int, ranks: int
) -> BufferLayout:
    """Return the layout of buckets with these `members`, the indices of their parameters, in buffer order.

    A parameter has `numels` elements and room for `rooms`. The length of a bucket is a multiple of `multiple`.
    """
    slots = [Slot(0, 0)] * len(numels)
    buckets: list[Bucket] = []
    for indices in members:
        start = end = buckets[-1].end if buckets else 0
        for index in indices:
            slots[index] = Slot(end, end + numels[index])
            end += rooms[index]
        buckets.append(Bucket(start, start + _round_up(end - start, multiple), tuple(indices)))
    return BufferLayout(tuple(slots), tuple(buckets), ranks)


def _members(
    numels: Sequence[int], bucket_elements: int, own_bucket: set[int], fp8_bucket: set[int]
) -> list[list[int]]:
    """Return the parameters of each bucket, in the order in which backward completes the buckets."""
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
    """Round `number` up to a multiple of `multiple`."""
    return -(-number // multiple) * multiple
