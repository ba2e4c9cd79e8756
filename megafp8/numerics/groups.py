"""Casts of consecutive rows that belong to different experts, in plain PyTorch. Each expert is cast separately.

The number of rows per expert is known only on the device. This reference copies it to the host;
`megafp8.kernels.grouped_cast` computes the same without the host.

The FP8 data of all experts is one `QuantizedTensor`: rowwise `[r, c]`, columnwise `[c, capacity]` (see `RowGroups`).
`scale_inv` has the shape that the granularity determines, with three exceptions. With one scale per tensor it is fp32
`[e]`. With one scale per row, columnwise, it is `[e·c, 1]`, one expert after the other. With 1×128 blocks, rowwise, it
is `[capacity, c / 128]`, with the rows at the same positions as in columnwise copies.

Shapes: e experts, r rows of all of them, c columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.numerics.formats import Format
from megafp8.numerics.quantize import amax, block_amax, quantize, quantize_blocks
from megafp8.numerics.sources import MatrixSource
from megafp8.numerics.tensor import BLOCK_1X128, ROW, QuantizedTensor, ScaledTensor, transposed
from megafp8.parallel.collectives import all_reduce

ALIGNMENT = 128
"""In columnwise copies, each expert's rows are padded with zeros to a multiple of this number, one block of scales."""


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Division of consecutive rows into experts.

    Attributes:
        ends_e: End of each expert's rows in the source, int32 `[e]`.
        capacity: Number of columns of a columnwise copy, sufficient for any division. Columns after the last expert's
            columns are not written.
    """

    ends_e: Tensor
    capacity: int

    @cached_property
    def padded_ends_e(self) -> Tensor:
        """End of each expert's columns in columnwise copies, int32 `[e]`, multiples of `ALIGNMENT`.

        They are needed only for FP8, so they are computed on first use.
        """
        sizes_e = torch.diff(self.ends_e, prepend=self.ends_e.new_zeros(1))
        return ((sizes_e + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT).cumsum(0, dtype=torch.int32)

    @classmethod
    def from_ends(cls, ends_e: Tensor, rows: int) -> RowGroups:
        """Build the groups from the ends of the experts' rows, int32 `[e]`, and the total number of rows."""
        return cls(ends_e, (rows // ALIGNMENT + len(ends_e)) * ALIGNMENT)

    @classmethod
    def equal(cls, experts: int, rows: int, device: torch.device) -> RowGroups:
        """Build groups with `rows` rows for each expert, as in a weight."""
        counts = torch.arange(1, experts + 1, dtype=torch.int32, device=device)
        return cls(counts * rows, experts * -(-rows // ALIGNMENT) * ALIGNMENT)


def row_slices(ends_e: Tensor) -> Iterator[slice]:
    """Yield the rows of each expert. This synchronizes with the device."""
    start = 0
    for end in ends_e.tolist():
        yield slice(start, end)
        start = end


def _rows_of(values_rc: Tensor, groups: RowGroups) -> Iterator[Tensor]:
    return (values_rc[rows] for rows in row_slices(groups.ends_e))


def amax_of_groups(source: MatrixSource, groups: RowGroups) -> Tensor:
    """Return the largest magnitude in each expert's rows, fp32 `[e]`; 0 without rows, inf if one is not finite."""
    return torch.stack([amax(rows) for rows in _rows_of(source.values(), groups)])


def cast_groups(
    source: MatrixSource, scale_e: Tensor, scale_inv_e: Tensor, fmt: Format, groups: RowGroups, *, rowwise: bool,
    columnwise: bool, newest_amax_e: Tensor | None,
) -> QuantizedTensor:  # fmt: skip
    """Cast each expert's rows with the expert's scale, and update `newest_amax_e` with their amaxes.

    `scale_e`, its reciprocal `scale_inv_e`, and the running maximum `newest_amax_e` are fp32 `[e]` with any stride.
    """
    values = source.values()
    if newest_amax_e is not None:
        newest_amax_e.copy_(torch.maximum(newest_amax_e, amax_of_groups(source, groups)))
    data = [quantize(rows, scale, fmt) for rows, scale in zip(_rows_of(values, groups), scale_e, strict=True)]
    transposed = _padded([rows.view(torch.uint8).t() for rows in data], 1, groups).view(fmt.dtype)
    return QuantizedTensor(
        ScaledTensor(_joined(data), scale_inv_e) if rowwise else None,
        ScaledTensor(transposed, scale_inv_e) if columnwise else None,
    )


def cast_groups_rows(
    source: MatrixSource, fmt: Format, groups: RowGroups, *, rowwise: bool, columnwise: bool, power_of_two: bool,
    eps: float, token_group: ProcessGroup | None,
) -> QuantizedTensor:  # fmt: skip
    """Cast with one scale per row, or columnwise with one scale for each column of an expert's rows.

    The scales of an expert without rows are arbitrary. Amaxes of columns are reduced over `token_group`, the ranks that
    hold other rows of the same experts.
    """
    cast = partial(quantize_blocks, fmt=fmt, granularity=ROW, power_of_two=power_of_two, eps=eps)
    amax_ec = torch.stack([block_amax(rows.t(), ROW) for rows in _rows_of(source.values(), groups)])
    if columnwise:
        all_reduce(amax_ec, token_group, "max")
    by_columns = [cast(rows.t(), amax=amax_c) for rows, amax_c in zip(_rows_of(source.values(), groups), amax_ec)]
    transposed = _padded([scaled.data.view(torch.uint8) for scaled in by_columns], 1, groups).view(fmt.dtype)
    return QuantizedTensor(
        cast(source.values()) if rowwise else None,
        ScaledTensor(transposed, torch.cat([scaled.scale_inv for scaled in by_columns]), ROW) if columnwise else None,
    )


def cast_groups_1x128(
    source: MatrixSource,
    fmt: Format,
    groups: RowGroups,
    *,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    eps: float,
) -> QuantizedTensor:
    """Cast in blocks of 128 neighboring elements. Columnwise blocks begin at each expert's first row.

    The scales are column-major in memory.
    """
    cast = partial(quantize_blocks, fmt=fmt, granularity=BLOCK_1X128, power_of_two=power_of_two, eps=eps)
    by_rows = [cast(rows) for rows in _rows_of(source.values(), groups)]
    by_columns = [cast(rows.t()) for rows in _rows_of(source.values(), groups)]
    data = _joined([scaled.data for scaled in by_rows])
    scale_inv = _padded([scaled.scale_inv.t() for scaled in by_rows], 1, groups)
    transposed = _padded([scaled.data.view(torch.uint8) for scaled in by_columns], 1, groups).view(fmt.dtype)
    columnwise_scale_inv = _padded([scaled.scale_inv for scaled in by_columns], ALIGNMENT, groups)
    return QuantizedTensor(
        ScaledTensor(data, scale_inv.t(), BLOCK_1X128) if rowwise else None,
        ScaledTensor(transposed, columnwise_scale_inv.t().contiguous().t(), BLOCK_1X128) if columnwise else None,
    )


def stored_groups(data: ScaledTensor, experts: int, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
    """Return weights stored only as FP8 data `[e·n, k]` with scales `[e]`, in the format of `cast_groups`."""
    by_columns = data._replace(data=transposed(data.data, experts, ALIGNMENT)) if columnwise else None
    return QuantizedTensor(data if rowwise else None, by_columns)


def _joined(data: Sequence[Tensor]) -> Tensor:
    return torch.cat([rows.view(torch.uint8) for rows in data]).view(data[0].dtype)


def _padded(parts: Sequence[Tensor], width: int, groups: RowGroups) -> Tensor:
    """Join the experts' parts, each padded with zeros, to `[c, capacity / width]`; a column covers `width` rows."""
    whole = parts[0].new_zeros(len(parts[0]), groups.capacity // width)
    for part, start in zip(parts, [0, *groups.padded_ends_e.tolist()], strict=False):
        whole[:, start // width :][:, : part.shape[1]] = part
    return whole
