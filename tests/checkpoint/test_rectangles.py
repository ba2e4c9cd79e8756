"""Rectangles: a tensor cut in any way loads into any other cut, in place, strided views included."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megafp8.checkpoint import CheckpointReader, Rectangle, Rectangles, collect, collect_shards, load, save
from megafp8.parallel.sharding import FlatShard, Init, ParamSpec, set_spec, shard_dim, stack_rows
from tests.checkpoint import toy


def _cuttings(shape: tuple[int, int], generator: torch.Generator) -> list[tuple[slice, slice]]:
    """A random grid over `shape`."""
    axes = []
    for length in shape:
        marks = torch.randperm(length - 1, generator=generator)[:2] + 1
        edges = [0, *sorted(marks.tolist()), length]
        axes.append([slice(a, b) for a, b in itertools.pairwise(edges)])
    return [(rows, cols) for rows in axes[0] for cols in axes[1]]


def _rectangles(local: Tensor, cuts: list[tuple[slice, slice]]) -> Rectangles:
    parts = [Rectangle((rows.start, cols.start), local[rows, cols]) for rows, cols in cuts]
    return Rectangles(tuple(local.shape), local.dtype, parts)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("transposed", [False, True])
def test_any_cutting_loads_into_any_other(tmp_path: Path, seed: int, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(11, 7, generator=generator)
    path = save(tmp_path, 1, {"w": _rectangles(whole, _cuttings((11, 7), generator))}, {})
    loaded = torch.zeros(7, 11).t() if transposed else torch.zeros(11, 7)
    load(path, {"w": _rectangles(loaded, _cuttings((11, 7), generator))})
    assert torch.equal(loaded, whole)


def test_a_part_of_the_tensor_may_be_loaded_alone(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(6, 4)
    path = save(tmp_path, 1, {"w": whole}, {})
    middle = torch.zeros(2, 3)
    load(path, {"w": Rectangles((6, 4), torch.float32, [Rectangle((3, 1), middle)])})
    assert middle.tolist() == [[13.0, 14.0, 15.0], [17.0, 18.0, 19.0]]


def test_collect_finds_the_pieces_of_a_fused_parameter() -> None:
    pieces = stack_rows([shard_dim("q", (8, 3), 0, 1, 2), shard_dim("k", (4, 3), 0, 1, 2)])
    param = set_spec(nn.Parameter(torch.arange(18.0).view(6, 3)), ParamSpec(pieces, Init("zeros"), False))
    state = collect([param], lambda p: p * 10, "optimizer.")
    assert {n: (r.global_shape, r.parts[0].offset) for n, r in state.items()} == {
        "optimizer.q": ((8, 3), (4, 0)),
        "optimizer.k": ((4, 3), (2, 0)),
    }
    assert state["optimizer.q"].parts[0].view.tolist() == [[10.0 * (3 * r + c) for c in range(3)] for r in range(4)]
    assert state["optimizer.k"].parts[0].view.tolist() == [[10.0 * (3 * r + c) for c in range(3)] for r in (4, 5)]


def test_the_same_rectangle_twice_on_a_rank_is_saved_once_and_loaded_twice(tmp_path: Path) -> None:
    model = toy.make(0, 1, 1, torch.float32)
    embedding = model.params[0]
    tied = nn.Parameter(embedding.detach().clone())
    tied.spec = embedding.spec
    path = save(tmp_path, 1, collect([embedding, tied], lambda p: p, ""), {})
    assert len(CheckpointReader(path).index.storage_data) == 1
    copies = toy.Toy([embedding, tied], [], {}).zeroed().params
    load(path, collect(copies, lambda p: p, ""))
    assert all(torch.equal(copy, toy.truth("embedding", (16, 4), torch.float32)) for copy in copies)


@pytest.mark.parametrize("ends", [(7,), (1, 2, 17), (11, 12)])
def test_shards_of_a_fused_parameter_load_into_the_whole(tmp_path: Path, ends: tuple[int, ...]) -> None:
    q, k = torch.arange(24.0).view(8, 3), torch.arange(100.0, 112.0).view(4, 3)
    saved = []
    for t in range(2):  # tensor parallel
        pieces = stack_rows([shard_dim("q", (8, 3), 0, t, 2), shard_dim("k", (4, 3), 0, t, 2)])
        local = torch.cat([q.chunk(2)[t], k.chunk(2)[t]])
        param = set_spec(nn.Parameter(local), ParamSpec(pieces, Init("zeros"), False))
        flat_shards = [FlatShard(param, a, b) for a, b in itertools.pairwise((0, *ends, 18))]
        saved += [collect_shards([(f, f.view(local).clone())], "exp_avg.") for f in flat_shards]
    state = {}
    for name, shape in {"exp_avg.q": (8, 3), "exp_avg.k": (4, 3)}.items():
        parts = [part for rank in saved if name in rank for part in rank[name].parts]
        assert all(len(rank[name].parts) <= 3 for rank in saved if name in rank)
        state[name] = Rectangles(shape, torch.float32, parts)
    path = save(tmp_path, 1, state, {})
    loaded = {"exp_avg.q": torch.zeros(8, 3), "exp_avg.k": torch.zeros(4, 3)}
    load(path, loaded)
    assert torch.equal(loaded["exp_avg.q"], q)
    assert torch.equal(loaded["exp_avg.k"], k)
