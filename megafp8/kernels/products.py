"""Products of whole matrices, many of one shape at once; of symmetric results only the lower half is computed.

    out = alpha · scale · a·b + beta · addend + gamma · I

Newton-Schulz iterations of Muon consist of these: Gram matrices X·Xᵀ, and polynomials of them, which commute, so that
their products are symmetric, too. A program computes a tile on or below the diagonal, and stores it and its mirror
image: half the products. So results are exactly symmetric but for tiles on the diagonal, which are up to rounding. The
polynomial's other terms are added to the sums in registers.

Sums are fp32, over k in one order, whatever the number of matrices: a matrix has the same bits alone and among others.
Operands are read and results written through tensor descriptors (TMA). Two programs of four warps share a
multiprocessor, so that one stores while the other multiplies.

Shapes: b matrices; results p × q, sums over k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megafp8.kernels.arithmetic import INTERPRETED, ceil_div
from megafp8.kernels.grouped_gemm import tile_at

_TILE, _TILE_K, _WARPS, _STAGES = 128, 64, 4, 3
ALIGNMENT = 8
"""All sides are multiples of it: rows of a tensor descriptor are 16 bytes apart."""


@triton.jit
def _lower_tile(index):
    """Row and column of a tile on or below the diagonal, counted row by row."""
    row = ((tl.sqrt(8.0 * index + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)
    return row, index - row * (row + 1) // 2


@triton.jit
def _tiles(a, b, i0, j0, k0, batch, p, q, k, A_COLUMNS: tl.constexpr, B_COLUMNS: tl.constexpr):
    """Tiles `[TILE, TILE_K]` of a and `[TILE_K, TILE]` of b."""
    if A_COLUMNS:
        x = a.load([batch * k + k0, i0]).T
    else:
        x = a.load([batch * p + i0, k0])
    if B_COLUMNS:
        y = b.load([batch * k + k0, j0])
    else:
        y = b.load([batch * q + j0, k0]).T
    return x, y


@triton.jit
def _add_product(x, y, sums, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        return sums + tl.dot(x.to(tl.float32), y.to(tl.float32))
    return tl.dot(x, y, sums)


@triton.jit(do_not_specialize=["alpha", "beta", "gamma"])
def product_kernel(a, b, addend, out, scale_b, p, q, k, alpha, beta, gamma, A_COLUMNS: tl.constexpr,
                   B_COLUMNS: tl.constexpr, SYMMETRIC: tl.constexpr, INTERPRETED: tl.constexpr, GROUP: tl.constexpr,
                   TILE: tl.constexpr, TILE_K: tl.constexpr):  # fmt: skip
    """A tile of the result of one matrix, and where SYMMETRIC its mirror image.

    `a`, `b`: matrices one below the other, `[b·p, k]` and `[b·q, k]`, or with A_COLUMNS, B_COLUMNS `[b·k, p]` and
    `[b·k, q]`. What a tile reads of the next matrix is multiplied by zero, or belongs to rows that are not stored.
    """
    batch = tl.program_id(1)
    if SYMMETRIC:
        i, j = _lower_tile(tl.program_id(0))
    else:
        i, j = tile_at(tl.program_id(0), tl.cdiv(p, TILE), tl.cdiv(q, TILE), GROUP)
    i0, j0 = i * TILE, j * TILE
    sums = tl.zeros([TILE, TILE], tl.float32)
    whole = k // TILE_K * TILE_K
    for k0 in range(0, whole, TILE_K):
        x, y = _tiles(a, b, i0, j0, k0, batch, p, q, k, A_COLUMNS, B_COLUMNS)
        sums = _add_product(x, y, sums, INTERPRETED)
    if whole < k:
        x, y = _tiles(a, b, i0, j0, whole, batch, p, q, k, A_COLUMNS, B_COLUMNS)
        inside = whole + tl.arange(0, TILE_K) < k
        x, y = tl.where(inside[None, :], x, 0.0), tl.where(inside[:, None], y, 0.0)
        sums = _add_product(x, y, sums, INTERPRETED)
    if scale_b is not None:
        alpha = alpha * tl.load(scale_b + batch)
    sums = sums * alpha
    if addend is not None:
        sums += beta * addend.load([batch, i0, j0]).reshape(TILE, TILE).to(tl.float32)
        diagonal = (i0 + tl.arange(0, TILE))[:, None] == (j0 + tl.arange(0, TILE))[None, :]
        sums += tl.where(diagonal, gamma, 0.0)
    result = sums.to(out.dtype)
    out.store([batch, i0, j0], result.reshape(1, TILE, TILE))
    if SYMMETRIC:  # noqa: SIM102 -- known when compiled
        if i != j:
            out.store([batch, j0, i0], result.T.reshape(1, TILE, TILE))


def product(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, *, a_columns: bool = False, b_columns: bool = False,
    symmetric: bool = False, alpha: float = 1.0, scale_b: Tensor | None = None, addend: Tensor | None = None,
    beta: float = 0.0, gamma: float = 0.0,
) -> Tensor:  # fmt: skip
    """alpha · scale · a·bᵀ, and with an `addend`, like the result, + beta · addend + gamma · I: `[b, p, q]`.

    `a`: `[b, p, k]`, or with `a_columns` `[b, k, p]`; `b`: `[b, q, k]` or `[b, k, q]`; contiguous, sides multiples of
    `ALIGNMENT`. `scale_b`: a factor of each product, fp32. `symmetric`: the result is, but for rounding.
    """
    count = len(a)
    (p, k), q = (a.shape[:0:-1] if a_columns else a.shape[1:]), b.shape[2 if b_columns else 1]
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert not (symmetric and p != q)
    out = torch.empty(count, p, q, dtype=out_dtype, device=a.device)
    down, across = ceil_div(p, _TILE), ceil_div(q, _TILE)
    flat = (x.view(-1, x.shape[-1]) for x in (a, b))
    blocks = ([_TILE_K, _TILE] if columns else [_TILE, _TILE_K] for columns in (a_columns, b_columns))
    results = (x if x is None else TensorDescriptor.from_tensor(x, [1, _TILE, _TILE]) for x in (addend, out))
    product_kernel[(down * (down + 1) // 2 if symmetric else down * across, count)](
        *map(TensorDescriptor.from_tensor, flat, blocks), *results, scale_b, p, q, k, alpha, beta, gamma,
        A_COLUMNS=a_columns, B_COLUMNS=b_columns, SYMMETRIC=symmetric, INTERPRETED=INTERPRETED, GROUP=16, TILE=_TILE,
        TILE_K=_TILE_K, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out
