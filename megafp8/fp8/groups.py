"""Casts of consecutive rows that belong to different experts, with one scale for each expert, in plain PyTorch.

How many rows an expert has is known on the device only. `megafp8.kernels.grouped_cast` does the same without the host
knowing it.

Shapes: e experts, r rows of all of them, c columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.fp8.formats import Format
from megafp8.fp8.quantize import amax, quantize
from megafp8.fp8.sources import Source

PLACES = 128
"""In columnwise copies the rows of each expert begin at multiples of this."""


class RowGroups(NamedTuple):
    """Where the rows of each expert end, int32 `[e]`: in the source, and in columnwise copies, rounded up to `PLACES`.

    `capacity`: columns of a columnwise copy, enough for any sizes; what is behind the last expert's is not written.
    """

    ends_e: Tensor
    places_e: Tensor
    capacity: int

    @classmethod
    def of(cls, ends_e: Tensor, rows: int) -> RowGroups:
        """`rows`: how many there are."""
        sizes_e = torch.diff(ends_e, prepend=ends_e.new_zeros(1))
        places_e = ((sizes_e + (PLACES - 1)) // PLACES * PLACES).cumsum(0, dtype=torch.int32)
        return cls(ends_e, places_e, (rows // PLACES + len(ends_e)) * PLACES)

    @classmethod
    def equal(cls, experts: int, rows: int, device: torch.device) -> RowGroups:
        """Each expert has `rows`, as those of a weight."""
        counts = torch.arange(1, experts + 1, dtype=torch.int32, device=device)
        padded = -(-rows // PLACES) * PLACES
        return cls(counts * rows, counts * padded, experts * padded)


class GroupedTensor(NamedTuple):
    """FP8 data of all experts, `[r, c]` and `[c, capacity]`, whichever were asked for; `scale_inv_e`: fp32 `[e]`."""

    rowwise: Tensor | None = None
    columnwise: Tensor | None = None
    scale_inv_e: Tensor | None = None


def _rows_of(values_rc: Tensor, groups: RowGroups) -> Iterator[Tensor]:
    start = 0
    for end in groups.ends_e.tolist():
        yield values_rc[start:end]
        start = end


def amax_of_groups(source: Source, groups: RowGroups) -> Tensor:
    """Largest magnitude of each expert's rows, fp32 `[e]`: 0 without rows, infinite where one is not finite."""
    return torch.stack([amax(rows) for rows in _rows_of(source.values(), groups)])


def cast_groups(
    source: Source, scale_e: Tensor, fmt: Format, groups: RowGroups, *, rowwise: bool, columnwise: bool,
    newest_amax_e: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """`[r, c]` and `[c, groups.capacity]` in FP8, each expert's rows by its scale; raises `newest_amax_e` to amaxes.

    `scale_e`, `newest_amax_e`: fp32 `[e]` of any stride.
    """
    values = source.values()
    if newest_amax_e is not None:
        newest_amax_e.copy_(torch.maximum(newest_amax_e, amax_of_groups(source, groups)))
    data = [quantize(rows, scale, fmt) for rows, scale in zip(_rows_of(values, groups), scale_e, strict=True)]
    transposed = torch.zeros(values.shape[1], groups.capacity, dtype=torch.uint8, device=values.device)
    place = 0
    for rows, end in zip(data, groups.places_e.tolist(), strict=True):
        transposed[:, place : place + len(rows)] = rows.view(torch.uint8).t()
        place = end
    whole = torch.cat([rows.view(torch.uint8) for rows in data]).view(fmt.dtype)
    return whole if rowwise else None, transposed.view(fmt.dtype) if columnwise else None
