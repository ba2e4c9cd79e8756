"""Gradient shards over several passes are the sums over all ranks, however late reductions are waited for.

Whole models are trained in tests/training/test_fsdp.py.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed import group as groups

from megafp8.data_parallel.fsdp import FullySharded
from megafp8.distributed import collectives
from megafp8.parallel_state import initialize_model_parallel
from tests.marks import slow_but
from tests.tiny_model import CPU, set_specs
from tests.world import World

WIDTH, PASSES = 6, 3
DTYPES = [torch.float32, torch.bfloat16]


def fully_sharded(
    model: nn.Module,
    units: list[nn.Module],
    group: ProcessGroup | None = None,
    replicate_group: ProcessGroup | None = None,
    reduce_dtype: torch.dtype = torch.float32,
) -> FullySharded:
    """`model` sharded over all ranks or those of `group`, in fp32."""
    group = group or groups.WORLD
    assert group is not None
    return FullySharded(
        [(model, units)], group=group, reduce_group=group, replicate_group=replicate_group, dtype=torch.float32,
        reduce_dtype=reduce_dtype, device=CPU,
    )  # fmt: skip


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    set_specs(model)
    return model


def _inputs(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    return [torch.randn(2, WIDTH, generator=generator) for _ in range(PASSES)]


def _unsharded(ranks: int) -> list[Tensor]:
    """Gradients of all ranks' passes."""
    model = _model()
    for rank in range(ranks):
        for x in _inputs(rank):
            model(x).square().sum().backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def _sharded(overlap: bool) -> tuple[list[tuple[int, int, Tensor]], list[bool]]:
    """This rank's rows of each gradient, with first and last; after each pass, whether reductions were waited for."""
    group = groups.WORLD
    assert group is not None
    model = _model()
    values = [param.detach().clone() for param in model.parameters()]
    sharded = fully_sharded(model, list(model)[1:])
    rows = torch.arange(WIDTH).tensor_split(group.size())[group.rank()]
    with torch.no_grad():
        for shard, value in zip(sharded.row_shards.values(), values, strict=True):
            shard.values.copy_(value[rows])
    waited = []
    for _ in range(2):  # steps
        sharded.zero()
        if overlap:
            sharded.start_overlap(PASSES)
        for x in _inputs(group.rank()):
            with torch.no_grad():
                model(x)  # not counted: it has no backward
            model(x).square().sum().backward()
            waited.append(bool(model._get_fsdp_state()._state_ctx.is_last_backward))  # type: ignore[operator]
        sharded.finish()
    gradients: list[Tensor] = [param.main_grad for param in sharded.params]  # type: ignore[misc]
    return [(int(rows[0]), int(rows[-1]) + 1, gradient.clone()) for gradient in gradients], waited


def test_gradient_shards_are_sums_over_passes_and_ranks(world2: World) -> None:
    expected = _unsharded(2)
    for overlap in (False, True):
        for found, waited in world2.run(_sharded, overlap):
            for (first, last, shard), gradient in zip(found, expected, strict=True):
                assert torch.allclose(shard, gradient[first:last], rtol=1e-5, atol=1e-6)
            assert waited == ([False, False, True] * 2 if overlap else [True] * 6)


def _replicated(overlap: bool, reduce_dtype: torch.dtype) -> tuple[list[tuple[int, int, Tensor]], list[list[int]]]:
    """As `_sharded`, two replicas; and how many elements each all-reduce of a step sums, before and in `finish`."""
    parallel = initialize_model_parallel(fsdp_replicas=2)
    model = _model()
    values = [param.detach().clone() for param in model.parameters()]
    shard, replicate = parallel.fsdp_shard, parallel.fsdp_replicate
    sharded = fully_sharded(model, list(model)[1:], shard.group, replicate.group, reduce_dtype)
    rows = torch.arange(WIDTH).tensor_split(shard.size)[shard.rank]
    with torch.no_grad():
        for own, value in zip(sharded.row_shards.values(), values, strict=True):
            own.values.copy_(value[rows])
    reduced: list[list[int]] = []
    all_reduce_async = collectives.all_reduce_async

    def counted(x: Tensor, group: ProcessGroup | None, *op: Any) -> collectives.Work:
        assert group is replicate.group
        assert x.dtype == reduce_dtype
        reduced[-1].append(x.numel())
        return all_reduce_async(x, group, *op)

    with mock.patch.object(collectives, "all_reduce_async", counted):
        for _ in range(2):  # steps
            sharded.zero()
            if overlap:
                sharded.start_overlap(PASSES)
            for x in _inputs(parallel.rank):
                reduced.append([])
                model(x).square().sum().backward()
            reduced.append([])
            sharded.finish()
    gradients: list[Tensor] = [param.main_grad for param in sharded.params]  # type: ignore[misc]
    return [(int(rows[0]), int(rows[-1]) + 1, gradient.clone()) for gradient in gradients], reduced


@pytest.mark.parametrize(
    ("overlap", "dtype"), slow_but([(o, d) for o in (True, False) for d in DTYPES], (True, torch.bfloat16))
)
def test_replicas_are_summed_once_a_step(world4: World, overlap: bool, dtype: torch.dtype) -> None:
    """A unit at a time, the last ones first, and in the last pass's backward where that is overlapped."""
    expected, units = _unsharded(4), [64] * 3  # 3 × 6 elements, padded
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (2e-2, 2e-2)
    for found, reduced in world4.run(_replicated, overlap, dtype):
        for (first, last, shard), gradient in zip(found, expected, strict=True):
            assert torch.allclose(shard, gradient[first:last], rtol=rtol, atol=atol)
        assert reduced == [[], [], *([units, []] if overlap else [[], units])] * 2
