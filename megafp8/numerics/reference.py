"""Reference implementation of `megafp8.kernels.quantize` for one scale per tensor, in plain PyTorch.

The fused kernels reproduce these functions bit for bit. Those for rows and blocks stand beside their recipes.

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
    """The source's values `[r, c]`, rounded to its dtype."""
    return source.values().to(source.dtype)


def amax(source: MatrixSource) -> Tensor:
    """Largest magnitude of the source, fp32 `[]`, infinite where it is not finite."""
    return largest(source.values())


def column_sums(source: MatrixSource) -> Tensor:
    """Sums of the columns `[c]`, fp32 or wider: taken in float64 and rounded once, so no order of summation shows."""
    values = source.values()
    return values.sum(dim=0, dtype=torch.float64).to(values.dtype)


def cast_tensor(
    source: MatrixSource, scale: Tensor, scale_inv: Tensor, fmt: Format, *, rowwise: bool, columnwise: bool,
    newest_amax: Tensor | None,
) -> QuantizedTensor:  # fmt: skip
    """Cast by `scale`, fp32 `[]`, with `scale_inv` its reciprocal; raise `newest_amax`, fp32 `[]`, to the source's."""
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
    """Cast by a scale from the amax, fp32 `[]`, of the tensor that the source is all or a shard of."""
    scale = scale_from_amax(whole_amax, fmt.max, eps=eps, power_of_two=power_of_two)
    return cast_tensor(source, scale, scale.reciprocal(), fmt, rowwise=rowwise, columnwise=columnwise, newest_amax=None)
