"""Gradient sinks: where weight gradients go instead of to autograd.

A weight may have a `GradSink`, given by `set_grad_sink`: dw `[n, k]` is then added to its `main_grad`, by the GEMM
itself where possible, or written there if it is a step's first. Autograd sees no gradient for the weight, which saves a
bf16 gradient and its rounding. Without a sink, dw is returned in the dtype that autograd wants: the weight's own unless
its `grad_dtype` says otherwise. While a sink's `WgradStore` is open, wgrad is deferred
(`megafp8.linear.deferred_wgrad`).

A sink belongs to a parameter object: tensors that autograd has saved may come back as other objects, without it.

Shapes: k inputs, n outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megafp8.linear.deferred_wgrad import WgradPair, WgradStore
from megafp8.numerics.dtypes import sum_dtype


class GradSink(Protocol):
    """Where a weight's gradient goes: into `main_grad`, a sum of its shape, in fp32 mostly.

    `is_empty`: there is no sum yet, and `main_grad` has any values: the first gradient is written, not added. `wgrads`
    takes wgrad for later while it is open; None where there is no later. `added` is called when a gradient has been
    written or added to `main_grad`. `pair`: keeps operands, so that kernels which can compute gradients of two
    micro-batches at once; None where each is computed by itself.
    """

    @property
    def main_grad(self) -> Tensor: ...

    @property
    def is_empty(self) -> bool: ...

    @property
    def wgrads(self) -> WgradStore | None: ...

    @property
    def pair(self) -> WgradPair | None: ...

    def added(self) -> None: ...


def set_grad_sink(weight: Tensor, sink: GradSink) -> None:
    """From now on the gradient of `weight`, a leaf, goes to `sink`."""
    weight.grad_sink = sink  # type: ignore[attr-defined]


def grad_sink(weight: Tensor) -> GradSink | None:
    """The weight's sink, if it has one."""
    return getattr(weight, "grad_sink", None)


def wgrad_dtype(weight: Tensor) -> torch.dtype:
    """What dtype `deliver` wants dw in."""
    if grad_sink(weight) is not None:
        return sum_dtype(weight.dtype)
    return (weight.grad_dtype if weight.is_leaf else None) or weight.dtype


def deliver(weight: Tensor, dw: Tensor) -> Tensor | None:
    """Add dw, of any floating dtype, to the weight's sink and give autograd nothing; or give autograd dw."""
    sink = grad_sink(weight)
    if sink is None:
        return dw
    assert dw.shape == sink.main_grad.shape, f"a gradient {tuple(dw.shape)} for {tuple(sink.main_grad.shape)}"
    if sink.is_empty:
        sink.main_grad.copy_(dw.detach())
    else:
        sink.main_grad.add_(dw.detach())
    sink.added()
    return None


class InPlace(NamedTuple):
    """The fp32 memory of a weight's gradient, which a kernel adds to; not `accumulate`: which it writes.

    `added` is to be called then.
    """

    main_grad: Tensor
    accumulate: bool
    added: Callable[[], None]


def in_place(weight: Tensor) -> InPlace | None:
    """Return where a kernel is to write the weight's gradient, or add it; None where it cannot."""
    sink = grad_sink(weight)
    if sink is None or weight.dtype == torch.float64:
        return None
    main_grad = sink.main_grad
    return InPlace(main_grad, not sink.is_empty, sink.added) if main_grad.dtype == torch.float32 else None


def summed_in_place(weight: Tensor) -> Tensor | None:
    """As `in_place`, for kernels that can only add: the sum is zero where there was none."""
    grad_buffer = in_place(weight)
    if grad_buffer is None:
        return None
    return grad_buffer.main_grad if grad_buffer.accumulate else grad_buffer.main_grad.zero_()


def was_added(weight: Tensor) -> None:
    """Tell the weight's sink that a gradient has been written or added to what `summed_in_place` returned."""
    sink = grad_sink(weight)
    assert sink is not None
    sink.added()


def open_store(weight: Tensor) -> WgradStore | None:
    """Where the weight's gradient is to be left for later, if it is."""
    sink = grad_sink(weight)
    store = None if sink is None else sink.wgrads
    return store if store is not None and store.is_open else None


def begin_or_defer(weight: Tensor, begin: Callable[[], Callable[[], Tensor | None]]) -> Callable[[], Tensor | None]:
    """Begin a weight gradient, and return what finishes it; or defer it, and return what does nothing."""
    store = open_store(weight)
    if store is None:
        return begin()
    store.put(begin)
    return lambda: None


def now_or_later(weight: Tensor, wgrad: Callable[[], Tensor | None]) -> Tensor | None:
    """What `wgrad` returns; or None, and `wgrad` in the weight's open store."""
    return begin_or_defer(weight, lambda: wgrad)()


def wgrad_by(weight: Tensor, experts: int, compute: Callable[..., None]) -> Tensor | None:
    """dw `[e·n, k]` of experts to the weight's sink, or back.

    `compute(dw_enk, accumulate=...)` writes it to `dw_enk` `[e, n, k]`, or adds it to the sink's fp32 sum.
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
    """As `wgrad_by`, of two micro-batches at once if the weight's sink wants pairs.

    `compute(of_micro_batches, dw_enk, accumulate=...)`: the sum of those of one or two `operands`.
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
        sink.added()  # the gradient of the micro-batch that was kept
    return None
