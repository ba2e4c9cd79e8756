"""Momentum of a matrix optimizer, and its update of masters, each in one pass. Reference: `MatrixOptimizer` on CPUs.

Shapes: n elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div

_ELEMENTS, _WARPS = 2048, 4  # per program


@triton.jit
def _elements(skip, n, ELEMENTS: tl.constexpr):
    """Return the indices of this program's elements, and the mask of those to update.

    The mask is empty if `skip`, a byte in memory or None, is not zero.
    """
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    if skip is not None:
        n = n * (tl.load(skip) == 0).to(tl.int32)
    return at, at < n


@triton.jit(do_not_specialize=["decay"])
def momentum_kernel(momentum_n, gradient_n, direction_n, skip, n, decay, NESTEROV: tl.constexpr,
                    ELEMENTS: tl.constexpr):  # fmt: skip
    """Update M ← M + (1 - decay)(G - M), and store M in `direction_n`; with NESTEROV, M + (1 - decay)(G - M)."""
    at, inside = _elements(skip, n, ELEMENTS)
    gradient = tl.load(gradient_n + at, mask=inside, other=0.0)
    momentum = tl.load(momentum_n + at, mask=inside, other=0.0).to(tl.float32)
    momentum += (1.0 - decay) * (gradient - momentum)
    tl.store(momentum_n + at, momentum.to(momentum_n.dtype.element_ty), mask=inside)
    if direction_n is not None:
        if NESTEROV:
            momentum += (1.0 - decay) * (gradient - momentum)
        tl.store(direction_n + at, momentum.to(direction_n.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["shrink", "factor"])
def decayed_add_kernel(x_n, update_n, skip, n, shrink, factor, ELEMENTS: tl.constexpr):
    """Compute x ← shrink · x + factor · update."""
    at, inside = _elements(skip, n, ELEMENTS)
    update = tl.load(update_n + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_n + at, mask=inside, other=0.0)
    tl.store(x_n + at, x * shrink + factor * update, mask=inside)


def _byte(skip: Tensor | None) -> Tensor | None:
    return None if skip is None else skip.view(torch.uint8)


def accumulate(
    momentum_n: Tensor, gradient_n: Tensor, direction_n: Tensor | None, decay: float, *, nesterov: bool,
    skip: Tensor | None = None,
) -> None:  # fmt: skip
    """Update the momentum in place, and store the direction of the update. All tensors are flat and contiguous.

    Args:
        momentum_n: Momentum, fp32 or bf16. It is rounded when it is stored; the direction has the value before.
        gradient_n: Gradient, fp32.
        direction_n: Output for the direction, which the optimizer then transforms, of any dtype; or None.
        decay: Decay rate of the momentum.
        nesterov: Whether to use Nesterov momentum.
        skip: Nothing is written if it is true, bool `[]`; or None.
    """
    momentum_kernel[(ceil_div(len(momentum_n), _ELEMENTS),)](
        momentum_n, gradient_n, direction_n, _byte(skip), len(momentum_n), decay, NESTEROV=nesterov, ELEMENTS=_ELEMENTS,
        num_warps=_WARPS,
    )  # fmt: skip


def decayed_add_(x_n: Tensor, update_n: Tensor, shrink: float, factor: float, *, skip: Tensor | None = None) -> None:
    """Compute x ← shrink · x + factor · update in place, unless `skip`, bool `[]`, is true.

    x is fp32, and both tensors are flat and contiguous.
    """
    decayed_add_kernel[(ceil_div(len(x_n), _ELEMENTS),)](
        x_n, update_n, _byte(skip), len(x_n), shrink, factor, ELEMENTS=_ELEMENTS, num_warps=_WARPS
    )
