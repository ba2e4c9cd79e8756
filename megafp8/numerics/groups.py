"""Casts of consecutive rows that belong to different experts, each expert's as if alone, in plain PyTorch.

How many rows an expert has is known on the device only. `megafp8.kernels.grouped_cast` does the same without the host
knowing it.

The FP8 data of all experts is one `QuantizedTensor`: rowwise `[r, c]`, columnwise `[c, capacity]` (`RowGroups`).
`scale_inv` is as its granularity says, but fp32 `[e]` with one scale per tensor; columnwise with one per row
`[e·c, 1]`, one expert after the other; and rowwise with 1×128 blocks `[capacity, c / 128]`, where the rows lie in
columnwise copies.

Shapes: e experts, r rows of all of them, c columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megafp8.numerics.formats import Format
from megafp8.numerics.quantize import amax, block_amax, quantize, quantize_blocks
from megafp8.numerics.sources import MatrixSource
from megafp8.numerics.tensor import BLOCK_1X128, ROW, QuantizedTensor, ScaledTensor
from megafp8.parallel.collectives import all_reduce

ALIGNMENT = 128
"""In columnwise copies the rows of each expert are padded with zeros to a multiple of this, a block of scales."""


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Where the rows of each expert end, int32 `[e]`: in the source `ends_e`, in columnwise copies `padded_ends_e`.

    `capacity`: columns of a columnwise copy, enough for any sizes; what is behind the last expert's is not written.
    """

    ends_e: Tensor
    capacity: int

    @cached_property
    def padded_ends_e(self) -> Tensor:
        """Multiples of `ALIGNMENT`. Not needed without FP8, so computed when asked for."""
        sizes_e = torch.diff(self.ends_e, prepend=self.ends_e.new_zeros(1))
        return ((sizes_e + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT).cumsum(0, dtype=torch.int32)

    @classmethod
    def from_ends(cls, ends_e: Tensor, rows: int) -> RowGroups:
        """`rows`: how many there are."""
        return cls(ends_e, (rows // ALIGNMENT + len(ends_e)) * ALIGNMENT)

    @classmethod
    def equal(cls, experts: int, rows: int, device: torch.device) -> RowGroups:
        """Each expert has `rows`, as those of a weight."""
        counts = torch.arange(1, experts + 1, dtype=torch.int32, device=device)
        return cls(counts * rows, experts * -(-rows // ALIGNMENT) * ALIGNMENT)


def row_slices(ends_e: Tensor) -> Iterator[slice]:
    """The rows of each expert; synchronizes with the device."""
    start = 0
    for end in ends_e.tolist():
        yield slice(start, end)
        start = end


def _rows_of(values_rc: Tensor, groups: RowGroups) -> Iterator[Tensor]:
    return (values_rc[rows] for rows in row_slices(groups.ends_e))


def amax_of_groups(source: MatrixSource, groups: RowGroups) -> Tensor:
    """Largest magnitude of each expert's rows, fp32 `[e]`: 0 without rows, infinite where one is not finite."""
    return torch.stack([amax(rows) for rows in _rows_of(source.values(), groups)])


def cast_groups(
    source: MatrixSource, scale_e: Tensor, scale_inv_e: Tensor, fmt: Format, groups: RowGroups, *, rowwise: bool,
    columnwise: bool, newest_amax_e: Tensor | None,
) -> QuantizedTensor:  # fmt: skip
    """Each expert's rows by its scale; raises `newest_amax_e` to their amaxes.

    `scale_e`, `scale_inv_e` its reciprocal, `newest_amax_e`: fp32 `[e]` of any stride.
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
    """Each row by a scale of its own, and each column of an expert's rows; that of an expert without rows is any.

    `token_group`: ranks with other rows of the same experts, over which amaxes of columns are reduced.
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
    """Each expert's rows by blocks of 128 neighbours, and its columns by blocks that begin at its first row.

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
    """FP8 data `[e·n, k]` with scales `[e]` that is all there is of experts' weights, as `cast_groups` casts them."""
    padded, n = data, len(data.data) // experts
    if columnwise and n % ALIGNMENT:
        rows = data.data.view(torch.uint8).view(experts, n, -1)  # the byte 0 is the number 0
        rows = F.pad(rows, (0, 0, 0, -n % ALIGNMENT)).flatten(0, 1)
        padded = data._replace(data=rows.view(data.data.dtype))
    return QuantizedTensor(data if rowwise else None, padded.t() if columnwise else None)


def _joined(data: Sequence[Tensor]) -> Tensor:
    return torch.cat([rows.view(torch.uint8) for rows in data]).view(data[0].dtype)


def _padded(parts: Sequence[Tensor], width: int, groups: RowGroups) -> Tensor:
    """`[c, capacity / width]`: each expert's part, padded with zeros; `width`: padded rows in a column."""
    whole = parts[0].new_zeros(len(parts[0]), groups.capacity // width)
    for part, start in zip(parts, [0, *groups.padded_ends_e.tolist()], strict=False):
        whole[:, start // width :][:, : part.shape[1]] = part
    return whole
