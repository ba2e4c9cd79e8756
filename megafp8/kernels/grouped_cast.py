"""Casts of the rows of many experts in one launch, with a scale for each expert, row and column, or 1×128 block.

In rowwise copies, rows have the same positions as in the source. In columnwise copies, which sums over rows read, the
rows of each expert are padded with zeros to a multiple of 128 (`RowGroups.padded_ends_e`). Then no product reaches the
rows of another expert, and addresses are aligned whatever the sizes. A program casts a tile of one expert, as `cast`
does for one matrix. The number of rows per expert is read on the device. Blocks of 128 rows begin at the expert's first
row. The scales of 1×128 blocks of both copies are padded like the columnwise copy, so that the copy engine reads them
in aligned vectors.

Reference: functions of equal names in `megafp8.numerics.groups`.

Shapes: r rows of e experts, c columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.kernels.arithmetic import INTERPRETED, atomic_amax, ceil_div, magnitude_bits, next_power_of_2
from megafp8.kernels.cast import cast, record_amax
from megafp8.kernels.launch import TritonKernel
from megafp8.kernels.quantize import TILES, CastTile, SourceArguments, inputs_of, tile_group, whole_blocks
from megafp8.kernels.tiles import column_amax, compute, compute_quads, part_columns
from megafp8.numerics.formats import Format
from megafp8.numerics.groups import ALIGNMENT, RowGroups
from megafp8.numerics.sources import MatrixSource
from megafp8.numerics.tensor import BLOCK_1X128, ROW, QuantizedTensor, ScaledTensor
from megafp8.parallel.collectives import all_reduce


@triton.jit
def _rows_at(p0, ends_e, padded_ends_e, e, EXPERTS: tl.constexpr):
    """Look up row `p0` of the columnwise copy.

    Return its expert (e after the last expert), its row in the source, the end of the expert's rows in the source, and
    whether it is the expert's first row.
    """
    index = tl.arange(0, EXPERTS)
    padded_ends = tl.load(padded_ends_e + index, mask=index < e, other=2147483647)
    expert = tl.sum((padded_ends <= p0).to(tl.int32), axis=0)
    follows = (expert > 0) & (expert < e)
    row = tl.load(ends_e + expert - 1, mask=follows, other=0)
    before = p0 - tl.load(padded_ends_e + expert - 1, mask=follows, other=0)
    return expert, row + before, tl.load(ends_e + expert, mask=expert < e, other=0), before == 0


@TritonKernel
def groups_kernel(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, rowwise, columnwise, scale, columnwise_scale, amax,
                  columnwise_amax, ends_e, padded_ends_e, c, e, scale_stride, amax_stride, quads, SOURCE: tl.constexpr,
                  FUNCTION: tl.constexpr, INTERPRETED: tl.constexpr, EXPERTS: tl.constexpr, TILE_R: tl.constexpr,
                  TILE_C: tl.constexpr, SCALES: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
                  RECORD: tl.constexpr, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
                  EPS: tl.constexpr):  # fmt: skip
    """Cast one tile of each part of the source, from one expert's rows.

    If SCALES is "tensor", the scales and amaxes belong to experts, with the strides `scale_stride` and `amax_stride`.
    If it is "vectors", they belong to rows, and to the columns of one expert after the other. If it is "1x128", the
    scales belong to blocks, and rowwise scales are at the positions of the padded rows.
    """
    p0, j0 = tl.program_id(1) * TILE_R, tl.program_id(0) * TILE_C
    expert, i0, end_r, first = _rows_at(p0, ends_e, padded_ends_e, e, EXPERTS)
    if expert < e:
        q, j = tl.arange(0, TILE_R // 4), tl.arange(0, TILE_C)
        inputs = (x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c)
        parts = compute_quads(inputs, i0, q, j0, j, end_r, c, (0, 0, 1, 0, 0), SOURCE, FUNCTION, 0, INTERPRETED)
        scales = scale
        if SCALES == "tensor":
            scales = tl.load(scale + expert * scale_stride)
        elif SCALES == "vectors":
            columnwise_scale += expert * c
            columnwise_amax += expert * c
        elif SCALES == "1x128":
            scales += p0 - i0
        if RECORD:
            record_amax(amax + expert * amax_stride, parts, SOURCE)
        for part in tl.static_range(2 if SOURCE == "gated_grad" else 1):
            at, end, width = part_columns(j0, c, part, SOURCE, 0)
            cast(parts[part], parts[part], rowwise, columnwise, scales, columnwise_scale, amax, columnwise_amax, i0,
                 p0, q, at, j, end_r, quads, end, width, scale_stride, first, EPS, SCALES, ROWWISE, COLUMNWISE,
                 True, FORMAT, FP8_MAX, POWER_OF_TWO, INTERPRETED, TILE_R, TILE_C)  # fmt: skip


@TritonKernel
def groups_amax_kernel(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, of_experts, of_rows, of_columns, ends_e,
                       padded_ends_e, c, e, SOURCE: tl.constexpr, FUNCTION: tl.constexpr, INTERPRETED: tl.constexpr,
                       EXPERTS: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr, WHOLE: tl.constexpr,
                       ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Update amaxes with one tile of each part of the source, from one expert's rows."""
    p0, j0 = tl.program_id(1) * TILE_R, tl.program_id(0) * TILE_C
    expert, i0, end_r, _ = _rows_at(p0, ends_e, padded_ends_e, e, EXPERTS)
    if expert < e:
        inputs = (x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c)
        i, j = tl.arange(0, TILE_R), tl.arange(0, TILE_C)
        y, y2 = compute(inputs, i0, i, j0, j, end_r, c, (0, 0, 1, 0, 0), SOURCE, FUNCTION, 0, INTERPRETED)
        bits = magnitude_bits(y)
        if SOURCE == "gated_grad":
            bits = tl.maximum(bits, magnitude_bits(y2))
        if WHOLE:
            atomic_amax(of_experts + expert, tl.max(bits), None)
        if ROWS:
            atomic_amax(of_rows + i0 + i, tl.max(bits, axis=1), i0 + i < end_r)
        if COLUMNS:
            atomic_amax(of_columns + expert * c + j0 + j, column_amax(bits, 8), j0 + j < c)


