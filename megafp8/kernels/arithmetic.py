"""Arithmetic shared by kernels. References: functions of equal names in `megafp8.numerics.sources` and `.quantize`.

Triton's interpreter has two bugs. It casts to FP8 incorrectly if rounding carries into the exponent, and for E4M3's
NaN; in the interpreter, `_interpreted_fp8` therefore rounds values to the format's grid first. It also misreads bf16's
subnormals; in the interpreter, kernels therefore get fp32 inputs (`kernel_input`).
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run on the CPU in Triton's interpreter, for tests."""


def ceil_div(number: int, divisor: int) -> int:
    """Return `number / divisor` rounded up. Triton's `cdiv` would cost the host 2 µs per call."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is at least `number` (1 or more). It is faster than Triton's function."""
    return 1 << (number - 1).bit_length()


def kernel_input(x: Tensor) -> Tensor:
    """Return x, or in the interpreter x in fp32 if it is bf16, because the interpreter misreads bf16's subnormals."""
    return x.float() if INTERPRETED and x.dtype == torch.bfloat16 else x


@triton.jit
def magnitude(x):
    """Return |x|, or infinity if x is NaN."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def magnitude_bits(x):
    """Return |x| as an integer with the same order and NaN above infinity.

    The maximum of such integers is one instruction, and keeps NaNs.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def atomic_amax(amax, bits, mask):
    """Update amaxes in memory, stored as integers, with the maximum of `magnitude_bits`. NaN becomes infinity."""
    tl.atomic_max(amax, tl.minimum(bits, 0x7F800000), mask=mask, sem="relaxed")


@triton.jit
def _exp2(x, INTERPRETED: tl.constexpr):
    """Return 2^x. A subnormal result may become zero."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x, INTERPRETED: tl.constexpr):
    """Return 1 / x rounded to nearest, for x from 1 to 2^126.

    A division would branch for results that are not normal numbers. This function has no branches: it computes the
    hardware's estimate and one Newton step in fused arithmetic.
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
    """Compute `sources.sigmoid`. A subnormal power does not change the sum, so it may be flushed to zero."""
    exponent = tl.minimum(x * -1.4426950408889634, 126.0, propagate_nan=tl.PropagateNan.ALL)
    return reciprocal(1.0 + _exp2(exponent, INTERPRETED), INTERPRETED)


@triton.jit
def activate(x, FUNCTION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return f(x) and f'(x) of the activation function with the name FUNCTION in `sources.FUNCTIONS`."""
    if FUNCTION == "silu":
        s = sigmoid(x, INTERPRETED)
        y = x * s
        return y, s + y * (1.0 - s)
    if FUNCTION == "clamped_silu":
        clamped = tl.minimum(x, 7.0, propagate_nan=tl.PropagateNan.ALL)
        s = sigmoid(clamped * 1.702, INTERPRETED)
        y = clamped * s
        return y, tl.where(x <= 7.0, s + y * (1.0 - s) * 1.702, 0.0)
    if FUNCTION == "limited_silu":
        limited = tl.minimum(x, 10.0, propagate_nan=tl.PropagateNan.ALL)
        s = sigmoid(limited, INTERPRETED)
        y = limited * s
        return y, tl.where(x <= 10.0, s + y * (1.0 - s), 0.0)
    if FUNCTION == "relu":
        return tl.where(x <= 0.0, 0.0, x), tl.where(x <= 0.0, 0.0, 1.0)
    if FUNCTION == "squared_relu":
        y = tl.where(x <= 0.0, 0.0, x)
        return y * y, 2.0 * y
    square = x * x
    s = sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * square), INTERPRETED)
    y = x * s
    return y, s + y * (1.0 - s) * (1.5957691216057308 + 0.21406444881780076 * square)


@triton.jit
def scale_from_amax(bits, FP8_MAX: tl.constexpr, eps, POWER_OF_TWO: tl.constexpr):
    """Compute `quantize.scale_from_amax` from an amax given as `magnitude_bits`.

    A power of two needs no division. FP8_MAX is 1.75 · 2^e in both formats, so the quotient's exponent is the
    difference of the exponents, minus one if the amax has a mantissa above 1.75. In this case, adding 0.25 minus one
    bit to the mantissa carries into the exponent.
    """
    bits = tl.maximum(bits, tl.full([], eps, tl.float32).to(tl.int32, bitcast=True))
    # One unsigned comparison excludes infinity, NaN, and zero, for which 0 - 1 wraps around.
    usable = (bits - 1).to(tl.uint32, bitcast=True) < 0x7F7FFFFF
    if POWER_OF_TWO:
        GREATEST: tl.constexpr = 0x7F000000  # 2^127
        EXPONENT: tl.constexpr = (15 if FP8_MAX == 57344.0 else 8) << 23
        down = tl.maximum((bits + 0x1FFFFF) & 0x7F800000, EXPONENT)
        return tl.where(usable, GREATEST - (down - EXPONENT), 0x3F800000).to(tl.float32, bitcast=True)
    amax = tl.where(usable, bits.to(tl.float32, bitcast=True), FP8_MAX)
    return tl.minimum(tl.div_rn(FP8_MAX, amax), 3.4028234663852886e38)


@triton.jit
def inverse(scale, POWER_OF_TWO: tl.constexpr):
    """Return 1 / scale. It is subnormal for the largest power of two."""
    if POWER_OF_TWO:
        bits = 0x7F000000 - scale.to(tl.int32, bitcast=True)
        return tl.where(bits == 0, 0x00400000, bits).to(tl.float32, bitcast=True)
    return tl.div_rn(1.0, scale)


@triton.jit
def _interpreted_fp8(y, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr):
    """Return the FP8 byte of y in the interpreter. Its casts are exact for values on the grid of the format."""
    MANTISSA: tl.constexpr = 2 if FORMAT == "e5m2" else 3
    MIN_NORMAL: tl.constexpr = 2.0**-14 if FORMAT == "e5m2" else 2.0**-6
    y = tl.where(y > FP8_MAX, FP8_MAX, tl.where(y < -FP8_MAX, -FP8_MAX, y))  # a NaN stays
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
def to_fp8(y, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr, INTERPRETED: tl.constexpr):
    """Cast a scaled fp32 tile to FP8 bytes: saturating, to nearest even, NaN stays NaN (`quantize.quantize`).

    This uses the GPU's instruction, because Triton's cast to E5M2 goes through another format and rounds twice.
    """
    if INTERPRETED:
        return _interpreted_fp8(y, FORMAT, FP8_MAX).to(tl.uint8)
    return tl.inline_asm_elementwise(
        E5M2X4 if FORMAT == "e5m2" else E4M3X4, "=r,f,f,f,f", [y], dtype=tl.uint8, is_pure=True, pack=4
    )


@triton.jit
def to_fp8_words(y0, y1, y2, y3, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr, INTERPRETED: tl.constexpr):
    """Cast four tiles as `to_fp8` does, and pack their bytes into 32-bit words, with y0 in the lowest byte."""
    if INTERPRETED:
        return (
            _interpreted_fp8(y0, FORMAT, FP8_MAX)
            | (_interpreted_fp8(y1, FORMAT, FP8_MAX) << 8)
            | (_interpreted_fp8(y2, FORMAT, FP8_MAX) << 16)
            | (_interpreted_fp8(y3, FORMAT, FP8_MAX) << 24)
        )
    return tl.inline_asm_elementwise(
        E5M2X4 if FORMAT == "e5m2" else E4M3X4, "=r,f,f,f,f", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1
    )
