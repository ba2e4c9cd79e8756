"""Quantize the rows of many experts in one launch, with a scale for each expert, or for each 1×128 block.

Rowwise copies have the rows where the source has them. In the columnwise copy, which sums over rows read, the rows of
each expert begin at a multiple of 128 (`RowGroups.places_e`) and zeros follow them up to the next: so no product
reaches the rows of another expert, and addresses are aligned whatever the sizes. A program casts a tile of one expert,
as `cast` does it for one matrix; how many rows the experts have is read on the device. Blocks of 128 rows begin where
the expert's rows begin, as those of a matrix do.

Reference: the functions of these names in `megafp8.fp8.groups`.

Shapes: r rows of e experts, c columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.fp8.formats import Format
from megafp8.fp8.groups import PLACES, RowGroups
from megafp8.fp8.sources import Source
from megafp8.fp8.tensor import BLOCK_1X128, QuantizedTensor, ScaledTensor
from megafp8.kernels.arithmetic import INTERPRETED, atomic_amax, ceil_div, magnitude_bits, next_power_of_2
from megafp8.kernels.cast import cast
from megafp8.kernels.launch import Kernel
from megafp8.kernels.quantize import TILES, Inputs, Tile, inputs_of, tile_group
from megafp8.kernels.tiles import compute, compute_quads, part_columns


@triton.jit
def _rows_at(place, ends_e, places_e, e, EXPERTS: tl.constexpr):
    """The expert whose rows lie at `place` of the columnwise copy, e if nobody's do; that row, and its expert's end."""
    index = tl.arange(0, EXPERTS)
    places = tl.load(places_e + index, mask=index < e, other=2147483647)
    expert = tl.sum((places <= place).to(tl.int32), axis=0)
    follows = (expert > 0) & (expert < e)
    row = tl.load(ends_e + expert - 1, mask=follows, other=0)
    row += place - tl.load(places_e + expert - 1, mask=follows, other=0)
    return expert, row, tl.load(ends_e + expert, mask=expert < e, other=0)


@Kernel
def groups_kernel(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, rowwise, columnwise, scale, columnwise_scale,
                  amax_e, ends_e, places_e, c, e, scale_stride, amax_stride, quads, SOURCE: tl.constexpr,
                  FUNCTION: tl.constexpr, INTERPRETED: tl.constexpr, EXPERTS: tl.constexpr, TILE_R: tl.constexpr,
                  TILE_C: tl.constexpr, SCALES: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
                  RECORD: tl.constexpr, FORMAT: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
                  EPS: tl.constexpr):  # fmt: skip
    """One tile of each part of the source, from one expert's rows.

    `scale`: of each expert, `scale_stride` apart; or where SCALES is "1x128" of each block, as `cast` has them.
    """
    place, j0 = tl.program_id(1) * TILE_R, tl.program_id(0) * TILE_C
    expert, i0, end_r = _rows_at(place, ends_e, places_e, e, EXPERTS)
    if expert < e:
        q, j = tl.arange(0, TILE_R // 4), tl.arange(0, TILE_C)
        inputs = (x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c)
        parts = compute_quads(inputs, i0, q, j0, j, end_r, c, (0, 0, 1, 0, 0), SOURCE, FUNCTION, 0, INTERPRETED)
        amax = amax_e + expert * amax_stride
        if SCALES == "tensor":
            scale += expert * scale_stride
        for part in tl.static_range(2 if SOURCE == "gated_grad" else 1):
            at, end, width = part_columns(j0, c, part, SOURCE, 0)
            cast(parts[part], parts[part], rowwise, columnwise, scale, columnwise_scale, amax, amax, i0, place, q, at,
                 j, end_r, quads, end, width, scale_stride, EPS, SCALES, ROWWISE, COLUMNWISE, RECORD, True, FORMAT,
                 FP8_MAX, POWER_OF_TWO, INTERPRETED, TILE_R, TILE_C)  # fmt: skip


@Kernel
def groups_amax_kernel(x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c, amax_e, ends_e, places_e, c, e,
                       SOURCE: tl.constexpr, FUNCTION: tl.constexpr, INTERPRETED: tl.constexpr, EXPERTS: tl.constexpr,
                       TILE_R: tl.constexpr, TILE_C: tl.constexpr):  # fmt: skip
    """One tile of each part of the source, from one expert's rows."""
    place, j0 = tl.program_id(1) * TILE_R, tl.program_id(0) * TILE_C
    expert, i0, end_r = _rows_at(place, ends_e, places_e, e, EXPERTS)
    if expert < e:
        inputs = (x_rc, second_rc, rstd_r, mean_r, weight_c, bias_c)
        i, j = tl.arange(0, TILE_R), tl.arange(0, TILE_C)
        y, y2 = compute(inputs, i0, i, j0, j, end_r, c, (0, 0, 1, 0, 0), SOURCE, FUNCTION, 0, INTERPRETED)
        bits = magnitude_bits(y)
        if SOURCE == "gated_grad":
            bits = tl.maximum(bits, magnitude_bits(y2))
        atomic_amax(amax_e + expert, tl.max(bits), None)


