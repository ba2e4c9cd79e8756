"""Matrix products of many experts in one launch; how many rows each expert has is read on the device.

The rows of one operand are those of the experts, one expert after the other. There are two products: FP8 rows times the
matrix of their expert (fprop, dgrad), for which bf16 has `torch.nn.functional.grouped_mm`; and for each expert the sum
over its rows of outer products (wgrad), added to fp32 in place. FP8 operands have one scale an expert; sums are fp32.

Operands are read through tensor descriptors, by the GPU's copy engine for tiles (TMA); a descriptor covers the rows of
all experts. A tile that reaches beyond the rows of its expert therefore reads those of the next. In products of rows
these are computed and not stored. In sums over rows of bf16 they are set to zero, in those of FP8 there are none: each
expert's rows begin at a multiple of TILE_K and zeros follow them (`megafp8.fp8.groups`).

Two programs of four warps share a multiprocessor: while one reads and writes results, the other multiplies. Products of
rows have no more programs than fit, each of which takes tile after tile (docs/decisions/0033-grouped-gemms.md).

Reference: `megafp8.ops.grouped_linear`, one expert after the other; sums are taken in another order.

Shapes: e experts, m rows of all of them; n columns and k summands of a product of rows; a sum over rows is `[p, q]` for
each expert. A tile is TILE_M × TILE_N, and TILE_K summands are read at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megafp8.kernels.arithmetic import INTERPRETED, ceil_div, next_power_of_2

TILE = 128
"""Rows and columns of a tile of results."""
_TILE_K = {torch.bfloat16: 64, torch.float8_e4m3fn: 128, torch.float8_e5m2: 128}
_PROGRAMS_PER_SM = 2
_CONSTANTS: dict[str, Any] = {
    "INTERPRETED": INTERPRETED, "GROUP": 16, "TILE_M": TILE, "TILE_N": TILE, "num_warps": 4, "num_stages": 3,
}  # fmt: skip


@triton.jit
def _dot(a, b, sums, FAST: tl.constexpr, INTERPRETED: tl.constexpr):
    """sums + a·b. Hopper's FP8 sums have 14 bits; where not FAST they are added up in fp32 every 128."""
    if INTERPRETED:
        return sums + tl.dot(a.to(tl.float32), b.to(tl.float32))
    if FAST:
        return tl.dot(a, b, sums)
    return tl.dot(a, b, sums, max_num_imprecise_acc=128)


