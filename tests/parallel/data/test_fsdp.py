"""Gradient shards over several passes are the sums over all ranks, however late reductions are waited for.

Whole models are trained in tests/training/test_fsdp.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from megafp8.parallel import collectives
from megafp8.parallel.data.fsdp import ShardedStages, ShardGroups, Unit
from megafp8.parallel.data.grad_buffer import gradient_of
from megafp8.parallel.parallel_state import ParallelState, initialize_model_parallel
from megafp8.parallel.sharding import spec_of
from tests.marks import slow_but
from tests.tiny_model import CPU, set_specs
from tests.world import World

WIDTH, PASSES = 6, 3
INNER = "1.1.weight"
DTYPES = [torch.float32, torch.bfloat16]


def param_groups(module: Any) -> list[Any]:
    """torch's, of what is gathered together."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] if groups is None else groups


class _Block(nn.Sequential):
    """A layer and an inner unit. Notes whether the inner unit is gathered by the time that the block is needed."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
        self.in_time: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        def note(_: Any = None) -> None:
            if isinstance(self[1], FSDPModule):
                (group,) = param_groups(self[1])
                self.in_time.append(group.is_unsharded or group._all_gather_result is not None)

        note()
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(note)
        return y


def _model(frozen: Sequence[str] = ()) -> nn.Sequential:
    torch.manual_seed(0)
    layer = partial(nn.Linear, WIDTH, WIDTH, bias=False)
    model = nn.Sequential(layer(), _Block(), layer())
    set_specs(model)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def _inputs(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    return [torch.randn(2, WIDTH, generator=generator) for _ in range(PASSES)]


def _unsharded(ranks: Sequence[int], frozen: Sequence[str] = ()) -> dict[str, Tensor]:
    """Gradients of the passes of `ranks`."""
    model = _model(frozen)
    for rank in ranks:
        for x in _inputs(rank):
            model(x).square().sum().backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def _sharded_model(
    parallel: ParallelState, reduce_dtype: torch.dtype = torch.float32, frozen: Sequence[str] = ()
) -> tuple[nn.Sequential, ShardedStages]:
    """The inner unit is that of experts, of which some ranks have others."""
    model = _model(frozen)
    groups = ShardGroups(parallel.fsdp_shard.group, parallel.fsdp_shard_backward.group)
    of_inner = ShardGroups(parallel.expert_shard.group, parallel.expert_shard_backward.group)
    values = dict(model.named_parameters())
    whole = {name: param.detach().clone() for name, param in values.items()}
    units = [Unit(model[1], groups, [Unit(model[1][1], of_inner)]), Unit(model[2], groups), Unit(model, groups)]
    sharded = ShardedStages(
        [units], replicate_group=parallel.fsdp_replicate.group, dtype=torch.float32, reduce_dtype=reduce_dtype,
        device=CPU,
    )  # fmt: skip
    with torch.no_grad():
        for name, param in values.items():
            rows = sharded.row_shards[param]
            rows.values.copy_(_rows(rows.param, whole[name]))
    return model, sharded


def _rows(shard: nn.Parameter, whole: Tensor) -> Tensor:
    (piece,) = spec_of(shard).shards
    return whole.narrow(0, piece.offset[0], piece.shape[0])


def _expected(parallel: ParallelState) -> dict[str, Tensor]:
    return _unsharded(parallel.amax.ranks) | {INNER: _unsharded(parallel.expert_data.ranks)[INNER]}


def _assert_sums(sharded: ShardedStages, parallel: ParallelState, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    expected = _expected(parallel)
    for shard in sharded.shards:
        (piece,) = spec_of(shard.param).shards
        sums = shard.view(_rows(shard.param, expected[piece.name]).contiguous())
        torch.testing.assert_close(gradient_of(shard), sums, rtol=rtol, atol=atol)
    updated = torch.tensor(sum(len(shard) for shard in sharded.shards))
    # Every element once, of all inner units.
    assert collectives.all_reduce(updated, parallel.amax.group) == WIDTH**2 * (3 + parallel.expert.size)


def _sums(overlap: bool) -> list[bool]:
    """Asserts that gradients are sums; after each pass, whether reductions were waited for."""
    parallel = initialize_model_parallel(expert_model_parallel_size=torch.distributed.get_world_size())
    model, sharded = _sharded_model(parallel)
    waited = []
    for _ in range(2):  # steps
        sharded.clear()
        if overlap:
            sharded.start_overlap(PASSES)
        for x in _inputs(parallel.rank):
            with torch.no_grad():
                model(x)  # not counted: it has no backward
            model(x).square().sum().backward()
            waited.append(bool(model._get_fsdp_state()._state_ctx.is_last_backward))  # type: ignore[operator]
        sharded.finish()
        _assert_sums(sharded, parallel)
    in_time = model[1].in_time
    assert len(in_time) == 2 * PASSES * 3
    assert all(in_time)
    return waited


def _frozen(names: Sequence[str]) -> tuple[int, int]:
    """Asserts sums, and that frozen rows stay; the number of elements that are trained and that have gradients."""
    parallel = initialize_model_parallel()
    model, sharded = _sharded_model(parallel, frozen=names)
    expected = _unsharded(parallel.amax.ranks, names)
    sharded.clear()
    sharded.start_overlap(PASSES)
    for x in _inputs(parallel.rank):
        model(x).square().sum().backward()
    sharded.finish()
    whole = dict(_model().named_parameters())
    for param in sharded.params:
        (piece,) = spec_of(param).shards
        if piece.name in names:
            assert torch.equal(param, _rows(param, whole[piece.name]))
            assert not hasattr(param, "main_grad")
        else:
            gradient = param.main_grad  # type: ignore[attr-defined]
            torch.testing.assert_close(gradient, _rows(param, expected[piece.name]), rtol=1e-5, atol=1e-6)
    assert {len(expected), len(sharded.trained)} == {4 - len(names)}
    return sum(len(shard) for shard in sharded.shards), int(sharded.flat.count_nonzero())


@pytest.mark.parametrize("names", [["0.weight"], [INNER], ["0.weight", "1.0.weight", INNER]])
def test_frozen_weights(world2: World, names: list[str]) -> None:
    """First ones, a whole unit, all but one: those that are trained have their gradients, the others nothing."""
    for trained, nonzero in world2.run(_frozen, names):
        assert trained == nonzero == (4 - len(names)) * WIDTH * WIDTH // 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradient_shards_are_sums_over_passes_and_ranks(world2: World, overlap: bool, ranks: int) -> None:
    """Also where one rank has all of the shards: of experts, and of the whole model.

    https://github.com/NVIDIA/Megatron-LM/issues/6660
    """
    for waited in world2.run(_sums, overlap, ranks=ranks):
        assert waited == ([False, False, True] * 2 if overlap else [True] * 6)


def _update(model: nn.Module, sharded: ShardedStages, parallel: ParallelState) -> None:
    """Subtracts a rank's gradients from what it owns; asserts that it then computes with all updated weights."""
    twin, expected = _model(), _expected(parallel)
    with torch.no_grad():
        for name, param in twin.named_parameters():
            param -= expected[name]
        for shard in sharded.shards:
            shard.view(shard.param).sub_(gradient_of(shard))
        assert sharded.weights is not None
        sharded.weights.start_gather()
        for x in _inputs(parallel.rank):
            torch.testing.assert_close(model(x), twin(x), rtol=1e-4, atol=1e-5)


