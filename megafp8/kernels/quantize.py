"""Launches of the kernels: the functions of `megafp8.fp8.reference`, with the same results bit for bit.

Shapes: r rows, c columns of the source.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafp8.fp8.formats import Format
from megafp8.fp8.quantize import scale_from_amax
from megafp8.fp8.sources import GELU, GELUGrad, Normalized, Plain, QKVGrad, ScaledColumns, Source, SwiGLU, SwiGLUGrad
from megafp8.fp8.tensor import BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity, QuantizedTensor, ScaledTensor
from megafp8.kernels.arithmetic import INTERPRETED, ceil_div, readable
from megafp8.kernels.cast import tile_kernel
from megafp8.kernels.reductions import maxima_kernel, sums_kernel


class Tile(NamedTuple):
    """Rows, columns and warps of a program, and a limit on a thread's registers where more programs at a time are worth
    it."""

    rows: int
    columns: int
    warps: int
    registers: int | None = None


def _of(matrices: Tile, *, swiglu: Tile, swiglu_grad: Tile, **others: Tile) -> dict[str, Tile]:
    """By source. GELU has SwiGLU's tiles, which has the same arithmetic to hold."""
    return {
        **dict.fromkeys(("plain", "rmsnorm", "layernorm"), matrices),
        **dict.fromkeys(("swiglu", "gelu"), swiglu),
        **dict.fromkeys(("swiglu_grad", "gelu_grad"), swiglu_grad),
        **others,
    }


_SUM_TILE = Tile(32, 128, 4)


# By pass, then by the source's name in the kernels. Measured on H200 (`benchmarks/bench_casts.py --sweep`). A head's
# columns are at most half a head.
TILES = {
    "one factor": _of(Tile(128, 64, 4), swiglu=Tile(64, 128, 8), swiglu_grad=Tile(64, 64, 4), qkv_grad=Tile(32, 64, 4)),
    "amax": _of(Tile(64, 256, 8), swiglu=Tile(32, 256, 8), swiglu_grad=Tile(32, 128, 4), qkv_grad=Tile(32, 64, 4)),
    "maxima": _of(Tile(128, 64, 4), swiglu=Tile(128, 64, 4), swiglu_grad=Tile(256, 64, 4), qkv_grad=Tile(128, 64, 4)),
    "vectors": _of(Tile(64, 128, 4), swiglu=Tile(64, 128, 8), swiglu_grad=Tile(32, 128, 4), qkv_grad=Tile(64, 64, 4)),
    "1x128": _of(
        Tile(128, 128, 8, 128), swiglu=Tile(128, 128, 8, 128), swiglu_grad=Tile(128, 128, 8), qkv_grad=Tile(128, 64, 4)
    ),
    "sums": _of(_SUM_TILE, swiglu=_SUM_TILE, swiglu_grad=_SUM_TILE),
    "128x128": _of(Tile(128, 128, 8), swiglu=Tile(128, 128, 8), swiglu_grad=Tile(128, 128, 16)),
}


class _Inputs(NamedTuple):
    """The kernel's name for a source, its six pointers (any tensor where one is not read, None for what is left out of
    the computation), its width in programs' terms, and what only a qkv gradient has: heads a and g, samples, strides of
    the angles, and half a head's width."""

    kind: str
    tensors: tuple[Tensor | None, ...]
    width: int
    heads: tuple[int, int, int, int, int] = (0, 0, 1, 0, 0)
    half_head: int = 0