@triton.jit
def _tile_at(index, down, across, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP tiles down, then the next column of them."""
    group = index // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    within = index % (GROUP * across)
    return group * GROUP + within % height, within // height


@triton.jit(do_not_specialize=["m", "e", "a_stride", "b_stride"])
def rows_kernel(a_mk, b, out_mn, ends_e, a_scale_inv_e, b_scale_inv_e, m, n, k, e, a_stride, b_stride, row_step,
                column_step, EXPERTS: tl.constexpr, FAST: tl.constexpr, INTERPRETED: tl.constexpr, GROUP: tl.constexpr,
                TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):  # fmt: skip
    """Tiles of rows times matrices; that of expert i, `[n, k]`, begins at row i·row_step and column i·column_step of b.

    EXPERTS: e rounded up to a power of two.
    """
    index = tl.arange(0, EXPERTS)
    ends = tl.load(ends_e + index, mask=index < e, other=m)
    starts = tl.where(index < e, tl.load(ends_e + index - 1, mask=(index > 0) & (index < e), other=0), m)
    across = tl.cdiv(n, TILE_N)
    tiles = tl.cumsum(tl.cdiv(ends - starts, TILE_M), axis=0) * across
    for tile in range(tl.program_id(0), tl.max(tiles, axis=0), tl.num_programs(0)):
        done = tiles <= tile  # experts whose tiles come before
        expert = tl.sum(done.to(tl.int32), axis=0)
        start = tl.max(tl.where(done, ends, 0), axis=0)
        end = tl.min(tl.where(done, m, ends), axis=0)
        first = tl.max(tl.where(done, tiles, 0), axis=0)
        down, right = _tile_at(tile - first, tl.cdiv(end - start, TILE_M), across, GROUP)
        i0, j0 = start + down * TILE_M, right * TILE_N
        sums = tl.zeros([TILE_M, TILE_N], tl.float32)
        for k0 in range(0, k, TILE_K):
            b_tile = b.load([expert * row_step + j0, expert * column_step + k0])
            sums = _dot(a_mk.load([i0, k0]), b_tile.T, sums, FAST, INTERPRETED)
        sums = sums * tl.load(a_scale_inv_e + expert * a_stride) * tl.load(b_scale_inv_e + expert * b_stride)
        i, j = i0 + tl.arange(0, TILE_M), j0 + tl.arange(0, TILE_N)
        at = i.to(tl.int64)[:, None] * n + j[None, :]
        tl.store(out_mn + at, sums.to(out_mn.dtype.element_ty), mask=(i < end)[:, None] & (j < n)[None, :])


@triton.jit(do_not_specialize=["a_stride", "b_stride"])
def sums_kernel(a, b, out_epq, ends_e, a_scale_inv_e, b_scale_inv_e, p, q, a_stride, b_stride,
                TRANSPOSED: tl.constexpr, ACCUMULATE: tl.constexpr, FAST: tl.constexpr, INTERPRETED: tl.constexpr,
                GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):  # fmt: skip
    """A tile of one expert's sum over its rows of a's row times b's: into `out_epq`, or added to it (ACCUMULATE).

    TRANSPOSED: the operands are `[p, places]` and `[q, places]`, where every expert's places end at multiples of
    TILE_K; else `[m, p]` and `[m, q]`.
    """
    down, across = tl.cdiv(p, TILE_M), tl.cdiv(q, TILE_N)
    expert = tl.program_id(0) // (down * across)
    i, j = _tile_at(tl.program_id(0) % (down * across), down, across, GROUP)
    i0, j0 = i * TILE_M, j * TILE_N
    start = tl.load(ends_e + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_e + expert)
    sums = tl.zeros([TILE_M, TILE_N], tl.float32)
    if TRANSPOSED:
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
    if a_scale_inv_e is not None:
        sums = sums * tl.load(a_scale_inv_e + expert * a_stride) * tl.load(b_scale_inv_e + expert * b_stride)
    if (not ACCUMULATE) or start < end:
        total = sums.reshape(1, TILE_M, TILE_N)
        if ACCUMULATE:
            total += out_epq.load([expert, i0, j0])
        out_epq.store([expert, i0, j0], total.to(out_epq.dtype))


class Operand(NamedTuple):
    """bf16 data, or FP8 with the inverse of each expert's scale, fp32 `[e]` of any stride."""

    data: Tensor
    scale_inv_e: Tensor | None = None

    @property
    def stride(self) -> int:
        return 0 if self.scale_inv_e is None else self.scale_inv_e.stride(0)


@cache
def _programs(device: torch.device) -> int:
    if device.type == "cpu":
        return 3
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def rows_times_matrices(
    a_mk: Operand, b: Operand, ends_e: Tensor, n: int, out_dtype: torch.dtype, *, columnwise: bool, fast: bool
) -> Tensor:
    """`[m, n]` in `out_dtype`: FP8 rows `[m, k]` times the transpose of their expert's matrix `[n, k]`.

    `b`: the matrices one below the other, `[e·n, k]`; or `columnwise` beside each other, `[n, places]`, as
    `megafp8.fp8.groups` casts weights whose gradients are to flow on. `ends_e`: int32, where the rows of each expert
    end. `fast`: sums stay in the tensor core. Widths are multiples of 16.
    """
    (m, k), experts = a_mk.data.shape, len(ends_e)
    out_mn = torch.empty(m, n, dtype=out_dtype, device=a_mk.data.device)
    if not out_mn.numel():
        return out_mn
    tile_k = _TILE_K[a_mk.data.dtype]
    row_step, column_step = (0, b.data.shape[1] // experts) if columnwise else (n, 0)
    most = (m // TILE + experts) * ceil_div(n, TILE)
    rows_kernel[(min(most, _programs(out_mn.device)),)](
        TensorDescriptor.from_tensor(a_mk.data, [TILE, tile_k]), TensorDescriptor.from_tensor(b.data, [TILE, tile_k]),
        out_mn, ends_e, a_mk.scale_inv_e, b.scale_inv_e, m, n, k, experts, a_mk.stride, b.stride, row_step,
        column_step, EXPERTS=next_power_of_2(experts), FAST=fast, TILE_K=tile_k, **_CONSTANTS,
    )  # fmt: skip
    return out_mn


def sums_over_rows(
    a: Operand, b: Operand, ends_e: Tensor, out_epq: Tensor, *, accumulate: bool, fast: bool = False
) -> None:
    """Each expert's sum over its rows of outer products, into `out_epq` or added to it (fp32).

    bf16 operands are `[m, p]` and `[m, q]`, and `ends_e` where the rows of each expert end; FP8 ones are `[p, places]`
    and `[q, places]` as `megafp8.fp8.groups` casts them, with where its places end.
    """
    experts, p, q = out_epq.shape
    if not a.data.numel():
        if not accumulate:
            out_epq.zero_()
        return
    tile_k, transposed = _TILE_K[a.data.dtype], a.scale_inv_e is not None
    shape = [TILE, tile_k] if transposed else [tile_k, TILE]
    sums_kernel[(experts * ceil_div(p, TILE) * ceil_div(q, TILE),)](
        TensorDescriptor.from_tensor(a.data, shape), TensorDescriptor.from_tensor(b.data, shape),
        TensorDescriptor.from_tensor(out_epq, [1, TILE, TILE]), ends_e, a.scale_inv_e, b.scale_inv_e, p, q, a.stride,
        b.stride, TRANSPOSED=transposed, ACCUMULATE=accumulate, FAST=fast, TILE_K=tile_k, **_CONSTANTS,
    )  # fmt: skip
