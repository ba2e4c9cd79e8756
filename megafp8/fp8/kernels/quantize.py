"""Launches of the tile kernel: the functions of `megafp8.fp8.plain`, with the same results bit for bit.

Shapes: r rows, c columns of the source.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megafp8.fp8.formats import Format
from megafp8.fp8.kernels.arithmetic import INTERPRETED, readable
from megafp8.fp8.kernels.cast import tile_kernel
from megafp8.fp8.kernels.cast_blocks import block_kernel
from megafp8.fp8.kernels.maxima import maxima_kernel
from megafp8.fp8.matrix import BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity, Operand, Scaled
from megafp8.fp8.scaling import scale_from_amax
from megafp8.fp8.sources import Normalized, Plain, QKVGrad, Source, SwiGLU, SwiGLUGrad


class Tile(NamedTuple):
    """Rows, columns and warps of a program; registers of a thread where there is a limit."""

    rows: int
    columns: int
    warps: int
    registers: int | None = None


# By pass and source. Measured on H200 (`tools/bench_casts.py --sweep`).
_TILES = {
    ("one factor", "plain"): Tile(128, 64, 4),
    ("one factor", "rmsnorm"): Tile(128, 64, 4),
    ("one factor", "layernorm"): Tile(128, 64, 4),
    ("one factor", "swiglu"): Tile(32, 128, 4),
    ("one factor", "swiglu_grad"): Tile(32, 128, 4),
    ("one factor", "qkv_grad"): Tile(64, 64, 4),
    ("amax", "plain"): Tile(64, 256, 8),
    ("amax", "rmsnorm"): Tile(64, 256, 8),
    ("amax", "layernorm"): Tile(64, 256, 8),
    ("amax", "swiglu"): Tile(32, 128, 4),
    ("amax", "swiglu_grad"): Tile(32, 128, 4),
    ("amax", "qkv_grad"): Tile(32, 64, 4),
    ("maxima", "plain"): Tile(128, 128, 4),
    ("maxima", "rmsnorm"): Tile(128, 128, 4),
    ("maxima", "layernorm"): Tile(128, 128, 4),
    ("maxima", "swiglu"): Tile(64, 128, 4),
    ("maxima", "swiglu_grad"): Tile(64, 128, 4),
    ("maxima", "qkv_grad"): Tile(64, 64, 4),
    ("vectors", "plain"): Tile(128, 128, 4),
    ("vectors", "rmsnorm"): Tile(128, 128, 4),
    ("vectors", "layernorm"): Tile(128, 128, 4),
    ("vectors", "swiglu"): Tile(32, 128, 4),
    ("vectors", "swiglu_grad"): Tile(32, 128, 4),
    ("vectors", "qkv_grad"): Tile(64, 64, 4),
    ("128x128", "plain"): Tile(128, 128, 8),
    ("128x128", "rmsnorm"): Tile(128, 128, 8),
    ("128x128", "layernorm"): Tile(128, 128, 8),
    ("128x128", "swiglu"): Tile(128, 128, 8),
    ("128x128", "swiglu_grad"): Tile(128, 128, 16),
}
_STRIPS = {"plain": (32, 32, 4, 4, 1)}


class _Inputs(NamedTuple):
    """The kernel's name for a source, its six pointers (any tensor where one is not read), its width in programs'
    terms, and what only a qkv gradient has: heads a and g, samples, strides of the angles, and half a head's width."""

    kind: str
    tensors: tuple[Tensor, ...]
    width: int
    heads: tuple[int, int, int, int, int] = (0, 0, 1, 0, 0)
    half_head: int = 0


