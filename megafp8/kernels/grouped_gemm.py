"""Grouped GEMMs: matrix products of many experts in one launch. The number of rows per expert is read on the device.

One operand contains the rows of all experts, one expert after the other. There are two products:

- FP8 rows times the matrix of their expert (fprop, dgrad). For bf16, `torch.nn.functional.grouped_mm` does this.
- For each expert, the sum of outer products over its rows (wgrad), which is added to fp32 in place.

Sums are fp32. FP8 operands have one scale per expert, or one for each row of each expert, and the final sums are
multiplied by the scales. With scales for blocks of 128 summands, each block's product is multiplied before it is added.
On Hopper, kernels in CUDA (`megafp8.kernels.grouped_gemm_cuda`) are faster for block scales and for one scale per
expert, if their compiler is installed. Operands with one scale per row always use the kernels of this file.

Operands are read through tensor descriptors by the GPU's copy engine for tiles (TMA). A descriptor covers the rows of
all experts, so a tile that reaches beyond the rows of its expert reads rows of the next expert. In products of rows,
the results of such rows are not stored. In sums over bf16 rows, such rows are set to zero. In sums over FP8 rows there
are none, because each expert's rows begin at a multiple of TILE_K and are followed by zeros
(`megafp8.numerics.groups`).

Two programs of four warps share a multiprocessor: while one reads and writes results, the other multiplies. With block
scales, registers must hold the sums and a block's product, so a program has eight warps, and a multiprocessor runs one
program. Products of rows launch only as many programs as fit, and each program computes several tiles
(docs/decisions/0015-experts.md).

Reference: `megafp8.gemm.dispatch.emulated` for each expert, which adds in another order.

Shapes: e experts with m rows in total; n columns and k summands of a product of rows; a sum over rows is `[p, q]` for
each expert. A tile is TILE_M × TILE_N, and TILE_K summands are read at once, which is one block if blocks have scales.
SCALES is the name of a's granularity.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megafp8.kernels import grouped_gemm_cuda as cuda
from megafp8.kernels.arithmetic import INTERPRETED, ceil_div, next_power_of_2
from megafp8.numerics.tensor import BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, ScaledTensor


class GemmTile(NamedTuple):
    """Tile of a program: rows, columns, warps and stages, and the number of programs that fit on a multiprocessor."""

    rows: int
    columns: int
    warps: int
    stages: int
    programs_per_sm: int


_TILE, _BLOCKS_TILE = GemmTile(128, 128, 4, 3, 2), GemmTile(128, 128, 8, 4, 1)
_BLOCK = 128
_PAIRS = ((TENSOR, TENSOR), (ROW, ROW), (BLOCK_1X128, BLOCK_128X128), (BLOCK_1X128, BLOCK_1X128))
_TILE_K = {torch.bfloat16: 64, torch.float8_e4m3fn: _BLOCK, torch.float8_e5m2: _BLOCK}


@triton.jit
def _product(a, b, INTERPRETED: tl.constexpr):
    """Return a·b in fp32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b)


