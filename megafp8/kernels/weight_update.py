"""AdamW and Lion for many tensors in one pass over memory. References: `torch.optim.AdamW` and `LionOptimizer`.

PyTorch's AdamW step reads and writes gradients to clip them, updates fp32 masters and moments, and reads the masters
again to round them into bf16 weights. These kernels read and write each element once, in its storage format. A table of
addresses lists the tensors, as in PyTorch's fused optimizers, so that one launch updates all of them.

*Moments in FP8* (`megafp8.numerics.moments`) are decoded and encoded in registers. One call of Philox yields the noise
of both moments for four elements.

Shapes: n elements of a tensor; b blocks of 128 of its elements; t tensors; c chunks of `CHUNK` elements. Device
functions: p elements of a program, `[CHUNK]`, or `[CHUNK / 128, 128]` if moments are FP8; q blocks, `[CHUNK / 128]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div, magnitude_bits
from megafp8.numerics.moments import BLOCK, FIRST, LOWEST, SECOND
from megafp8.numerics.philox import Key
from megafp8.numerics.stochastic_rounding import NOISE_ROUNDS

CHUNK, _WARPS = 1024, 4
"""Number of elements per program."""
_DTYPES = {
    torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.uint8: tl.uint8,
}  # fmt: skip
(
    _GRADIENT, _FIRST, _SECOND, _FIRST_EXPONENT, _SECOND_EXPONENT, _MASTER, _PARAM, _REMAINDER, _KEY, _NOISE_BLOCK,
    _LENGTH, _CHUNKS,
) = (tl.constexpr(column) for column in range(12))  # fmt: skip
"""Columns of the table. Each weight has one row: addresses in the order of `WeightTensors`, key of the noise, index of
the first block in the noise, length, and first chunk."""
_COLUMNS = tl.constexpr(12)
_LOWEST, _ROUNDS = tl.constexpr(LOWEST), tl.constexpr(NOISE_ROUNDS)
_FIRST_LARGEST, _SECOND_LARGEST = (tl.constexpr(int(np.float32(x.largest).view(np.int32))) for x in (FIRST, SECOND))
"""Bits of the largest value of each format."""
_FIRST_MIN, _SECOND_MIN = tl.constexpr(FIRST.min_exponent), tl.constexpr(SECOND.min_exponent)
_FIRST_NAN, _SECOND_NAN = tl.constexpr(FIRST.nan), tl.constexpr(SECOND.nan)


class WeightTensors(NamedTuple):
    """Tensors of one weight, each flat and contiguous.

    Attributes:
        gradient_n: Gradient, fp32.
        first_n: First moment, fp32, bf16 or uint8 (FP8).
        second_n: Second moment in the same dtype; None for Lion.
        first_exponent_b: Exponents of the scales of an FP8 first moment, int8, otherwise None.
        second_exponent_b: The same of the second moment.
        master_n: Master, fp32, or None if parameter and remainder together are the master.
        param_n: Parameter that the new master is rounded into, of any dtype, or None.
        remainder_n: Remainder of the master, int16 (`megafp8.optimizer.state_storage`), or None.
        key: Key of the noise of FP8 moments.
        first: Index of the first element in the noise, a multiple of a block, for a part of a weight.
    """

    gradient_n: Tensor
    first_n: Tensor
    second_n: Tensor | None
    first_exponent_b: Tensor | None
    second_exponent_b: Tensor | None
    master_n: Tensor | None
    param_n: Tensor | None
    remainder_n: Tensor | None
    key: Key = (0, 0)
    first: int = 0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors in their order."""
        return self[:-2]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the tensors in their order, 0 for None."""
        return tuple(0 if x is None else x.data_ptr() for x in self.tensors)

    @property
    def form(self) -> tuple[torch.dtype, torch.dtype | None, bool, bool]:
        """Properties that all tensors of a launch must share.

        These are the dtypes of moments and parameter, whether there are remainders, and whether all addresses and the
        length are multiples of 16. Without this alignment, masked loads read single elements.
        """
        param = None if self.param_n is None else self.param_n.dtype
        aligned = not any(number % 16 for number in (*self.addresses, len(self.gradient_n)))
        return self.first_n.dtype, param, self.remainder_n is not None, aligned


@triton.jit
def _tensor(row, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to the tensor in a column of a table row."""
    address = tl.load(row + column).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16) if ALIGNED else address


