"""Quantized matrices: FP8 data, and the inverse scale of each block.

Recipes differ in the number of elements that share a scale, from the whole tensor down to 16 neighbors: the
`Granularity`. Everything else about a quantized matrix is equal for all recipes, so one type serves them all.

A GEMM sums over the last dim of both operands ("TN"), and a tensor is an operand of two GEMMs that sum over different
dims. It is therefore needed rowwise, `[r, c]`, and columnwise, `[c, r]`, which is its transpose. A `QuantizedTensor`
has one or both of these. With one scale per tensor, columnwise data is a transposed copy of rowwise data; with blocks,
the two are different casts.

Only Blackwell's tensor cores multiply matrices with blocks of 32 and 16. megafp8 *dequantizes* such a matrix: the block
scales are multiplied into the data. bf16 holds the products exactly, because a value has at most four significant bits
and a scale has four.

    mxfp8    E4M3 or E5M2 · 2^(e - 127)    4 bits        exact from 2^-130 on; smaller products within 2^-134
    nvfp4    E2M1 · E4M3                   2 + 4 bits    exact: 0, or 2^-10 to 2688

MXFP8's products have the magnitudes of the tensor itself, and bf16 has fp32's range. In NVFP4, the fp32 scale of the
tensor is not multiplied into the data: it remains as scale_inv, and multiplies the results of a GEMM.

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


@dataclass(frozen=True, eq=False)  # compared by identity, which is fast enough for every GEMM
class Granularity:
    """Size of the blocks that share a scale. All instances are defined below.

    Attributes:
        name: Name in messages and tables.
        rows: Number of rows of a block; None means the whole tensor.
        columns: Number of columns of a block; None means all columns.
        two_level: Whether block scales are relative to an fp32 scale of the whole tensor.
    """

    name: str
    rows: int | None
    columns: int | None
    two_level: bool = False

    def grid(self, r: int, c: int) -> tuple[int, ...]:
        """Return the shape of the scales of an `[r, c]` matrix: `[]` for one scale, else blocks down and across."""
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
"""Granularity of bf16 data that block scales have been multiplied into; one scale for the tensor remains."""

HOPPER_PAIRS = (
    (TENSOR, TENSOR),
    (ROW, ROW),
    (BLOCK_1X128, BLOCK_1X128),
    (BLOCK_1X128, BLOCK_128X128),
    (BLOCK_128X128, BLOCK_1X128),
)
"""Granularities of the two operands of a GEMM that Hopper's tensor cores compute."""


def on_hopper(granularity: Granularity) -> bool:
    """Return whether Hopper's tensor cores support operands of this granularity."""
    return any(granularity in pair for pair in HOPPER_PAIRS)


def as_cast(granularity: Granularity) -> Granularity:
    """Return the granularity of operands after their cast: `DEQUANTIZED` for blocks of 32 and 16, else unchanged."""
    return granularity if on_hopper(granularity) else DEQUANTIZED


