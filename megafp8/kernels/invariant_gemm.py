"""Batch-invariant GEMM: the order of the sums depends on the weight's shape, and not on the number of rows of x.

    y[i, j] = (Σ x[i, k] · w[j, k]) · x_scale_inv[i] · w_scale_inv[j]

The summed dim is split into `parts(n, k)` parts. The sum of a part stays in the tensor core's accumulators from its
first to its last k, and the parts are added in order. With few rows, each part is a separate program: reading w is all
the work, and one program per tile would leave most of the GPU idle. The last program of a tile to finish adds the sums
of all parts. With many rows, one program computes all parts. Both add the same numbers in the same order, so the bits
are equal.

*One instruction.* The rows of a tile are outputs, and its columns are rows of x: a tile computes y transposed. Hopper's
instruction (wgmma) multiplies 64 rows by 8 to 256 columns, so few rows of x need no padding to 64. For every number of
columns, the instruction adds its 16 (FP8: 32) summands in the same way (tests/kernels/test_invariant_gemm.py, on a
GPU).

*Scales.* Scales of tensors and rows multiply the final sums. With blocks of 128 summands, each block's product is
multiplied by its scales and then added. With `fast`, the FP8 sums of a part stay in the tensor core, which has 14 bits;
otherwise they are added in fp32 every 128 summands.

Multiplications and additions are never contracted (`enable_fp_fusion`), because kernels might differ in this.

Reference: `megafp8.gemm.invariant.product` on a CPU, which uses another order.

Shapes: m rows of x, n outputs, k summands. A tile has N outputs and M rows, and reads K summands at once.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import INTERPRETED, ceil_div, kernel_input, next_power_of_2
from megafp8.kernels.grouped_gemm import tile_at
from megafp8.kernels.launch import TritonKernel
from megafp8.numerics.tensor import BLOCK_1X128, BLOCK_128X128, DEQUANTIZED, ROW, TENSOR, Granularity, ScaledTensor

_BLOCK = 128
"""Number of summands in a block. The length of a part is a multiple of it."""
_FEW_N, _FEW_M = 64, 64
"""Outputs per tile, and largest number of rows, for launches with one program per part."""
_PROGRAMS, _MOST_PARTS, _LEAST_BLOCKS = 264, 8, 4
"""Number of programs that keeps a GPU with 132 multiprocessors busy, most parts, and least blocks per part."""


class _Tile(NamedTuple):
    n: int
    m: int
    warps: int
    stages: int


@cache
def parts(n: int, k: int) -> int:
    """Return the number of parts that the summed dim of a weight `[n, k]` is split into. It depends only on n and k."""
    tiles, count = ceil_div(n, _FEW_N), 1
    while count < _MOST_PARTS and 2 * count * tiles <= _PROGRAMS and ceil_div(k, _BLOCK) >= 2 * count * _LEAST_BLOCKS:
        count *= 2
    return count


@triton.jit
def _product(w, x, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        return tl.dot(w.to(tl.float32), tl.trans(x.to(tl.float32)), input_precision="ieee")
    return tl.dot(w, tl.trans(x), input_precision="ieee")


@triton.jit
def _sum_of_part(
    w_rows, x_rows, w_scales, x_scales, begin, until, k, w_step, x_step,
    BLOCKS: tl.constexpr, FAST: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Return the sums of the products from summand `begin` to `until`, `[N, M]`.

    `w_step` and `x_step` are the distances between the scales of neighboring blocks of summands. WHOLE means that k is
    a multiple of K.
    """
    sums = tl.zeros([N, M], tl.float32)
    for k0 in range(begin, until, K):
        c = k0 + tl.arange(0, K)
        if WHOLE:
            w, x = tl.load(w_rows[:, None] + c[None, :]), tl.load(x_rows[:, None] + c[None, :])
        else:
            w = tl.load(w_rows[:, None] + c[None, :], mask=(c < k)[None, :], other=0.0)
            x = tl.load(x_rows[:, None] + c[None, :], mask=(c < k)[None, :], other=0.0)
        if BLOCKS:
            w_scale, x_scale = tl.load(w_scales + k0 // 128 * w_step), tl.load(x_scales + k0 // 128 * x_step)
            sums += _product(w, x, INTERPRETED) * w_scale[:, None] * x_scale[None, :]
        elif INTERPRETED:
            sums += _product(w, x, INTERPRETED)
        elif FAST:
            sums = tl.dot(w, tl.trans(x), sums, input_precision="ieee")
        else:
            sums = tl.dot(w, tl.trans(x), sums, max_num_imprecise_acc=128)
    return sums


@triton.jit
def _store(y_mn, sums, i, j, w_scale_inv, x_scale_inv, w_stride, x_stride, m, n, SCALED: tl.constexpr):
    if SCALED:
        w_scale = tl.load(w_scale_inv + tl.minimum(j, n - 1) * w_stride)
        x_scale = tl.load(x_scale_inv + tl.minimum(i, m - 1) * x_stride)
        sums = sums * x_scale[None, :] * w_scale[:, None]
    at = i.to(tl.int64)[None, :] * n + j[:, None]
    tl.store(y_mn + at, sums.to(y_mn.dtype.element_ty), mask=(i < m)[None, :] & (j < n)[:, None])


def product_kernel(
    w_nk, x_mk, y_mn, w_scale_inv, x_scale_inv, sums_of_parts, arrived,
    m, n, k, part_length, w_stride, w_step, x_stride, x_step,
    SIDE_BY_SIDE: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr, BLOCKS: tl.constexpr, W_ROWS: tl.constexpr,
    FAST: tl.constexpr, WHOLE: tl.constexpr, INTERPRETED: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y, or with SIDE_BY_SIDE one part of a tile that covers all rows.

    `w_stride` and `x_stride` are the distances between the scales of neighboring rows (of W_ROWS rows of w). `arrived`
    counts the parts of each tile that have finished, int32; it contains zeros before and after a launch.
    """
    if SIDE_BY_SIDE:
        down, right = tl.program_id(0), 0
    else:
        down, right = tile_at(tl.program_id(0), tl.cdiv(n, N), tl.cdiv(m, M), 8)
    j, i = down * N + tl.arange(0, N), right * M + tl.arange(0, M)
    # Rows beyond the last one read the last row again.
    row_j, row_i = tl.minimum(j, n - 1), tl.minimum(i, m - 1)
    w_rows, x_rows = w_nk + row_j.to(tl.int64) * k, x_mk + row_i.to(tl.int64) * k
    w_scales, x_scales = w_scale_inv + row_j // W_ROWS * w_stride, x_scale_inv + row_i * x_stride
    if SIDE_BY_SIDE and PARTS > 1:
        part = tl.program_id(1)
        sums = _sum_of_part(
            w_rows, x_rows, w_scales, x_scales, part * part_length, tl.minimum(k, (part + 1) * part_length), k, w_step,
            x_step, BLOCKS, FAST, WHOLE, INTERPRETED, N, M, K,
        )  # fmt: skip
        at = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
        sums_of_tile = sums_of_parts + down.to(tl.int64) * (PARTS * N * M)
        tl.store(sums_of_tile + part * (N * M) + at, sums)
        tl.debug_barrier()  # wait until all threads have written
        if tl.atomic_add(arrived + down, 1, sem="acq_rel") == PARTS - 1:
            total = tl.zeros([N, M], tl.float32)
            for p in tl.static_range(PARTS):
                total += tl.load(sums_of_tile + p * (N * M) + at, cache_modifier=".cg")
            _store(y_mn, total, i, j, w_scale_inv, x_scale_inv, w_stride, x_stride, m, n, SCALED)
            tl.store(arrived + down, 0)
    elif PARTS > 1:
        total = tl.zeros([N, M], tl.float32)
        for p in range(PARTS):
            total += _sum_of_part(
                w_rows, x_rows, w_scales, x_scales, p * part_length, tl.minimum(k, (p + 1) * part_length), k, w_step,
                x_step, BLOCKS, FAST, WHOLE, INTERPRETED, N, M, K,
            )  # fmt: skip
        _store(y_mn, total, i, j, w_scale_inv, x_scale_inv, w_stride, x_stride, m, n, SCALED)
    else:
        sums = _sum_of_part(
            w_rows, x_rows, w_scales, x_scales, 0, k, k, w_step, x_step, BLOCKS, FAST, WHOLE, INTERPRETED, N, M, K
        )
        _store(y_mn, sums, i, j, w_scale_inv, x_scale_inv, w_stride, x_stride, m, n, SCALED)


_kernel = TritonKernel(product_kernel)
_PAIRS = {
    (TENSOR, TENSOR), (ROW, TENSOR), (ROW, ROW), (DEQUANTIZED, DEQUANTIZED), (BLOCK_1X128, BLOCK_128X128),
    (BLOCK_1X128, BLOCK_1X128),
}  # fmt: skip
_MOST_TILES = _PROGRAMS
"""Largest number of tiles that have several parts: the more tiles there are, the fewer parts a tile has."""


@cache
def _arrived(device: torch.device) -> Tensor:
    """Return the counters of finished parts. A kernel resets them to zero, so all kernels of a stream share them."""
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


def _strides(scale_inv: Tensor, granularity: Granularity) -> tuple[int, int]:
    """Return the strides of scales along rows (or blocks of 128 rows), and along blocks of summands."""
    if granularity in (TENSOR, DEQUANTIZED):
        return 0, 0
    return scale_inv.stride(0), scale_inv.stride(1)


def tile_of(m: int, size: int, *, blocks: bool) -> tuple[_Tile, int]:
    """Return the tile for m rows with elements of `size` bytes, and the number of summands to read at once."""
    few = m <= _FEW_M
    tile = _Tile(_FEW_N, max(16, next_power_of_2(m)), 4, 6 if size == 1 else 5) if few else _Tile(128, 128, 8, 4)
    if size > 2:  # not multiplied by tensor cores
        return tile._replace(stages=2), 32
    if blocks and not few:  # registers hold three sums: of all parts, of one part, and of a block
        tile = tile._replace(m=64)
    return tile, _BLOCK if size == 1 or blocks or few else 64


def product(
    x: Tensor | ScaledTensor, w: Tensor | ScaledTensor, dtype: torch.dtype, *, fast: bool = True,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `x wᵀ`, `[m, n]` in `dtype`, without synchronizing with the host.

    Args:
        x: Input `[m, k]`, with high-precision or quantized values.
        w: Weight `[n, k]` in the same form.
        dtype: Dtype of the result.
        fast: Whether FP8 sums of a part stay in the tensor core.
        out: Contiguous tensor for the result, or None.
    """
    scaled = isinstance(x, ScaledTensor)
    x_data, w_data = (y.data if isinstance(y, ScaledTensor) else y for y in (x, w))
    (m, k), n = x_data.shape, len(w_data)
    y = torch.empty(m, n, dtype=dtype, device=x_data.device) if out is None else out
    if not y.numel():
        return y
    x_scale, w_scale, blocks, w_rows, strides = x_data, w_data, False, 1, (0, 0, 0, 0)
    if isinstance(x, ScaledTensor):
        assert isinstance(w, ScaledTensor)
        pair = x.granularity, w.granularity
        if pair not in _PAIRS:
            raise ValueError(
                f"inference.batch_invariant: no kernel multiplies an input with a scale for each {pair[0].name} by a "
                f"weight with one for each {pair[1].name}"
            )
        x_scale, w_scale, blocks = x.scale_inv, w.scale_inv, x.granularity is BLOCK_1X128
        w_rows = 128 if w.granularity is BLOCK_128X128 else 1
        strides = (*_strides(w_scale, w.granularity), *_strides(x_scale, x.granularity))
    x_data, w_data = kernel_input(x_data.contiguous()), kernel_input(w_data.contiguous())
    few, count, size = m <= _FEW_M, parts(n, k), x_data.element_size()
    tile, block_k = tile_of(m, size, blocks=blocks)
    length = ceil_div(ceil_div(k, count), _BLOCK) * _BLOCK
    tiles = ceil_div(n, tile.n)
    grid, sums = (tiles * ceil_div(m, tile.m), 1), y
    if few:
        grid = tiles, count
        if count > 1:
            sums = torch.empty(tiles * count * tile.n * tile.m, dtype=torch.float32, device=y.device)
    bound = _kernel.bind(
        SIDE_BY_SIDE=few, PARTS=count, SCALED=scaled and not blocks, BLOCKS=blocks, W_ROWS=w_rows,
        FAST=fast or size > 1, WHOLE=k % block_k == 0, INTERPRETED=INTERPRETED, N=tile.n, M=tile.m, K=block_k,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    target = kernel_input(y)
    bound.launch(
        grid, (w_data, x_data, target, w_scale, x_scale, sums, _arrived(y.device)), (m, n, k, length, *strides)
    )
    return y if target is y else y.copy_(target)
