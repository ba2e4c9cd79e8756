"""Launches of the cast and reduction kernels.

References: functions of equal names in `megafp8.numerics.reference` and in the recipes' files.

Shapes: r rows, c columns of the source.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.kernels.arithmetic import INTERPRETED, ceil_div, kernel_input
from megafp8.kernels.cast import tile_kernel
from megafp8.kernels.launch import BoundKernel, TritonKernel
from megafp8.kernels.reductions import amax_kernel, sums_kernel
from megafp8.numerics.formats import Format
from megafp8.numerics.quantize import scale_from_amax
from megafp8.numerics.sources import (
    ActivationSource,
    Gated,
    GatedGrad,
    Gathered,
    MatrixSource,
    Normalized,
    Plain,
    QKVGrad,
    Ungated,
    UngatedGrad,
)
from megafp8.numerics.tensor import BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity, QuantizedTensor, ScaledTensor


class CastTile(NamedTuple):
    """Rows, columns and warps of a program. `registers` limits the registers per thread if more programs are faster."""

    rows: int
    columns: int
    warps: int
    registers: int | None = None


def _tiles(
    matrix: CastTile, activation: CastTile, activation_grad: CastTile, **qkv_grad: CastTile
) -> dict[str, CastTile]:
    return {"matrix": matrix, "activation": activation, "activation_grad": activation_grad, **qkv_grad}


_SUM_TILE = CastTile(128, 64, 4)
# Tiles by pass and `tile_group`, measured on H200 (`benchmarks/bench_casts.py --sweep`). The tile of a qkv gradient is
# at most half a head wide.
TILES = {
    "per_tensor": _tiles(
        CastTile(64, 128, 8), CastTile(64, 64, 4), CastTile(64, 128, 8, 80), qkv_grad=CastTile(64, 64, 4)
    ),
    # one scale per tensor, rows of many experts
    "experts": _tiles(CastTile(64, 128, 4), CastTile(64, 64, 4, 64), CastTile(64, 64, 4)),
    "amax": _tiles(CastTile(64, 256, 8), CastTile(32, 256, 8), CastTile(32, 128, 4), qkv_grad=CastTile(32, 64, 4)),
    "vector_amax": _tiles(
        CastTile(128, 64, 4), CastTile(128, 64, 4), CastTile(256, 64, 4), qkv_grad=CastTile(128, 64, 4)
    ),
    "vectors": _tiles(CastTile(64, 128, 4), CastTile(64, 128, 8), CastTile(32, 128, 4), qkv_grad=CastTile(64, 64, 4)),
    "1x128": _tiles(
        CastTile(128, 128, 8, 128), CastTile(128, 128, 8, 128), CastTile(128, 128, 8), qkv_grad=CastTile(128, 64, 4)
    ),
    "128x128": _tiles(CastTile(128, 128, 8), CastTile(128, 128, 8), CastTile(128, 128, 16)),
    "sums": _tiles(_SUM_TILE, _SUM_TILE, _SUM_TILE),
}  # fmt: skip


def tile_group(source: MatrixSource) -> str:
    """Return the group of a source. Sources of one group use the same tiles."""
    return _tile_group(type(source))


@cache
def _tile_group(source: type[MatrixSource]) -> str:
    if issubclass(source, QKVGrad):
        return "qkv_grad"
    if issubclass(source, (UngatedGrad, GatedGrad)):
        return "activation_grad"
    return "activation" if issubclass(source, ActivationSource) else "matrix"


class SourceArguments(NamedTuple):
    """Arguments of kernels for a source.

    Attributes:
        kind: SOURCE of the kernels (`megafp8.kernels.tiles`).
        tensors: The six pointers: any tensor if a pointer is not read, None to leave it out of the computation.
        width: Number of columns of a part.
        function: Activation function, or "zero_centered" for a norm.
        heads: For a qkv gradient: a, g, number of samples, and the two strides of the angles.
        half_head: For a qkv gradient: half of the head width.
        norms: For a qkv gradient: statistics and weights of the norms of q and k.
    """

    kind: str
    tensors: tuple[Tensor | None, ...]
    width: int
    function: str = ""
    heads: tuple[int, int, int, int, int] = (0, 0, 1, 0, 0)
    half_head: int = 0
    norms: tuple[Tensor | None, Tensor | None] = (None, None)


def inputs_of(source: MatrixSource) -> SourceArguments:
    """Return the kernel arguments for a source."""
    if isinstance(source, QKVGrad):
        cos, sin = source.cos, source.sin
        a, d = source.dq_sbad.shape[2:]
        assert cos.stride() == sin.stride()
        assert cos.stride(-1) == 1
        dq, dk, dv = kernel_input(source.dq_sbad), kernel_input(source.dk_sbgd), kernel_input(source.dv_sbgd)
        g, b = dk.shape[2], dk.shape[1]
        heads = (a, g, b, cos.stride(0), cos.stride(1) if cos.shape[1] == b else 0)
        norms: tuple[Tensor | None, Tensor | None] = (None, None)
        x, function = dv, ""
        if source.norms is not None:
            weight = source.norms.weight_hd
            x, function = kernel_input(source.norms.x_rc), "zero_centered" if source.norms.zero_centered else ""
            norms = (source.norms.statistics_2rh, None if weight is None else kernel_input(weight))
        width = (a + 2 * g) * d // 2
        return SourceArguments("qkv_grad", (dq, dk, cos, sin, dv, x), width, function, heads, d // 2, norms)
    assert isinstance(source, Plain)
    x = kernel_input(source.x_rc)
    c = x.shape[1]
    if isinstance(source, Normalized):
        weight, form = kernel_input(source.weight_c), "zero_centered" if source.zero_centered else ""
        if source.mean_r is None:
            return SourceArguments("rmsnorm", (x, x, source.rstd_r, x, weight, None), c, form)
        assert source.bias_c is not None
        tensors = (x, x, source.rstd_r, source.mean_r, weight, kernel_input(source.bias_c))
        return SourceArguments("layernorm", tensors, c, form)
    if isinstance(source, Gathered):
        return SourceArguments("gathered", (x, source.rows_r, source.factor_r, x, None, None), c)
    dy, suffix = (kernel_input(source.dy_rf), "_grad") if isinstance(source, (UngatedGrad, GatedGrad)) else (x, "")
    if isinstance(source, (Gated, GatedGrad)):
        return SourceArguments(f"gated{suffix}", (x, dy, x, x, x, None), c // 2, source.function)
    if isinstance(source, (Ungated, UngatedGrad)):
        bias = None if source.bias_f is None else kernel_input(source.bias_f)
        return SourceArguments(f"activation{suffix}", (x, dy, x, x, x, bias), c, source.function)
    return SourceArguments("plain", (x, x, x, x, x, None), c)


class _CastConstants(NamedTuple):
    """Constants of `tile_kernel` that determine the cast."""

    SCALES: str
    ROWWISE: bool
    COLUMNWISE: bool
    RECORD: bool = False
    WORDS: bool = False
    FORMAT: str = "e4m3"
    FP8_MAX: float = 448.0
    POWER_OF_TWO: bool = False


class _AmaxConstants(NamedTuple):
    """Constants of `amax_kernel` that determine which amaxes it computes."""

    WHOLE: bool = False
    ROWS: bool = False
    COLUMNS: bool = False


class _NoConstants(NamedTuple):
    """Constants of a kernel that needs none."""


_VALUES, _WHOLE = _CastConstants("none", True, False), _AmaxConstants(True)
_Constants = _CastConstants | _AmaxConstants | _NoConstants


@cache
def _bound(
    kernel: TritonKernel, tile: CastTile, columns: int, kind: str, function: str, half: int, full: bool,
    quad_angles: bool, constants: _Constants,
) -> BoundKernel:  # fmt: skip
    """Return the kernel for sources of this kind. See `tile_kernel` for `full` and `quad_angles`.

    `columns` is the number of columns of a program, which may be less than in `tile`.
    """
    options = {} if tile.registers is None else {"maxnreg": tile.registers}
    if kernel is tile_kernel:
        options |= {"FULL": full, "QUAD_ANGLES": quad_angles}
    return kernel.bind(
        SOURCE=kind, FUNCTION=function, HALF=half, INTERPRETED=INTERPRETED, TILE_R=tile.rows, TILE_C=columns,
        num_warps=tile.warps, enable_fp_fusion=False, **constants._asdict(), **options,
    )  # fmt: skip


def _launch(
    kernel: TritonKernel,
    what: str,
    source: MatrixSource,
    outputs: tuple[Tensor, ...],
    constants: _Constants,
    *numbers: float,
) -> None:
    """Launch `kernel` with the tiles for the pass `what`.

    `outputs` and `numbers` follow the source's pointers and sizes. An output that is not used may be any tensor.
    """
    if isinstance(source, QKVGrad) and source.dq_sbad.shape[3] & (source.dq_sbad.shape[3] - 1):
        source = Plain(source.values())  # tiles are powers of two wide, but this head is not
    kind, inputs, width, function, heads, half, norms = inputs_of(source)
    r, tile = source.shape[0], TILES[what][tile_group(source)]
    columns = min(tile.columns, half) if half else tile.columns
    full = r % tile.rows == 0 and width % columns == 0
    quad_angles = kind == "qkv_grad" and heads[2] % 4 == 0 and heads[4] == 0
    bound = _bound(kernel, tile, columns, kind, function, half, full, quad_angles, constants)
    grid = (ceil_div(width, columns), ceil_div(r, tile.rows))
    bound.launch(grid, (*inputs, *norms, *outputs), (r, width, *heads, *numbers))


def _cast(
    source: MatrixSource, scales: str, fmt: Format, granularity: Granularity,
    arguments: tuple[Tensor, Tensor, Tensor, Tensor], scale_inv: Tensor, columnwise_scale_inv: Tensor, *,
    rowwise: bool, columnwise: bool, record: bool = False, power_of_two: bool = False, eps: float = 0.0,
) -> QuantizedTensor:  # fmt: skip
    """Allocate the data, launch `tile_kernel`, and return the quantized tensor.

    `arguments` are the kernel's scale, columnwise scale, amax and columnwise amax. Scales that the kernel computes are
    written there, and `scale_inv` and `columnwise_scale_inv` are views of them.
    """
    (r, c), device = source.shape, source.device
    data = torch.empty(r, c, dtype=fmt.dtype, device=device) if rowwise else None
    transposed = torch.empty(c, r, dtype=fmt.dtype, device=device) if columnwise else None
    if r * c:
        words, unused = r % 4 == 0, arguments[0]
        data_bytes = unused if data is None else data.view(torch.uint8)
        transposed_bytes = unused if transposed is None else transposed.view(torch.int32 if words else torch.uint8)
        _launch(
            tile_kernel, "per_tensor" if granularity is TENSOR else scales, source,
            (data_bytes, transposed_bytes, *arguments),
            _CastConstants(scales, rowwise, columnwise, record, words, fmt.name, fmt.max, power_of_two), r // 4, eps,
        )  # fmt: skip
    return QuantizedTensor(
        None if data is None else ScaledTensor(data, scale_inv, granularity),
        None if transposed is None else ScaledTensor(transposed, columnwise_scale_inv, granularity),
    )


def materialize(source: MatrixSource) -> Tensor:
    """Return the values of the source, `[r, c]`, rounded to its dtype."""
    r, c = source.shape
    values = torch.empty(r, c, dtype=source.dtype, device=source.device)
    if r * c:
        _launch(tile_kernel, "per_tensor", source, (values,) * 6, _VALUES, 0, 0.0)
    return values


def amax(source: MatrixSource) -> Tensor:
    """Return the largest magnitude of the source, fp32 `[]`; inf if a value is infinite or NaN."""
    result = torch.zeros((), dtype=torch.float32, device=source.device)
    if 0 not in source.shape:
        bits = result.view(torch.int32)
        _launch(amax_kernel, "amax", source, (bits,) * 3, _WHOLE)
    return result


def column_sums(source: MatrixSource) -> Tensor:
    """Return the sums of the columns, `[c]`, fp32. They are computed in float64 and rounded once."""
    assert not isinstance(source, QKVGrad), "its tiles have other sizes"
    r, c = source.shape
    sums = torch.zeros((ceil_div(r, _SUM_TILE.rows), c), dtype=torch.float64, device=source.device)
    if sums.numel():
        _launch(sums_kernel, "sums", source, (sums,), _NoConstants())
    return sums.sum(dim=0).float()


def cast_tensor(
    source: MatrixSource, scale: Tensor, scale_inv: Tensor, fmt: Format, *, rowwise: bool, columnwise: bool,
    newest_amax: Tensor | None,
) -> QuantizedTensor:  # fmt: skip
    """Cast the source with the given scale. See `reference.cast_tensor`."""
    amax = scale if newest_amax is None else newest_amax
    return _cast(
        source, "tensor", fmt, TENSOR, (scale, scale, amax.view(torch.int32), amax), scale_inv, scale_inv,
        rowwise=rowwise, columnwise=columnwise, record=newest_amax is not None,
    )  # fmt: skip


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
    """Cast the source with a scale computed from `whole_amax`. See `reference.cast_current`."""
    scale_inv = torch.empty_like(whole_amax) if 0 not in source.shape else torch.ones_like(whole_amax)
    return _cast(
        source, "current", fmt, TENSOR, (scale_inv, scale_inv, whole_amax.view(torch.int32), whole_amax), scale_inv,
        scale_inv, rowwise=rowwise, columnwise=columnwise, power_of_two=power_of_two, eps=eps,
    )  # fmt: skip


def amaxes(source: MatrixSource) -> tuple[Tensor, Tensor]:
    """Return the amaxes of the rows, `[r]`, and of the columns, `[c]`, fp32."""
    return _amaxes(source, rows=True, columns=True)


def _amaxes(source: MatrixSource, *, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Return the amaxes of rows, `[r]`, and columns, `[c]`; zeros if they are not wanted."""
    r, c = source.shape
    both = torch.zeros(r + c, dtype=torch.float32, device=source.device)
    if 0 not in source.shape:
        bits = both.view(torch.int32)
        _launch(amax_kernel, "vector_amax", source, (bits, bits, bits[r:]), _AmaxConstants(False, rows, columns))
    return both[:r], both[r:]


