"""A quantized matrix: 8-bit data, and the inverse scale of each block of it.

Recipes differ in how many elements share a scale, from the whole tensor down to 16 neighbours: the `Granularity`.
Everything else about a quantized matrix is the same for all, so there is one type.

A GEMM sums over the last dim of both operands ("TN"), and a tensor takes part in two GEMMs that sum over different
dims. So it is wanted rowwise `[r, c]` and columnwise `[c, r]`, its transpose; a `QuantizedTensor` has both or either.
With one scale per tensor the second is a transposed copy of the first; with blocks they are two different casts.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
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

HOPPER_PAIRS = (
    (TENSOR, TENSOR),
    (ROW, ROW),
    (BLOCK_1X128, BLOCK_1X128),
    (BLOCK_1X128, BLOCK_128X128),
    (BLOCK_128X128, BLOCK_1X128),
)
"""Granularities of the two operands of a GEMM that Hopper's tensor cores compute."""
BLACKWELL_PAIRS = ((BLOCK_1X32, BLOCK_1X32), *product((BLOCK_1X16, BLOCK_16X16), repeat=2))
"""Those that only Blackwell's tensor cores compute. Pairs in neither are emulated."""


def on_hopper(granularity: Granularity) -> bool:
    """Whether Hopper's tensor cores take operands of this granularity."""
    return any(granularity in pair for pair in HOPPER_PAIRS)


class ScaledTensor(NamedTuple):
    """`data · scale_inv`: `data` `[r, c]` in an FP8 dtype, row-major.

    `scale_inv`: fp32, shaped `granularity.grid(r, c)`. `tensor_scale`: fp32 `[]`, the tensor's scale where the
    granularity is two-level, which `scale_inv` has been divided by (`megafp8.numerics.recipes.nvfp4`); else None.
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