def _inputs(source: Source) -> _Inputs:
    c = source.shape[1]
    if isinstance(source, Normalized):
        x, weight = readable(source.x_rc), readable(source.weight_c)
        if source.mean_r is None:
            return _Inputs("rmsnorm", (x, x, source.rstd_r, x, weight, None), c)
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
    if isinstance(source, ScaledColumns):
        return _Inputs("plain", (x, x, x, x, source.scale_c, None), c)
    if isinstance(source, GELU):
        dy = readable(source.dy_rc) if isinstance(source, GELUGrad) else x
        bias = None if source.bias_c is None else readable(source.bias_c)
        return _Inputs(source.kind, (x, dy, x, x, x, bias), c)
    if isinstance(source, SwiGLU):
        return _Inputs(source.kind, (x, x, x, x, source.scale_f, None), c)
    if isinstance(source, SwiGLUGrad):
        dy = readable(source.dy_rf)
        return _Inputs(source.kind, (x, dy, x, x, source.scale_f, None), c // 2)
    return _Inputs(source.kind, (x, x, x, x, None, None), c)


def _launch(kernel: Any, what: str, source: Source, outputs: tuple[Tensor, ...], *numbers: Any, **options: Any) -> None:
    """Launch `kernel` on tiles for the pass `what`. `outputs`: its pointers behind those of the source; any tensor
    where one is not used. `numbers`: its arguments behind the source's."""
    if isinstance(source, QKVGrad) and source.dq_sbad.shape[3] & (source.dq_sbad.shape[3] - 1):
        source = Plain(source.values())  # tiles are powers of two wide, and this head is not
    kind, inputs, width, heads, half = _inputs(source)
    r = source.shape[0]
    tile = TILES[what][kind]
    columns = min(tile.columns, half) if half else tile.columns
    limit = {} if tile.registers is None else {"maxnreg": tile.registers}
    kernel[(ceil_div(width, columns), ceil_div(r, tile.rows))](
        *inputs, *outputs, r, width, *heads, *numbers, SOURCE=kind, HALF=half, INTERPRETED=INTERPRETED,
        TILE_R=tile.rows, TILE_C=columns, num_warps=tile.warps, enable_fp_fusion=False, **options, **limit,
    )  # fmt: skip


def _cast(
    source: Source, scales: str, fmt: Format, outputs: tuple[Tensor, ...], rows: Tensor | None,
    columns: Tensor | None, *, record: bool = False, power_of_two: bool = False, eps: float = 0.0,
) -> None:  # fmt: skip
    """Launch a cast. `outputs`: scale, column scale, amax, column amax."""
    if 0 in source.shape:
        return
    words = source.shape[0] % 4 == 0
    by_rows = None if rows is None else rows.view(torch.uint8)
    by_columns = None if columns is None else columns.view(torch.int32 if words else torch.uint8)
    codes = (outputs[0] if by_rows is None else by_rows, outputs[0] if by_columns is None else by_columns)
    _launch(
        tile_kernel, "one factor" if scales in ("tensor", "current") else scales, source, codes + outputs,
        source.shape[0] // 4, eps, SCALES=scales, ROWS=rows is not None, COLUMNS=columns is not None, RECORD=record,
        WORDS=words, FORMAT=fmt.name, FP8_MAX=fmt.max, POWER_OF_TWO=power_of_two,
    )  # fmt: skip


def _empty(source: Source, fmt: Format, rowwise: bool, columnwise: bool) -> tuple[Tensor | None, Tensor | None]:
    """Room for the codes as rows and as columns."""
    r, c = source.shape
    return (
        torch.empty((r, c), dtype=fmt.dtype, device=source.device) if rowwise else None,
        torch.empty((c, r), dtype=fmt.dtype, device=source.device) if columnwise else None,
    )


def _operand(
    rows: Tensor | None, columns: Tensor | None, scale_inv: Tensor, column_scale_inv: Tensor, granularity: Granularity
) -> QuantizedTensor:
    return QuantizedTensor(
        None if rows is None else ScaledTensor(rows, scale_inv, granularity),
        None if columns is None else ScaledTensor(columns, column_scale_inv, granularity),
    )


def materialize(source: Source) -> Tensor:
    values = torch.empty(source.shape, dtype=source.dtype, device=source.device)
    if values.numel():
        _launch(
            tile_kernel, "one factor", source, (values,) * 6, 0, 0.0, SCALES="none", ROWS=True, COLUMNS=False,
            RECORD=False, WORDS=False, FORMAT="e4m3", FP8_MAX=448.0, POWER_OF_TWO=False,
        )  # fmt: skip
    return values


def amax(source: Source) -> Tensor:
    result = torch.zeros((), dtype=torch.float32, device=source.device)
    if 0 not in source.shape:
        outputs = (result.view(torch.int32),) * 3
        _launch(maxima_kernel, "amax", source, outputs, WHOLE=True, ROWS=False, COLUMNS=False)
    return result


def raise_column_amax(source: Source, amax_c: Tensor) -> None:
    if 0 not in source.shape:
        bits = amax_c.view(torch.int32)
        _launch(maxima_kernel, "maxima", source, (bits,) * 3, WHOLE=False, ROWS=False, COLUMNS=True)


def column_sums(source: Source) -> Tensor:
    assert not isinstance(source, QKVGrad), "its tiles are of another size"
    r, c = source.shape
    sums = torch.zeros((ceil_div(r, _SUM_TILE.rows), c), dtype=torch.float64, device=source.device)
    if sums.numel():
        _launch(sums_kernel, "sums", source, (sums,))
    return sums.sum(dim=0).float()


def cast_tensor(
    source: Source, scale: Tensor, scale_inv: Tensor, fmt: Format, *, rowwise: bool, columnwise: bool,
    newest_amax: Tensor | None,
) -> QuantizedTensor:  # fmt: skip
    by_rows, by_columns = _empty(source, fmt, rowwise, columnwise)
    noted = scale if newest_amax is None else newest_amax
    outputs = (scale, scale, noted.view(torch.int32), noted)
    _cast(source, "tensor", fmt, outputs, by_rows, by_columns, record=newest_amax is not None)
    return _operand(by_rows, by_columns, scale_inv, scale_inv, TENSOR)


def cast_current(
    source: Source, whole_amax: Tensor, fmt: Format, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float
) -> QuantizedTensor:
    by_rows, by_columns = _empty(source, fmt, rowwise, columnwise)
    scale_inv = torch.empty_like(whole_amax) if 0 not in source.shape else torch.ones_like(whole_amax)
    outputs = (scale_inv, scale_inv, whole_amax.view(torch.int32), whole_amax)
    _cast(source, "current", fmt, outputs, by_rows, by_columns, power_of_two=power_of_two, eps=eps)
    return _operand(by_rows, by_columns, scale_inv, scale_inv, TENSOR)


def amaxes(source: Source) -> tuple[Tensor, Tensor]:
    return _amaxes(source, rowwise=True, columnwise=True)


def _amaxes(source: Source, *, rowwise: bool, columnwise: bool) -> tuple[Tensor, Tensor]:
    """Zeros for those that are not asked for."""
    r, c = source.shape
    maxima = torch.zeros(r + c, dtype=torch.float32, device=source.device)
    if 0 not in source.shape:
        bits = maxima.view(torch.int32)
        _launch(maxima_kernel, "maxima", source, (bits, bits, bits[r:]), WHOLE=False, ROWS=rowwise, COLUMNS=columnwise)
    return maxima[:r], maxima[r:]


def cast_rows(
    source: Source, fmt: Format, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float,
    amaxes: tuple[Tensor, Tensor] | None = None,
) -> QuantizedTensor:  # fmt: skip
    r, c = source.shape
    by_rows, by_columns = _empty(source, fmt, rowwise, columnwise)
    row_amax, column_amax = _amaxes(source, rowwise=rowwise, columnwise=columnwise) if amaxes is None else amaxes
    start = r + -r % 4  # of the columns' factors: each part begins at a multiple of 16 bytes
    inverse = torch.empty(start + c, dtype=torch.float32, device=source.device)
    if 0 in source.shape:
        inverse = scale_from_amax(inverse.zero_(), fmt.max, eps=eps, power_of_two=power_of_two).reciprocal()
    outputs = (inverse, inverse[start:], row_amax.view(torch.int32), column_amax.view(torch.int32))
    _cast(source, "vectors", fmt, outputs, by_rows, by_columns, power_of_two=power_of_two, eps=eps)
    return _operand(by_rows, by_columns, inverse[:r].unsqueeze(-1), inverse[start:].unsqueeze(-1), ROW)


def cast_1x128(
    source: Source, fmt: Format, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float
) -> QuantizedTensor:
    """The factors `[r, ceil(c/128)]` lie in memory column by column, as cuBLASLt wants them."""
    r, c = source.shape
    by_rows, by_columns = _empty(source, fmt, rowwise, columnwise)
    scale_inv = torch.empty((-(-c // 128), r), dtype=torch.float32, device=source.device)
    column_scale_inv = torch.empty((-(-r // 128), c), dtype=torch.float32, device=source.device)
    outputs = (scale_inv, column_scale_inv, scale_inv, scale_inv)
    _cast(_whole_blocks(source, head=128), "1x128", fmt, outputs, by_rows, by_columns,
          power_of_two=power_of_two, eps=eps)  # fmt: skip
    return _operand(by_rows, by_columns, scale_inv.t(), column_scale_inv.t(), BLOCK_1X128)


def cast_128x128(
    source: Source, fmt: Format, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float
) -> QuantizedTensor:
    """A row of the factors begins at a multiple of four, as cuBLASLt wants them."""
    r, c = source.shape
    by_rows, by_columns = _empty(source, fmt, rowwise, columnwise)
    down, across = -(-r // 128), -(-c // 128)
    scale_inv = torch.empty((down, across + -across % 4), dtype=torch.float32, device=source.device)
    column_scale_inv = torch.empty((across, down + -down % 4), dtype=torch.float32, device=source.device)
    outputs = (scale_inv, column_scale_inv, scale_inv, scale_inv)
    _cast(_whole_blocks(source, head=None), "128x128", fmt, outputs, by_rows, by_columns,
          power_of_two=power_of_two, eps=eps)  # fmt: skip
    return _operand(by_rows, by_columns, scale_inv[:, :across], column_scale_inv[:, :down], BLOCK_128X128)


def _whole_blocks(source: Source, *, head: int | None) -> Source:
    """`source`, or its values where its two parts would share a block; those of a head `head` wide may."""
    split = isinstance(source, SwiGLUGrad) and source.shape[1] % 256
    split = split or (isinstance(source, QKVGrad) and source.dq_sbad.shape[3] != head)
    return Plain(source.values()) if split else source
