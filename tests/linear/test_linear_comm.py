"""What a linear layer does between the two ends of a collective: the sum of dx is under way while wgrad is computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from megafp8.fp8 import BlockwiseScaling, CurrentScaling, DelayedScaling, Fp8Manager, Fp8Recipe
from megafp8.linear.deferred_wgrad import WgradStore
from megafp8.linear.grad_sink import set_grad_sink
from megafp8.linear.quantized_gather import TPComm
from megafp8.parallel.tp_overlap import AllGatherHandle, Product, ReduceHandle
from tests.fp8.linear_layer import LinearLayer

RECIPES = {
    "high precision": None,
    "delayed": DelayedScaling(amax_history_len=2),
    "current, wgrad kept": CurrentScaling(override_linear_precision=(False, False, True)),
    "current, dgrad kept": CurrentScaling(override_linear_precision=(False, True, False)),
    "blockwise": BlockwiseScaling(),
}


class Diary:
    """An exchange with nobody that writes down what happens, and brings tokens in two halves."""

    group = None

    def __init__(self) -> None:
        self.events: list[str] = []

    def gather(self, own: Sequence[Tensor]) -> AllGatherHandle:
        m = own[0].shape[0]
        halves = [slice(0, m // 2), slice(m // 2, m)]
        self.events.append("gather")
        return AllGatherHandle(
            list(own), [(half, lambda i=i: self.events.append(f"half {i}")) for i, half in enumerate(halves)]
        )

    def sum(self, product: Product) -> ReduceHandle:
        y_mn = product.compute()
        self.events.append("sum begins")
        return ReduceHandle(self, lambda: y_mn)

    def wait(self) -> None:
        self.events.append("sum ends")


class Sink:
    """Takes the weight's gradient as it comes."""

    is_empty = False

    def __init__(self, diary: Diary, weight: Tensor) -> None:
        self.events, self.wgrads = diary.events, WgradStore()
        self.main_grad = torch.zeros_like(weight)

    def added(self) -> None:
        self.events.append("wgrad")


def _run(recipe: Fp8Recipe | None, comm: TPComm, diary: Diary) -> tuple[list[Tensor], list[str], list[str]]:
    """y, dx and dw; and what happened forward and backward."""
    manager = Fp8Manager(recipe, amax_group=None)
    op = LinearLayer(manager)
    manager.materialize(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 2, 32, generator=generator).requires_grad_()
    weight = nn.Parameter(torch.randn(48, 32, generator=generator))
    set_grad_sink(weight, sink := Sink(diary, weight))
    y = op(x, weight, comm=comm)
    forward = list(diary.events)
    diary.events.clear()
    y.backward(torch.randn(y.shape, generator=generator))
    assert x.grad is not None
    return [y.detach(), x.grad, sink.main_grad], forward, list(diary.events)


@pytest.mark.parametrize("name", RECIPES)
def test_dx_is_summed_while_wgrad_runs(name: str) -> None:
    diary, nobody = Diary(), Diary()
    found, forward, backward = _run(RECIPES[name], TPComm(input=diary), diary)
    assert forward == ["gather", "half 0", "half 1"]
    assert backward == ["sum begins", "wgrad", "sum ends"]
    expected, _, _ = _run(RECIPES[name], TPComm(), nobody)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_a_gathered_gradient(name: str) -> None:
    diary = Diary()
    _, forward, backward = _run(RECIPES[name], TPComm(output=diary), diary)
    assert forward == ["sum begins", "sum ends"]
    assert backward == ["gather", "half 0", "half 1", "wgrad"]
