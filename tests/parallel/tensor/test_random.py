"""Layout-independent random numbers: slices, chunks, distribution."""

from __future__ import annotations

import pytest
import torch

from megafp8.numerics.philox import key_of
from megafp8.parallel.sharding import Init, ParamShard, shard_dim
from megafp8.parallel.tensor import random as layout_random
from megafp8.parallel.tensor.random import fill_, normal_at


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_slice_is_a_slice(dim: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, init = (12, 8), Init("normal", 0.02)
    whole = fill_(torch.empty(shape), ParamShard("w", shape, (0, 0), shape), init, seed=3)
    monkeypatch.setattr(layout_random, "_CHUNK", 17)  # several chunks, none a multiple of a row
    for rank in range(ranks):
        shard = shard_dim("w", shape, dim, rank, ranks)
        assert torch.equal(fill_(torch.empty(shard.shape), shard, init, seed=3), whole.chunk(ranks, dim)[rank])


def test_streams_differ_and_are_standard_normal() -> None:
    index = torch.arange(200_000)
    a, b = normal_at(index, key_of(1, "a")), normal_at(index, key_of(1, "b"))
    assert not torch.equal(a, normal_at(index, key_of(2, "a")))
    for x in (a, b):
        assert abs(x.mean()) < 0.01
        assert abs(x.std() - 1) < 0.01
        assert abs((x**4).mean() - 3) < 0.1
    assert abs((a * b).mean()) < 0.01  # no correlation between streams
    assert abs((a[1:] * a[:-1]).mean()) < 0.01  # nor between neighbours


def test_ones_and_zeros() -> None:
    shard = ParamShard("n", (5,), (0,), (5,))
    assert fill_(torch.empty(5), shard, Init("ones"), 0).tolist() == [1.0] * 5
    assert fill_(torch.empty(5), shard, Init("zeros"), 0).tolist() == [0.0] * 5
