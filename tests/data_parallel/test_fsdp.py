"""Shares of gradients over several passes: the sums of all ranks', however late reductions are waited for.

Whole models in shares are trained in tests/training/test_fsdp.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import group as groups

from megafp8.data_parallel.fsdp import FullySharded
from megafp8.distributed.sharding import Init, ParamSpec, set_spec, unsharded
from tests.world import World

CPU = torch.device("cpu")
WIDTH, PASSES = 6, 3


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    for name, param in model.named_parameters():
        set_spec(param, ParamSpec(unsharded(name, tuple(param.shape)), Init("zeros"), True))
    return model


def _inputs(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    return [torch.randn(2, WIDTH, generator=generator) for _ in range(PASSES)]


def _plain(ranks: int) -> list[Tensor]:
    """Gradients of all ranks' passes."""
    model = _model()
    for rank in range(ranks):
        for x in _inputs(rank):
            model(x).square().sum().backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def _sharded(overlap: bool) -> tuple[list[tuple[int, int, Tensor]], list[bool]]:
    """This rank's rows of each gradient, with the first and the last; after each pass, whether all was waited for."""
    group = groups.WORLD
    assert group is not None
    model = _model()
    values = [param.detach().clone() for param in model.parameters()]
    sharded = FullySharded(
        [(model, list(model)[1:])],
        group=group,
        reduce_group=group,
        dtype=torch.float32,
        reduce_dtype=torch.float32,
        device=CPU,
    )
    found, waited = [], []
    rows = [torch.arange(WIDTH).tensor_split(group.size())[group.rank()]] * len(values)
    with torch.no_grad():
        for share, value, own in zip(sharded.rows.values(), values, rows):
            share.values.copy_(value[own])
    for _ in range(2):  # steps
        sharded.zero()
        if overlap:
            sharded.start_overlap(PASSES)
        for x in _inputs(group.rank()):
            with torch.no_grad():
                model(x)  # no pass: it has no backward
            model(x).square().sum().backward()
            waited.append(bool(model._get_fsdp_state()._state_ctx.is_last_backward))  # type: ignore[operator]
        sharded.finish()
    for param, own in zip(sharded.params, rows):
        gradient = param.main_grad
        assert isinstance(gradient, Tensor)
        found.append((int(own[0]), int(own[-1]) + 1, gradient.clone()))
    return found, waited


def test_shares_of_sums_over_passes(world2: World) -> None:
    expected = _plain(2)
    for overlap in (False, True):
        for found, waited in world2.run(_sharded, overlap):
            for (first, last, share), gradient in zip(found, expected, strict=True):
                assert torch.allclose(share, gradient[first:last], rtol=1e-5, atol=1e-6)
            assert waited == ([False, False, True] * 2 if overlap else [True] * 6)
