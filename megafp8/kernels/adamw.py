"""AdamW for many tensors in one pass over memory. Reference: `megafp8.optimizer.adamw` on CPUs.

PyTorch's AdamW step reads and writes gradients to clip them, updates fp32 masters and moments, and reads the masters
again to round them into bf16 weights. This kernel reads and writes each element once, in its storage format. A table of
addresses lists the tensors, as in PyTorch's fused optimizers, so that one launch updates all of them.

Shapes: n elements of a tensor; t tensors; c chunks of `CHUNK` elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div

CHUNK, _WARPS = 1024, 4
"""Number of elements per program."""
_COLUMNS = 8
"""Number of columns of the table. Each tensor has one row: addresses of gradient, first and second moment, master,
parameter and remainder, then length and first chunk."""
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class AdamWTensors(NamedTuple):
    """Tensors of one weight, each flat and contiguous with n elements.

    Attributes:
        gradient_n: Gradient, fp32.
        exp_avg_n: First moment, fp32 or bf16.
        exp_avg_sq_n: Second moment, fp32 or bf16.
        master_n: Master, fp32, or None if parameter and remainder together are the master.
        param_n: Parameter that the new master is rounded into, of any dtype, or None.
        remainder_n: Remainder of the master, int16 (`megafp8.optimizer.state_storage`), or None.
    """

    gradient_n: Tensor
    exp_avg_n: Tensor
    exp_avg_sq_n: Tensor
    master_n: Tensor | None
    param_n: Tensor | None
    remainder_n: Tensor | None

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the tensors in their order, 0 for None."""
        return tuple(0 if x is None else x.data_ptr() for x in self)

    @property
    def form(self) -> tuple[torch.dtype, torch.dtype | None, bool, bool]:
        """Properties that all tensors of a launch must share.

        These are the dtypes of moments and parameter, whether there are remainders, and whether all addresses and the
        length are multiples of 16. Without this alignment, masked loads read single elements.
        """
        param = None if self.param_n is None else self.param_n.dtype
        aligned = not any(number % 16 for number in (*self.addresses, len(self.gradient_n)))
        return self.exp_avg_n.dtype, param, self.remainder_n is not None, aligned