@triton.jit
def _elements(table_t, tensor_c, skip, FP8: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):
    """Return this program's row of the table, elements and their mask, and blocks and their mask.

    The masks are empty if `skip`, a byte in memory or None, is not zero.
    """
    row = table_t + tl.load(tensor_c + tl.program_id(0)) * _COLUMNS
    n = tl.load(row + _LENGTH)
    n = tl.multiple_of(n, 16) if ALIGNED else n
    if skip is not None:
        n = n * (tl.load(skip) == 0).to(tl.int64)
    chunk = tl.program_id(0) - tl.load(row + _CHUNKS)
    block_q = chunk * (CHUNK // 128) + tl.arange(0, CHUNK // 128)
    if FP8:
        at_p = block_q[:, None] * 128 + tl.arange(0, 128)[None, :]
    else:
        at_p = chunk * CHUNK + tl.arange(0, CHUNK)
    return row, at_p, at_p < n, block_q, block_q * 128 < n


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load_moment(row, at_p, inside_p, block_q, inside_q, IS_SECOND: tl.constexpr, FP8: tl.constexpr,
                 MOMENT: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Return the first or second moment in fp32 (`moments.decode`)."""
    moment_n = _tensor(row, _SECOND if IS_SECOND else _FIRST, MOMENT, ALIGNED)
    stored_p = tl.load(moment_n + at_p, mask=inside_p, other=0)
    if FP8:
        exponent_b = _tensor(row, _SECOND_EXPONENT if IS_SECOND else _FIRST_EXPONENT, tl.int8, ALIGNED)
        MIN_EXPONENT: tl.constexpr = _SECOND_MIN if IS_SECOND else _FIRST_MIN
        NAN: tl.constexpr = _SECOND_NAN if IS_SECOND else _FIRST_NAN
        data_p = stored_p.to(tl.int32)
        size_p = data_p if IS_SECOND else data_p & 0x7F
        exponent_q = tl.load(exponent_b + block_q, mask=inside_q, other=0).to(tl.int32)
        normal_p = ((size_p << 20) + ((126 + MIN_EXPONENT) << 23)).to(tl.float32, bitcast=True)
        value_p = tl.where(size_p < 8, size_p.to(tl.float32) * 2.0 ** (MIN_EXPONENT - 3), normal_p)
        moment_p = tl.where(size_p == NAN, float("nan"), value_p) * _power_of_two(exponent_q)[:, None]
        if not IS_SECOND:
            moment_p = tl.where(data_p >= 0x80, -moment_p, moment_p)
    else:
        moment_p = stored_p.to(tl.float32)
    return moment_p


@triton.jit
def _store_moment(x_p, word_p, row, at_p, inside_p, block_q, inside_q, IS_SECOND: tl.constexpr, FP8: tl.constexpr,
                  MOMENT: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Store the first or second moment (`moments.encode`), rounded with its half of a random word for each element."""
    if FP8:
        exponent_b = _tensor(row, _SECOND_EXPONENT if IS_SECOND else _FIRST_EXPONENT, tl.int8, ALIGNED)
        LARGEST: tl.constexpr = _SECOND_LARGEST if IS_SECOND else _FIRST_LARGEST
        MIN_EXPONENT: tl.constexpr = _SECOND_MIN if IS_SECOND else _FIRST_MIN
        half_p = (word_p >> 16) & 0xFFFF if IS_SECOND else word_p & 0xFFFF
        bits_p = magnitude_bits(x_p)
        exponent_q = tl.maximum((tl.max(bits_p, axis=1) - LARGEST + 0x7FFFFF) >> 23, _LOWEST)
        tl.store(exponent_b + block_q, exponent_q.to(tl.int8), mask=inside_q)
        y_p = bits_p.to(tl.float32, bitcast=True) * _power_of_two(-exponent_q)[:, None]
        binade_p = tl.maximum((y_p.to(tl.int32, bitcast=True) >> 23) - 127, MIN_EXPONENT)
        steps_p = (y_p * _power_of_two(3 - binade_p) + half_p.to(tl.float32) * 2.0**-16).to(tl.int32)
        if IS_SECOND:
            steps_p = tl.where((steps_p == 0) & (x_p > 0), 1, steps_p)
        stored_p = ((binade_p - MIN_EXPONENT) << 3) + steps_p
        if not IS_SECOND:
            stored_p = stored_p | ((x_p.to(tl.int32, bitcast=True) >> 24) & 0x80)
        stored_p = tl.where(bits_p < 0x7F800000, stored_p, _SECOND_NAN if IS_SECOND else _FIRST_NAN)
    else:
        stored_p = x_p
    moment_n = _tensor(row, _SECOND if IS_SECOND else _FIRST, MOMENT, ALIGNED)
    tl.store(moment_n + at_p, stored_p.to(MOMENT), mask=inside_p)


@triton.jit
def _noise(row, block_q, noise_step, FP8: tl.constexpr, CHUNK: tl.constexpr):
    """Return a random word for each element: the lower half is for the first moment, the upper half for the second.

    It is `stochastic_rounding.uniform` for a matrix `[n, 2]`. Moments that are not FP8 get zeros.
    """
    if FP8:
        key = tl.load(row + _KEY)
        group = (block_q[:, None] + tl.load(row + _NOISE_BLOCK)) * 32 + tl.arange(0, 32)[None, :]
        low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
        zero = low * 0
        step = zero + noise_step.to(tl.uint32)
        w0, w1, w2, w3 = tl.philox_impl(low, high, step, zero, key.to(tl.uint32), (key >> 32).to(tl.uint32), _ROUNDS)
        word_p = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(CHUNK // 128, 128).to(tl.int32, bitcast=True)
    else:
        word_p = tl.zeros([CHUNK], tl.int32)
    return word_p


@triton.jit
def _load_gradient(row, factor, at_p, inside_p, ALIGNED: tl.constexpr):
    gradient_p = tl.load(_tensor(row, _GRADIENT, tl.float32, ALIGNED) + at_p, mask=inside_p, other=0.0)
    if factor is not None:
        gradient_p *= tl.load(factor)
    return gradient_p


@triton.jit
def _load_master(row, at_p, inside_p, REMAINDER: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the masters, fp32 (`state_storage.join_master`)."""
    if REMAINDER:
        upper_p = tl.load(_tensor(row, _PARAM, tl.int16, ALIGNED) + at_p, mask=inside_p, other=0).to(tl.int32)
        lower_p = tl.load(_tensor(row, _REMAINDER, tl.int16, ALIGNED) + at_p, mask=inside_p, other=0).to(tl.int32)
        master_p = ((upper_p << 16) + lower_p).to(tl.float32, bitcast=True)
    else:
        master_p = tl.load(_tensor(row, _MASTER, tl.float32, ALIGNED) + at_p, mask=inside_p, other=0.0)
    return master_p


@triton.jit
def _store_master(master_p, row, at_p, inside_p, PARAM: tl.constexpr, REMAINDER: tl.constexpr, ALIGNED: tl.constexpr):
    """Store the masters and round them into the parameter, if there is one (`state_storage.split_master`)."""
    if REMAINDER:
        bits_p = master_p.to(tl.int32, bitcast=True)
        upper_p = (bits_p + 0x8000) >> 16
        tl.store(_tensor(row, _PARAM, tl.int16, ALIGNED) + at_p, upper_p.to(tl.int16), mask=inside_p)
        lower_p = (bits_p - (upper_p << 16)).to(tl.int16)
        tl.store(_tensor(row, _REMAINDER, tl.int16, ALIGNED) + at_p, lower_p, mask=inside_p)
    else:
        tl.store(_tensor(row, _MASTER, tl.float32, ALIGNED) + at_p, master_p, mask=inside_p)
        if PARAM is not None:
            tl.store(_tensor(row, _PARAM, PARAM, ALIGNED) + at_p, master_p.to(PARAM), mask=inside_p)


@triton.jit(do_not_specialize=["shrink", "rate", "beta1", "beta2", "root2_inv", "eps", "noise_step"])
def adamw_kernel(table_t, tensor_c, factor, skip, shrink, rate, beta1, beta2, root2_inv, eps, noise_step,
                 MOMENT: tl.constexpr, PARAM: tl.constexpr, REMAINDER: tl.constexpr, ALIGNED: tl.constexpr,
                 FP8: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Update a chunk.

    `shrink` is 1 - lr · decay, `rate` is lr / (1 - beta1^step), and `root2_inv` is 1 / √(1 - beta2^step). If PARAM is
    None, the master is not rounded into a parameter. Root and quotient are the hardware's, with an error of up to two
    units in the last place: rounding them correctly takes a seventh of the time with FP8 moments.
    """
    row, at_p, inside_p, block_q, inside_q = _elements(table_t, tensor_c, skip, FP8, ALIGNED, CHUNK)
    gradient_p = _load_gradient(row, factor, at_p, inside_p, ALIGNED)
    first_p = _load_moment(row, at_p, inside_p, block_q, inside_q, False, FP8, MOMENT, ALIGNED)
    second_p = _load_moment(row, at_p, inside_p, block_q, inside_q, True, FP8, MOMENT, ALIGNED)
    master_p = _load_master(row, at_p, inside_p, REMAINDER, ALIGNED)
    first_p += (1.0 - beta1) * (gradient_p - first_p)
    second_p = beta2 * second_p + (1.0 - beta2) * gradient_p * gradient_p
    master_p = master_p * shrink - rate * (first_p / (tl.sqrt(second_p) * root2_inv + eps))
    word_p = _noise(row, block_q, noise_step, FP8, CHUNK)
    _store_moment(first_p, word_p, row, at_p, inside_p, block_q, inside_q, False, FP8, MOMENT, ALIGNED)
    _store_moment(second_p, word_p, row, at_p, inside_p, block_q, inside_q, True, FP8, MOMENT, ALIGNED)
    _store_master(master_p, row, at_p, inside_p, PARAM, REMAINDER, ALIGNED)


@triton.jit(do_not_specialize=["shrink", "rate", "beta1", "beta2", "noise_step"])
def lion_kernel(table_t, tensor_c, factor, skip, shrink, rate, beta1, beta2, noise_step, MOMENT: tl.constexpr,
                PARAM: tl.constexpr, REMAINDER: tl.constexpr, ALIGNED: tl.constexpr, FP8: tl.constexpr,
                CHUNK: tl.constexpr):  # fmt: skip
    """Update a chunk. `shrink` is 1 - lr · decay, and `rate` is lr."""
    row, at_p, inside_p, block_q, inside_q = _elements(table_t, tensor_c, skip, FP8, ALIGNED, CHUNK)
    gradient_p = _load_gradient(row, factor, at_p, inside_p, ALIGNED)
    first_p = _load_moment(row, at_p, inside_p, block_q, inside_q, False, FP8, MOMENT, ALIGNED)
    master_p = _load_master(row, at_p, inside_p, REMAINDER, ALIGNED)
    mean_p = first_p + (1.0 - beta1) * (gradient_p - first_p)
    sign_p = (mean_p > 0).to(tl.float32) - (mean_p < 0).to(tl.float32)
    master_p = master_p * shrink - rate * sign_p
    first_p += (1.0 - beta2) * (gradient_p - first_p)
    word_p = _noise(row, block_q, noise_step, FP8, CHUNK)
    _store_moment(first_p, word_p, row, at_p, inside_p, block_q, inside_q, False, FP8, MOMENT, ALIGNED)
    _store_master(master_p, row, at_p, inside_p, PARAM, REMAINDER, ALIGNED)


class UpdateTable:
    """Addresses of tensors of one form, and the tensor that each program updates."""

    def __init__(self, weights: Sequence[WeightTensors]) -> None:
        moment, param, remainder, aligned = weights[0].form
        assert all(x.form == weights[0].form for x in weights)
        rows, tensor_c = list[tuple[int, ...]](), list[int]()
        for i, x in enumerate(weights):
            n = len(x.gradient_n)
            exponents = (x.first_exponent_b, x.second_exponent_b)
            assert x.gradient_n.dtype == torch.float32
            assert x.second_n is None or x.second_n.dtype == moment
            for tensor in x.tensors:
                length = n if all(tensor is not part for part in exponents) else ceil_div(n, BLOCK)
                assert tensor is None or (tensor.is_contiguous() and tensor.shape == (length,))
            low, high = x.key
            key = int(np.array(low | high << 32, np.uint64).view(np.int64))
            rows.append((*x.addresses, key, x.first // BLOCK, n, len(tensor_c)))
            tensor_c += [i] * ceil_div(n, CHUNK)
        device = weights[0].gradient_n.device
        self._table_t = torch.tensor(rows, dtype=torch.int64, device=device)
        self._tensor_c = torch.tensor(tensor_c, dtype=torch.int32, device=device)
        self._constants: Mapping[str, Any] = {
            "MOMENT": _DTYPES[moment], "PARAM": None if param is None else _DTYPES[param], "REMAINDER": remainder,
            "ALIGNED": aligned, "FP8": moment == torch.uint8, "CHUNK": CHUNK, "num_warps": _WARPS,
        }  # fmt: skip

    def adamw(
        self, *, lr: float, decay: float, betas: tuple[float, float], eps: float, count: int,
        factor: Tensor | None, skip: Tensor | None,
    ) -> None:  # fmt: skip
        """Update all tensors in place by AdamW.

        Args:
            lr: Learning rate.
            decay: Weight decay.
            betas: Decay rates of the two moments.
            eps: Number added to the denominator.
            count: Number of this update, counted from 1. The noise of FP8 moments depends on it.
            factor: Factor of the gradients, fp32 `[]`, or None. The stored gradients do not change.
            skip: Nothing is written if it is true, bool `[]`; or None.
        """
        beta1, beta2 = betas
        numbers = (lr / (1.0 - beta1**count), beta1, beta2, (1.0 - beta2**count) ** -0.5, eps)
        self._launch(adamw_kernel, factor, skip, 1.0 - lr * decay, *numbers, count - 1)

    def lion(
        self, *, lr: float, decay: float, betas: tuple[float, float], count: int, factor: Tensor | None,
        skip: Tensor | None,
    ) -> None:  # fmt: skip
        """Update all tensors in place by Lion. The arguments are those of `adamw`."""
        self._launch(lion_kernel, factor, skip, 1.0 - lr * decay, lr, *betas, count - 1)

    def _launch(self, kernel: Any, factor: Tensor | None, skip: Tensor | None, *numbers: float) -> None:
        if len(self._tensor_c):
            skip_byte = None if skip is None else skip.view(torch.uint8)
            kernel[(len(self._tensor_c),)](
                self._table_t, self._tensor_c, factor, skip_byte, *numbers, **self._constants
            )  # fmt: skip
