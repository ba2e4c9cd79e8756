"""The gradient buffer: both ways in, the order in which buckets are reduced, and the sums that ranks get."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafp8.linear.grad_sink import deliver, was_added
from megafp8.parallel import collectives
from megafp8.parallel.data.grad_buffer import GradBuffer, gradient_of, main_grad_of
from megafp8.parallel.sharding import spec_of
from tests.tiny_model import batch, initial_values, loss_sum, make_buffer, make_param, tiny_params
from tests.world import World


def _record_starts(buffer: GradBuffer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The indices of the buckets that are started, in order, instead of reducing them."""
    found: list[int] = []
    starts = [bucket.start for bucket in buffer.layout.buckets]

    def all_reduce_async(x: torch.Tensor, group: object) -> collectives.CollectiveWork:
        found.append(starts.index(x.storage_offset()))
        return collectives.DONE

    monkeypatch.setattr(collectives, "all_reduce_async", all_reduce_async)
    return found


Three = tuple[list[Any], GradBuffer, list[int]]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Three:
    """Three parameters in three buckets; the last parameter is bucket 0. The middle one has two uses."""
    params = [make_param(f"p{i}", 4, num_uses=2 if i == 1 else 1) for i in range(3)]
    buffer = make_buffer(params)
    assert len(buffer.layout.buckets) == 3
    return params, buffer, _record_starts(buffer, monkeypatch)