def cast_rows(
    source: MatrixSource, fmt: Format, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float,
    amaxes: tuple[Tensor, Tensor] | None = None,
) -> QuantizedTensor:  # fmt: skip
    """Cast with one scale per row, and columnwise with one scale per column. See `rowwise.cast_rows`."""
    r, c = source.shape
    amax_r, amax_c = _amaxes(source, rows=rowwise, columns=columnwise) if amaxes is None else amaxes
    start = r + -r % 4  # the columns' scales begin at a multiple of 16 bytes
    scale_inv = torch.empty(start + c, dtype=torch.float32, device=source.device)
    if 0 in source.shape:
        scale_inv = scale_from_amax(scale_inv.zero_(), fmt.max, eps=eps, power_of_two=power_of_two).reciprocal()
    arguments = (scale_inv, scale_inv[start:], amax_r.view(torch.int32), amax_c.view(torch.int32))
    return _cast(
        source, "vectors", fmt, ROW, arguments, scale_inv[:r].unsqueeze(-1), scale_inv[start:].unsqueeze(-1),
        rowwise=rowwise, columnwise=columnwise, power_of_two=power_of_two, eps=eps,
    )  # fmt: skip


def cast_1x128(
    source: MatrixSource, fmt: Format, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float
) -> QuantizedTensor:
    """Cast with 1×128 blocks. The scales `[r, ceil(c/128)]` are column-major in memory, as cuBLASLt requires."""
    r, c = source.shape
    scale_inv = torch.empty((ceil_div(c, 128), r), dtype=torch.float32, device=source.device)
    columnwise_scale_inv = torch.empty((ceil_div(r, 128), c), dtype=torch.float32, device=source.device)
    return _cast(
        whole_blocks(source, head=128), "1x128", fmt, BLOCK_1X128,
        (scale_inv, columnwise_scale_inv, scale_inv, scale_inv), scale_inv.t(), columnwise_scale_inv.t(),
        rowwise=rowwise, columnwise=columnwise, power_of_two=power_of_two, eps=eps,
    )  # fmt: skip


