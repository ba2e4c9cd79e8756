"""Products of MXFP8 and of NVFP4 matrices on Blackwell's tensor cores, through `torch.nn.functional.scaled_mm`.

Blackwell multiplies by the scales inside the tensor core, so blocks of 32 (MXFP8) and 16 (NVFP4) cost next to nothing.
It reads data and scales in layouts of its own, into which this file converts:

    data      MXFP8's are bytes already. NVFP4's are four bits, two in a byte, the first of a pair in the low half; ours
              are held in E4M3, whose bits give them without a look-up. Squares of 16×16 are written out as 1×16.
    scales    one byte each: E8M0 for MXFP8; E4M3 for NVFP4, whose second level, 1/S, is passed in fp32 beside them and
              multiplies the finished sum. They lie in tiles of 128 rows × 4 blocks, tiles row by row, and within one

                  offset = (row % 32) · 16 + (row // 32) · 4 + block

              (cuBLAS documentation, "1D Block Scaling Factors Layout"). Rows and blocks to fill a tile are zeros.
    sizes     k a multiple of 32 and n one of 16, by zeros, which add nothing to any sum; m is free. These are what
              torch's own tests of both formats cover.

A NaN, which four bits cannot hold, becomes its block's scale: it reaches the same row of the result as in emulation.

What it gives up. An operand is rearranged for every product, a few passes over one byte an element, and its cast has no
fused kernel either: this is correct, and not yet fast. And it has not run on Blackwell yet: tests hold it to the
documented layouts, and a GPU must first get a known product right (`megafp8.gemm.scaled_mm_check`).

Shapes: m, n the result's dims, k the dim summed over; r rows and c columns of a matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.numerics.recipes.mxfp8 import e8m0_encode
from megafp8.numerics.tensor import BLACKWELL_PAIRS, BLOCK_1X32, BLOCK_16X16, ScaledTensor, zero_pad

_TILE_ROWS, _TILE_BLOCKS = 128, 4
_K_MULTIPLE, _N_MULTIPLE = 32, 16
_E4M3_NAN = 0x7F


class Arranged(NamedTuple):
    """A matrix as `scaled_mm` takes it: `data` `[r, k]` in FP8, or `[r, k/2]` in pairs of E2M1.

    For each level of scales, the finest first: the scales, which elements share one, and how they lie in memory.
    """

    data: Tensor
    scale_inv: list[Tensor]
    scaling: list[F.ScalingType]
    swizzle: list[F.SwizzleType]


def multiplies(a_mk: ScaledTensor, b_nk: ScaledTensor, out_dtype: torch.dtype) -> bool:
    """Whether Blackwell has a product of two such matrices."""
    is_pair = (a_mk.granularity, b_nk.granularity) in BLACKWELL_PAIRS
    some_e4m3 = torch.float8_e4m3fn in (a_mk.data.dtype, b_nk.data.dtype)
    return is_pair and some_e4m3 and out_dtype in (torch.bfloat16, torch.float32)


def block_scaled_mm(a_mk: ScaledTensor, b_nk: ScaledTensor, out_dtype: torch.dtype) -> Tensor:
    """`a · bᵀ`, `[m, n]` in `out_dtype`, bf16 or fp32; for matrices that `multiplies` takes, on Blackwell."""
    n = b_nk.data.shape[0]
    a, b = arranged(a_mk), arranged(b_nk, row_multiple=_N_MULTIPLE)
    y_mn = F.scaled_mm(
        a.data,
        b.data.t(),
        scale_a=a.scale_inv,
        scale_recipe_a=a.scaling,
        scale_b=b.scale_inv,
        scale_recipe_b=b.scaling,
        swizzle_a=a.swizzle,
        swizzle_b=b.swizzle,
        output_dtype=out_dtype,
    )
    return y_mn[:, :n].contiguous() if n % _N_MULTIPLE else y_mn


def arranged(x_rk: ScaledTensor, *, row_multiple: int = 1) -> Arranged:
    """`x` with zeros appended until k is a multiple of 32, and r one of `row_multiple`."""
    r, k = x_rk.data.shape
    data_rk = zero_pad(x_rk.data, -r % row_multiple, -k % _K_MULTIPLE)
    return _mxfp8(data_rk, x_rk) if x_rk.granularity is BLOCK_1X32 else _nvfp4(data_rk, x_rk)


def _mxfp8(data_rk: Tensor, x_rk: ScaledTensor) -> Arranged:
    scales = swizzled(e8m0_encode(x_rk.scale_inv), data_rk.shape[0])
    return Arranged(
        data_rk,
        [scales.view(torch.float8_e8m0fnu)],
        [F.ScalingType.BlockWise1x32],
        [F.SwizzleType.SWIZZLE_32_4_4],
    )


def _nvfp4(data_rk: Tensor, x_rk: ScaledTensor) -> Arranged:
    assert x_rk.tensor_scale_inv is not None
    (r, k), unpadded_r = data_rk.shape, x_rk.data.shape[0]
    scales = x_rk.scale_inv.to(torch.float8_e4m3fn).view(torch.uint8)
    if x_rk.granularity is BLOCK_16X16:
        scales = scales.repeat_interleave(16, dim=0)[:unpadded_r]
    scales = F.pad(scales, (0, k // 16 - scales.shape[1], 0, r - unpadded_r))
    bytes_rk = data_rk.view(torch.uint8)
    broken = ((bytes_rk & 0x7F) == _E4M3_NAN).view(r, k // 16, 16).any(dim=-1)
    scales = swizzled(scales.masked_fill(broken, _E4M3_NAN), r)
    return Arranged(
        packed(bytes_rk).view(torch.float4_e2m1fn_x2),
        [scales.view(torch.float8_e4m3fn), x_rk.tensor_scale_inv],
        [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise],
        [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE],
    )


def swizzled(scales_rc: Tensor, rows: int) -> Tensor:
    """Bytes `[r, c]` with zero rows appended up to `rows`, in whole tiles of 128×4: flat, uint8."""
    r, c = scales_rc.shape
    down, across = -(-rows // _TILE_ROWS), -(-c // _TILE_BLOCKS)
    whole = F.pad(scales_rc, (0, across * _TILE_BLOCKS - c, 0, down * _TILE_ROWS - r))
    tiles = whole.view(down, 4, 32, across, _TILE_BLOCKS)  # a tile's 128 rows are 4 times 32
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def packed(e4m3_rc: Tensor) -> Tensor:
    """E2M1 values held in E4M3, as bytes `[r, c]`, c even, to four bits each, `[r, c/2]` uint8: sign, two bits of
    exponent, one of mantissa. A NaN becomes ±6.

    Without sign and the two last bits of the mantissa, which are 0, the E4M3 bytes of 1, 1.5, 2, 3, 4 and 6 are 14 to
    19, and their E2M1 bits 2 to 7. 0.5, subnormal in E2M1 only, is 12 and becomes 1; 0 stays 0.
    """
    magnitude = (e4m3_rc & 0x7F) >> 2
    nibbles = (magnitude.clamp(12, 19) - 12 + (magnitude == 12)) | ((e4m3_rc >> 4) & 8)
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
