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
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def gelu_gate(x):
    """GELU's factor of x, a sigmoid, and the slope of that one's argument."""
    square = x * x
    exponent = x * (1.5957691216057308 + 0.07135481627260025 * square)
    return sigmoid(exponent), 1.5957691216057308 + 0.21406444881780076 * square


@triton.jit
def scale_of(amax, FP8_MAX: tl.constexpr, eps, POWER_OF_TWO: tl.constexpr):
    """`scale_from_amax` of a magnitude that is infinite where the tensor was not finite."""
    amax = tl.maximum(amax, eps)
    scale = tl.minimum(tl.div_rn(FP8_MAX, amax), 3.4028234663852886e38)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where((amax > 0.0) & (amax < float("inf")), scale, 1.0)


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


@triton.jit
def codes_of_four(y0, y1, y2, y3, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr, INTERPRETED: tl.constexpr):
    """Scaled fp32 tiles to FP8, saturating, to nearest even, NaN stays NaN: words of four codes, y0's the lowest.

    On the GPU by the instruction itself: Triton's own cast to E5M2 goes through another format and rounds twice.
    """
    if INTERPRETED:
        word = (
            _interpreted_code(y0, FORMAT, FP8_MAX)
            | (_interpreted_code(y1, FORMAT, FP8_MAX) << 8)
            | (_interpreted_code(y2, FORMAT, FP8_MAX) << 16)
            | (_interpreted_code(y3, FORMAT, FP8_MAX) << 24)
        )
    elif FORMAT == "e5m2":
        word = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        word = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return word
