"""A second implementation of FP8 from the formats' definition: NumPy in float64, and none of torch's casts."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megafp8.fp8 import E5M2, Format

E2M1_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of four-bit floating point (OCP microscaling formats 1.0); the index is the code without its sign."""


def decode(code: int, fmt: Format) -> float:
    """The number a byte stands for (OCP 8-bit floating point specification, tables 1 and 2)."""
    mantissa_bits, bias = (2, 15) if fmt is E5M2 else (3, 7)
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if fmt is E5M2 and exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    if fmt is not E5M2 and code & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


@cache
def finite_values(fmt: Format) -> NDArray[np.float64]:
    """All finite values that are not negative, rising; the index is the code."""
    values = [decode(code, fmt) for code in range(128)]
    return np.array([v for v in values if np.isfinite(v)])


def round_to(x: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.intp]:
    """Index of the nearest magnitude, ties to the even index, saturating; 0 for a NaN."""
    clamped = np.minimum(np.nan_to_num(np.abs(x), nan=0.0, posinf=np.inf), values[-1])
    low = np.searchsorted(values, clamped, side="right") - 1
    high = np.minimum(low + 1, len(values) - 1)
    to_low, to_high = clamped - values[low], values[high] - clamped
    return np.where((to_high < to_low) | ((to_high == to_low) & (low % 2 == 1)), high, low)


def encode(x: NDArray[np.float32], fmt: Format) -> NDArray[np.uint8]:
    """Nearest code, ties to the even one, saturating. NaN gives the code 0x7F, a NaN in both formats."""
    code = round_to(x.astype(np.float64), finite_values(fmt)) | np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


def to_e2m1(x: NDArray[np.float32], noise: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The nearest value of E2M1; with `noise` in [0, 1) the next below or above, so that the mean is kept to 2^-17."""
    y, values = x.astype(np.float64), E2M1_VALUES
    if noise is None:
        rounded = values[round_to(y, values)]
    else:
        both = np.union1d(-values, values)
        inside = np.clip(np.nan_to_num(y), -6.0, 6.0)
        low = np.searchsorted(both, inside, side="right") - 1
        below, above = both[low], both[np.minimum(low + 1, len(both) - 1)]
        way = (inside - below) / np.where(above > below, above - below, 1.0)
        rounded = np.abs(np.where(np.rint((way + noise) * 2**16) >= 2**16, above, below))
    return np.where(np.isnan(y), np.nan, np.copysign(rounded, y)).astype(np.float32)


def bytes_of(x8: Tensor) -> NDArray[np.uint8]:
    """The bytes of an FP8 tensor, every NaN as 0x7F."""
    data = x8.detach().cpu().contiguous().view(torch.uint8).numpy().copy()
    data[x8.detach().cpu().float().isnan().numpy()] = 0x7F
    return data


def scale_of(amax: float, fp8_max: float, *, margin: int = 0, eps: float = 0.0, power_of_two: bool = False) -> float:
    """The scale of one finite, positive amax in fp32 arithmetic, number by number."""
    with np.errstate(over="ignore"):
        scale = np.float32(fp8_max * 2.0**-margin) / max(np.float32(amax), np.float32(eps))
    scale = min(scale, np.finfo(np.float32).max)
    if power_of_two:
        _, exponent = np.frexp(scale)  # scale = m · 2^exponent, m in [1/2, 1)
        scale = np.float32(np.ldexp(1.0, int(exponent) - 1))
    return float(scale)


def spread(r: int, c: int, seed: int, octaves: float = 12) -> Tensor:
    """Normals `[r, c]` of very different sizes: each is multiplied by a power of two."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(r, c, generator=generator) * 2 ** (octaves * torch.rand(r, c, generator=generator) - octaves / 2)