def cast_128x128(
    source: MatrixSource, fmt: Format, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float
) -> QuantizedTensor:
    """Cast with 128×128 blocks. Each row of scales begins at a multiple of four elements, as cuBLASLt requires."""
    r, c = source.shape
    down, across = ceil_div(r, 128), ceil_div(c, 128)
    scale_inv = torch.empty((down, across + -across % 4), dtype=torch.float32, device=source.device)
    columnwise_scale_inv = torch.empty((across, down + -down % 4), dtype=torch.float32, device=source.device)
    return _cast(
        whole_blocks(source, head=None), "128x128", fmt, BLOCK_128X128,
        (scale_inv, columnwise_scale_inv, scale_inv, scale_inv), scale_inv[:, :across], columnwise_scale_inv[:, :down],
        rowwise=rowwise, columnwise=columnwise, power_of_two=power_of_two, eps=eps,
    )  # fmt: skip


def whole_blocks(source: MatrixSource, *, head: int | None) -> MatrixSource:
    """Return `source`, or its values as a plain source if its two parts would share a block.

    A head of the width `head` is a block itself.
    """
    split = isinstance(source, GatedGrad) and source.shape[1] % 256
    split = split or (isinstance(source, QKVGrad) and source.dq_sbad.shape[3] != head)
    return Plain(source.values()) if split else source
