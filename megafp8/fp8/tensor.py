"""A quantized matrix: eight-bit codes, and one factor for each block of them.

Recipes differ in how many elements share a factor, from the whole tensor down to sixteen neighbours. That is a
`Granularity`; everything else about a quantized matrix is the same for all, so there is one type.

A GEMM sums over the last dim of both operands ("TN"), and a matrix takes part in two GEMMs that sum over different
dims. So a tensor is wanted as rows `[r, c]` and as columns `[c, r]`, its transpose: an `QuantizedTensor` is both or
either.
With one factor for the tensor the second is a transposed copy of the first; with finer blocks they are two different
casts.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Granularity:
    """Blocks of `rows` × `columns` elements share a factor; None is the whole extent. Names as in configs."""

    name: str
    rows: int | None
    columns: int | None

    def grid(self, r: int, c: int) -> tuple[int, ...]:
        """The shape of the factors of an `[r, c]` matrix: `[]` for one factor a tensor, else blocks down and across."""
        if self.rows is None:
            return ()
        return (-(-r // self.rows), 1 if self.columns is None else -(-c // self.columns))


TENSOR = Granularity("tensor", None, None)
ROW = Granularity("row", 1, None)
BLOCK_1X128 = Granularity("1x128", 1, 128)
BLOCK_128X128 = Granularity("128x128", 128, 128)
BLOCK_1X32 = Granularity("1x32", 1, 32)
BLOCK_1X16 = Granularity("1x16", 1, 16)
BLOCK_16X16 = Granularity("16x16", 16, 16)


class ScaledTensor(NamedTuple):
    """`data · scale_inv`: codes `[r, c]` in an FP8 dtype, row-major; factors fp32, shaped `granularity.grid(r, c)`.

    `tensor_scale`: fp32 `[]`, NVFP4's second level, which `scale_inv` was divided by (`megafp8.fp8.recipes.nvfp4`);
    None for factors of one level.
    """

    data: Tensor
    scale_inv: Tensor
    granularity: Granularity = TENSOR
    tensor_scale: Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values `[r, c]`; exact products need fp32 or wider."""
        r, c = self.data.shape
        return self.data.to(dtype) * expand(self.scale_inv.to(dtype), self.granularity, r, c)

    def t(self) -> ScaledTensor:
        """The transposed matrix `[c, r]`, row-major again; for one factor a tensor only."""
        assert self.granularity is TENSOR
        return ScaledTensor(_transposed(self.data), self.scale_inv)


class QuantizedTensor(NamedTuple):
    """A tensor `[r, c]` as GEMMs want it: `rowwise` `[r, c]`, `columnwise` `[c, r]`, whichever were asked for."""

    rowwise: ScaledTensor | None
    columnwise: ScaledTensor | None

    @property
    def required_rowwise(self) -> ScaledTensor:
        """The rows, which were asked for."""
        assert self.rowwise is not None
        return self.rowwise

    @property
    def required_columnwise(self) -> ScaledTensor:
        """The columns, which were asked for."""
        assert self.columnwise is not None
        return self.columnwise


def _transposed(codes_rc: Tensor) -> Tensor:
    if codes_rc.is_cuda and codes_rc.shape[0] % 4 == codes_rc.shape[1] % 4 == 0:
        from megafp8.kernels.transpose import transpose  # needs Triton, which comes with torch's CUDA builds

        return transpose(codes_rc)
    # As bytes: a copy of FP8 is a copy of bytes, and every backend has a kernel for those.
    return codes_rc.view(torch.uint8).t().contiguous().view(codes_rc.dtype)


def expand(factors: Tensor, granularity: Granularity, r: int, c: int) -> Tensor:
    """One factor an element (or a shape that broadcasts to that) from one a block, for an `[r, c]` matrix."""
    if granularity.rows is None:
        return factors
    if granularity.rows > 1:
        factors = factors.repeat_interleave(granularity.rows, dim=0)[:r]
    if granularity.columns is not None:
        factors = factors.repeat_interleave(granularity.columns, dim=1)[:, :c]
    return factors


def zero_pad(codes_rc: Tensor, rows: int, columns: int) -> Tensor:
    """Codes of one byte an element with zero rows and columns appended; themselves where there are none to append."""
    if rows == columns == 0:
        return codes_rc
    return F.pad(codes_rc.view(torch.uint8), (0, columns, 0, rows)).view(codes_rc.dtype)  # the byte 0 is the number 0
