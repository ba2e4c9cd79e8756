"""Sources to operands in plain PyTorch: what every fused kernel must reproduce bit for bit.

`megafp8.kernels.quantize` implements the same functions: a `Source` and a way of scaling in, an `QuantizedTensor`
with the rows and columns that were asked for out.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megafp8.fp8.blocks import block_amax, quantize_1x128, quantize_128x128, quantize_rows
from megafp8.fp8.formats import Format
from megafp8.fp8.quantize import amax as largest
from megafp8.fp8.quantize import quantize
from megafp8.fp8.scaling import scale_from_amax
from megafp8.fp8.sources import Source
from megafp8.fp8.tensor import ROW, QuantizedTensor, ScaledTensor


def materialize(source: Source) -> Tensor:
    """The source's values `[r, c]`, rounded to its dtype."""
    return source.values().to(source.dtype)


def amax(source: Source) -> Tensor:
    """Largest magnitude of the source, fp32 `[]`, infinite where it is not finite."""
    return largest(source.values())


def raise_column_amax(source: Source, amax_c: Tensor) -> None:
    """Raise `amax_c`, fp32 `[c]`, to the largest magnitudes of the columns, infinite where these are not finite."""
    if 0 not in source.shape:
        largest_c = source.values().abs().amax(dim=0).float().nan_to_num(nan=torch.inf, posinf=torch.inf)
        torch.maximum(amax_c, largest_c, out=amax_c)


def column_sums(source: Source) -> Tensor:
    """Sums of the columns `[c]`, fp32 or wider: taken in float64 and rounded once, so in no order of their own."""
    values = source.values()
    return values.sum(dim=0, dtype=torch.float64).to(values.dtype)


def cast_tensor(
    source: Source, scale: Tensor, scale_inv: Tensor, fmt: Format, *, rowwise: bool, columnwise: bool,
    newest_amax: Tensor | None,
) -> QuantizedTensor:  # fmt: skip
    """By one factor, `scale`, fp32 `[]`, `scale_inv` its reciprocal; `newest_amax`, fp32 `[]`, is raised to the
    source's amax where given."""
    values = source.values()
    if newest_amax is not None:
        torch.maximum(newest_amax, largest(values), out=newest_amax)
    by_rows = ScaledTensor(quantize(values, scale, fmt), scale_inv)
    return QuantizedTensor(by_rows if rowwise else None, by_rows.t() if columnwise else None)


def cast_current(
    source: Source, whole_amax: Tensor, fmt: Format, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float
) -> QuantizedTensor:
    """By one factor made of the amax, fp32 `[]`, of the tensor that the source is all or a part of."""
    scale = scale_from_amax(whole_amax, fmt.max, eps=eps, power_of_two=power_of_two)
    return cast_tensor(source, scale, scale.reciprocal(), fmt, rowwise=rowwise, columnwise=columnwise, newest_amax=None)


def _both(values: Tensor, cast: Callable[[Tensor], ScaledTensor], rowwise: bool, columnwise: bool) -> QuantizedTensor:
    return QuantizedTensor(cast(values) if rowwise else None, cast(values.t().contiguous()) if columnwise else None)


def amaxes(source: Source) -> tuple[Tensor, Tensor]:
    """Largest magnitudes of the rows `[r]` and of the columns `[c]`, fp32, infinite where they are not finite."""
    x_rc = source.values()
    return block_amax(x_rc, ROW).squeeze(-1), block_amax(x_rc.t(), ROW).squeeze(-1)


def cast_rows(
    source: Source, fmt: Format, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float,
    amaxes: tuple[Tensor, Tensor] | None = None,
) -> QuantizedTensor:  # fmt: skip
    """By one factor for each row of the rows, and of the columns. `amaxes` of both where they are not the source's own
    but those of a tensor that it is a part of."""
    x_rc = source.values()
    amax_r, amax_c = (None, None) if amaxes is None else amaxes
    cast = partial(quantize_rows, fmt=fmt, power_of_two=power_of_two, eps=eps)
    return QuantizedTensor(
        cast(x_rc, amax_r=amax_r) if rowwise else None,
        cast(x_rc.t().contiguous(), amax_r=amax_c) if columnwise else None,
    )


def cast_1x128(
    source: Source, fmt: Format, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float
) -> QuantizedTensor:
    """By blocks of 128 neighbours in a row of the rows, and of the columns."""
    return _both(
        source.values(), lambda x: quantize_1x128(x, fmt, power_of_two=power_of_two, eps=eps), rowwise, columnwise
    )


def cast_128x128(
    source: Source, fmt: Format, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float
) -> QuantizedTensor:
    """By square blocks: the columns are the rows transposed, factors and codes."""
    return _both(
        source.values(), lambda x: quantize_128x128(x, fmt, power_of_two=power_of_two, eps=eps), rowwise, columnwise
    )
