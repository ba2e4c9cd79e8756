"""What plans say a rank holds and sends, against layouts of buffers and sums done by hand."""

from __future__ import annotations

import pytest

from megafp8.parallel.data.buckets import bucket_layout
from megafp8.parallel.data.plan import FullyShardedPlan, Zero1Plan, plan_type

NUMELS, MOMENTS = [1000, 70, 64, 5000, 300], [2, 2, 1, 1, 2]


@pytest.mark.parametrize(
    ("zero", "fsdp", "storage"), [(0, False, "resident"), (1, False, "zero"), (0, True, "fsdp"), (1, True, "fsdp")]
)
def test_storage_of_weights(zero: int, fsdp: bool, storage: str) -> None:
    assert plan_type(zero, fsdp).weight_storage == storage


def test_a_replica_holds_and_updates_everything() -> None:
    held = plan_type(0, False)(4, 1, 2000, 1).held(NUMELS, MOMENTS, own_bucket=[], fp8=[])
    count = sum(NUMELS)
    assert (held.values, held.fp8, held.masters, held.released) == (count, 0, count, 0)
    assert held.gradients == bucket_layout(NUMELS, 2000).numel
    assert list(held.updated) == list(zip(MOMENTS, NUMELS, strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_zero_holds_at_most_its_shard(ranks: int) -> None:
    """No rank of the layout updates more, in all and in FP8, than the plan says; moments are those of the worst mix."""
    fp8 = [0, 3]
    held = Zero1Plan(ranks, 1, 2000, 1).held(NUMELS, MOMENTS, own_bucket=[4], fp8=fp8)
    layout = bucket_layout(NUMELS, 2000, ranks=ranks, own_bucket=[4], fp8_bucket=fp8)
    shards = [layout.shards(rank) for rank in range(ranks)]
    assert held.gradients == held.values + held.fp8 == layout.numel
    assert held.masters >= max(sum(x.end - x.start for x in shard) for shard in shards)
    assert held.released >= max(sum(x.end - x.start for x in shard if x.param in fp8) for shard in shards)
    kept = sum(moments * count for moments, count in held.updated)
    assert sum(count for _, count in held.updated) == held.masters
    assert kept >= max(sum(MOMENTS[x.param] * (x.end - x.start) for x in shard) for shard in shards)


def test_fsdp_holds_rows_of_everything() -> None:
    """Halves, rounded up. Weights are masters but for FP8 data; 2 replicas have half of the masters each, with padding,
    and values."""
    one, two = (FullyShardedPlan(2 * r, 1, 2000, r).held([1001, 70], [2, 1], own_bucket=[], fp8=[0]) for r in (1, 2))
    assert (one.values, one.fp8, one.masters, one.released) == (0, 512, 536, 536)
    assert (two.values, two.fp8, two.masters, two.released) == (128, 512, 320, 256)
    assert (one.gradients, two.gradients) == (512 + 64, 512 + 128)
    assert (list(one.updated), list(two.updated)) == ([(2, 501), (1, 35)], [(2, 320), (1, 0)])


def test_collectives_of_a_step() -> None:
    """Once a step: an all-reduce; a reduce-scatter and an all-gather; both, of the shards of 4 ranks in 2 replicas."""
    replicated, zero, fsdp = (plan_type(*how)(8, 2, 100, 2) for how in ((0, False), (1, False), (0, True)))
    assert [(x.reductions, x.gathers) for x in (replicated, zero, fsdp)] == [(2, 0), (1, 1), (1, 1)]
    assert replicated.step_group == zero.step_group == (8, 2)
    assert replicated.received(800) == zero.received(800) == 700
    assert fsdp.step_group == (2, 8)
    assert fsdp.received(800) == 100


def test_collectives_of_a_block() -> None:
    """4 ranks have a quarter each, and replicas all of it."""
    assert [plan_type(0, fsdp)(8, 2, 100, 2).gathered(800) for fsdp in (False, True)] == [0, 600]
