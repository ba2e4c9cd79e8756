"""Weight gradients for later: not computed before they are run, then the same, with nothing kept that is not needed."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megafp8.fp8 import BlockwiseScaling, CurrentScaling, DelayedScaling, Fp8Manager, Fp8Recipe
from megafp8.linear.deferred_wgrad import Wgrad, WgradStore, run
from megafp8.parallel.data.grad_buffer import GradBuffer, main_grad_of
from megafp8.parallel.sharding import Init, ParamSpec, set_spec, unsharded
from tests.fp8.linear_layer import LinearLayer
from tests.marks import slow_but

CPU = torch.device("cpu")
RECIPES = {
    "high precision": None,
    "delayed": DelayedScaling(amax_history_len=2),
    "current, wgrad kept": CurrentScaling(override_linear_precision=(False, False, True)),
    "blockwise": BlockwiseScaling(),
}


class Layer:
    """A linear layer whose gradient goes into a buffer."""

    def __init__(self, recipe: Fp8Recipe | None, n: int = 32, k: int = 16) -> None:
        manager = Fp8Manager(recipe, amax_group=None)
        self.op = LinearLayer(manager)
        manager.materialize(CPU)
        self.weight = nn.Parameter(torch.randn(n, k, generator=torch.Generator().manual_seed(1)))
        set_spec(self.weight, ParamSpec(unsharded("layer.weight", (n, k)), Init("zeros"), replicated_over_tp=True))
        self.store = WgradStore()
        self.buffer = GradBuffer(
            [self.weight], data_parallel_group=None, bucket_elements=1, device=CPU, wgrads=self.store
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.op(x, self.weight)


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(128, 16, generator=generator).requires_grad_() for _ in range(count)]


def loss(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()


@pytest.mark.parametrize("name", RECIPES)
def test_a_deferred_gradient_is_the_same_and_later(name: str) -> None:
    now, later = Layer(RECIPES[name]), Layer(RECIPES[name])
    xs, same_xs = inputs(2), inputs(2)
    for x in xs:
        loss(now(x)).backward()
    assert main_grad_of(now.weight).abs().max() > 0
    later.buffer.start_overlap(2)  # counts both when they come, and would complain of a third
    left: list[deque[Wgrad]] = []
    for x in same_xs:
        wgrads = deque[Wgrad]()
        with later.store.collect(wgrads):
            loss(later(x)).backward()
        left.append(wgrads)
        assert main_grad_of(later.weight).abs().max() == 0
        assert later.weight.grad is None
    torch.testing.assert_close([x.grad for x in same_xs], [x.grad for x in xs], rtol=0, atol=0)
    for wgrads in left:
        assert len(wgrads) == 1
        run(wgrads)
        assert not wgrads
    torch.testing.assert_close(main_grad_of(later.weight), main_grad_of(now.weight), rtol=0, atol=0)


@pytest.mark.parametrize("for_exchanges", [True, False])
def test_only_a_store_for_exchanges_computes_during_one(for_exchanges: bool) -> None:
    now, layer = Layer(RECIPES["delayed"]), Layer(RECIPES["delayed"])
    for x, same in zip(inputs(2), inputs(2)):
        loss(now(x)).backward()
        before = main_grad_of(layer.weight).clone()
        left = deque[Wgrad]()
        with layer.store.collect(left, for_exchanges=for_exchanges):
            loss(layer(same)).backward()
            assert torch.equal(main_grad_of(layer.weight), before)
            layer.store.compute_during_exchange()
            assert len(left) == (not for_exchanges)
        run(left)
        assert torch.equal(main_grad_of(layer.weight), main_grad_of(now.weight))
    layer.store.compute_during_exchange()  # nothing to do


def test_outside_of_collect_gradients_are_computed_at_once() -> None:
    layer = Layer(None)
    wgrads = deque[Wgrad]()
    with layer.store.collect(wgrads):
        pass
    (x,) = inputs(1)
    loss(layer(x)).backward()
    assert not wgrads
    assert main_grad_of(layer.weight).abs().max() > 0


def test_an_error_closes_the_store() -> None:
    store = WgradStore()
    with pytest.raises(ZeroDivisionError), store.collect(deque()):
        raise ZeroDivisionError
    assert not store.is_open


class Token:
    """Something to be alive or not."""


class Earlier(torch.autograd.Function):
    """An operation before the layer; its node holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: list[weakref.ref[Token]]) -> Tensor:
        ctx.token = Token()
        tokens.append(weakref.ref(ctx.token))
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * 2, None


@pytest.mark.parametrize(
    "name", slow_but(["high precision", "delayed", "current, wgrad kept"], "delayed", "current, wgrad kept")
)
def test_what_is_kept_does_not_hold_the_graph(name: str) -> None:
    """The layer's input is kept, but not the operations that it came from."""
    layer, tokens = Layer(RECIPES[name]), list[weakref.ref[Token]]()
    (x,) = inputs(1)
    wgrads = deque[Wgrad]()
    with layer.store.collect(wgrads):
        loss(layer(Earlier.apply(x, tokens))).backward()
    gc.collect()
    assert tokens[0]() is None
    run(wgrads)
    assert main_grad_of(layer.weight).abs().max() > 0


def test_a_gradient_begins_before_the_one_ahead_finishes() -> None:
    diary: list[str] = []

    def wgrad(name: str) -> Wgrad:
        def begin():
            diary.append(f"begin {name}")
            return lambda: diary.append(f"finish {name}")

        return begin

    run(deque([wgrad("a"), wgrad("b"), wgrad("c")]))
    assert diary == ["begin a", "begin b", "finish a", "begin c", "finish b", "finish c"]
    run(deque())
