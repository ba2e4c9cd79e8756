"""Rows of a parameter are what the parameter says they are."""

from __future__ import annotations

import itertools

import pytest
import torch

from megafp8.distributed.sharding import Init, ParamSpec, cut, pieces_of, rows_of, set_spec, stack, whole


def _spec() -> ParamSpec:
    """Tensor-parallel rank 1 of 2 of a fused weight: 4 rows of q, 2 of k, 2 of v."""
    pieces = stack([cut(name, (rows, 3), 0, 1, 2) for name, rows in (("q", 8), ("k", 4), ("v", 4))])
    return ParamSpec(pieces, Init("normal", 1.0), replicated_over_tp=False, weight_decay=False, num_uses=2)


@pytest.mark.parametrize("cuts", [(0, 8), (0, 3, 6, 8), (0, 1, 5, 8), (0, 4, 8), (0, 2, 2, 8)])
def test_rows_are_where_they_were_in_the_whole(cuts: tuple[int, ...]) -> None:
    """Each element of the local parameter, by the global name and place that its spec gives it."""

    def places(spec: ParamSpec, local: torch.Tensor) -> dict[tuple[str, int, int], float]:
        param = set_spec(torch.nn.Parameter(local), spec)
        return {
            (piece.name, piece.offset[0] + i, piece.offset[1] + j): view[i, j].item()
            for piece, view in pieces_of(param, local)
            for i in range(piece.shape[0])
            for j in range(piece.shape[1])
        }

    local = torch.arange(24.0).view(8, 3)
    expected, found = places(_spec(), local), {}
    for first, last in itertools.pairwise(cuts):
        part = places(rows_of(_spec(), first, last), local[first:last])
        assert not part.keys() & found.keys()
        found |= part
    assert found == expected


def test_rows_keep_what_else_is_said_of_the_parameter() -> None:
    rows = rows_of(_spec(), 3, 5)
    assert (rows.weight_decay, rows.num_uses, rows.init) == (False, 2, Init("normal", 1.0))
    assert [(p.name, p.offset, p.shape, p.row) for p in rows.pieces] == [
        ("q", (7, 0), (1, 3), 0),
        ("k", (2, 0), (1, 3), 1),
    ]
    bias = ParamSpec(whole("b", (4,)), Init("zeros"), replicated_over_tp=True)
    assert [(p.offset, p.shape) for p in rows_of(bias, 1, 3).pieces] == [((1,), (2,))]
