from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.data_parallel.buckets import Bucket, BufferLayout, Run, Slot, bucket_layout


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


@given(
    numels=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    bucket_elements=st.integers(1, 20000),
    align=st.sampled_from([1, 8, 64]),
    ranks=st.integers(1, 9),
    data=st.data(),
)
def test_sharded_layout_properties(
    numels: list[int], bucket_elements: int, align: int, ranks: int, data: st.DataObject
) -> None:
    alone = data.draw(st.sets(st.integers(0, len(numels) - 1), max_size=2))
    layout = bucket_layout(numels, bucket_elements, align, ranks=ranks, own_bucket=alone)
    assert all(slot.start % align == 0 for slot in layout.slots)
    assert [i for bucket in layout.buckets for i in bucket.params] == list(reversed(range(len(numels))))
    for bucket in layout.buckets:
        assert len(bucket.params) == 1 or not alone & set(bucket.params)
        assert (bucket.end - bucket.start) % (align * ranks) == 0
        used = layout.slots[bucket.params[-1]].end
        assert used <= bucket.end < used + align * (ranks + 1)  # padded once
    owners = [[-1] * n for n in numels]
    for rank in range(ranks):
        owned = layout.owned(rank)
        for bucket, own in zip(layout.buckets, owned, strict=True):
            assert own.end - own.start == (bucket.end - bucket.start) // ranks
            assert own.start % align == 0
        runs = layout.runs(rank)
        assert len({run.param for run in runs}) == len(runs), "two runs of one parameter"
        for run in runs:
            slot = layout.slots[run.param]
            assert any(o.start <= slot.start + run.start < slot.start + run.end <= o.end for o in owned)
            for i in range(run.start, run.end):
                assert owners[run.param][i] == -1, "owned twice"
                owners[run.param][i] = rank
    assert all(rank >= 0 for owner in owners for rank in owner), "owned by nobody"
    assert all(owner == sorted(owner) for owner in owners)


def test_shards_by_hand() -> None:
    layout = bucket_layout([100, 64, 1], bucket_elements=128, ranks=2)
    assert layout.buckets == (Bucket(0, 128, (2, 1)), Bucket(128, 256, (0,)))
    assert layout.owned(0) == [Slot(0, 64), Slot(128, 192)]
    assert layout.runs(0) == [Run(2, 0, 1), Run(0, 0, 64)]
    assert layout.runs(1) == [Run(1, 0, 64), Run(0, 64, 100)]
    assert bucket_layout([100, 64, 1], 128).runs(0) == [Run(2, 0, 1), Run(1, 0, 64), Run(0, 0, 100)]


def test_what_stands_alone_is_cut_alike_in_every_layout() -> None:
    first, last = [4000, 300, 300, 300], [4000, 300, 64]  # a tied weight, and what else the two stages have
    layouts = [bucket_layout(numels, 3000, ranks=4, own_bucket={0}) for numels in (first, last)]
    for rank in range(4):
        a, b = ([run for run in layout.runs(rank) if run.param == 0] for layout in layouts)
        assert a == b != []


def _llama_405b_stage(tensor: int, layers: int) -> list[int]:
    """Elements of the parameters of a middle pipeline stage on one tensor-parallel rank."""
    h, ffn, kv = 16384, 53248, 1024
    cut = [(h + 2 * kv) * h, h * h, 2 * ffn * h, h * ffn]
    qkv, proj, gate_up, down = (n // tensor for n in cut)
    return [h, qkv, proj, h, gate_up, down] * layers


@pytest.mark.parametrize(("tensor", "layers", "ranks"), [(8, 8, 8), (8, 8, 64), (1, 126, 1000)])
def test_shards_of_a_405b_model(tensor: int, layers: int, ranks: int) -> None:
    numels = _llama_405b_stage(tensor, layers)
    start = time.process_time()
    layout: BufferLayout = bucket_layout(numels, 40_000_000, ranks=ranks)
    runs = [layout.runs(rank) for rank in {0, 1, ranks // 2, ranks - 1}]
    assert time.process_time() - start < 0.5
    assert layout.numel % (64 * ranks) == 0
    assert layout.numel - sum(numels) < len(layout.buckets) * 64 * (ranks + 1)
    assert layout.numel / sum(numels) < 1.001
    for found in runs:
        owned = sum(run.end - run.start for run in found)
        assert layout.numel // ranks - 64 * ranks * len(layout.buckets) <= owned <= layout.numel // ranks
    # So nobody has more than 1.001 of an equal share; padding is at the end of a bucket and spares the last rank.
    covered = sum(run.end - run.start for rank in range(ranks) for run in layout.runs(rank)) if ranks < 100 else None
    assert covered in (sum(numels), None)


def test_no_bucket_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="bucket_elements is 0"):
        bucket_layout([1], 0)


@given(
    numels=st.lists(st.integers(1, 5000), min_size=1, max_size=30),
    bucket_elements=st.integers(1, 20000),
    ranks=st.integers(1, 5),
    data=st.data(),
)
def test_parameters_that_stay_apart(numels: list[int], bucket_elements: int, ranks: int, data: st.DataObject) -> None:
    indices = st.sets(st.integers(0, len(numels) - 1))
    apart, alone = data.draw(indices), data.draw(indices)
    layout = bucket_layout(numels, bucket_elements, 64, ranks=ranks, own_bucket=alone, fp8_bucket=apart)
    assert sorted(i for bucket in layout.buckets for i in bucket.params) == list(range(len(numels)))
    assert [b.start for b in layout.buckets] == [0, *(b.end for b in layout.buckets)][: len(layout.buckets)]
    completed = [bucket.params[-1] for bucket in layout.buckets]
    assert completed == sorted(completed, reverse=True)
    for bucket in layout.buckets:
        assert len({i in apart for i in bucket.params}) == 1
        assert len(bucket.params) == 1 or not alone & set(bucket.params)
        assert list(bucket.params) == sorted(bucket.params, reverse=True)
        assert all(layout.slots[a].end <= layout.slots[b].start for a, b in pairwise(bucket.params))
        assert (bucket.end - bucket.start) % (64 * ranks) == 0
    for kind in (True, False):  # each kind fills its buckets as if it were alone
        sizes = [b.end - b.start for b in layout.buckets if (b.params[0] in apart) == kind and not alone]
        assert all(size >= bucket_elements for size in sizes[:-1])


def test_two_kinds_by_hand() -> None:
    layout = bucket_layout([10, 64, 10, 64, 10], bucket_elements=192, fp8_bucket={1, 3})
    assert layout.buckets == (Bucket(0, 128, (3, 1)), Bucket(128, 320, (4, 2, 0)))
    assert layout.slots == (Slot(256, 266), Slot(64, 128), Slot(192, 202), Slot(0, 64), Slot(128, 138))
