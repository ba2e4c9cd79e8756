"""Products of whole matrices, many of one shape at once; of symmetric results only the lower half is computed.

    out = alpha · scale · a·b + beta · addend + gamma · I

Newton-Schulz iterations of Muon consist of these: Gram matrices X·Xᵀ, and polynomials of them, which commute, so that
their products are symmetric, too. Of a symmetric result tiles on and below the diagonal are computed, and stored with
their mirror images: half the products. So results are exactly symmetric but for tiles on the diagonal, which are up to
rounding. The polynomial's other terms are added to the sums in registers.

A program computes two square tiles, one below the other. In a symmetric result both are on or below the diagonal, for
each second row of tiles, which leaves the other tiles on the diagonal: these are computed alone, at last. With sides of
4,096 that are 256 pairs and 16 tiles, all of which 132 multiprocessors compute in the time of two pairs.

Sums are fp32, over k in one order, whatever the number of matrices: a matrix has the same bits alone and among others.
Operands are read and results written through tensor descriptors (TMA).

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

_TILE, _TILE_K, _WARPS, _STAGES = 128, 64, 8, 4
ALIGNMENT = 8
"""All sides are multiples of it: rows of a tensor descriptor are multiples of 16 bytes."""


@triton.jit
def _operands(a, b, i0, j0, k0, batch, p, q, k, A_COLUMNS: tl.constexpr, B_COLUMNS: tl.constexpr):
    """Tiles of a, `[rows, TILE_K]`, and of b, `[TILE_K, TILE]`."""
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
def _dot(x, y, sums, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        return sums + tl.dot(x.to(tl.float32), y.to(tl.float32))
    return tl.dot(x, y, sums)


@triton.jit
def _sums(a, b, i0, j0, batch, p, q, k, A_COLUMNS: tl.constexpr, B_COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr,
          ROWS: tl.constexpr, TILE: tl.constexpr, TILE_K: tl.constexpr):  # fmt: skip
    """Sums of products `[ROWS, TILE]`.

    What operands have of the next matrix is multiplied by zero, or belongs to rows that are not stored.
    """
    sums = tl.zeros([ROWS, TILE], tl.float32)
    whole = k // TILE_K * TILE_K
    for k0 in range(0, whole, TILE_K):
        x, y = _operands(a, b, i0, j0, k0, batch, p, q, k, A_COLUMNS, B_COLUMNS)
        sums = _dot(x, y, sums, INTERPRETED)
    if whole < k:
        x, y = _operands(a, b, i0, j0, whole, batch, p, q, k, A_COLUMNS, B_COLUMNS)
        inside = whole + tl.arange(0, TILE_K) < k
        x, y = tl.where(inside[None, :], x, 0.0), tl.where(inside[:, None], y, 0.0)
        sums = _dot(x, y, sums, INTERPRETED)
    return sums


@triton.jit
def _store(sums, addend, out, i, j, batch, alpha, beta, gamma, SYMMETRIC: tl.constexpr, TILE: tl.constexpr):
    """Store tile (i, j) of the result, and where SYMMETRIC its mirror image."""
    sums = sums * alpha
    if addend is not None:
        sums += beta * addend.load([batch, i * TILE, j * TILE]).reshape(TILE, TILE).to(tl.float32)
        diagonal = (i * TILE + tl.arange(0, TILE))[:, None] == (j * TILE + tl.arange(0, TILE))[None, :]
        sums += tl.where(diagonal, gamma, 0.0)
    result = sums.to(out.dtype)
    out.store([batch, i * TILE, j * TILE], result.reshape(1, TILE, TILE))
    if SYMMETRIC:  # noqa: SIM102 -- known when compiled
        if i != j:
            out.store([batch, j * TILE, i * TILE], result.T.reshape(1, TILE, TILE))


@triton.jit(do_not_specialize=["alpha", "beta", "gamma"])
def product_kernel(a, a_single, b, addend, out, scale_b, p, q, k, alpha, beta, gamma, A_COLUMNS: tl.constexpr,
                   B_COLUMNS: tl.constexpr, SYMMETRIC: tl.constexpr, INTERPRETED: tl.constexpr, GROUP: tl.constexpr,
                   TILE: tl.constexpr, TILE_K: tl.constexpr):  # fmt: skip
    """Two tiles of the result of one matrix, or one on the diagonal.

    `a`, `b`: matrices one below the other, `[b·p, k]` and `[b·q, k]`, or with A_COLUMNS, B_COLUMNS `[b·k, p]` and
    `[b·k, q]`. `a_single`: a, for single tiles.
    """
    batch, index = tl.program_id(1), tl.program_id(0)
    if scale_b is not None:
        alpha = alpha * tl.load(scale_b + batch)
    pairs = tl.cdiv(p, 2 * TILE)
    if SYMMETRIC:
        pair = tl.sqrt(index.to(tl.float32)).to(tl.int32)
        pair = tl.where(pair * pair > index, pair - 1, pair)
        pair = tl.where((pair + 1) * (pair + 1) <= index, pair + 1, pair)
        j = index - pair * pair
    else:
        pair, j = tile_at(index, pairs, tl.cdiv(q, TILE), GROUP)
    if pair < pairs:
        sums = _sums(a, b, 2 * pair * TILE, j * TILE, batch, p, q, k, A_COLUMNS, B_COLUMNS, INTERPRETED, 2 * TILE,
                     TILE, TILE_K)  # fmt: skip
        upper, lower = sums.reshape(2, TILE, TILE).permute(1, 2, 0).split()
        _store(upper, addend, out, 2 * pair, j, batch, alpha, beta, gamma, SYMMETRIC, TILE)
        _store(lower, addend, out, 2 * pair + 1, j, batch, alpha, beta, gamma, SYMMETRIC, TILE)
    else:
        i = 2 * (index - pairs * pairs) + 1
        single = _sums(a_single, b, i * TILE, i * TILE, batch, p, q, k, A_COLUMNS, B_COLUMNS, INTERPRETED, TILE, TILE,
                     TILE_K)  # fmt: skip
        _store(single, addend, out, i, i, batch, alpha, beta, gamma, SYMMETRIC, TILE)


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
    pairs, across = ceil_div(p, 2 * _TILE), ceil_div(q, _TILE)
    programs = pairs * pairs + across // 2 if symmetric else pairs * across

    def operand(x: Tensor, columns: bool, rows: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [_TILE_K, rows] if columns else [rows, _TILE_K])

    results = (x if x is None else TensorDescriptor.from_tensor(x, [1, _TILE, _TILE]) for x in (addend, out))
    product_kernel[(programs, count)](
        operand(a, a_columns, 2 * _TILE), operand(a, a_columns, _TILE), operand(b, b_columns, _TILE), *results,
        scale_b, p, q, k, alpha, beta, gamma, A_COLUMNS=a_columns, B_COLUMNS=b_columns, SYMMETRIC=symmetric,
        INTERPRETED=INTERPRETED, GROUP=16, TILE=_TILE, TILE_K=_TILE_K, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out
