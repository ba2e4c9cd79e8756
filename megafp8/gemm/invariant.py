"""Batch-invariant products: a row of the result depends only on its row of x and on w, not on the number of rows.

On CUDA, our own kernel sums in an order that follows from the weight's shape (`megafp8.kernels.invariant_gemm`). On
CPUs, the math library chooses its kernel by the shape, so each call has `_ROWS` rows, padded with zeros, and widths
that are multiples of `_ALIGNMENT`: kernels for other widths may compute the rows of one product differently.

Shapes: m rows of x, n outputs, k inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.gemm.dispatch import emulated
from megafp8.numerics.tensor import ScaledTensor

_ROWS, _ALIGNMENT = 16, 16


def product(
    x: Tensor | ScaledTensor, w: Tensor | ScaledTensor, dtype: torch.dtype, *, fast: bool = True,
    out: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return `x wᵀ`, `[m, n]` in `dtype`, written to `out` if given; x and w are FP8, or values of one dtype.

    `fast` keeps FP8 sums in Hopper's tensor cores. `bias` `[n]` is added to the rounded product.

    Raises:
        ValueError: If the kernel does not support the pair of granularities.
    """
    data = x.data if isinstance(x, ScaledTensor) else x
    if data.is_cuda and dtype != torch.float64:
        from megafp8.kernels import invariant_gemm  # needs Triton, which comes with torch's CUDA builds

        y_mn = invariant_gemm.product(x, w, dtype, fast=fast, out=out)
        return y_mn if bias is None else y_mn.add_(bias)
    if isinstance(x, ScaledTensor):
        assert isinstance(w, ScaledTensor)
        y_mn = emulated(x, w, dtype, product_in_blocks)
    else:
        assert not isinstance(w, ScaledTensor)
        wide = torch.promote_types(x.dtype, torch.float32)
        y_mn = product_in_blocks(x.to(wide), w.to(wide)).to(dtype)
    y_mn = y_mn if out is None else out.copy_(y_mn)
    return y_mn if bias is None else y_mn.add_(bias)


def product_in_blocks(x_mk: Tensor, w_nk: Tensor) -> Tensor:
    """Return `x wᵀ`, `[m, n]`, computed as products of `_ROWS` rows each."""
    (m, k), n = x_mk.shape, len(w_nk)
    w_kn = F.pad(w_nk, (0, -k % _ALIGNMENT, 0, -n % _ALIGNMENT)).t()
    x_mk = F.pad(x_mk, (0, -k % _ALIGNMENT, 0, -m % _ROWS))
    y_mn = x_mk.new_empty(len(x_mk), w_kn.shape[1])
    for rows, y in zip(x_mk.split(_ROWS), y_mn.split(_ROWS), strict=True):
        y.copy_(rows.clone() @ w_kn)  # copy the rows: the choice of a kernel may depend on the address of a matrix
    return y_mn[:m, :n].contiguous()
