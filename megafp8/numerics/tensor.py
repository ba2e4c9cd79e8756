"""A quantized matrix: its data, and the inverse scale of each block of it.

Recipes differ in how many elements share a scale, from the whole tensor down to 16 neighbours: the `Granularity`.
Everything else about a quantized matrix is the same for all, so there is one type.

A GEMM sums over the last dim of both operands ("TN"), and a tensor takes part in two GEMMs that sum over different
dims. So it is wanted rowwise `[r, c]` and columnwise `[c, r]`, its transpose; a `QuantizedTensor` has both or either.
With one scale per tensor the second is a transposed copy of the first; with blocks they are two different casts.

Only Blackwell's tensor cores multiply blocks of 32 and 16. Such a matrix is `dequantized`: its block scales are
multiplied into the data, which bf16 holds exactly, as a value has at most four significant bits and a scale four.

    mxfp8    E4M3 or E5M2 · 2^(e - 127)    4 bits        exact from 2^-130 on; what is smaller, within 2^-134
    nvfp4    E2M1 · E4M3                   2 + 4 bits    exact: 0, or 2^-10 to 2688

MXFP8's products have the magnitudes of the tensor itself, and bf16 has fp32's range. In NVFP4 the tensor's scale, in
fp32, is no factor of the data: it is left as scale_inv, and multiplies the finished sums of a GEMM.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.numerics.implementations import kernels


@dataclass(frozen=True, eq=False)  # compared by identity, as at every GEMM
class Granularity:
    """Blocks of `rows` × `columns` elements share a scale; None is the whole extent. There are those below.

    `two_level`: block scales are relative to a scale of the tensor, in fp32.
    """

    name: str
    rows: int | None
    columns: int | None
    two_level: bool = False

    def grid(self, r: int, c: int) -> tuple[int, ...]:
        """The shape of the scales of an `[r, c]` matrix: `[]` for one per tensor, else blocks down and across."""
        if self.rows is None:
            return ()
        return (-(-r // self.rows), 1 if self.columns is None else -(-c // self.columns))


TENSOR = Granularity("tensor", None, None)
ROW = Granularity("row", 1, None)
BLOCK_1X128 = Granularity("1x128", 1, 128)
BLOCK_128X128 = Granularity("128x128", 128, 128)
BLOCK_1X32 = Granularity("1x32", 1, 32)
BLOCK_1X16 = Granularity("1x16", 1, 16, two_level=True)
BLOCK_16X16 = Granularity("16x16", 16, 16, two_level=True)
DEQUANTIZED = Granularity("dequantized", None, None)
"""Data in bf16, into which the scales of blocks are multiplied already; one scale for the tensor is left."""

HOPPER_PAIRS = (
    (TENSOR, TENSOR),
    (ROW, ROW),
    (BLOCK_1X128, BLOCK_1X128),
    (BLOCK_1X128, BLOCK_128X128),
    (BLOCK_128X128, BLOCK_1X128),
)
"""Granularities of the two operands of a GEMM that Hopper's tensor cores compute."""


def on_hopper(granularity: Granularity) -> bool:
    """Return whether Hopper's tensor cores take operands of this granularity."""
    return any(granularity in pair for pair in HOPPER_PAIRS)


def as_cast(granularity: Granularity) -> Granularity:
    """Return the granularity of operands after their cast: their own, or `DEQUANTIZED` for blocks of 32 and 16."""
    return granularity if on_hopper(granularity) else DEQUANTIZED


