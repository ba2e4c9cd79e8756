"""Matrix products: one for FP8 operands with several backends, one for all other dtypes.

Hopper's tensor cores support FP8 only as a · bᵀ with both operands row-major ("TN"), so this is the only form; the
caller transposes beforehand. The GEMM itself applies scales finer than per-tensor, block by block.

Backends for FP8:
    cublaslt   cuBLASLt through nvmath-python: the algorithm is chosen by measurement, weight gradients are accumulated
               in place, and a call costs the host a few microseconds
    scaled_mm  torch.nn.functional.scaled_mm: cuBLASLt's first choice on CUDA; oneDNN on CPU, where torch supports it
    emulated   the same product with fp32 operands, on any device: exact products (FP8 × FP8 fits fp32), fp32 sums;
               for a float64 result float64 sums, so that layouts can be compared without noise from the order of sums

Blocks of 32 and 16 (mxfp8, nvfp4) need Blackwell's tensor cores, which no backend uses: the casts dequantize such
operands, and bf16 GEMMs multiply them. Pairs of granularities that Hopper's tensor cores do not support are emulated.

cuBLASLt needs n and k to be multiples of 16. Other sizes are padded with zeros, which adds nothing to the sums and
costs a copy. Layer sizes and tokens per micro-batch that are multiples of 16 avoid the copy.

Shapes: m, n the result's dims, k the summed dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.gemm.cublaslt import CublasLt, available
from megafp8.gemm.cublaslt_problem import ALIGNMENT, adds_bias, arranged
from megafp8.host.shipped import install_command
from megafp8.host.user_cache import user_cache
from megafp8.numerics.tensor import (
    BLOCK_1X128,
    BLOCK_128X128,
    DEQUANTIZED,
    HOPPER_PAIRS,
    ROW,
    TENSOR,
    ScaledTensor,
    zero_pad,
)

GemmBackend = Literal["auto", "cublaslt", "scaled_mm", "emulated"]

_SCALING = {
    TENSOR: F.ScalingType.TensorWise,
    ROW: F.ScalingType.RowWise,
    BLOCK_1X128: F.ScalingType.BlockWise1x128,
    BLOCK_128X128: F.ScalingType.BlockWise128x128,
}
_ONE_SCALE = (TENSOR, DEQUANTIZED)
_BLOCK_SCALED_ROWS = 4
"""Number that the rows must be a multiple of in cuBLASLt with 1×128 block scales."""


def algorithm_file() -> Path:
    """Return the path of the file that stores cuBLASLt's fastest algorithms between runs."""
    return user_cache() / "cublaslt.json"


@cache
def _shared_cublaslt(index: int, autotune: bool) -> CublasLt:
    """Return the cuBLASLt handle of GPU `index`. All layers share it, because each handle has large workspaces."""
    device = torch.device("cuda", index)
    return CublasLt(device, autotune=autotune, cache_file=algorithm_file() if autotune else None)


