"""Conversion of Adam's moments to FP8 in one pass, including random bits.

Reference: `megafp8.optimizer.fp8_moments.encode`. In PyTorch, the random bits alone (Philox in 64-bit integers) move
about 600 bytes per element. Here a program computes the scales of a few blocks of 128, draws a random word for each
element in registers, and stores bytes. The arithmetic is equal to the reference's: products with powers of two, which
are exact, one sum, and a truncation.

Shapes: n elements, b blocks of 128.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div, magnitude_bits
from megafp8.numerics.philox import Key

_BLOCKS, _WARPS = 16, 4  # per program


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["key0", "key1"])
def encode_kernel(x_n, data_n, exponent_b, n, b, key0, key1, LARGEST_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr,
                  POSITIVE: tl.constexpr, NAN: tl.constexpr, LOWEST: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """Encode BLOCKS blocks of 128 elements."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None].to(tl.int64) * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_n + at, mask=at < n, other=0.0)
    bits = magnitude_bits(x)
    exponent = tl.maximum((tl.max(bits, axis=1) - LARGEST_BITS + 0x7FFFFF) >> 23, LOWEST)
    tl.store(exponent_b + block, exponent.to(tl.int8), mask=block < b)
    y = bits.to(tl.float32, bitcast=True) * _power_of_two(-exponent)[:, None]
    binade = tl.maximum((y.to(tl.int32, bitcast=True) >> 23) - 127, MIN_EXPONENT)

    counter = (block[:, None] * 32 + tl.arange(0, 32)[None, :]).to(tl.uint32)
    zero = counter * 0
    k0, k1 = key0.to(tl.uint32, bitcast=True), key1.to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = tl.philox_impl(counter, zero, zero, zero, k0, k1)
    word = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCKS, 128)
    noise = (word >> 12).to(tl.int32).to(tl.float32) * (2.0**-20)

    steps = (y * _power_of_two(3 - binade) + noise).to(tl.int32)
    if POSITIVE:
        steps = tl.where((steps == 0) & (x > 0), 1, steps)
    data = ((binade - MIN_EXPONENT) << 3) + steps
    if not POSITIVE:
        data = data | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    data = tl.where(bits < 0x7F800000, data, NAN)
    tl.store(data_n + at, data.to(tl.uint8), mask=at < n)


def encode_blocks(
    x_n: Tensor, data_n: Tensor, exponent_b: Tensor, key: Key, *, largest: float, min_exponent: int, positive: bool,
    nan: int, lowest: int,
) -> None:  # fmt: skip
    """Encode x, fp32 `[n]`, as bytes `data_n`, uint8 `[n]`, and exponents of scale_inv, int8 `[b]`.

    All tensors are contiguous. `key` is the Philox key. The other arguments describe the format, as in
    `megafp8.optimizer.fp8_moments`.
    """
    n, b = len(x_n), len(exponent_b)
    assert n < 1 << 31, "there is a 32-bit counter for every four elements"
    if not n:
        return
    key0, key1 = np.array(key, dtype=np.uint32).view(np.int32).tolist()
    encode_kernel[(ceil_div(b, _BLOCKS),)](
        x_n, data_n, exponent_b, n, b, key0, key1, LARGEST_BITS=int(np.float32(largest).view(np.int32)),
        MIN_EXPONENT=min_exponent, POSITIVE=positive, NAN=nan, LOWEST=lowest, BLOCKS=_BLOCKS, num_warps=_WARPS,
    )  # fmt: skip
