"""Where each gradient lies in the one flat buffer, and how the buffer is cut into buckets.

Backward hands in gradients roughly from the last parameter to the first. So the parameters are laid out in reverse,
and the buckets, cut one after the other from the start of the buffer, fill up in order: the first is complete, and its
all-reduce under way, while the rest of the backward pass still computes. Larger buckets use the network better, smaller
ones start earlier and leave less for the end.

A bucket is never cut inside a parameter, so one large parameter makes one large bucket. Every parameter starts on a
multiple of `align` elements (64 fp32 elements are 256 bytes, what CUDA's allocator, vector loads and cuBLASLt like to
see), and the gaps stay zero.

Sharded over the `ranks` of data parallelism (ZeRO stage 1), every bucket is padded so that each rank owns an equal
slice of it, on the same alignment: rank r sums, updates and hands out the r-th. Slices know nothing of parameters; what
a rank owns of one, if anything, is a single run of its elements. A parameter that other layouts share, as the tied
weights of the first and last pipeline stage, lies in a bucket of its own (`alone`): then it is cut at the same elements
in all of them, and its owners in each can talk to each other.

A bucket's slices are equal in bytes only if all of it has one dtype. So parameters that travel in another (`apart`, FP8
codes) fill buckets of their own. Two buckets are then open at a time, and they follow each other as they fill up.

Pure arithmetic: the layout of a model that fits on no single machine can be computed and checked anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """Elements `[start, end)` of the buffer: one parameter, without its padding."""

    start: int
    end: int


@dataclass(frozen=True)
class Bucket:
    """Elements `[start, end)` of the buffer, padding included, and the parameters in it in buffer order."""

    start: int
    end: int
    params: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Elements `[start, end)` of parameter `param`, counted row by row."""

    param: int
    start: int
    end: int


@dataclass(frozen=True)
class BufferLayout:
    """`slots[i]` is the place of parameter `i`; `buckets` follow each other without a gap and cover the buffer.

    The length of each bucket is a multiple of `ranks`, over which it is cut into equal slices.
    """

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    ranks: int = 1

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.buckets[-1].end if self.buckets else 0

    def owned(self, rank: int) -> list[Slot]:
        """What `rank` owns: one slice of each bucket, padding included."""
        assert 0 <= rank < self.ranks
        lengths = [(bucket.end - bucket.start) // self.ranks for bucket in self.buckets]
        starts = [bucket.start + rank * length for bucket, length in zip(self.buckets, lengths)]
        return [Slot(start, start + length) for start, length in zip(starts, lengths)]

    def runs(self, rank: int) -> list[Run]:
        """What `rank` owns of the parameters, in buffer order."""
        found = []
        for bucket, own in zip(self.buckets, self.owned(rank)):
            for index in bucket.params:
                slot = self.slots[index]
                start, end = max(own.start, slot.start), min(own.end, slot.end)
                if start < end:
                    found.append(Run(index, start - slot.start, end - slot.start))
        return found


def bucket_layout(
    numels: Sequence[int],
    bucket_elements: int,
    align: int = 64,
    *,
    ranks: int = 1,
    alone: Collection[int] = (),
    apart: Collection[int] = (),
) -> BufferLayout:
    """Lay out parameters of `numels` elements, given in forward order, in backward order.

    A bucket closes as soon as it holds `bucket_elements` or more; only the last, and those next to a parameter in
    `alone`, may hold fewer. Those in `apart` share buckets with each other only. The length of a bucket is a multiple
    of `align * ranks`. Raises ValueError where `bucket_elements` is not positive.
    """
    if bucket_elements < 1:
        raise ValueError(f"bucket_elements is {bucket_elements}; a gradient bucket needs at least 1 element")
    assert min([align, ranks, *numels]) >= 1
    slots = [Slot(0, 0)] * len(numels)
    buckets: list[Bucket] = []
    for members in _members([_round_up(n, align) for n in numels], bucket_elements, set(alone), set(apart)):
        start = end = buckets[-1].end if buckets else 0
        for index in members:
            slots[index] = Slot(end, end + numels[index])
            end = _round_up(slots[index].end, align)
        buckets.append(Bucket(start, start + _round_up(end - start, align * ranks), tuple(members)))
    return BufferLayout(tuple(slots), tuple(buckets), ranks)


def _members(numels: Sequence[int], bucket_elements: int, alone: set[int], apart: set[int]) -> list[list[int]]:
    """The parameters of each bucket, in the order in which backward completes them."""
    closed: list[list[int]] = []
    opened: dict[bool, list[int]] = {True: [], False: []}  # by whether its parameters stay apart
    for index in reversed(range(len(numels))):
        kind = index in apart
        if index in alone and opened[kind]:
            closed.append(opened[kind])
            opened[kind] = []
        opened[kind].append(index)
        if index in alone or sum(numels[i] for i in opened[kind]) >= bucket_elements:
            closed.append(opened[kind])
            opened[kind] = []
    closed += [members for members in opened.values() if members]
    return sorted(closed, key=lambda members: -members[-1])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