def _launch(source: Source, what: str, groups: RowGroups) -> tuple[Inputs, Tile, dict[str, Any]]:
    """Arguments for `source`, its tile in the pass `what`, and constants of either kernel."""
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
    source: Source, scale_e: Tensor, scale_inv_e: Tensor, fmt: Format, groups: RowGroups, *, rowwise: bool,
    columnwise: bool, newest_amax_e: Tensor | None,
) -> QuantizedTensor:  # fmt: skip
    data, transposed = _cast(
        source, "tensor", fmt, groups, (scale_e, scale_e), scale_e.stride(0), newest_amax_e, rowwise=rowwise,
        columnwise=columnwise,
    )  # fmt: skip
    return QuantizedTensor(
        None if data is None else ScaledTensor(data, scale_inv_e),
        None if transposed is None else ScaledTensor(transposed, scale_inv_e),
    )


def cast_groups_1x128(
    source: Source, fmt: Format, groups: RowGroups, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float
) -> QuantizedTensor:
    (r, c), device = source.shape, source.device
    scale_inv = torch.empty(ceil_div(c, PLACES), r, dtype=torch.float32, device=device)
    columnwise_scale_inv = torch.empty(groups.capacity // PLACES, c, dtype=torch.float32, device=device)
    data, transposed = _cast(
        source, "1x128", fmt, groups, (scale_inv, columnwise_scale_inv), r, None, rowwise=rowwise,
        columnwise=columnwise, power_of_two=power_of_two, eps=eps,
    )  # fmt: skip
    return QuantizedTensor(
        None if data is None else ScaledTensor(data, scale_inv.t(), BLOCK_1X128),
        None if transposed is None else ScaledTensor(transposed, columnwise_scale_inv.t(), BLOCK_1X128),
    )


def _cast(
    source: Source, scales: str, fmt: Format, groups: RowGroups, arguments: tuple[Tensor, Tensor], scale_stride: int,
    newest_amax_e: Tensor | None, *, rowwise: bool, columnwise: bool, power_of_two: bool = False, eps: float = 0.0,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Allocate data and launch. `arguments`: scale and columnwise scale of `groups_kernel`."""
    (r, c), device, unused = source.shape, source.device, arguments[0]
    data = torch.empty(r, c, dtype=fmt.dtype, device=device) if rowwise else None
    transposed = torch.empty(c, groups.capacity, dtype=fmt.dtype, device=device) if columnwise else None
    if r * c:
        amax_e = unused if newest_amax_e is None else newest_amax_e
        inputs, tile, constants = _launch(source, "per_tensor" if scales == "tensor" else scales, groups)
        assert scales == "tensor" or inputs.kind != "gated_grad", "its parts may share a block"
        bound = groups_kernel.bind(
            **constants, SCALES=scales, ROWWISE=rowwise, COLUMNWISE=columnwise, RECORD=newest_amax_e is not None,
            FORMAT=fmt.name, FP8_MAX=fmt.max, POWER_OF_TWO=power_of_two, EPS=eps,
        )  # fmt: skip
        bound.launch(
            (ceil_div(inputs.width, tile.columns), groups.capacity // tile.rows),
            (
                *inputs.tensors, unused if data is None else data.view(torch.uint8),
                unused if transposed is None else transposed.view(torch.int32), *arguments, amax_e.view(torch.int32),
                groups.ends_e, groups.places_e,
            ),
            (inputs.width, len(groups.ends_e), scale_stride, amax_e.stride(0), groups.capacity // 4),
        )  # fmt: skip
    return data, transposed


def amax_of_groups(source: Source, groups: RowGroups) -> Tensor:
    """Largest magnitude of each expert's rows, fp32 `[e]`: 0 without rows, infinite where one is not finite."""
    experts = len(groups.ends_e)
    amax_e = torch.zeros(experts, dtype=torch.float32, device=source.device)
    if 0 not in source.shape:
        inputs, tile, constants = _launch(source, "amax", groups)
        bound = groups_amax_kernel.bind(**constants)
        bound.launch(
            (ceil_div(inputs.width, tile.columns), groups.capacity // tile.rows),
            (*inputs.tensors, amax_e.view(torch.int32), groups.ends_e, groups.places_e), (inputs.width, experts),
        )  # fmt: skip
    return amax_e