def _launch(source: MatrixSource, what: str, groups: RowGroups) -> tuple[SourceArguments, CastTile, dict[str, Any]]:
    """Return the kernel arguments for `source`, its tile in the pass `what`, and constants of both kernels."""
    inputs, tile = inputs_of(source), TILES[what][tile_group(source)]
    assert inputs.kind != "qkv_grad"
    constants = {
        "SOURCE": inputs.kind, "FUNCTION": inputs.function, "INTERPRETED": INTERPRETED,
        "EXPERTS": next_power_of_2(len(groups.ends_e)), "TILE_R": tile.rows, "TILE_C": tile.columns,
        "num_warps": tile.warps, "enable_fp_fusion": False,
    }  # fmt: skip
    if tile.registers is not None:
        constants["maxnreg"] = tile.registers
    return inputs, tile, constants


def cast_groups(
    source: MatrixSource, scale_e: Tensor, scale_inv_e: Tensor, fmt: Format, groups: RowGroups, *, rowwise: bool,
    columnwise: bool, newest_amax_e: Tensor | None,
) -> QuantizedTensor:  # fmt: skip
    """Cast each expert's rows with the expert's scale. See `groups.cast_groups`."""
    amax_e = scale_e if newest_amax_e is None else newest_amax_e
    data, transposed = _cast(
        source, "tensor", fmt, groups, (scale_e, scale_e, amax_e, amax_e), scale_e.stride(0), rowwise=rowwise,
        columnwise=columnwise, record=newest_amax_e is not None,
    )  # fmt: skip
    return QuantizedTensor(
        None if data is None else ScaledTensor(data, scale_inv_e),
        None if transposed is None else ScaledTensor(transposed, scale_inv_e),
    )