class ScaledTensor(NamedTuple):
    """Quantized matrix in one orientation, with the values `data · scale_inv · tensor_scale_inv`.

    Attributes:
        data: FP8 data, `[r, c]`, row-major. Dequantized data is bf16, and may be the transpose of a row-major matrix,
            because bf16 GEMMs support both memory orders.
        scale_inv: Inverse scales, fp32, of the shape `granularity.grid(r, c)`.
        granularity: Size of the blocks that share a scale.
        tensor_scale_inv: Inverse scale of the whole tensor, fp32 `[]`, for a two-level granularity; else None.
    """

    data: Tensor
    scale_inv: Tensor
    granularity: Granularity = TENSOR
    tensor_scale_inv: Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values, `[r, c]`, in `dtype`. The products are exact in fp32 or wider."""
        r, c = self.data.shape
        values = self.data.to(dtype) * expand(self.scale_inv.to(dtype), self.granularity, r, c)
        return values if self.tensor_scale_inv is None else values * self.tensor_scale_inv.to(dtype)

    def dequantized(self) -> ScaledTensor:
        """Return the same matrix in bf16, with the block scales multiplied into the data (see the module docstring)."""
        data = self._replace(tensor_scale_inv=None).dequantize().to(torch.bfloat16)
        left = self.tensor_scale_inv
        return ScaledTensor(data, self.scale_inv.new_ones(()) if left is None else left, DEQUANTIZED)

    def t(self) -> ScaledTensor:
        """Return the transpose `[c, r]`, row-major again. The matrix must have one scale per tensor or square block."""
        assert self.granularity.rows == self.granularity.columns
        scale_inv = self.scale_inv if self.granularity is TENSOR else self.scale_inv.t()
        return self._replace(data=transposed(self.data), scale_inv=scale_inv)


class QuantizedTensor(NamedTuple):
    """Quantized tensor `[r, c]` in both orientations: `rowwise` `[r, c]` and `columnwise` `[c, r]`; None if not needed.

    GEMMs read one of them.
    """

    rowwise: ScaledTensor | None
    columnwise: ScaledTensor | None

    @classmethod
    def cast_both(
        cls, x_rc: Tensor, cast: Callable[[Tensor], ScaledTensor], *, rowwise: bool, columnwise: bool
    ) -> QuantizedTensor:
        """Build the tensor by casting x rowwise, and its transpose columnwise."""
        return cls(cast(x_rc) if rowwise else None, cast(x_rc.t().contiguous()) if columnwise else None)

    def dequantized(self) -> QuantizedTensor:
        """Return both orientations dequantized. Both are stored row by row of the tensor; bf16 GEMMs can transpose."""
        rowwise, columnwise = self.rowwise, self.columnwise
        if rowwise is not None:
            rowwise = rowwise.dequantized()
        if columnwise is not None:
            columnwise = columnwise.dequantized()
            columnwise = columnwise._replace(data=columnwise.data.t().contiguous().t())
        return QuantizedTensor(rowwise, columnwise)

    @property
    def required_rowwise(self) -> ScaledTensor:
        """Rowwise data, which must exist."""
        assert self.rowwise is not None
        return self.rowwise

    @property
    def required_columnwise(self) -> ScaledTensor:
        """Columnwise data, which must exist."""
        assert self.columnwise is not None
        return self.columnwise


def transposed(data_rc: Tensor, experts: int = 1, alignment: int = 1) -> Tensor:
    """Return the transpose of FP8 data, row-major.

    Each of `experts` has as many rows. They become columns, padded with zeros to a multiple of `alignment`, which is 1
    or a multiple of 4.
    """
    r, c = data_rc.shape
    if data_rc.is_cuda and r % (4 * experts) == c % 4 == 0:
        result: Tensor = kernels("transpose").transpose(data_rc, experts, max(alignment, 4))
        return result
    # Copy as bytes, of which 0 is the value 0: not every backend has a kernel that copies FP8.
    rows = data_rc.view(torch.uint8).unflatten(0, (experts, r // experts))
    rows = F.pad(rows, (0, 0, 0, -(r // experts) % alignment)).flatten(0, 1)
    return rows.t().contiguous().view(data_rc.dtype)


def expand(scales: Tensor, granularity: Granularity, r: int, c: int) -> Tensor:
    """Expand scales per block to scales per element of an `[r, c]` matrix, or to a shape that broadcasts to it."""
    if granularity.rows is None:
        return scales
    if granularity.rows > 1:
        scales = scales.repeat_interleave(granularity.rows, dim=0)[:r]
    if granularity.columns is not None:
        scales = scales.repeat_interleave(granularity.columns, dim=1)[:, :c]
    return scales


def zero_pad(data_rc: Tensor, rows: int, columns: int) -> Tensor:
    """Append `rows` zero rows and `columns` zero columns to 8-bit data; return the data itself if both are 0."""
    if rows == columns == 0:
        return data_rc
    return F.pad(data_rc.view(torch.uint8), (0, columns, 0, rows)).view(data_rc.dtype)  # byte 0 is the value 0