class Fp8Gemm:
    """FP8 products with one backend on one device; "auto" selects the fastest backend available on the device.

    With `autotune`, cuBLASLt's algorithms are timed when a shape is first used.

    Raises:
        ValueError: If a backend is requested by name and is not available.
    """

    def __init__(self, backend: GemmBackend, device: torch.device, *, autotune: bool = True) -> None:
        has_cublaslt = available(device)
        if backend == "cublaslt" and not has_cublaslt:
            raise ValueError(
                f"fp8.gemm_backend = cublaslt: needs nvmath-python ({install_command('gpu')}) and a Hopper GPU, but "
                f"{device} does not have both; try auto"
            )
        if backend == "auto":
            backend = ("cublaslt" if has_cublaslt else "scaled_mm") if device.type == "cuda" else "emulated"
        self.backend = backend
        self._cublaslt: CublasLt | None = None
        if backend == "cublaslt":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._cublaslt = _shared_cublaslt(index, autotune)

    def tn(
        self,
        a_mk: ScaledTensor,
        b_nk: ScaledTensor,
        out_dtype: torch.dtype,
        *,
        use_fast_accum: bool,
        out: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return `a · bᵀ`, `[m, n]`, rounded once to `out_dtype`; written to `out`, contiguous, if given.

        `use_fast_accum` has an effect only on Hopper. `bias` `[n]` is added before rounding if cuBLASLt supports this,
        otherwise to the rounded product.
        """
        if bias is not None and not self._adds(a_mk, b_nk, out_dtype, bias):
            return self.tn(a_mk, b_nk, out_dtype, use_fast_accum=use_fast_accum, out=out).add_(bias)
        if self.backend == "emulated":
            y_mn = emulated(a_mk, b_nk, out_dtype)
            return y_mn if out is None else out.copy_(y_mn)
        if _in_bf16(a_mk, b_nk, out_dtype):
            return self._bf16(a_mk, b_nk, out_dtype, out)
        if self._cublaslt is not None and _fits(a_mk, b_nk):
            if out is None:
                a8 = a_mk.data
                out = torch.empty(a8.shape[0], b_nk.data.shape[0], dtype=out_dtype, device=a8.device)
            self._cublaslt.matmul_tn(a_mk, b_nk, out, accumulate=False, use_fast_accum=use_fast_accum, bias=bias)
            return out
        if (a_mk.granularity, b_nk.granularity) not in HOPPER_PAIRS:
            return _into(out, emulated(a_mk, b_nk, out_dtype))
        assert a_mk.data.is_contiguous()
        assert b_nk.data.is_contiguous()
        return _into(out, _scaled_mm(a_mk, b_nk, out_dtype, use_fast_accum))

    def _bf16(self, a_mk: ScaledTensor, b_nk: ScaledTensor, out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Return the product of dequantized operands on CUDA, `[m, n]` in `out_dtype`.

        Sums are multiplied by the product of both scales. This product loses digits below 2^-126: in nvfp4, for tensors
        with amaxes that multiply to less than 2^-103.
        """
        a, b_kn = a_mk.data, b_nk.data.t()
        factor = a_mk.scale_inv * b_nk.scale_inv
        if self._cublaslt is None or out_dtype == torch.float16 or not _fits_bf16(a, b_kn):
            return _into(out, torch.mm(a, b_kn, out_dtype=torch.float32).mul_(factor).to(out_dtype))
        if out is None:
            out = torch.empty(a.shape[0], b_kn.shape[1], dtype=out_dtype, device=a.device)
        self._cublaslt.matmul(a, b_kn, out, accumulate=False, factor=factor)
        return out

    def _adds(self, a_mk: ScaledTensor, b_nk: ScaledTensor, out_dtype: torch.dtype, bias: Tensor) -> bool:
        """Return whether cuBLASLt adds this bias to this product."""
        return (
            self._cublaslt is not None
            and _fits(a_mk, b_nk)
            and adds_bias(a_mk.granularity.name, b_nk.granularity.name, out_dtype)
            and bias.dtype == out_dtype
            and bias.is_contiguous()
            and bias.data_ptr() % ALIGNMENT == 0
        )

    def accumulate_tn(self, a_mk: ScaledTensor, b_nk: ScaledTensor, out_mn: Tensor, *, use_fast_accum: bool) -> None:
        """Add `a · bᵀ` to `out_mn`, which is fp32 and contiguous."""
        if self._cublaslt is not None and _fits(a_mk, b_nk):
            self._cublaslt.matmul_tn(a_mk, b_nk, out_mn, accumulate=True, use_fast_accum=use_fast_accum)
        elif self._cublaslt is not None and _in_bf16(a_mk, b_nk, out_mn.dtype) and _fits_bf16(a_mk.data, b_nk.data.t()):
            factor = a_mk.scale_inv * b_nk.scale_inv
            self._cublaslt.matmul(a_mk.data, b_nk.data.t(), out_mn, accumulate=True, factor=factor)
        else:
            out_mn.add_(self.tn(a_mk, b_nk, out_mn.dtype, use_fast_accum=use_fast_accum))


def _into(out: Tensor | None, y_mn: Tensor) -> Tensor:
    """Return `y_mn`, copied into `out` if given."""
    return y_mn if out is None else out.copy_(y_mn)


def _in_bf16(a_mk: ScaledTensor, b_nk: ScaledTensor, out_dtype: torch.dtype) -> bool:
    """Return whether tensor cores multiply these operands in bf16."""
    dequantized = a_mk.granularity is DEQUANTIZED and b_nk.granularity is DEQUANTIZED
    return dequantized and a_mk.data.is_cuda and out_dtype != torch.float64


def _fits_bf16(a_mk: Tensor, b_kn: Tensor) -> bool:
    """Return whether cuBLASLt supports these matrices unpadded.

    Their rows, transposed or not, must be multiples of 16 bytes.
    """
    sizes = (*a_mk.shape, b_kn.shape[1])
    return min(sizes) > 0 and not any(size * 2 % ALIGNMENT for size in sizes)


def _fits(a_mk: ScaledTensor, b_nk: ScaledTensor) -> bool:
    """Return whether cuBLASLt supports these operands unpadded."""
    n, k = b_nk.data.shape
    return (
        (a_mk.granularity, b_nk.granularity) in HOPPER_PAIRS
        and n % ALIGNMENT == 0
        and k % ALIGNMENT == 0
        and (a_mk.granularity is not BLOCK_1X128 or a_mk.data.shape[0] % _BLOCK_SCALED_ROWS == 0)
    )


def emulated(
    a_mk: ScaledTensor,
    b_nk: ScaledTensor,
    out_dtype: torch.dtype,
    multiply: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute `Fp8Gemm.tn` in fp32 or wider.

    `multiply` computes a · bᵀ of the converted matrices; torch's matmul by default.
    """
    wide = torch.promote_types(out_dtype, torch.float32)
    one_scale = a_mk.granularity in _ONE_SCALE and b_nk.granularity in _ONE_SCALE  # scales multiply the finished sum
    if one_scale:
        a, b = a_mk.data.to(wide), b_nk.data.to(wide)
    else:
        a, b = a_mk.dequantize(wide), b_nk.dequantize(wide)
    y_mn = a @ b.t() if multiply is None else multiply(a, b)
    return (y_mn.mul_(a_mk.scale_inv).mul_(b_nk.scale_inv) if one_scale else y_mn).to(out_dtype)


def _scaled_mm(a_mk: ScaledTensor, b_nk: ScaledTensor, out_dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
    """Compute `Fp8Gemm.tn` with torch's scaled_mm, on padded operands."""
    m, (n, k) = a_mk.data.shape[0], b_nk.data.shape
    pad_m = -m % _BLOCK_SCALED_ROWS if a_mk.granularity is BLOCK_1X128 else 0
    pad_n, pad_k = -n % ALIGNMENT, -k % ALIGNMENT
    a_mk, b_nk = arranged(a_mk), arranged(b_nk)
    a_scale_inv, b_scale_inv = a_mk.scale_inv, b_nk.scale_inv
    if pad_m:
        a_scale_inv = F.pad(a_scale_inv.t(), (0, pad_m)).t()
    if b_nk.granularity is ROW:
        b_scale_inv = F.pad(b_scale_inv, (0, 0, 0, pad_n)).t()
    elif b_nk.granularity is BLOCK_128X128:  # scales are padded to a multiple of four blocks of k
        b_scale_inv = F.pad(b_scale_inv, (0, -b_scale_inv.shape[1] % 4)).t()
    y_mn = F.scaled_mm(  # torch supports fp16 results only for some granularities
        zero_pad(a_mk.data, pad_m, pad_k),
        zero_pad(b_nk.data, pad_n, pad_k).t(),
        a_scale_inv,
        _SCALING[a_mk.granularity],
        b_scale_inv,
        _SCALING[b_nk.granularity],
        output_dtype=torch.float32 if out_dtype == torch.float16 else out_dtype,
        use_fast_accum=use_fast_accum and a_mk.granularity in (TENSOR, ROW),  # torch rejects it for blocks
    ).to(out_dtype)
    return y_mn[:m, :n].contiguous() if pad_m or pad_n else y_mn


def gemm(
    a_mk: Tensor, b_kn: Tensor, out_dtype: torch.dtype, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return `a · b` of two matrices of one dtype in any layout, `[m, n]` in `out_dtype`; written to `out` if given.

    Sums are fp32 for 16-bit operands, and an fp32 result is not rounded. On CPU, these operands are widened first: the
    products and sums are the same, and much faster. `bias` `[n]` is added as in `Fp8Gemm.tn`.
    """
    if bias is not None:
        if a_mk.is_cuda and out_dtype == a_mk.dtype == bias.dtype:
            return torch.addmm(bias, a_mk, b_kn, out=out)
        return gemm(a_mk, b_kn, out_dtype, out).add_(bias)
    if a_mk.is_cuda and out_dtype == a_mk.dtype:
        return torch.mm(a_mk, b_kn, out=out)
    wide = torch.promote_types(a_mk.dtype, torch.float32)
    if not a_mk.is_cuda:
        a_mk, b_kn = a_mk.to(wide), b_kn.to(wide)
    elif a_mk.dtype != wide and out_dtype == wide:
        return torch.mm(a_mk, b_kn, out_dtype=wide, out=out)
    y_mn = (a_mk @ b_kn).to(out_dtype)
    return y_mn if out is None else out.copy_(y_mn)