def cast_groups_rows(
    source: MatrixSource, fmt: Format, groups: RowGroups, *, rowwise: bool, columnwise: bool, power_of_two: bool,
    eps: float, token_group: ProcessGroup | None,
) -> QuantizedTensor:  # fmt: skip
    """Cast with one scale per row, or per column of an expert's rows. See `groups.cast_groups_rows`."""
    r, c = source.shape
    start, columns = r + -r % 4, len(groups.ends_e) * c  # rows and columns begin at multiples of 16 bytes
    amaxes = torch.zeros(start + columns, dtype=torch.float32, device=source.device)
    scale_inv = torch.ones_like(amaxes)  # GEMMs also read the scales of experts without rows
    _amaxes(source, groups, (amaxes, amaxes, amaxes[start:]), rows=rowwise, columns=columnwise)
    if columnwise:
        all_reduce(amaxes[start:], token_group, "max")
    data, transposed = _cast(
        source, "vectors", fmt, groups, (scale_inv, scale_inv[start:], amaxes, amaxes[start:]), 0, rowwise=rowwise,
        columnwise=columnwise, power_of_two=power_of_two, eps=eps,
    )  # fmt: skip
    return QuantizedTensor(
        None if data is None else ScaledTensor(data, scale_inv[:r].unsqueeze(-1), ROW),
        None if transposed is None else ScaledTensor(transposed, scale_inv[start:].unsqueeze(-1), ROW),
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
    """Cast in blocks of 128 neighboring elements. See `groups.cast_groups_1x128`."""
    source = whole_blocks(source, head=None)
    c, device = source.shape[1], source.device
    scale_inv = torch.empty(ceil_div(c, ALIGNMENT), groups.capacity, dtype=torch.float32, device=device)
    columnwise_scale_inv = torch.empty(groups.capacity // ALIGNMENT, c, dtype=torch.float32, device=device)
    data, transposed = _cast(
        source, "1x128", fmt, groups, (scale_inv, columnwise_scale_inv, scale_inv, scale_inv), groups.capacity,
        rowwise=rowwise, columnwise=columnwise, power_of_two=power_of_two, eps=eps,
    )  # fmt: skip
    return QuantizedTensor(
        None if data is None else ScaledTensor(data, scale_inv.t(), BLOCK_1X128),
        None if transposed is None else ScaledTensor(transposed, columnwise_scale_inv.t(), BLOCK_1X128),
    )


def _cast(
    source: MatrixSource, scales: str, fmt: Format, groups: RowGroups, arguments: tuple[Tensor, Tensor, Tensor, Tensor],
    scale_stride: int, *, rowwise: bool, columnwise: bool, record: bool = False, power_of_two: bool = False,
    eps: float = 0.0,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Allocate the data and launch `groups_kernel`; return rowwise and columnwise data.

    `arguments` are the kernel's scale, columnwise scale, amax and columnwise amax.
    """
    (r, c), device = source.shape, source.device
    scale, columnwise_scale, amax, columnwise_amax = arguments
    data = torch.empty(r, c, dtype=fmt.dtype, device=device) if rowwise else None
    transposed = torch.empty(c, groups.capacity, dtype=fmt.dtype, device=device) if columnwise else None
    if r * c:
        inputs, tile, constants = _launch(source, "experts" if scales == "tensor" else scales, groups)
        assert scales != "vectors" or inputs.kind != "gated_grad", "its parts are apart in a row"
        bound = groups_kernel.bind(
            **constants, SCALES=scales, ROWWISE=rowwise, COLUMNWISE=columnwise, RECORD=record, FORMAT=fmt.name,
            FP8_MAX=fmt.max, POWER_OF_TWO=power_of_two, EPS=eps,
        )  # fmt: skip
        bound.launch(
            (ceil_div(inputs.width, tile.columns), groups.capacity // tile.rows),
            (
                *inputs.tensors, scale if data is None else data.view(torch.uint8),
                scale if transposed is None else transposed.view(torch.int32), scale, columnwise_scale,
                amax.view(torch.int32), columnwise_amax.view(torch.int32), groups.ends_e, groups.padded_ends_e,
            ),
            (inputs.width, len(groups.ends_e), scale_stride, amax.stride(0), groups.capacity // 4),
        )  # fmt: skip
    return data, transposed


def amax_of_groups(source: MatrixSource, groups: RowGroups) -> Tensor:
    """Return the largest magnitude in each expert's rows, fp32 `[e]`."""
    amax_e = torch.zeros(len(groups.ends_e), dtype=torch.float32, device=source.device)
    _amaxes(source, groups, (amax_e,) * 3)
    return amax_e


def _amaxes(
    source: MatrixSource, groups: RowGroups, outputs: tuple[Tensor, ...], *, rows: bool = False, columns: bool = False
) -> None:
    """Update `outputs`, fp32, with the amaxes of experts, or of rows and of each expert's columns."""
    if 0 not in source.shape:
        whole = not (rows or columns)
        inputs, tile, constants = _launch(source, "amax" if whole else "vector_amax", groups)
        assert whole or inputs.kind != "gated_grad", "its parts are apart in a row"
        bound = groups_amax_kernel.bind(**constants, WHOLE=whole, ROWS=rows, COLUMNS=columns)
        bound.launch(
            (ceil_div(inputs.width, tile.columns), groups.capacity // tile.rows),
            (*inputs.tensors, *(x.view(torch.int32) for x in outputs), groups.ends_e, groups.padded_ends_e),
            (inputs.width, len(groups.ends_e)),
        )  # fmt: skip
