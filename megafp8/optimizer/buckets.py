"""Where each gradient lies in the one flat buffer, and how the buffer is cut into buckets.

Backward hands in gradients roughly from the last parameter to the first. So the parameters are laid out in reverse,
and the buckets, cut one after the other from the start of the buffer, fill up in order: the first is complete, and its
all-reduce under way, while the rest of the backward pass still computes. Larger buckets use the network better, smaller
ones start earlier and leave less for the end.

A bucket is never cut inside a parameter, so one large parameter makes one large bucket. Every parameter starts on a
multiple of `align` elements (64 fp32 elements are 256 bytes, what CUDA's allocator, vector loads and cuBLASLt like to
see), and the gaps stay zero.

Pure arithmetic: the layout of a model that fits on no single machine can be computed and checked anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
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
class BufferLayout:
    """`slots[i]` is the place of parameter `i`; `buckets` follow each other without a gap and cover the buffer."""

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.buckets[-1].end if self.buckets else 0


def bucket_layout(numels: Sequence[int], bucket_elements: int, align: int = 64) -> BufferLayout:
    """Lay out parameters of `numels` elements, given in forward order, in backward order.

    A bucket closes as soon as it holds `bucket_elements` or more; only the last may hold fewer. Raises ValueError where
    `bucket_elements` is not positive.
    """
    if bucket_elements < 1:
        raise ValueError(f"bucket_elements is {bucket_elements}; a gradient bucket needs at least 1 element")
    assert min([align, *numels]) >= 1
    slots = [Slot(0, 0)] * len(numels)
    buckets: list[Bucket] = []
    members: list[int] = []
    bucket_start = end = 0
    for index in reversed(range(len(numels))):
        slots[index] = Slot(end, end + numels[index])
        end = -(-slots[index].end // align) * align
        members.append(index)
        if end - bucket_start >= bucket_elements or index == 0:
            buckets.append(Bucket(bucket_start, end, tuple(members)))
            bucket_start, members = end, []
    return BufferLayout(tuple(slots), tuple(buckets))
