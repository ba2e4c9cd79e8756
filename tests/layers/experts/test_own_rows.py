"""Rooms of expert rows in CUDA graphs."""

from __future__ import annotations

import torch

from megafp8.layers.experts.own_rows import RowBound


def _rows(count: int) -> torch.Tensor:
    return torch.tensor([count], dtype=torch.int32)


def test_a_surplus_gives_its_layer_a_margin_and_the_others_as_large_a_part_of_their_limits() -> None:
    bound = RowBound(torch.device("cpu"))
    limits = {"a": 8192, "b": 4096, "c": 8192}
    assert [bound.room(layer, _rows(1024), limit) for layer, limit in limits.items()] == [1024] * 3
    with bound.fixed():
        assert [bound.room(layer, _rows(1280), limit) for layer, limit in limits.items()] == [1280] * 3
        assert not bound.surplus.any()
        bound.room("a", _rows(2048), limits["a"])
        bound.room("a", _rows(1300), limits["a"])  # the most counts
        assert bound.surplus.tolist()[:3] == [768, 0, 0]
    bound.grow()
    with bound.fixed():
        rooms = {layer: bound.room(layer, _rows(0), limit) for layer, limit in limits.items()}
    assert rooms == {"a": 2560, "b": 1280, "c": 2048}, "b has more than a quarter of its limit already"


def test_a_graph_has_at_least_a_multiple_of_an_even_load() -> None:
    bound = RowBound(torch.device("cpu"))
    assert [bound.room(layer, _rows(rows), 4096, 1024) for layer, rows in (("a", 900), ("b", 3000))] == [900, 3000]
    with bound.fixed(least=1.5):
        assert [bound.room(layer, _rows(0), 4096, 1024) for layer in "ab"] == [1536, 3840]


def test_a_limit_is_never_exceeded_and_a_rank_may_have_no_experts() -> None:
    bound = RowBound(torch.device("cpu"))
    bound.grow()  # another rank had a surplus
    bound.room("a", _rows(1000), 1024)
    with bound.fixed():
        assert bound.room("a", _rows(1024), 1024) == 1024