@triton.jit
def _dot(a, b, sums, FAST: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return sums + a·b. Hopper's FP8 sums have 14 bits; unless FAST, they are added in fp32 every 128 summands."""
    if INTERPRETED:
        return sums + _product(a, b, INTERPRETED)
    if FAST:
        return tl.dot(a, b, sums)
    return tl.dot(a, b, sums, max_num_imprecise_acc=128)


@triton.jit
def _scaled(sums, a_scale_inv, b_scale_inv, i, j, p, q):
    """Multiply the sums of rows i of a and rows j of b by their scales; a has p rows, b has q."""
    a_scale = tl.load(a_scale_inv + i, mask=i < p, other=0.0)
    b_scale = tl.load(b_scale_inv + j, mask=j < q, other=0.0)
    return sums * a_scale[:, None] * b_scale[None, :]


@triton.jit
def tile_at(index, down, across, GROUP: tl.constexpr):
    """Return row and column of a tile. Tiles are numbered GROUP tiles down, then in the next column of tiles."""
    group = index // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    within = index % (GROUP * across)
    return group * GROUP + within % height, within // height


@triton.jit(do_not_specialize=["m", "e", "a_stride", "b_stride"])
def rows_kernel(a_mk, b, out_mn, ends_e, a_scale_inv, b_scale_inv, m, n, k, e, a_stride, b_stride, row_step,
                column_step, EXPERTS: tl.constexpr, SCALES: tl.constexpr, FAST: tl.constexpr,
                INTERPRETED: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
                TILE_K: tl.constexpr):  # fmt: skip
    """Compute tiles of rows times the matrix of their expert.

    The matrix of expert i, `[n, k]`, begins at row i·row_step and column i·column_step of b. EXPERTS is e rounded up to
    a power of two.

    `a_stride` and `b_stride` are the distances between the scales of neighboring experts. With blocks, which are
    1 × TILE_K in a and square in b, they are the distances between neighboring blocks of k in a, and between
    neighboring blocks of rows in b. The scales of a's blocks are at the positions that the rows have in the columnwise
    copy. Scales of rows are contiguous.
    """
    index = tl.arange(0, EXPERTS)
    ends = tl.load(ends_e + index, mask=index < e, other=m)
    starts = tl.where(index < e, tl.load(ends_e + index - 1, mask=(index > 0) & (index < e), other=0), m)
    across = tl.cdiv(n, TILE_N)
    tiles = tl.cumsum(tl.cdiv(ends - starts, TILE_M), axis=0) * across
    for tile in range(tl.program_id(0), tl.max(tiles, axis=0), tl.num_programs(0)):
        done = tiles <= tile  # experts that have only earlier tiles
        expert = tl.sum(done.to(tl.int32), axis=0)
        start = tl.max(tl.where(done, ends, 0), axis=0)
        end = tl.min(tl.where(done, m, ends), axis=0)
        first = tl.max(tl.where(done, tiles, 0), axis=0)
        padded = tl.sum(tl.where(done, tl.cdiv(ends - starts, 128), 0), axis=0) * 128
        down, right = tile_at(tile - first, tl.cdiv(end - start, TILE_M), across, GROUP)
        i0, j0 = start + down * TILE_M, right * TILE_N
        sums = tl.zeros([TILE_M, TILE_N], tl.float32)
        for k0 in range(0, k, TILE_K):
            row, column = expert * row_step + j0, expert * column_step + k0
            if SCALES == "1x128":
                i = padded + down * TILE_M + tl.arange(0, TILE_M)
                a_scale = tl.load(a_scale_inv + k0 // TILE_K * a_stride + i)
                b_scale = tl.load(b_scale_inv + row // TILE_K * b_stride + column // TILE_K)
                product = _product(a_mk.load([i0, k0]), b.load([row, column]).T, INTERPRETED)
                sums += product * (a_scale * b_scale)[:, None]
            else:
                sums = _dot(a_mk.load([i0, k0]), b.load([row, column]).T, sums, FAST, INTERPRETED)
        i, j = i0 + tl.arange(0, TILE_M), j0 + tl.arange(0, TILE_N)
        if SCALES == "tensor":
            sums = sums * tl.load(a_scale_inv + expert * a_stride) * tl.load(b_scale_inv + expert * b_stride)
        elif SCALES == "row":
            sums = _scaled(sums, a_scale_inv, b_scale_inv + expert * n, i, j, m, n)
        at = i.to(tl.int64)[:, None] * n + j[None, :]
        tl.store(out_mn + at, sums.to(out_mn.dtype.element_ty), mask=(i < end)[:, None] & (j < n)[None, :])


@triton.jit
def _add_blocks(sums, a, b, a_scale_inv, b_scale_inv, start, end, i0, j0, a_stride, b_stride,
                INTERPRETED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
                TILE_K: tl.constexpr):  # fmt: skip
    """Add the products of the blocks of rows from `start` to `end`, each multiplied by its scales, to `sums`."""
    a_scale_inv += i0 + tl.arange(0, TILE_M)
    b_scale_inv += j0 + tl.arange(0, TILE_N)
    for k0 in range(start, end, TILE_K):
        a_scale = tl.load(a_scale_inv + k0 // TILE_K * a_stride)
        b_scale = tl.load(b_scale_inv + k0 // TILE_K * b_stride)
        product = _product(a.load([i0, k0]), b.load([j0, k0]).T, INTERPRETED)
        sums += product * a_scale[:, None] * b_scale[None, :]
    return sums


@triton.jit(do_not_specialize=["a_stride", "b_stride"])
def sums_kernel(a, b, earlier_a, earlier_b, out_epq, ends_e, earlier_ends_e, a_scale_inv, b_scale_inv,
                earlier_a_scale_inv, earlier_b_scale_inv, p, q, a_stride, b_stride, SCALES: tl.constexpr,
                ACCUMULATE: tl.constexpr, PAIR: tl.constexpr, FAST: tl.constexpr, INTERPRETED: tl.constexpr,
                GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):  # fmt: skip
    """Compute a tile of one expert's sum of outer products over its rows, and store it or add it to `out_epq`.

    With ACCUMULATE, the tile is added. With PAIR, the sum also covers the rows of `earlier_a` and `earlier_b`, which
    belong to another micro-batch and have separate scales.

    The operands are `[p, padded]` and `[q, padded]`, with an expert's rows padded to a multiple of TILE_K. If SCALES is
    "none", they are `[m, p]` and `[m, q]`. `a_stride` and `b_stride` are the distances between the scales of
    neighboring experts. With blocks, which are 1 × TILE_K, they are the distances between neighboring blocks of padded
    rows, and p and q are multiples of the tile. Scales of rows are contiguous.
    """
    down, across = tl.cdiv(p, TILE_M), tl.cdiv(q, TILE_N)
    expert = tl.program_id(0) // (down * across)
    i, j = tile_at(tl.program_id(0) % (down * across), down, across, GROUP)
    i0, j0 = i * TILE_M, j * TILE_N
    start = tl.load(ends_e + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_e + expert)
    has_rows = start < end
    sums = tl.zeros([TILE_M, TILE_N], tl.float32)
    if PAIR:
        earlier_start = tl.load(earlier_ends_e + expert - 1, mask=expert > 0, other=0)
        earlier_end = tl.load(earlier_ends_e + expert)
        has_rows |= earlier_start < earlier_end
    if SCALES == "1x128":
        if PAIR:
            sums = _add_blocks(sums, earlier_a, earlier_b, earlier_a_scale_inv, earlier_b_scale_inv, earlier_start,
                               earlier_end, i0, j0, a_stride, b_stride, INTERPRETED, TILE_M, TILE_N,
                               TILE_K)  # fmt: skip
        sums = _add_blocks(sums, a, b, a_scale_inv, b_scale_inv, start, end, i0, j0, a_stride, b_stride, INTERPRETED,
                           TILE_M, TILE_N, TILE_K)  # fmt: skip
    elif SCALES != "none":
        if PAIR:
            for k0 in range(earlier_start, earlier_end, TILE_K):
                sums = _dot(earlier_a.load([i0, k0]), earlier_b.load([j0, k0]).T, sums, FAST, INTERPRETED)
            a_ratio = tl.load(earlier_a_scale_inv + expert * a_stride) / tl.load(a_scale_inv + expert * a_stride)
            b_ratio = tl.load(earlier_b_scale_inv + expert * b_stride) / tl.load(b_scale_inv + expert * b_stride)
            sums = sums * a_ratio * b_ratio  # convert to the scales of a and b
        for k0 in range(start, end, TILE_K):
            sums = _dot(a.load([i0, k0]), b.load([j0, k0]).T, sums, FAST, INTERPRETED)
    else:
        whole = start + (end - start) // TILE_K * TILE_K
        for k0 in range(start, whole, TILE_K):
            sums = _dot(a.load([k0, i0]).T, b.load([k0, j0]), sums, FAST, INTERPRETED)
        if whole < end:
            inside = (whole + tl.arange(0, TILE_K) < end)[:, None]
            x, y = tl.where(inside, a.load([whole, i0]), 0.0), tl.where(inside, b.load([whole, j0]), 0.0)
            sums = _dot(x.T, y, sums, FAST, INTERPRETED)
    if SCALES == "tensor":
        sums = sums * tl.load(a_scale_inv + expert * a_stride) * tl.load(b_scale_inv + expert * b_stride)
    elif SCALES == "row":
        i, j = i0 + tl.arange(0, TILE_M), j0 + tl.arange(0, TILE_N)
        sums = _scaled(sums, a_scale_inv + expert * p, b_scale_inv + expert * q, i, j, p, q)
    if (not ACCUMULATE) or has_rows:
        total = sums.reshape(1, TILE_M, TILE_N)
        if ACCUMULATE:
            total += out_epq.load([expert, i0, j0])
        out_epq.store([expert, i0, j0], total.to(out_epq.dtype))


@cache
def _programs(device: torch.device, tile: GemmTile) -> int:
    if device.type == "cpu":
        return 3
    return tile.programs_per_sm * torch.cuda.get_device_properties(device).multi_processor_count


def _launched(dtype: torch.dtype, scales: str, *, fast: bool) -> tuple[GemmTile, int, dict[str, Any]]:
    """Return the tile of both kernels, the number of summands read at once, and constants.

    Sums of blocks are never fast.
    """
    blocks = scales == BLOCK_1X128.name
    tile, tile_k = _BLOCKS_TILE if blocks else _TILE, _TILE_K[dtype]
    return tile, tile_k, {
        "SCALES": scales, "FAST": fast and not blocks, "INTERPRETED": INTERPRETED, "GROUP": 16, "TILE_M": tile.rows,
        "TILE_N": tile.columns, "TILE_K": tile_k, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def _check(a: ScaledTensor, b: ScaledTensor, *widths: int) -> None:
    """Assert that the granularities can be multiplied, and that scales have the memory order that kernels read."""
    assert (a.granularity, b.granularity) in _PAIRS
    if a.granularity is not TENSOR:
        assert a.scale_inv.stride(0) == b.scale_inv.stride(1 if b.granularity is BLOCK_128X128 else 0) == 1
    if a.granularity is BLOCK_1X128:
        assert not any(width % _BLOCK for width in widths)


def rows_times_matrices(
    a_mk: ScaledTensor, b: ScaledTensor, ends_e: Tensor, n: int, out_dtype: torch.dtype, *, columnwise: bool, fast: bool
) -> Tensor:
    """Multiply FP8 rows, `[m, k]`, by the transpose of their expert's matrix, `[n, k]`.

    Widths are multiples of 16, or of 128 with block scales. One scale per row of `a_mk` can be combined with one scale
    per matrix.

    Args:
        a_mk: Rows of all experts.
        b: Matrices of all experts one below the other, `[e·n, k]`; or with `columnwise` side by side, `[n, padded]`, as
            `megafp8.numerics.groups` casts weights columnwise.
        ends_e: End of each expert's rows, int32.
        n: Number of rows of a matrix.
        out_dtype: Dtype of the result.
        columnwise: Arrangement of the matrices in b.
        fast: Whether sums stay in the tensor core. Sums of blocks never do.

    Returns:
        The products, `[m, n]`.
    """
    (m, k), experts = a_mk.data.shape, len(ends_e)
    out_mn = torch.empty(m, n, dtype=out_dtype, device=a_mk.data.device)
    if not out_mn.numel():
        return out_mn
    if a_mk.granularity is ROW and b.granularity is TENSOR:  # repeat the scale of a matrix for each of its rows
        b = b._replace(scale_inv=b.scale_inv.repeat_interleave(n).unsqueeze(1), granularity=ROW)
    _check(a_mk, b, n, k)
    row_step, column_step = (0, b.data.shape[1] // experts) if columnwise else (n, 0)
    if a_mk.granularity is not ROW and out_dtype in cuda.ROWS_RESULTS and cuda.takes(out_mn.device):
        cuda.rows_times_matrices(a_mk, b, ends_e, out_mn, row_step, column_step, fast=fast)
        return out_mn
    tile, tile_k, constants = _launched(a_mk.data.dtype, a_mk.granularity.name, fast=fast)
    most = (m // tile.rows + experts) * ceil_div(n, tile.columns)
    rows_kernel[(min(most, _programs(out_mn.device, tile)),)](
        TensorDescriptor.from_tensor(a_mk.data, [tile.rows, tile_k]),
        TensorDescriptor.from_tensor(b.data, [tile.columns, tile_k]), out_mn, ends_e, a_mk.scale_inv, b.scale_inv, m, n,
        k, experts, a_mk.scale_inv.stride(-1), b.scale_inv.stride(0), row_step, column_step,
        EXPERTS=next_power_of_2(experts), **constants,
    )  # fmt: skip
    return out_mn


def values_times_matrices(a_mk: Tensor, b: Tensor, ends_e: Tensor, n: int) -> Tensor:
    """Multiply bf16 or fp16 rows, `[m, k]`, by the transpose of their expert's matrix; b is `[e·n, k]`.

    All numbers of rows use one tile size, so the result of a row does not depend on the number of other rows. Results
    of `grouped_mm` may depend on it.
    """
    (m, k), experts = a_mk.shape, len(ends_e)
    out_mn = torch.empty(m, n, dtype=a_mk.dtype, device=a_mk.device)
    if not out_mn.numel():
        return out_mn
    tile, tile_k, constants = _launched(torch.bfloat16, "none", fast=True)
    most = (m // tile.rows + experts) * ceil_div(n, tile.columns)
    rows_kernel[(min(most, _programs(out_mn.device, tile)),)](
        TensorDescriptor.from_tensor(a_mk.contiguous(), [tile.rows, tile_k]),
        TensorDescriptor.from_tensor(b, [tile.columns, tile_k]), out_mn, ends_e, out_mn, out_mn, m, n, k, experts, 0, 0,
        n, 0, EXPERTS=next_power_of_2(experts), **constants,
    )  # fmt: skip
    return out_mn


def sums_over_rows(
    a: Tensor | ScaledTensor, b: Tensor | ScaledTensor, ends_e: Tensor, out_epq: Tensor, *, accumulate: bool,
    fast: bool = False, earlier: tuple[ScaledTensor, ScaledTensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Sum outer products over each expert's rows.

    Args:
        a: First operand: bf16 `[m, p]`, or FP8 `[p, padded]` as `megafp8.numerics.groups` casts it. With FP8, p is a
            multiple of 16, or of 128 if blocks of 1×128 have scales.
        b: Second operand: bf16 `[m, q]`, or FP8 `[q, padded]`, with the same restriction.
        ends_e: End of each expert's rows, or of its padded rows for FP8.
        out_epq: Result.
        accumulate: Whether to add the sums to `out_epq` (fp32) instead of overwriting it.
        fast: Whether FP8 sums stay in the tensor core.
        earlier: a, b and ends of another micro-batch to be summed as well. Only for FP8 with one scale per expert or
            block scales.
    """
    if earlier is not None and not earlier[0].data.numel():
        earlier = None
    if earlier is not None and not (a.data if isinstance(a, ScaledTensor) else a).numel():
        a, b, ends_e = earlier
        earlier = None
    experts, p, q = out_epq.shape
    a_data, a_scale_inv, a_stride, scales = _parts(a)
    b_data, b_scale_inv, b_stride, _ = _parts(b)
    if not a_data.numel():
        if not accumulate:
            out_epq.zero_()
        return
    if earlier is not None:
        assert scales in (TENSOR.name, BLOCK_1X128.name)
        assert [_parts(x)[2:] for x in earlier[:2]] == [(a_stride, scales), (b_stride, scales)]
    if isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor):
        _check(a, b, p, q)
        on_hopper = a.granularity is not ROW and out_epq.dtype in cuda.SUMS_RESULTS
        if on_hopper and cuda.takes(out_epq.device):
            cuda.sums_over_rows(a, b, ends_e, out_epq, accumulate=accumulate, fast=fast, earlier=earlier)
            return
    tile, tile_k, constants = _launched(a_data.dtype, scales, fast=fast)
    shapes = [[tile_k, size] if scales == "none" else [size, tile_k] for size in tile[:2]]
    operands = map(TensorDescriptor.from_tensor, (a_data, b_data), shapes)
    earlier_operands: list[TensorDescriptor | None] = [None, None]
    earlier_scales: list[Tensor | None] = [None, None]
    if earlier is not None:
        earlier_operands = [TensorDescriptor.from_tensor(x.data, shape) for x, shape in zip(earlier[:2], shapes)]
        earlier_scales = [x.scale_inv for x in earlier[:2]]
    sums_kernel[(experts * ceil_div(p, tile.rows) * ceil_div(q, tile.columns),)](
        *operands, *earlier_operands, TensorDescriptor.from_tensor(out_epq, [1, tile.rows, tile.columns]), ends_e,
        None if earlier is None else earlier[2], a_scale_inv, b_scale_inv, *earlier_scales, p, q, a_stride, b_stride,
        ACCUMULATE=accumulate, PAIR=earlier is not None, **constants,
    )  # fmt: skip


def _parts(x: Tensor | ScaledTensor) -> tuple[Tensor, Tensor | None, int, str]:
    """Return data, scales, the stride of the scales along summands or experts, and the name of their granularity."""
    if isinstance(x, ScaledTensor):
        return x.data, x.scale_inv, x.scale_inv.stride(-1), x.granularity.name
    return x, None, 0, "none"