def test_views_and_dtypes() -> None:
    params = [make_param("a", [[0.0] * 5] * 3), make_param("b", 7, dtype=torch.bfloat16)]
    buffer = make_buffer(params)
    for param in params:
        assert main_grad_of(param).shape == param.shape
        assert main_grad_of(param).dtype == torch.float32
        assert main_grad_of(param).untyped_storage().data_ptr() == buffer.flat.untyped_storage().data_ptr()
    with pytest.raises(AssertionError, match="without main_grad"):
        main_grad_of(make_param("c", 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sink_adds_in_fp32(dtype: torch.dtype) -> None:
    param = make_param("p", 1)
    make_buffer([param])
    deliver(param, torch.tensor([256.0], dtype=dtype))
    deliver(param, torch.tensor([1.0], dtype=dtype))  # 257 has no bf16
    assert main_grad_of(param).item() == 257.0
    with pytest.raises(AssertionError, match="gradient of shape"):
        deliver(param, torch.ones(1, 1, dtype=dtype))  # would broadcast


def test_autograd_adds_in_fp32_and_leaves_no_grad() -> None:
    param = make_param("p", [1.0], dtype=torch.bfloat16)
    make_buffer([param])
    (256 * param).sum().backward()
    (1 * param).sum().backward()
    assert main_grad_of(param).item() == 257.0
    assert param.grad is None


def test_a_model_with_both_ways_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are torch's, and every bucket is reduced during the last backward; again in a second step, which
    does not see what the memory had before."""
    p = tiny_params()
    buffer = make_buffer(p.values(), 64)
    starts = _record_starts(buffer, monkeypatch)
    reference = {name: torch.tensor(value, requires_grad=True) for name, value in initial_values().items()}
    for step in range(2):
        for i, row in enumerate(batch(0, 3)):
            if step == 0:
                loss_sum(reference, row, torch.nn.functional.linear).backward()
            loss = loss_sum(p, row)
            if i == 2:
                buffer.start_overlap()
            assert starts == []
            loss.backward()
        assert starts == [0, 1, 2, 3]
        buffer.finish()
        assert starts == [0, 1, 2, 3]
        for name, param in p.items():
            expected = reference[name].grad
            assert expected is not None
            torch.testing.assert_close(main_grad_of(param).double(), expected, rtol=1e-5, atol=1e-5)
        buffer.clear()
        buffer.flat.fill_(torch.nan)
        starts.clear()


def test_buckets_start_in_order_and_when_complete(three: Three) -> None:
    params, buffer, starts = three
    one = torch.ones(4)
    deliver(params[1], one)  # an earlier micro-batch does not count
    buffer.start_overlap()
    deliver(params[1], one)
    deliver(params[2], one)
    assert starts == [0]  # the second use of params[1] is missing
    deliver(params[0], one)
    assert starts == [0]  # bucket 2 is complete and waits for bucket 1
    was_added(params[1])
    assert starts == [0, 1, 2]


def test_overlap_over_several_micro_batches(three: Three) -> None:
    params, buffer, starts = three
    buffer.start_overlap(micro_batches=2)
    for use in range(4):
        for param in params if use < 2 else params[1:2]:
            was_added(param)
        assert starts == [[], [0], [0], [0, 1, 2]][use]


def test_finish_starts_what_had_no_gradient(three: Three) -> None:
    params, buffer, starts = three
    buffer.clear()
    buffer.flat.fill_(torch.nan)
    buffer.start_overlap()
    deliver(params[2], torch.ones(4))
    deliver(params[0], torch.ones(4))
    buffer.finish()
    assert starts == [0, 1, 2]
    assert [main_grad_of(param).sum() for param in params] == [4, 0, 4]


def test_misuse_is_an_error(three: Three) -> None:
    params, buffer, _ = three
    buffer.start_overlap()
    was_added(params[0])
    with pytest.raises(AssertionError, match="p0 received more gradients"):
        was_added(params[0])
    was_added(params[2])
    with pytest.raises(AssertionError, match="p2 came after its bucket was reduced"):
        was_added(params[2])
    buffer.finish()
    with pytest.raises(AssertionError, match="clear"):
        buffer.start_overlap()
    buffer.clear()
    buffer.start_overlap()  # the counters start afresh
    was_added(params[0])


def test_a_buffer_and_its_parameters_are_freed() -> None:
    """Nothing keeps the largest tensors of a model alive once the model and its buffer are gone."""
    param = make_param("w", 4)
    buffer = make_buffer([param])
    (param * 2).sum().backward()
    gone = [weakref.ref(param), weakref.ref(buffer.flat)]
    del param, buffer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_one_rank_rounds_nothing() -> None:
    param = make_param("p", 1)
    buffer = make_buffer([param], sharded=True, reduce_dtype=torch.bfloat16)
    deliver(param, torch.tensor([257.0]))
    buffer.finish()
    assert [gradient_of(shard).tolist() for shard in buffer.shards] == [[257.0]]


def _uneven_case() -> list[list[float]]:
    """Rank 0 produces gradients forward, rank 1 backward and leaves p1 unused, in both steps."""
    rank = dist.get_rank()
    params = [make_param(f"p{i}", 4) for i in range(4)]
    buffer = make_buffer(params, 64, dist.group.WORLD)
    sums = []
    for step in range(2):
        buffer.clear()
        for micro_batch in range(3):
            if micro_batch == 2:
                buffer.start_overlap()
            for i in [0, 1, 2, 3] if rank == 0 else [3, 2, 0]:
                deliver(params[i], torch.full((4,), 10.0**i * (1 + step)))
        buffer.finish()
        sums.append([main_grad_of(param)[0].item() for param in params])
    return sums


def test_ranks_that_disagree_about_order_and_use_still_match(world2: World) -> None:
    expected = [[6.0, 30.0, 600.0, 6000.0], [12.0, 60.0, 1200.0, 12000.0]]
    assert world2.run(_uneven_case) == [expected, expected]


def _bf16_case(sharded: bool) -> list[float]:
    """Micro-batches of 256 and 1 on each rank: 257 is sent as 256, and the sum is 512."""
    param = make_param("p", 200)
    buffer = make_buffer([param], 64, dist.group.WORLD, sharded=sharded, reduce_dtype=torch.bfloat16)
    for gradient in (256.0, 1.0):
        deliver(param, torch.full((200,), gradient))
    assert main_grad_of(param)[0] == 257.0
    buffer.finish()
    return [x for shard in buffer.shards for x in gradient_of(shard).tolist()]


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_reduced_in_bf16(world2: World, sharded: bool) -> None:
    a, b = world2.run(_bf16_case, sharded)
    assert (a + b if sharded else a) == [512.0] * 200
    assert sharded or a == b


def _sharded_case(overlap: bool) -> tuple[list[tuple[str, int, int]], list[list[float]], bool]:
    """Each rank has 1 + rank times 1, 2, 3, ... for every parameter; the shards and sums that it then owns."""
    params = [make_param(f"p{i}", n) for i, n in enumerate([100, 64, 300, 5])]
    buffer = make_buffer(params, 64, dist.group.WORLD, sharded=True, own_bucket=[params[2]])
    for _ in range(2):
        buffer.clear()
        if overlap:
            buffer.start_overlap()
        for param in reversed(params):
            deliver(param, (1.0 + dist.get_rank()) * torch.arange(1, 1 + param.numel()))
        buffer.finish()
    shards = [(spec_of(s.param).shards[0].name, s.start, s.end) for s in buffer.shards]
    own_bucket = all(bucket.params == (2,) or 2 not in bucket.params for bucket in buffer.layout.buckets)
    return shards, [gradient_of(s).tolist() for s in buffer.shards], own_bucket


@pytest.mark.parametrize("overlap", [False, True])
def test_each_rank_has_its_shard_of_the_sums(world4: World, overlap: bool) -> None:
    seen: dict[str, list[int]] = {f"p{i}": [] for i in range(4)}
    for shards, sums, own_bucket in world4.run(_sharded_case, overlap):
        assert own_bucket
        for (name, start, end), values in zip(shards, sums, strict=True):
            assert values == [10.0 * (i + 1) for i in range(start, end)]  # 1 + 2 + 3 + 4
            seen[name] += range(start, end)
    assert {name: sorted(places) for name, places in seen.items()} == {
        f"p{i}": list(range(n)) for i, n in enumerate([100, 64, 300, 5])
    }
