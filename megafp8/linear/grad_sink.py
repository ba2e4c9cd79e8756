"""Gradient sinks: destinations of weight gradients that bypass autograd.

`set_grad_sink` gives a weight a `GradSink`. dw `[n, k]` is then added to the sink's `main_grad`, in the GEMM itself if
possible, or written to it if it is the first gradient of a step. Autograd sees no gradient for the weight, which saves
a bf16 gradient and its rounding. Without a sink, dw is returned in the dtype that autograd expects: the weight's dtype
unless its `grad_dtype` says otherwise. While a sink's `WgradStore` is open, wgrad is deferred
(`megafp8.linear.deferred_wgrad`).

A sink belongs to a parameter object. Tensors that autograd has saved may be unpacked as new objects, without the sink.

Shapes: k inputs, n outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megafp8.linear.deferred_wgrad import WgradPair, WgradStore
from megafp8.numerics.dtypes import sum_dtype


class GradSink(Protocol):
    """Destination of a weight's gradient."""

    @property
    def main_grad(self) -> Tensor:
        """Sum of the gradients, in the weight's shape and usually in fp32."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no sum yet.

        In this case `main_grad` has undefined values, and the first gradient is written instead of added.
        """

    @property
    def wgrads(self) -> WgradStore | None:
        """Store that takes wgrad for later while it is open; None if wgrad is never deferred."""

    @property
    def pair(self) -> WgradPair | None:
        """Keeper of operands, for kernels that compute the gradients of two micro-batches together.

        None if every gradient is computed separately.
        """

    def added(self) -> None:
        """Report that a gradient has been written or added to `main_grad`."""


def set_grad_sink(weight: Tensor, sink: GradSink) -> None:
    """Send the gradient of `weight`, a leaf, to `sink` from now on."""
    weight.grad_sink = sink  # type: ignore[attr-defined]


def grad_sink(weight: Tensor) -> GradSink | None:
    """Return the weight's sink, or None."""
    return getattr(weight, "grad_sink", None)


def wgrad_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which `deliver` expects dw."""
    if grad_sink(weight) is not None:
        return sum_dtype(weight.dtype)
    return (weight.grad_dtype if weight.is_leaf else None) or weight.dtype


def deliver(weight: Tensor, dw: Tensor) -> Tensor | None:
    """Add dw, of any floating dtype, to the weight's sink and return None; without a sink, return dw."""
    sink = grad_sink(weight)
    if sink is None:
        return dw
    assert dw.shape == sink.main_grad.shape, f"gradient of shape {tuple(dw.shape)} for {tuple(sink.main_grad.shape)}"
    if sink.is_empty:
        sink.main_grad.copy_(dw.detach())
    else:
        sink.main_grad.add_(dw.detach())
    sink.added()
    return None


class InPlace(NamedTuple):
    """fp32 memory of a weight's gradient, for a kernel that writes it directly.

    Attributes:
        main_grad: Memory of the gradient.
        accumulate: Whether the kernel must add to the memory instead of writing to it.
        added: Function to call after the kernel.
    """

    main_grad: Tensor
    accumulate: bool
    added: Callable[[], None]


def in_place(weight: Tensor) -> InPlace | None:
    """Return the memory to which a kernel can write or add the weight's gradient; None if it cannot."""
    sink = grad_sink(weight)
    if sink is None or weight.dtype == torch.float64:
        return None
    main_grad = sink.main_grad
    return InPlace(main_grad, not sink.is_empty, sink.added) if main_grad.dtype == torch.float32 else None


def summed_in_place(weight: Tensor) -> Tensor | None:
    """Return the memory like `in_place`, for kernels that can only add: it is zeroed if there is no sum yet."""
    grad_buffer = in_place(weight)
    if grad_buffer is None:
        return None
    return grad_buffer.main_grad if grad_buffer.accumulate else grad_buffer.main_grad.zero_()


def was_added(weight: Tensor) -> None:
    """Report to the weight's sink that a gradient was added to the memory that `summed_in_place` returned."""
    sink = grad_sink(weight)
    assert sink is not None
    sink.added()


def open_store(weight: Tensor) -> WgradStore | None:
    """Return the store that defers the weight's gradient, or None if the gradient is not deferred."""
    sink = grad_sink(weight)
    store = None if sink is None else sink.wgrads
    return store if store is not None and store.is_open else None


def begin_or_defer(weight: Tensor, begin: Callable[[], Callable[[], Tensor | None]]) -> Callable[[], Tensor | None]:
    """Begin a weight gradient and return a function that finishes it, or defer it and return a no-op."""
    store = open_store(weight)
    if store is None:
        return begin()
    store.put(begin)
    return lambda: None


def now_or_later(weight: Tensor, wgrad: Callable[[], Tensor | None]) -> Tensor | None:
    """Call `wgrad` and return its result; or put `wgrad` in the weight's open store and return None."""
    return begin_or_defer(weight, lambda: wgrad)()


class _OneGradient:
    """Sink that adds several gradients to the sum of `sink`, which counts them as one."""

    wgrads = pair = None

    def __init__(self, sink: GradSink) -> None:
        self.sink, self.is_empty, self.counts = sink, sink.is_empty, False

    @property
    def main_grad(self) -> Tensor:
        return self.sink.main_grad

    def added(self) -> None:
        self.is_empty, self.counts = False, True


@contextmanager
def one_gradient(weights: Iterable[Tensor]) -> Iterator[None]:
    """Count all gradients that each weight receives inside the context as one, and defer none of them."""
    sinks = [(weight, _OneGradient(sink)) for weight in weights if (sink := grad_sink(weight)) is not None]
    for weight, one in sinks:
        set_grad_sink(weight, one)
    try:
        yield
    finally:
        for weight, one in sinks:
            set_grad_sink(weight, one.sink)
    for _, one in sinks:
        if one.counts:
            one.sink.added()


def wgrad_by(weight: Tensor, experts: int, compute: Callable[..., None]) -> Tensor | None:
    """Compute dw `[e·n, k]` of experts and add it to the weight's sink, or return it if there is no sink.

    `compute(dw_enk, accumulate=...)` writes dw to `dw_enk` `[e, n, k]`, or adds it to the sink's fp32 sum.
    """
    grad_buffer = in_place(weight)
    if grad_buffer is None:
        dw = torch.empty(weight.shape, dtype=wgrad_dtype(weight), device=weight.device)
    else:
        dw = grad_buffer.main_grad
    compute(dw.view(experts, -1, weight.shape[1]), accumulate=grad_buffer is not None and grad_buffer.accumulate)
    if grad_buffer is None:
        return deliver(weight, dw)
    grad_buffer.added()
    return None


def paired_wgrad_by(weight: Tensor, experts: int, operands: Any, compute: Callable[..., None]) -> Tensor | None:
    """Compute dw like `wgrad_by`, for two micro-batches together if the weight's sink uses pairs.

    `compute(operands_list, dw_enk, accumulate=...)` computes the sum of the gradients of one or two `operands`.
    """

    def alone(operands: Any) -> Tensor | None:
        return wgrad_by(weight, experts, partial(compute, [operands]))

    sink = grad_sink(weight)
    if sink is None or sink.pair is None:
        return alone(operands)
    now = sink.pair.put(operands, alone)
    if now:
        wgrad_by(weight, experts, partial(compute, now))
    if len(now) > 1:
        sink.added()  # once more, for the gradient of the kept micro-batch
    return None
