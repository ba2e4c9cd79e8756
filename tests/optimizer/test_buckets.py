from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.optimizer.buckets import Bucket, Slot, bucket_layout


@given(
    numels=st.lists(st.integers(1, 5000), max_size=40),
    bucket_elements=st.integers(1, 20000),
    align=st.sampled_from([1, 8, 64, 128]),
)
def test_layout_properties(numels: list[int], bucket_elements: int, align: int) -> None:
    layout = bucket_layout(numels, bucket_elements, align)
    assert [slot.end - slot.start for slot in layout.slots] == numels
    assert all(slot.start % align == 0 for slot in layout.slots)
    backward = layout.slots[::-1]
    assert all(a.end <= b.start < a.end + align for a, b in pairwise(backward))  # in order, no overlap

    assert [i for bucket in layout.buckets for i in bucket.params] == list(reversed(range(len(numels))))
    assert [b.start for b in layout.buckets] == [0, *(b.end for b in layout.buckets)][: len(layout.buckets)]
    assert layout.numel == (layout.buckets[-1].end if numels else 0)
    for bucket in layout.buckets:
        assert bucket.start % align == 0
        assert bucket.end % align == 0
        for i in bucket.params:  # no parameter is cut by a bucket's edge
            assert bucket.start <= layout.slots[i].start < layout.slots[i].end <= bucket.end
    for bucket in layout.buckets[:-1]:
        assert bucket.end - bucket.start >= bucket_elements
        assert layout.slots[bucket.params[-1]].start - bucket.start < bucket_elements  # and closed at once


def test_layout_by_hand() -> None:
    layout = bucket_layout([100, 64, 1], bucket_elements=128)
    assert layout.slots == (Slot(128, 228), Slot(64, 128), Slot(0, 1))
    assert layout.buckets == (Bucket(0, 128, (2, 1)), Bucket(128, 256, (0,)))


def test_a_405b_model() -> None:
    """Llama 3 405B: 126 layers, h 16384, ffn 53248, 8 of 128 heads for keys and values, vocabulary 128256."""
    h, ffn, kv, vocabulary = 16384, 53248, 1024, 128256
    layer = [h, (h + 2 * kv) * h, h * h, h, 2 * ffn * h, h * ffn]
    numels = [vocabulary * h, *(layer * 126), h, vocabulary * h]
    start = time.process_time()
    layout = bucket_layout(numels, 40_000_000)
    assert time.process_time() - start < 1.0  # allocating 1.6 TB would take longer, and fail
    assert layout.numel == sum(numels) == 405_853_388_800  # every shape is a multiple of 64
    assert len(layout.buckets) == 2 + 126 * 4  # one for each large matrix; the vectors join the next one


def test_no_bucket_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="bucket_elements is 0"):
        bucket_layout([1], 0)
