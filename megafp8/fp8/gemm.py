"""Matrix products: one for FP8 operands with several backends, one for everything else.

Hopper's tensor cores take FP8 only as a · bᵀ with both operands row-major ("TN"), so that is the one form there is;
transposing beforehand is the caller's business. Both scales are single factors, so they multiply the finished sum.

Backends for FP8:
    scaled_mm  torch.nn.functional.scaled_mm: cuBLASLt on CUDA; oneDNN on CPU, in torch releases that have it there
    emulated   the same product with fp32 operands, anywhere: exact products (FP8 × FP8 fits fp32), fp32 sums;
               for a float64 result float64 sums, which lets layouts be compared without the noise of their order

cuBLASLt wants n and k to be multiples of 16. Others are padded with zeros, which adds nothing to any sum and costs a
copy; layer sizes and tokens per micro-batch that are multiples of 16 never pay it.

Shapes: m, n the result's dims, k the dim summed over.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

GemmBackend = Literal["auto", "scaled_mm", "emulated"]

_ALIGNMENT = 16


def fp8_gemm_tn(
    a8_mk: Tensor,
    a_scale_inv: Tensor,
    b8_nk: Tensor,
    b_scale_inv: Tensor,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    backend: GemmBackend,
) -> Tensor:
    """`a · bᵀ · a_scale_inv · b_scale_inv`, `[m, n]` in `out_dtype`, rounded to it once.

    Operands are FP8 and contiguous, scales fp32 `[]`. `backend` "auto" is scaled_mm on CUDA and emulated elsewhere.
    `use_fast_accum` matters on Hopper with scaled_mm only.
    """
    assert a8_mk.is_contiguous()
    assert b8_nk.is_contiguous()
    if backend == "auto":
        backend = "scaled_mm" if a8_mk.is_cuda else "emulated"
    if backend == "emulated":
        wide = torch.promote_types(out_dtype, torch.float32)
        return (a8_mk.to(wide) @ b8_nk.to(wide).t()).mul_(a_scale_inv).mul_(b_scale_inv).to(out_dtype)
    n, k = b8_nk.shape
    pad_n, pad_k = -n % _ALIGNMENT, -k % _ALIGNMENT
    y_mn = F.scaled_mm(
        _zero_pad(a8_mk, 0, pad_k),
        _zero_pad(b8_nk, pad_n, pad_k).t(),
        a_scale_inv,
        F.ScalingType.TensorWise,
        b_scale_inv,
        F.ScalingType.TensorWise,
        output_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )
    return y_mn[:, :n].contiguous() if pad_n else y_mn


def _zero_pad(x8: Tensor, rows: int, columns: int) -> Tensor:
    """`x8` with zero rows and columns appended."""
    if rows == columns == 0:
        return x8
    return F.pad(x8.view(torch.uint8), (0, columns, 0, rows)).view(x8.dtype)  # the byte 0 is the number 0


def gemm(a_mk: Tensor, b_kn: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`a · b` of two matrices of one dtype in any layout, `[m, n]` in `out_dtype`.

    Sums are fp32 for 16-bit operands, and reach an fp32 result unrounded. On CPU those operands are widened first: the
    same products and sums, and far faster there.
    """
    wide = torch.promote_types(a_mk.dtype, torch.float32)
    if not a_mk.is_cuda:
        a_mk, b_kn = a_mk.to(wide), b_kn.to(wide)
    elif a_mk.dtype != wide and out_dtype == wide:
        return torch.mm(a_mk, b_kn, out_dtype=wide)
    return (a_mk @ b_kn).to(out_dtype)
