"""Cast to FP8, transpose and amax in one pass over the tensor.

The plain version in `megafp8.fp8.quantize` moves some thirty bytes for each element of a bf16 tensor: an amax, a copy
to fp32, a product, a clamp, a cast, and later a transpose byte by byte. What must move is four: two bytes in, one out
for the rows, one for the columns. So one program takes a tile, casts it, writes it both ways round and raises the amax
with one atomic. The transpose goes through shared memory inside the tile, so that both stores are whole cache lines.

Scales that come from the tensor itself need a pass of their own before (`amax_kernel`).

Triton's interpreter casts to FP8 wrongly where rounding carries into the exponent, and an E4M3 NaN; under it, and only
there, `_interpreted_cast` puts values on the format's grid first. It reads bf16's subnormals wrongly too: there it is
given fp32.

Shapes: r rows, c columns.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.fp8.formats import Format

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_TILE_R, _TILE_C = 64, 64
_AMAX_BLOCK, _AMAX_PROGRAMS = 8192, 2048


@triton.jit
def _magnitude(x):  # type: ignore[no-untyped-def]
    """|x|, and infinity for NaN."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _interpreted_cast(y, dtype: tl.constexpr, MANTISSA: tl.constexpr, MIN_NORMAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The cast of a clamped y where the interpreter is: on the grid of the format any cast is exact."""
    bits = y.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, MIN_NORMAL) * (2.0**-MANTISSA)
    size = ((size / step + 8388608.0) - 8388608.0) * step  # adding 2^23 rounds to an integer
    rounded = (size.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    codes = tl.where(y == y, rounded.to(dtype).to(tl.uint8, bitcast=True), 0x7F)
    return codes.to(tl.uint8).to(dtype, bitcast=True)


@triton.jit
def cast_kernel(  # type: ignore[no-untyped-def]
    x_rc,
    rows_rc,
    columns_cr,
    scale,
    amax,
    r,
    c,
    FP8_MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_NORMAL: tl.constexpr,
    TRANSPOSE: tl.constexpr,
    RECORD: tl.constexpr,
    INTERPRETED: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    j = tl.program_id(1).to(tl.int64) * TILE_C + tl.arange(0, TILE_C)
    inside = (i < r)[:, None] & (j < c)[None, :]
    x = tl.load(x_rc + i[:, None] * c + j[None, :], mask=inside, other=0.0).to(tl.float32)
    if RECORD:
        tl.atomic_max(amax, tl.max(_magnitude(x)))
    y = x * tl.load(scale)
    y = tl.where(y > FP8_MAX, FP8_MAX, tl.where(y < -FP8_MAX, -FP8_MAX, y))  # a NaN passes both
    if INTERPRETED:
        y8 = _interpreted_cast(y, rows_rc.dtype.element_ty, MANTISSA, MIN_NORMAL)
    else:
        y8 = y.to(rows_rc.dtype.element_ty)
    tl.store(rows_rc + i[:, None] * c + j[None, :], y8, mask=inside)
    if TRANSPOSE:
        tl.store(columns_cr + j[:, None] * r + i[None, :], tl.trans(y8), mask=tl.trans(inside))


@triton.jit
def amax_kernel(x, amax, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    largest = 0.0
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.max(_magnitude(tl.load(x + i, mask=i < n, other=0.0).to(tl.float32))))
    tl.atomic_max(amax, largest)


def amax(x: Tensor) -> Tensor:
    """Largest magnitude in `x`, fp32 `[]`, inf where it holds an inf or a NaN. Twin: `quantize.amax`."""
    result = torch.zeros((), dtype=torch.float32, device=x.device)
    programs = max(1, min(_AMAX_PROGRAMS, triton.cdiv(x.numel(), _AMAX_BLOCK)))
    amax_kernel[(programs,)](x.contiguous(), result, x.numel(), BLOCK=_AMAX_BLOCK)
    return result


def cast(
    x_rc: Tensor, scale: Tensor, fmt: Format, *, transpose: bool, newest_amax: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`x · scale` in `fmt`, row-major `[r, c]`, and with `transpose` also `[c, r]`. Twin: `quantize.quantize`.

    x is contiguous fp32 or bf16; `scale` fp32 `[]`; `newest_amax`, fp32 `[]`, is raised to the amax of x where given.
    """
    r, c = x_rc.shape
    rows = torch.empty((r, c), dtype=fmt.dtype, device=x_rc.device)
    columns = torch.empty((c, r), dtype=fmt.dtype, device=x_rc.device) if transpose else None
    if _INTERPRETED:
        x_rc = x_rc.float()
    if x_rc.numel():
        cast_kernel[(triton.cdiv(r, _TILE_R), triton.cdiv(c, _TILE_C))](
            x_rc,
            rows,
            rows if columns is None else columns,
            scale,
            scale if newest_amax is None else newest_amax,
            r,
            c,
            FP8_MAX=fmt.max,
            MANTISSA=fmt.mantissa_bits,
            MIN_NORMAL=fmt.min_normal,
            TRANSPOSE=transpose,
            RECORD=newest_amax is not None,
            INTERPRETED=_INTERPRETED,
            TILE_R=_TILE_R,
            TILE_C=_TILE_C,
        )
    return rows, columns
