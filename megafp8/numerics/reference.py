"""Reference implementation of `megafp8.kernels.quantize` for one scale per tensor, in plain PyTorch.

The fused kernels reproduce these functions bit for bit. The references for scales per row and per block are in the
files of their recipes.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.numerics.formats import Format
from megafp8.numerics.quantize import amax as largest
from megafp8.numerics.quantize import quantize, scale_from_amax
from megafp8.numerics.sources import MatrixSource
from megafp8.numerics.tensor import QuantizedTensor, ScaledTensor


def materialize(source: MatrixSource) -> Tensor:
    """Return the values of the source, `[r, c]`, rounded to its dtype."""
    return source.values().to(source.dtype)


def amax(source: MatrixSource) -> Tensor:
    """Return the largest magnitude of the source, fp32 `[]`; inf if a value is infinite or NaN."""
    return largest(source.values())


def column_sums(source: MatrixSource) -> Tensor:
    """Return the sums of the columns, `[c]`, fp32 or wider.

    The sums are computed in float64 and rounded once, so they do not depend on the order of summation.
    """
    values = source.values()
    return values.sum(dim=0, dtype=torch.float64).to(values.dtype)


def cast_tensor(
    source: MatrixSource, scale: Tensor, scale_inv: Tensor, fmt: Format, *, rowwise: bool, columnwise: bool,
    newest_amax: Tensor | None,
) -> QuantizedTensor:  # fmt: skip
    """Cast the source with the given scale.

    Args:
        source: Matrix to cast.
        scale: Factor before rounding, fp32 `[]`.
        scale_inv: Reciprocal of `scale`, fp32 `[]`.
        fmt: FP8 format.
        rowwise: Whether to return rowwise data.
        columnwise: Whether to return columnwise data.
        newest_amax: Running maximum to update with the source's amax, fp32 `[]`, or None.
    """
    values = source.values()
    if newest_amax is not None:
        torch.maximum(newest_amax, largest(values), out=newest_amax)
    by_rows = ScaledTensor(quantize(values, scale, fmt), scale_inv)
    return QuantizedTensor(by_rows if rowwise else None, by_rows.t() if columnwise else None)


def cast_current(
    source: MatrixSource,
    whole_amax: Tensor,
    fmt: Format,
    *,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
) -> QuantizedTensor:
    """Cast the source with a scale computed from `whole_amax`, fp32 `[]`.

    `whole_amax` is the amax of the whole tensor; the source may be a shard of it.
    """
    scale = scale_from_amax(whole_amax, fmt.max, eps=eps, power_of_two=power_of_two)
    return cast_tensor(source, scale, scale.reciprocal(), fmt, rowwise=rowwise, columnwise=columnwise, newest_amax=None)