class ScaledTensor(NamedTuple):
    """`data · scale_inv · tensor_scale_inv`: `data` `[r, c]` in an FP8 dtype, row-major, or dequantized in bf16.

    `scale_inv`: fp32, shaped `granularity.grid(r, c)`. `tensor_scale_inv`: fp32 `[]`, the second level of scales where
    the granularity is two-level; else None. Dequantized data may also be the transpose of a row-major matrix: GEMMs in
    bf16 take either.
    """

    data: Tensor
    scale_inv: Tensor
    granularity: Granularity = TENSOR
    tensor_scale_inv: Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values `[r, c]`; exact products need fp32 or wider."""
        r, c = self.data.shape
        values = self.data.to(dtype) * expand(self.scale_inv.to(dtype), self.granularity, r, c)
        return values if self.tensor_scale_inv is None else values * self.tensor_scale_inv.to(dtype)

    def dequantized(self) -> ScaledTensor:
        """The same matrix with block scales multiplied into the data, in bf16 (see above)."""
        data = self._replace(tensor_scale_inv=None).dequantize().to(torch.bfloat16)
        left = self.tensor_scale_inv
        return ScaledTensor(data, self.scale_inv.new_ones(()) if left is None else left, DEQUANTIZED)

    def t(self) -> ScaledTensor:
        """The transposed matrix `[c, r]`, row-major again; for one scale per tensor or square block only."""
        assert self.granularity.rows == self.granularity.columns
        scale_inv = self.scale_inv if self.granularity is TENSOR else self.scale_inv.t()
        return self._replace(data=_transposed(self.data), scale_inv=scale_inv)


class QuantizedTensor(NamedTuple):
    """A tensor `[r, c]` as GEMMs take it: `rowwise` `[r, c]`, `columnwise` `[c, r]`, whichever were asked for."""

    rowwise: ScaledTensor | None
    columnwise: ScaledTensor | None

    @classmethod
    def cast_both(
        cls, x_rc: Tensor, cast: Callable[[Tensor], ScaledTensor], *, rowwise: bool, columnwise: bool
    ) -> QuantizedTensor:
        """`cast` of x, and of its transpose."""
        return cls(cast(x_rc) if rowwise else None, cast(x_rc.t().contiguous()) if columnwise else None)

    def dequantized(self) -> QuantizedTensor:
        """Both dequantized. Data of either lies in memory as the rows of the tensor do: GEMMs in bf16 transpose."""
        rowwise, columnwise = self.rowwise, self.columnwise
        if rowwise is not None:
            rowwise = rowwise.dequantized()
        if columnwise is not None:
            columnwise = columnwise.dequantized()
            columnwise = columnwise._replace(data=columnwise.data.t().contiguous().t())
        return QuantizedTensor(rowwise, columnwise)

    @property
    def required_rowwise(self) -> ScaledTensor:
        """`rowwise`, which was asked for."""
        assert self.rowwise is not None
        return self.rowwise

    @property
    def required_columnwise(self) -> ScaledTensor:
        """`columnwise`, which was asked for."""
        assert self.columnwise is not None
        return self.columnwise


def _transposed(data_rc: Tensor) -> Tensor:
    if data_rc.is_cuda and data_rc.shape[0] % 4 == data_rc.shape[1] % 4 == 0:
        transposed: Tensor = kernels("transpose").transpose(data_rc)
        return transposed
    # As bytes: a copy of FP8 is a copy of bytes, and every backend has a kernel for those.
    return data_rc.view(torch.uint8).t().contiguous().view(data_rc.dtype)


def expand(scales: Tensor, granularity: Granularity, r: int, c: int) -> Tensor:
    """One scale per element (or a shape that broadcasts to that) from one per block, for an `[r, c]` matrix."""
    if granularity.rows is None:
        return scales
    if granularity.rows > 1:
        scales = scales.repeat_interleave(granularity.rows, dim=0)[:r]
    if granularity.columns is not None:
        scales = scales.repeat_interleave(granularity.columns, dim=1)[:, :c]
    return scales


def zero_pad(data_rc: Tensor, rows: int, columns: int) -> Tensor:
    """8-bit data with zero rows and columns appended; itself where there are none to append."""
    if rows == columns == 0:
        return data_rc
    return F.pad(data_rc.view(torch.uint8), (0, columns, 0, rows)).view(data_rc.dtype)  # the byte 0 is the number 0