def _inputs(source: Source) -> _Inputs:
    c = source.shape[1]
    if isinstance(source, Normalized):
        x, weight = readable(source.x_rc), readable(source.weight_c)
        if source.mean_r is None:
            return _Inputs("rmsnorm", (x, x, source.rstd_r, x, weight, weight), c)
        assert source.bias_c is not None
        return _Inputs("layernorm", (x, x, source.rstd_r, source.mean_r, weight, readable(source.bias_c)), c)
    if isinstance(source, QKVGrad):
        s, b, a, d = source.dq_sbad.shape
        cos, sin = (table.squeeze(2).expand(s, b, d // 2) for table in (source.cos, source.sin))
        assert cos.stride() == sin.stride()
        assert cos.stride(-1) == 1
        dq, dk, dv = (readable(x) for x in (source.dq_sbad, source.dk_sbgd, source.dv_sbgd))
        heads = (a, source.dk_sbgd.shape[2], b, cos.stride(0), cos.stride(1))
        return _Inputs(source.kind, (dq, dk, cos, sin, dv, dv), c // 2, heads, d // 2)
    assert isinstance(source, (Plain, SwiGLU, SwiGLUGrad))
    x = readable(source.x_rc)
    if isinstance(source, SwiGLUGrad):
        dy = readable(source.dy_rf)
        return _Inputs(source.kind, (x, dy, x, x, x, x), c // 2)
    return _Inputs(source.kind, (x,) * 6, c)


def _launch(kernel: Any, source: Source, tile: Tile, outputs: tuple[Tensor, ...], *numbers: Any, **options: Any) -> None:
    """`outputs`: the kernel's pointers behind those of the source; any tensor where one is not used."""
    kind, inputs, width, heads, half_head = _inputs(source)
    r = source.shape[0]
    limit = {} if tile.registers is None else {"maxnreg": tile.registers}
    kernel[(triton.cdiv(width, tile.columns), triton.cdiv(r, tile.rows))](
        *inputs, *outputs, r, width, *heads, *numbers, SOURCE=kind, HALF=half_head, INTERPRETED=INTERPRETED,
        num_warps=tile.warps, enable_fp_fusion=False, **options, **limit,
    )  # fmt: skip


def _launch_tiles(kernel: Any, what: str, source: Source, outputs: tuple[Tensor, ...], *numbers: Any, **options: Any) -> None:
    if isinstance(source, QKVGrad) and source.dq_sbad.shape[3] & (source.dq_sbad.shape[3] - 1):
        source = Plain(source.values())  # tiles are powers of two wide, and this head is not
    kind, _, _, _, half = _inputs(source)
    tile = _TILES[what, kind]
    if half:
        tile = tile._replace(columns=half)
    _launch(kernel, source, tile, outputs, *numbers, TILE_R=tile.rows, TILE_C=tile.columns, **options)


def _cast(source: Source, scales: str, fmt: Format, outputs: tuple[Tensor, ...], rows: Tensor | None,
          columns: Tensor | None, *, record: bool = False, power_of_two: bool = False, eps: float = 0.0) -> None:  # fmt: skip
    """Launch a cast. `outputs`: scale, column scale, amax, column amax."""
    if 0 in source.shape:
        return
    words = source.shape[0] % 4 == 0
    by_rows = None if rows is None else rows.view(torch.uint8)
    by_columns = None if columns is None else columns.view(torch.int32 if words else torch.uint8)
    codes = (outputs[0] if by_rows is None else by_rows, outputs[0] if by_columns is None else by_columns)
    options = dict(ROWS=rows is not None, COLUMNS=columns is not None, WORDS=words, FORMAT=fmt.name,
        FP8_MAX=fmt.max, POWER_OF_TWO=power_of_two)
    if scales == "1x128":
        kind = _inputs(source).kind
        strip_r, strip_c, warps, vector, unroll, *limit = _STRIPS.get(kind, _STRIPS["plain"])
        _launch(block_kernel, source, Tile(128, 64 if kind == "qkv_grad" else 128, warps, *limit), codes + outputs[:2], source.shape[0] // 4, eps,
            STRIP_R=strip_r, STRIP_C=strip_c, VECTOR=vector, UNROLL=unroll, **options)
        return
    _launch_tiles(
        tile_kernel, "one factor" if scales in ("tensor", "current") else scales, source, codes + outputs, source.shape[0] // 4, eps, SCALES=scales,
        RECORD=record, **options)


def _empty(source: Source, fmt: Format, rows: bool, columns: bool) -> tuple[Tensor | None, Tensor | None]:
    """Room for the codes as rows and as columns."""
    r, c = source.shape
    return (
        torch.empty((r, c), dtype=fmt.dtype, device=source.device) if rows else None,
        torch.empty((c, r), dtype=fmt.dtype, device=source.device) if columns else None,
    )


def _operand(
    rows: Tensor | None, columns: Tensor | None, scale_inv: Tensor, column_scale_inv: Tensor, granularity: Granularity
) -> Operand:
    return Operand(
        None if rows is None else Scaled(rows, scale_inv, granularity),
        None if columns is None else Scaled(columns, column_scale_inv, granularity),
    )


def materialize(source: Source) -> Tensor:
    values = torch.empty(source.shape, dtype=source.dtype, device=source.device)
    if values.numel():
        _launch_tiles(
            tile_kernel, "one factor", source, (values,) * 6, 0, 0.0, SCALES="none", ROWS=True, COLUMNS=False,
            RECORD=False, WORDS=False, FORMAT="e4m3", FP8_MAX=448.0, POWER_OF_TWO=False,
        )  # fmt: skip
    return values


def amax(source: Source) -> Tensor:
    result = torch.zeros((), dtype=torch.float32, device=source.device)
    if 0 not in source.shape:
        outputs = (result.view(torch.int32),) * 3
        _launch_tiles(maxima_kernel, "amax", source, outputs, WHOLE=True, ROWS=False, COLUMNS=False)
    return result


def cast_tensor(
    source: Source, scale: Tensor, scale_inv: Tensor, fmt: Format, *, rows: bool, columns: bool,
    newest_amax: Tensor | None,
) -> Operand:  # fmt: skip
    by_rows, by_columns = _empty(source, fmt, rows, columns)
    noted = scale if newest_amax is None else newest_amax
    outputs = (scale, scale, noted.view(torch.int32), noted)
    _cast(source, "tensor", fmt, outputs, by_rows, by_columns, record=newest_amax is not None)
    return _operand(by_rows, by_columns, scale_inv, scale_inv, TENSOR)


def cast_current(
    source: Source, whole_amax: Tensor, fmt: Format, *, rows: bool, columns: bool, power_of_two: bool, eps: float
) -> Operand:
    by_rows, by_columns = _empty(source, fmt, rows, columns)
    scale_inv = torch.empty_like(whole_amax) if 0 not in source.shape else torch.ones_like(whole_amax)
    outputs = (scale_inv, scale_inv, whole_amax.view(torch.int32), whole_amax)
    _cast(source, "current", fmt, outputs, by_rows, by_columns, power_of_two=power_of_two, eps=eps)
    return _operand(by_rows, by_columns, scale_inv, scale_inv, TENSOR)


def cast_rows(source: Source, fmt: Format, *, rows: bool, columns: bool, power_of_two: bool, eps: float) -> Operand:
    r, c = source.shape
    by_rows, by_columns = _empty(source, fmt, rows, columns)
    start = r + -r % 4  # of the columns' factors: each part begins at a multiple of 16 bytes
    maxima = torch.zeros(start + c, dtype=torch.float32, device=source.device)
    bits, inverse = maxima.view(torch.int32), torch.empty_like(maxima)
    if 0 in source.shape:
        inverse = scale_from_amax(maxima, fmt.max, eps=eps, power_of_two=power_of_two).reciprocal()
    else:
        outputs = (bits, bits, bits[start:])
        _launch_tiles(maxima_kernel, "maxima", source, outputs, WHOLE=False, ROWS=rows, COLUMNS=columns)
    outputs = (inverse, inverse[start:], bits, bits[start:])
    _cast(source, "vectors", fmt, outputs, by_rows, by_columns, power_of_two=power_of_two, eps=eps)
    return _operand(by_rows, by_columns, inverse[:r].unsqueeze(-1), inverse[start:].unsqueeze(-1), ROW)


def cast_1x128(source: Source, fmt: Format, *, rows: bool, columns: bool, power_of_two: bool, eps: float) -> Operand:
    """The factors `[r, ceil(c/128)]` lie in memory column by column, as cuBLASLt wants them."""
    r, c = source.shape
    by_rows, by_columns = _empty(source, fmt, rows, columns)
    scale_inv = torch.empty((-(-c // 128), r), dtype=torch.float32, device=source.device)
    column_scale_inv = torch.empty((-(-r // 128), c), dtype=torch.float32, device=source.device)
    outputs = (scale_inv, column_scale_inv, scale_inv, scale_inv)
    _cast(_whole_blocks(source, True), "1x128", fmt, outputs, by_rows, by_columns,
          power_of_two=power_of_two, eps=eps)  # fmt: skip
    return _operand(by_rows, by_columns, scale_inv.t(), column_scale_inv.t(), BLOCK_1X128)


def cast_128x128(source: Source, fmt: Format, *, rows: bool, columns: bool, power_of_two: bool, eps: float) -> Operand:
    """A row of the factors begins at a multiple of four, as cuBLASLt wants them."""
    r, c = source.shape
    by_rows, by_columns = _empty(source, fmt, rows, columns)
    down, across = -(-r // 128), -(-c // 128)
    scale_inv = torch.empty((down, across + -across % 4), dtype=torch.float32, device=source.device)
    column_scale_inv = torch.empty((across, down + -down % 4), dtype=torch.float32, device=source.device)
    outputs = (scale_inv, column_scale_inv, scale_inv, scale_inv)
    _cast(_whole_blocks(source), "128x128", fmt, outputs, by_rows, by_columns,
          power_of_two=power_of_two, eps=eps)  # fmt: skip
    return _operand(by_rows, by_columns, scale_inv[:, :across], column_scale_inv[:, :down], BLOCK_128X128)


def _whole_blocks(source: Source, one_row: bool = False) -> Source:
    """`source`, or its values where its two parts would share a block."""
    qkv = isinstance(source, QKVGrad) and not (one_row and source.dq_sbad.shape[3] == 128)
    split = qkv or (isinstance(source, SwiGLUGrad) and source.shape[1] % 256)
    return Plain(source.values()) if split else source
