"""Where weight gradients go, and the weight gradient in high precision.

A weight may have an attribute `grad_sink` (`GradSink`), set by the gradient buffer: dw `[n, k]` is then added to its
`main_grad`, by the GEMM itself where possible. Autograd sees no gradient for the weight, which saves a bf16 gradient
and its rounding. Without a sink, dw is returned in the dtype that autograd wants: the weight's own unless its
`grad_dtype` says otherwise. While a sink's `WgradStore` is open, wgrad is deferred (`megafp8.ops.deferred_wgrad`).

Shapes: m tokens, k inputs, n outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megafp8.fp8.gemm.dispatch import gemm
from megafp8.ops.deferred_wgrad import WgradStore


class GradSink(Protocol):
    """Where a weight's gradient goes: called with dw, or told that dw has been added to `main_grad`, its fp32 sum.

    `wgrads` takes wgrad for later while it is open; None where there is no later.
    """

    main_grad: Tensor
    wgrads: WgradStore | None

    def __call__(self, grad: Tensor) -> None: ...

    def added(self) -> None: ...


def wgrad_dtype(weight: Tensor) -> torch.dtype:
    """What dtype `deliver` wants dw in."""
    has_sink = getattr(weight, "grad_sink", None) is not None
    if has_sink:
        return torch.promote_types(weight.dtype, torch.float32)
    return (weight.grad_dtype if weight.is_leaf else None) or weight.dtype


def deliver(weight: Tensor, dw_nk: Tensor) -> Tensor | None:
    """Give dw to the weight's sink and autograd nothing, or autograd dw."""
    sink = getattr(weight, "grad_sink", None)
    if sink is None:
        return dw_nk
    sink(dw_nk)
    return None


def open_store(weight: Tensor) -> WgradStore | None:
    """Where the weight's gradient is to be left for later, if it is."""
    store = getattr(getattr(weight, "grad_sink", None), "wgrads", None)
    return store if store is not None and store.is_open else None


def wgrad(weight: Tensor, dy_mn: Tensor, x_mk: Tensor) -> Tensor | None:
    """dw in high precision, to its sink or back; on CUDA a sink's fp32 takes it in place."""
    main_grad = summed_in_place(weight)
    if main_grad is None or not (dy_mn.is_cuda and dy_mn.dtype == x_mk.dtype and dy_mn.dtype.itemsize == 2):
        return deliver(weight, gemm(dy_mn.t(), x_mk, wgrad_dtype(weight)))
    torch.addmm(main_grad, dy_mn.t(), x_mk, out_dtype=torch.float32, out=main_grad)
    weight.grad_sink.added()  # type: ignore[attr-defined]
    return None


def wgrad_now_or_later(weight: Tensor, dy_mn: Tensor, x_mk: Tensor) -> Tensor | None:
    """`wgrad`, or None and its operands in the open store."""
    store = open_store(weight)
    if store is None:
        return wgrad(weight, dy_mn, x_mk)
    finish = partial(wgrad, weight, dy_mn.detach(), x_mk.detach())  # detached: the graph need not live on
    store.put(lambda: finish)
    return None


def wgrad_by(weight: Tensor, experts: int, compute: Callable[..., None]) -> Tensor | None:
    """dw `[e·n, k]` of experts to the weight's sink, or back.

    `compute(dw_enk, accumulate=...)` writes it to `dw_enk` `[e, n, k]`, or adds it to the sink's fp32 sum.
    """
    main_grad = summed_in_place(weight)
    dw = torch.empty(weight.shape, dtype=wgrad_dtype(weight), device=weight.device) if main_grad is None else main_grad
    compute(dw.view(experts, -1, weight.shape[1]), accumulate=main_grad is not None)
    if main_grad is None:
        return deliver(weight, dw)
    weight.grad_sink.added()  # type: ignore[attr-defined]
    return None


def now_or_later(weight: Tensor, wgrad: Callable[[], Tensor | None]) -> Tensor | None:
    """What `wgrad` returns; or None, and `wgrad` in the weight's open store."""
    store = open_store(weight)
    if store is None:
        return wgrad()
    store.put(lambda: wgrad)
    return None


def summed_in_place(weight: Tensor) -> Tensor | None:
    """The fp32 sum of the weight's gradients, if it has a sink with one."""
    main_grad = getattr(getattr(weight, "grad_sink", None), "main_grad", None)
    fits = main_grad is not None and main_grad.dtype == torch.float32 and weight.dtype != torch.float64
    return main_grad if fits else None