def _replicated(overlap: bool, reduce_dtype: torch.dtype) -> list[list[int]]:
    """Return how many elements each reduction of a step of two replicas sums, before and in `finish`; see `_sums`."""
    parallel = initialize_model_parallel(fsdp_replicas=2, expert_model_parallel_size=2)
    model, sharded = _sharded_model(parallel, reduce_dtype)
    tolerance = (1e-5, 1e-6) if reduce_dtype == torch.float32 else (2e-2, 2e-2)
    reduced: list[list[int]] = []
    reduce_scatter = collectives.reduce_scatter_in_place_async

    def counted(x: Tensor, group: ProcessGroup | None) -> collectives.CollectiveWork:
        assert group is parallel.fsdp_replicate.group
        assert x.dtype == reduce_dtype
        reduced[-1].append(x.numel())
        return reduce_scatter(x, group)

    with mock.patch.object(collectives, "reduce_scatter_in_place_async", counted):
        for _ in range(2):  # steps
            sharded.clear()
            if overlap:
                sharded.start_overlap(PASSES)
            for x in _inputs(parallel.rank):
                reduced.append([])
                model(x).square().sum().backward()
            reduced.append([])
            sharded.finish()
            _assert_sums(sharded, parallel, *tolerance)
    if reduce_dtype == torch.float32:
        _update(model, sharded, parallel)
    return reduced


@pytest.mark.parametrize(
    ("overlap", "dtype"), slow_but([(o, d) for o in (True, False) for d in DTYPES], (True, torch.bfloat16))
)
def test_replicas_are_summed_once_a_step(world4: World, overlap: bool, dtype: torch.dtype) -> None:
    """A unit at a time, the last ones first, and in the last pass's backward where that is overlapped."""
    units = [128] * 4  # 3 × 6 elements, and all 36 of the inner unit, padded
    for reduced in world4.run(_replicated, overlap, dtype):
        assert reduced == [[], [], *([units, []] if overlap else [[], units])] * 2
