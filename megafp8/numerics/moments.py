"""FP8 formats of Adam's moments: one byte per element, and a power-of-two scale per block of 128 neighbors.

*Range.* Elements of a block may differ by orders of magnitude; elements of the second moment, which are squares, differ
by twice as many. The first moment is E4M3. The second moment has no sign, so the sign bit extends the exponent. The
result is E5M3, the upper byte of a positive fp16 number without its sign. Both formats have four significant bits.

*No zeros.* Adam divides by the root of the second moment. So the second moment is never rounded to zero, but to the
smallest value. At worst, this makes the update too small for an element with gradients of 1e-5 of the largest in its
block.

*Stochastic rounding.* Neighboring values differ by 1/16 to 1/8, and at beta2 = 0.95 a second moment decays by 1/20 per
step. Rounded to nearest, it would soon stop decaying (at 1.25 · 2^i). So both moments are rounded up with the
probability that keeps the mean exact, to within 2^-16 of a step.

*Cost.* The cost is noise. Each rounding adds about 0.0013 x² to the variance of x: a step is 1/11 of the value in the
mean square, and the mean of f (1 - f) is 1/6. A moment remembers 1 / (1 - beta²) roundings, which gives the second
moment a noise of 11% at beta2 = 0.95, 26% at 0.99, and 80% at 0.999. So betas are at most 1 - 1/128. For comparison,
the second moment at 0.95 is an average over about 40 gradients and has a noise of 22% anyway.

docs/decisions/0008-optimizers.md has a comparison with FP8-LM and COAT, and measurements.

Shapes: n elements of a tensor, b blocks of 128 elements; the last block may be shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megafp8.numerics.formats import E4M3

BLOCK = 128
LOWEST = -100
"""Smallest exponent of a scale, for which all values and 1 / scale are still normal numbers, also in bf16."""


@dataclass(frozen=True)
class MomentFormat:
    """Eight-bit format with three mantissa bits.

    Args:
        largest: Largest value.
        min_exponent: Exponent of the smallest normal number.
        positive: Whether the format has no negative values and rounds no positive value to zero.
        nan: Byte of NaN.
        unpack: Function that converts bytes, uint8, to fp32 values.
    """

    largest: float
    min_exponent: int
    positive: bool
    nan: int
    unpack: Callable[[Tensor], Tensor]


FIRST = MomentFormat(
    largest=E4M3.max,
    min_exponent=-6,
    positive=False,
    nan=0x7F,
    unpack=lambda data: data.view(E4M3.dtype).float(),
)
SECOND = MomentFormat(
    largest=1.875 * 2**15,  # fp16's infinity and NaNs come after it
    min_exponent=-14,
    positive=True,
    nan=0xFF,
    unpack=lambda data: (data.to(torch.int16) << 7).view(torch.float16).float(),
)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in fp32, for int32 exponents in [-126, 127]. It sets bits, so it is exact on every device."""
    return ((exponent + 127) << 23).view(torch.float32)


def _scale_inv_exponents(amax_b: Tensor, fmt: MomentFormat) -> Tensor:
    """Return ⌈log2(amax / largest)⌉, int32 `[b]` in the range of int8, so that amax / 2^exponent fits the format."""
    largest = torch.tensor(fmt.largest).view(torch.int32).item()
    difference = amax_b.view(torch.int32) - largest  # exponents in the upper bits, mantissas below
    return ((difference + (1 << 23) - 1) >> 23).clamp(min=LOWEST)


def encode(x_n: Tensor, fmt: MomentFormat, noise_n: Tensor) -> tuple[Tensor, Tensor]:
    """Encode x, fp32 `[n]`, as data, uint8 `[n]`, and exponents of the blocks' scale_inv, int8 `[b]`.

    Values that are not representable are rounded up if their distance from the value below, in steps, and the noise sum
    to 1 or more. Non-finite values become NaN. This is the bitwise reference of `megafp8.kernels.weight_update`.

    Args:
        x_n: Values.
        fmt: FP8 format.
        noise_n: Noise in [0, 1), fp32, as multiples of 2^-16 (`stochastic_rounding.uniform`).
    """
    x_bk, noise_bk = (F.pad(y_n, (0, -len(x_n) % BLOCK)).view(-1, BLOCK) for y_n in (x_n, noise_n))
    exponent_b1 = _scale_inv_exponents(x_bk.abs().amax(dim=1, keepdim=True), fmt)
    y_bk = x_bk.abs() * _power_of_two(-exponent_b1)
    binade_bk = ((y_bk.view(torch.int32) >> 23) - 127).clamp(min=fmt.min_exponent)
    # Neighboring values differ by 2^(binade - 3). The sum of an integer below 16 and the noise is exact, so integers do
    # not change.
    steps_bk = (y_bk * _power_of_two(3 - binade_bk) + noise_bk).int()
    if fmt.positive:
        steps_bk = steps_bk.maximum((x_bk > 0).int())
    # A binade has eight values, and the lowest binade begins at zero. Sixteen steps are the first of the next binade.
    data_bk = ((binade_bk - fmt.min_exponent) << 3) + steps_bk
    if not fmt.positive:
        data_bk |= x_bk.signbit().int() << 7
    data_bk = data_bk.masked_fill_(~x_bk.isfinite(), fmt.nan)
    return data_bk.to(torch.uint8).view(-1)[: len(x_n)], exponent_b1.view(-1).to(torch.int8)


def decode(data_n: Tensor, exponent_b: Tensor, fmt: MomentFormat) -> Tensor:
    """Return the values, fp32 `[n]`, of the results of `encode`. They are exact in bf16."""
    scale_inv_n = _power_of_two(exponent_b.int()).repeat_interleave(BLOCK)[: len(data_n)]
    return fmt.unpack(data_n) * scale_inv_n
