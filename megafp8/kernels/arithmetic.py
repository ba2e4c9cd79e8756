"""Arithmetic that kernels share, each the same bits as its plain twin in `sources`, `scaling` and `quantize`.

Triton's interpreter casts to FP8 wrongly where rounding carries into the exponent, and an E4M3 NaN; under it, and only
there, `_interpreted_code` puts values on the format's grid first. It reads bf16's subnormals wrongly too: kernels are
given fp32 there (`readable`).
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run on the CPU in Triton's interpreter: for tests."""


def ceil_div(number: int, divisor: int) -> int:
    """Rounded up. Triton's own `cdiv` works in kernels too, and costs the host 2 µs a call for it."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest that is not below `number` >= 1. Not Triton's own for the same reason."""
    return 1 << (number - 1).bit_length()


def readable(x: Tensor) -> Tensor:
    """`x` as a kernel may be given it: the interpreter reads bf16's subnormals wrongly."""
    return x.float() if INTERPRETED and x.dtype == torch.bfloat16 else x


@triton.jit
def magnitude(x):
    """|x|, and infinity for NaN."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def magnitude_bits(x):
    """|x| as an integer, which orders as |x| does and puts NaN above infinity: a maximum of these is one instruction,
    and loses no NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def raise_to(maxima, bits, mask):
    """Atomically: maxima, integers in memory, to at least the largest of some `magnitude_bits`, infinity for NaN."""
    tl.atomic_max(maxima, tl.minimum(bits, 0x7F800000), mask=mask, sem="relaxed")


@triton.jit
def _exp2(x, INTERPRETED: tl.constexpr):
    """2^x; a result below the normal numbers may be zero."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x, INTERPRETED: tl.constexpr):
    """1 / x rounded to nearest, of x from 1 to 2^126.

    A division has branches for results that are not normal numbers. Without them it is the hardware's estimate and one
    Newton step in fused arithmetic.
    """
    if INTERPRETED:
        return tl.div_rn(1.0, x)
    return tl.inline_asm_elementwise(
        "{ .reg .f32 estimate, error, negative; rcp.approx.ftz.f32 estimate, $1; neg.f32 negative, $1; "
        "fma.rn.f32 error, negative, estimate, 0f3F800000; fma.rn.f32 $0, estimate, error, estimate; }",
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def sigmoid(x, INTERPRETED: tl.constexpr):
    """`sources.sigmoid`. A power that is no normal number is lost in the sum, as it would be if it were exact."""
    exponent = tl.minimum(x * -1.4426950408889634, 126.0, propagate_nan=tl.PropagateNan.ALL)
    return reciprocal(1.0 + _exp2(exponent, INTERPRETED), INTERPRETED)


@triton.jit
def gelu_gate(x, INTERPRETED: tl.constexpr):
    """GELU's factor of x, a sigmoid, and the slope of that one's argument."""
    square = x * x
    exponent = x * (1.5957691216057308 + 0.07135481627260025 * square)
    return sigmoid(exponent, INTERPRETED), 1.5957691216057308 + 0.21406444881780076 * square


@triton.jit
def scale_of(bits, FP8_MAX: tl.constexpr, eps, POWER_OF_TWO: tl.constexpr):
    """`scale_from_amax` of the largest of some `magnitude_bits`.

    To a power of two without a division: FP8_MAX is 1.75 · 2^e for both formats, so the quotient's exponent is the
    difference of the exponents, one less where amax's mantissa is above 1.75, which carries when 0.25 less a bit is
    added to it.
    """
    bits = tl.maximum(bits, tl.full([], eps, tl.float32).to(tl.int32, bitcast=True))
    # One comparison, without signs: below are infinity and NaN, and 0 - 1.
    usable = (bits - 1).to(tl.uint32, bitcast=True) < 0x7F7FFFFF
    if POWER_OF_TWO:
        GREATEST: tl.constexpr = 0x7F000000  # 2^127
        EXPONENT: tl.constexpr = (15 if FP8_MAX == 57344.0 else 8) << 23
        down = tl.maximum((bits + 0x1FFFFF) & 0x7F800000, EXPONENT)
        return tl.where(usable, GREATEST - (down - EXPONENT), 0x3F800000).to(tl.float32, bitcast=True)
    amax = tl.where(usable, bits.to(tl.float32, bitcast=True), FP8_MAX)
    return tl.minimum(tl.div_rn(FP8_MAX, amax), 3.4028234663852886e38)


@triton.jit
def inverse_of(scale, POWER_OF_TWO: tl.constexpr):
    """The reciprocal of a scale; the greatest power of two's is subnormal."""
    if POWER_OF_TWO:
        bits = 0x7F000000 - scale.to(tl.int32, bitcast=True)
        return tl.where(bits == 0, 0x00400000, bits).to(tl.float32, bitcast=True)
    return tl.div_rn(1.0, scale)


@triton.jit
def _interpreted_code(y, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr):
    """The code of y as an integer where the interpreter is: on the grid of the format any cast is exact."""
    MANTISSA: tl.constexpr = 2 if FORMAT == "e5m2" else 3
    MIN_NORMAL: tl.constexpr = 2.0**-14 if FORMAT == "e5m2" else 2.0**-6
    y = tl.where(y > FP8_MAX, FP8_MAX, tl.where(y < -FP8_MAX, -FP8_MAX, y))  # a NaN passes both
    bits = y.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, MIN_NORMAL) * (2.0**-MANTISSA)
    size = ((size / step + 8388608.0) - 8388608.0) * step  # adding 2^23 rounds to an integer
    rounded = (size.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    y8 = rounded.to(tl.float8e5) if FORMAT == "e5m2" else rounded.to(tl.float8e4nv)
    return tl.where(y == y, y8.to(tl.uint8, bitcast=True), 0x7F).to(tl.int32)


E4M3X4: tl.constexpr = tl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
)
E5M2X4: tl.constexpr = tl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; "
    "cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
)


@triton.jit
def codes(y, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr, INTERPRETED: tl.constexpr):
    """A scaled fp32 tile to FP8, saturating, to nearest even, NaN stays NaN: bytes.

    On the GPU by the instruction itself: Triton's own cast to E5M2 goes through another format and rounds twice.
    """
    if INTERPRETED:
        return _interpreted_code(y, FORMAT, FP8_MAX).to(tl.uint8)
    return tl.inline_asm_elementwise(
        E5M2X4 if FORMAT == "e5m2" else E4M3X4, "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4
    )


@triton.jit
def codes_of_four(y0, y1, y2, y3, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr, INTERPRETED: tl.constexpr):
    """The same of four tiles at once: 32-bit words of four codes, y0's the lowest."""
    if INTERPRETED:
        return (
            _interpreted_code(y0, FORMAT, FP8_MAX)
            | (_interpreted_code(y1, FORMAT, FP8_MAX) << 8)
            | (_interpreted_code(y2, FORMAT, FP8_MAX) << 16)
            | (_interpreted_code(y3, FORMAT, FP8_MAX) << 24)
        )
    return tl.inline_asm_elementwise(
        E5M2X4 if FORMAT == "e5m2" else E4M3X4, "=r,f,f,f,f", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1
    )
