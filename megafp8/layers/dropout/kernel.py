"""Dropout kernel that computes the mask in registers. Reference: `megafp8.layers.dropout.reference`.

Shapes: n tokens, c channels.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import kernel_input, next_power_of_2
from megafp8.kernels.launch import BoundKernel, TritonKernel
from megafp8.layers.dropout.reference import Dropout

NUMBERS = ("key0", "key1", "threshold")
"""Kernel parameters that differ between layers, for which Triton must not specialize."""


@triton.jit
def dropped(x, position, sample, key0, key1, threshold, scale, WIDTH: tl.constexpr):
    """Apply dropout to x, the channels of one token, fp32 `[WIDTH]`; WIDTH is at least 4."""
    group = tl.arange(0, WIDTH // 4).to(tl.uint32)
    place, low, high = position.to(tl.uint32), sample.to(tl.uint32), (sample >> 32).to(tl.uint32)
    k0, k1 = key0.to(tl.uint32, bitcast=True), key1.to(tl.uint32, bitcast=True)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox_impl(group, zero + place, zero + low, zero + high, k0, k1)
    word = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(WIDTH)
    return tl.where(word >= threshold.to(tl.uint32, bitcast=True), x * scale, 0.0)


def dropout_kernel(x_nc, residual_nc, y_nc, position_n, sample_n, c, key0, key1, threshold, scale, ADD: tl.constexpr,
                   WIDTH: tl.constexpr):  # fmt: skip
    """Apply dropout to one token, and add the residual if ADD."""
    i = tl.program_id(0)
    j = tl.arange(0, WIDTH)
    at = i.to(tl.int64) * c + j
    x = tl.load(x_nc + at, mask=j < c, other=0.0).to(tl.float32)
    y = dropped(x, tl.load(position_n + i), tl.load(sample_n + i), key0, key1, threshold, scale, WIDTH)
    if ADD:
        y = tl.load(residual_nc + at, mask=j < c, other=0.0).to(tl.float32) + y
    tl.store(y_nc + at, y.to(y_nc.dtype.element_ty), mask=j < c)


_KERNEL = TritonKernel(dropout_kernel, do_not_specialize=NUMBERS)


def numbers(dropout: Dropout) -> tuple[int, int, int, float]:
    """Return the kernel arguments of a dropout: key and threshold as signed 32-bit integers, and the scale."""
    key0, key1, threshold = np.array([*dropout.key, dropout.threshold], dtype=np.uint32).view(np.int32).tolist()
    return key0, key1, threshold, dropout.scale


@cache
def _bound(c: int, add: bool) -> BoundKernel:
    width = max(4, next_power_of_2(c))
    return _KERNEL.bind(ADD=add, WIDTH=width, num_warps=min(16, max(4, width // 512)), enable_fp_fusion=False)


def add(residual: Tensor | None, x: Tensor, dropout: Dropout) -> Tensor:
    """Compute `megafp8.layers.dropout.reference.add` for contiguous x and residual `[..., c]`."""
    c = x.shape[-1]
    x = kernel_input(x)
    y = torch.empty_like(x)
    if x.numel():
        tensors = (x, x if residual is None else kernel_input(residual), y, *dropout.places.tensors)
        _bound(c, residual is not None).launch((x.numel() // c, 1), tensors, (c, *numbers(dropout)))
    return y
