"""Gradient shards over several passes are the sums over all ranks, however late reductions are waited for.

Whole models are trained in tests/training/test_fsdp.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import group as groups

from megafp8.data_parallel.fsdp import FullySharded
from tests.tiny_model import CPU, set_specs
from tests.world import World

WIDTH, PASSES = 6, 3


def fully_sharded(model: nn.Module, units: list[nn.Module]) -> FullySharded:
    """`model` sharded over all ranks, everything in fp32."""
    group = groups.WORLD
    assert group is not None
    fp32 = torch.float32
    return FullySharded(
        [(model, units)], group=group, reduce_group=group, dtype=fp32, reduce_dtype=fp32, device=CPU
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
