"""The layout of the gradient buffer: by hand, its properties for random parameters, and that of a very large model."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.parallel.data.buckets import Bucket, ParamRange, Slot, bucket_layout


def test_layout_by_hand() -> None:
    layout = bucket_layout([100, 64, 1], bucket_elements=128)
    assert layout.slots == (Slot(128, 228), Slot(64, 128), Slot(0, 1))
    assert layout.buckets == (Bucket(0, 128, (2, 1)), Bucket(128, 256, (0,)))
    assert layout.shards(0) == [ParamRange(2, 0, 1), ParamRange(1, 0, 64), ParamRange(0, 0, 100)]


def test_shards_by_hand() -> None:
    layout = bucket_layout([100, 64, 1], bucket_elements=128, ranks=2)
    assert layout.buckets == (Bucket(0, 128, (2, 1)), Bucket(128, 256, (0,)))
    assert layout.owned(0) == [Slot(0, 64), Slot(128, 192)]
    assert layout.shards(0) == [ParamRange(2, 0, 1), ParamRange(0, 0, 64)]
    assert layout.shards(1) == [ParamRange(1, 0, 64), ParamRange(0, 64, 100)]


def test_fp8_buckets_by_hand() -> None:
    layout = bucket_layout([10, 64, 10, 64, 10], bucket_elements=192, fp8_bucket={1, 3})
    assert layout.buckets == (Bucket(0, 128, (3, 1)), Bucket(128, 320, (4, 2, 0)))
    assert layout.slots == (Slot(256, 266), Slot(64, 128), Slot(192, 202), Slot(0, 64), Slot(128, 138))


@given(
    numels=st.lists(st.integers(1, 5000), max_size=30),
    bucket_elements=st.integers(1, 20000),
    align=st.sampled_from([1, 8, 64, 128]),
    ranks=st.integers(1, 9),
    data=st.data(),
)
def test_properties(numels: list[int], bucket_elements: int, align: int, ranks: int, data: st.DataObject) -> None:
    indices = st.sets(st.integers(0, max(0, len(numels) - 1)))
    fp8, own = data.draw(st.just(set()) | indices), data.draw(st.just(set()) | indices)
    layout = bucket_layout(numels, bucket_elements, align, ranks=ranks, own_bucket=own, fp8_bucket=fp8)
    assert [slot.end - slot.start for slot in layout.slots] == numels
    assert all(slot.start % align == 0 for slot in layout.slots)
    assert sorted(i for bucket in layout.buckets for i in bucket.params) == list(range(len(numels)))
    assert [b.start for b in layout.buckets] == [0, *(b.end for b in layout.buckets)][: len(layout.buckets)]
    assert layout.numel == (layout.buckets[-1].end if numels else 0)
    completed = [bucket.params[-1] for bucket in layout.buckets]
    assert completed == sorted(completed, reverse=True)
    for bucket in layout.buckets:
        assert len({i in fp8 for i in bucket.params}) == 1
        assert len(bucket.params) == 1 or not own & set(bucket.params)
        assert (bucket.end - bucket.start) % (align * ranks) == 0
        slots = [layout.slots[i] for i in bucket.params]
        assert list(bucket.params) == sorted(bucket.params, reverse=True)
        assert slots[0].start == bucket.start
        assert all(a.end <= b.start < a.end + align for a, b in pairwise(slots))  # in order, no overlap
        assert slots[-1].end <= bucket.end < slots[-1].end + align * (ranks + 1)  # padded once
    for kind in (True, False):  # each kind fills its buckets as if the other did not exist
        buckets = [b for b in layout.buckets if (b.params[0] in fp8) == kind and not own]
        for bucket in buckets[:-1]:
            assert bucket.end - bucket.start >= bucket_elements
            assert layout.slots[bucket.params[-1]].start - bucket.start < bucket_elements  # and closed at once
    if not fp8:
        assert [i for bucket in layout.buckets for i in bucket.params] == list(reversed(range(len(numels))))
    owners = [[-1] * n for n in numels]
    for rank in range(ranks):
        owned = layout.owned(rank)
        for bucket, slot in zip(layout.buckets, owned, strict=True):
            assert slot.end - slot.start == (bucket.end - bucket.start) // ranks
            assert slot.start % align == 0
        shards = layout.shards(rank)
        assert len({shard.param for shard in shards}) == len(shards), "two shards of one parameter"
        for param, start, end in shards:
            at = layout.slots[param].start
            assert any(slot.start <= at + start < at + end <= slot.end for slot in owned)
            assert owners[param][start:end] == [-1] * (end - start), "owned twice"
            owners[param][start:end] = [rank] * (end - start)
    assert all(rank >= 0 for owner in owners for rank in owner), "owned by no rank"
    assert all(owner == sorted(owner) for owner in owners)


def test_a_parameter_with_its_own_bucket_is_sharded_alike_in_every_layout() -> None:
    first, last = [4000, 300, 300, 300], [4000, 300, 64]  # a tied weight, and what else the two stages have
    layouts = [bucket_layout(numels, 3000, ranks=4, own_bucket={0}) for numels in (first, last)]
    for rank in range(4):
        a, b = ([shard for shard in layout.shards(rank) if shard.param == 0] for layout in layouts)
        assert a == b != []


def _llama_405b(tensor: int, layers: int) -> list[int]:
    """Elements of the parameters of some layers of Llama 3 405B on one tensor-parallel rank.

    Hidden size 16384, ffn 53248, 8 of 128 heads for keys and values.
    """
    h, ffn, kv = 16384, 53248, 1024
    matrices = [(h + 2 * kv) * h, h * h, 2 * ffn * h, h * ffn]
    qkv, proj, gate_up, down = (n // tensor for n in matrices)
    return [h, qkv, proj, h, gate_up, down] * layers


def test_a_405b_model() -> None:
    h, vocabulary = 16384, 128256
    numels = [vocabulary * h, *_llama_405b(1, 126), h, vocabulary * h]
    start = time.process_time()
    layout = bucket_layout(numels, 40_000_000)
    assert time.process_time() - start < 1.0  # allocating 1.6 TB would take longer, and fail
    assert layout.numel == sum(numels) == 405_853_388_800  # every shape is a multiple of 64
    assert len(layout.buckets) == 2 + 126 * 4  # one for each large matrix; the vectors join the next one


@pytest.mark.parametrize(("tensor", "layers", "ranks"), [(8, 8, 8), (8, 8, 64), (1, 126, 1000)])
def test_shards_of_a_405b_model(tensor: int, layers: int, ranks: int) -> None:
    numels = _llama_405b(tensor, layers)
    start = time.process_time()
    layout = bucket_layout(numels, 40_000_000, ranks=ranks)
    shards = [layout.shards(rank) for rank in {0, 1, ranks // 2, ranks - 1}]
    assert time.process_time() - start < 0.5
    assert layout.numel - sum(numels) < len(layout.buckets) * 64 * (ranks + 1)
    assert layout.numel / sum(numels) < 1.001
    for found in shards:
        owned = sum(end - start for _, start, end in found)
        assert layout.numel // ranks - 64 * ranks * len(layout.buckets) <= owned <= layout.numel // ranks


def test_no_bucket_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="bucket_elements is 0"):
        bucket_layout([1], 0)
