"""Every region mapping against its definition, and its backward as the adjoint: <f(x), dy> = <x, f*(dy)>."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafp8.parallel.collectives import WaitFunction, all_gather, all_reduce
from megafp8.parallel.parallel_state import initialize_model_parallel
from megafp8.parallel.tensor import mappings
from megafp8.parallel.tp_overlap import AllGatherHandle, Product, ReduceHandle, default_overlap
from tests.marks import slow_but
from tests.world import World

# (mapping, whether its input is the same on all ranks, and its output)
CASES = {
    "copy_to_tensor_parallel": (True, False),
    "reduce_from_tensor_parallel": (False, True),
    "gather_from_sequence_parallel": (False, False),
    "reduce_scatter_to_sequence_parallel": (False, False),
    "scatter_to_sequence_parallel": (True, False),
    "start_gather_from_sequence_parallel": (False, False),
    "start_reduce_scatter_to_sequence_parallel": (False, False),
}


def _case(name: str) -> None:
    """Tensors that are the same on all ranks count once in an inner product, slices and partial sums on each rank."""
    group = initialize_model_parallel(torch.distributed.get_world_size()).tensor
    same_in, same_out = CASES[name]

    def draw(shape: tuple[int, ...], same: bool, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed if same else seed + 1 + group.rank)
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def inner(a: torch.Tensor, b: torch.Tensor, same: bool) -> float:
        value = (a * b).sum()
        return (value if same else all_reduce(value.clone(), group.group)).item()

    for same in (False, same_in):
        x = draw((4, 2, 8), same, 10).requires_grad_()
        of_ranks = all_gather(x.detach().unsqueeze(0), group.group)  # [ranks, 4, 2, 8]
        if name.startswith("start_"):
            overlap = default_overlap(group.group, sequence_parallel=True)
            y = getattr(mappings, name)(x.flatten(1), overlap)().unflatten(1, (2, 8))
        else:
            y = getattr(mappings, name)(x, group.group)
        expected = {
            "copy_to_tensor_parallel": x,
            "reduce_from_tensor_parallel": of_ranks.sum(0),
            "gather_from_sequence_parallel": torch.cat(list(of_ranks), 0),
            "reduce_scatter_to_sequence_parallel": of_ranks.sum(0).chunk(group.size)[group.rank],
            "scatter_to_sequence_parallel": x.chunk(group.size)[group.rank],
        }[name.removeprefix("start_")]
        torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
    dy = draw(tuple(y.shape), same_out, 20)
    y.backward(dy)
    assert x.grad is not None
    assert inner(y.detach(), dy, same_out) == pytest.approx(inner(x.detach(), x.grad, same_in), rel=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", slow_but([1, 2, 4], 4))
def test_forward_and_its_adjoint(world4: World, name: str, ranks: int) -> None:
    world4.run(_case, name, ranks=ranks)


class OneAtATime:
    """Overlap of one rank, which logs its exchanges and fails if one begins before the last one was waited for."""

    group: Any = "a group"

    def __init__(self) -> None:
        self.log: list[str] = []

    def _begin(self, name: str) -> WaitFunction:
        assert not self.log or self.log[-1].startswith("end"), f"{name} begins after {self.log}"
        self.log.append(name)
        return WaitFunction(partial(self.log.append, f"end of {name}"))

    def gather(self, shards: Sequence[Tensor]) -> AllGatherHandle:
        return AllGatherHandle([x.clone() for x in shards], [(slice(0, len(shards[0])), self._begin("gather").wait)])

    def sum(self, product: Product) -> ReduceHandle:
        return ReduceHandle(self._begin("sum"), product.compute().clone)


@pytest.mark.parametrize("recomputed", [False, True])
def test_backward_works_during_an_exchange_and_a_recomputed_block_has_its_own(recomputed: bool) -> None:
    overlap = OneAtATime()

    def during_backward() -> None:
        overlap.log[-1] += ", and work"
        overlap.log.append("end of work")

    def block(x_mn: Tensor) -> Tensor:
        x_mn = mappings.start_gather_from_sequence_parallel(x_mn.tanh(), overlap, during_backward)()
        return mappings.start_reduce_scatter_to_sequence_parallel(x_mn.exp(), overlap, during_backward)()

    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2).requires_grad_()
    y = checkpoint(block, x, use_reentrant=False) if recomputed else block(x)
    forward = ["gather", "end of gather", "sum", "end of sum"]
    assert overlap.log == forward
    y.sum().backward()
    backward = ["gather, and work", "end of work", "end of gather", "sum, and work", "end of work", "end of sum"]
    assert overlap.log == [*forward, *forward * recomputed, *backward]
    expected = x.detach().tanh().exp() * (1 - x.detach().tanh() ** 2)
    torch.testing.assert_close(x.grad, expected, rtol=1e-14, atol=1e-14)
