"""Rows of a parameter keep the global names and positions that they have in the parameter."""

from __future__ import annotations

import itertools

import pytest
import torch

from megafp8.parallel.sharding import (
    Init,
    ParamSpec,
    boxes,
    set_spec,
    shard_dim,
    shards_of,
    slice_rows,
    stack_rows,
    unsharded,
)


def _spec() -> ParamSpec:
    """Tensor-parallel rank 1 of 2 of a fused weight: 4 rows of q, 2 of k, 2 of v."""
    shards = stack_rows([shard_dim(name, (rows, 3), 0, 1, 2) for name, rows in (("q", 8), ("k", 4), ("v", 4))])
    return ParamSpec(shards, Init("normal", 1.0), replicated_over_tp=False, weight_decay=False, num_uses=2)


def _positions(spec: ParamSpec, local: torch.Tensor) -> dict[tuple[str, int, int], float]:
    """Each element of `local` by its global name and index."""
    param = set_spec(torch.nn.Parameter(local), spec)
    return {
        (shard.name, shard.offset[0] + i, shard.offset[1] + j): view[i, j].item()
        for shard, view in shards_of(param, local)
        for i in range(shard.shape[0])
        for j in range(shard.shape[1])
    }


@pytest.mark.parametrize("cuts", [(0, 8), (0, 3, 6, 8), (0, 1, 5, 8), (0, 4, 8), (0, 2, 2, 8)])
def test_sliced_rows_keep_their_global_positions(cuts: tuple[int, ...]) -> None:
    local, found = torch.arange(24.0).view(8, 3), {}
    for first, last in itertools.pairwise(cuts):
        part = _positions(slice_rows(_spec(), first, last), local[first:last])
        assert not part.keys() & found.keys()
        found |= part
    assert found == _positions(_spec(), local)


def test_sliced_rows_keep_the_rest_of_the_spec() -> None:
    rows = slice_rows(_spec(), 3, 5)
    assert (rows.weight_decay, rows.num_uses, rows.init) == (False, 2, Init("normal", 1.0))
    assert [(p.name, p.offset, p.shape, p.row) for p in rows.shards] == [
        ("q", (7, 0), (1, 3), 0),
        ("k", (2, 0), (1, 3), 1),
    ]
    bias = ParamSpec(unsharded("b", (4,)), Init("zeros"), replicated_over_tp=True)
    assert [(p.offset, p.shape) for p in slice_rows(bias, 1, 3).shards] == [((1,), (2,))]
    assert [(p.name, p.offset, p.shape) for p in slice_rows(bias, 4, 4).shards] == [("b", (4,), (0,))]


@pytest.mark.parametrize("shape", [(7,), (1, 5), (4, 3), (3, 1), (2, 3, 4)])
def test_boxes_cover_a_run_of_elements_in_order(shape: tuple[int, ...]) -> None:
    index = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, end in itertools.combinations(range(index.numel() + 1), 2):
        found = list(boxes(shape, start, end))
        assert len(found) <= 2 * len(shape) - 1
        parts = [index[tuple(slice(a, a + n) for a, n in zip(low, box))] for low, box in found]
        assert all(part.shape == box for part, (_, box) in zip(parts, found))
        assert torch.cat([part.flatten() for part in parts]).tolist() == list(range(start, end))
    assert list(boxes(shape, 1, 1)) == []