@triton.jit
def _tensor(table, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to the tensor in a column of a table row."""
    address = tl.load(table + column).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16) if ALIGNED else address


@triton.jit(do_not_specialize=["shrink", "rate", "beta1", "beta2", "root2", "eps"])
def adamw_kernel(table_t8, tensor_c, factor, skip, shrink, rate, beta1, beta2, root2, eps, MOMENT: tl.constexpr,
                 PARAM: tl.constexpr, REMAINDER: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr,
                 CHUNK: tl.constexpr):  # fmt: skip
    """Update a chunk.

    `shrink` is 1 - lr · decay, `rate` is lr / (1 - beta1^step), and `root2` is √(1 - beta2^step). If PARAM is None, the
    master is not rounded into a parameter.
    """
    row = table_t8 + tl.load(tensor_c + tl.program_id(0)) * COLUMNS
    exp_avg_n, exp_avg_sq_n = _tensor(row, 1, MOMENT, ALIGNED), _tensor(row, 2, MOMENT, ALIGNED)
    n = tl.load(row + 6)
    n = tl.multiple_of(n, 16) if ALIGNED else n
    if skip is not None:
        n = n * (tl.load(skip) == 0).to(tl.int64)
    at = (tl.program_id(0) - tl.load(row + 7)) * CHUNK + tl.arange(0, CHUNK)
    inside = at < n
    gradient = tl.load(_tensor(row, 0, tl.float32, ALIGNED) + at, mask=inside, other=0.0)
    exp_avg = tl.load(exp_avg_n + at, mask=inside, other=0.0).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_n + at, mask=inside, other=0.0).to(tl.float32)
    if REMAINDER:
        param_n, remainder_n = _tensor(row, 4, tl.int16, ALIGNED), _tensor(row, 5, tl.int16, ALIGNED)
        upper = tl.load(param_n + at, mask=inside, other=0).to(tl.int32)
        bits = (upper << 16) + tl.load(remainder_n + at, mask=inside, other=0).to(tl.int32)
        master = bits.to(tl.float32, bitcast=True)
    else:
        master_n = _tensor(row, 3, tl.float32, ALIGNED)
        master = tl.load(master_n + at, mask=inside, other=0.0)
    if factor is not None:
        gradient *= tl.load(factor)
    exp_avg += (1.0 - beta1) * (gradient - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1.0 - beta2) * gradient * gradient
    master = master * shrink - rate * tl.div_rn(exp_avg, tl.div_rn(tl.sqrt_rn(exp_avg_sq), root2) + eps)
    tl.store(exp_avg_n + at, exp_avg.to(MOMENT), mask=inside)
    tl.store(exp_avg_sq_n + at, exp_avg_sq.to(MOMENT), mask=inside)
    if REMAINDER:
        bits = master.to(tl.int32, bitcast=True)
        upper = (bits + 0x8000) >> 16
        tl.store(param_n + at, upper.to(tl.int16), mask=inside)
        tl.store(remainder_n + at, (bits - (upper << 16)).to(tl.int16), mask=inside)
    else:
        tl.store(master_n + at, master, mask=inside)
        if PARAM is not None:
            tl.store(_tensor(row, 4, PARAM, ALIGNED) + at, master.to(PARAM), mask=inside)


class AdamWTable:
    """Addresses of tensors of one form, and the tensor that each program updates."""

    def __init__(self, tensors: Sequence[AdamWTensors]) -> None:
        self._moment, self._param, self._remainder, self._aligned = tensors[0].form
        assert all(x.form == tensors[0].form for x in tensors)
        rows, tensor_c = list[tuple[int, ...]](), list[int]()
        for i, x in enumerate(tensors):
            assert all(part is None or (part.is_contiguous() and part.shape == x.gradient_n.shape) for part in x)
            assert x.gradient_n.dtype == torch.float32
            assert x.exp_avg_sq_n.dtype == x.exp_avg_n.dtype
            rows.append((*x.addresses, len(x.gradient_n), len(tensor_c)))
            tensor_c += [i] * ceil_div(len(x.gradient_n), CHUNK)
        device = tensors[0].gradient_n.device
        self._table_t8 = torch.tensor(rows, dtype=torch.int64, device=device)
        self._tensor_c = torch.tensor(tensor_c, dtype=torch.int32, device=device)

    def step(
        self, *, lr: float, decay: float, betas: tuple[float, float], eps: float, count: int,
        factor: Tensor | None, skip: Tensor | None,
    ) -> None:  # fmt: skip
        """Update all tensors in place.

        Args:
            lr: Learning rate.
            decay: Weight decay.
            betas: Decay rates of the two moments.
            eps: Number added to the denominator.
            count: Number of this update, counted from 1.
            factor: Factor of the gradients, fp32 `[]`, or None. The stored gradients do not change.
            skip: Nothing is written if it is true, bool `[]`; or None.
        """
        beta1, beta2 = betas
        if not len(self._tensor_c):
            return
        adamw_kernel[(len(self._tensor_c),)](
            self._table_t8, self._tensor_c, factor, None if skip is None else skip.view(torch.uint8), 1.0 - lr * decay,
            lr / (1.0 - beta1**count), beta1, beta2, (1.0 - beta2**count) ** 0.5, eps, MOMENT=_DTYPES[self._moment],
            PARAM=None if self._param is None else _DTYPES[self._param], REMAINDER=self._remainder,
            ALIGNED=self._aligned, COLUMNS=_COLUMNS, CHUNK=CHUNK, num_warps=_WARPS,
        )  # fmt: skip
