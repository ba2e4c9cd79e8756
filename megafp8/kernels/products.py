"""Batched products of matrices of one shape; only the lower half of symmetric results is computed.

    out = alpha · scale · a·b + beta · addend + gamma · I

Muon's Newton-Schulz iterations consist of such products: Gram matrices X·Xᵀ and polynomials of them. The polynomials
commute, so their products are symmetric too. For a symmetric result, the tiles on and below the diagonal are computed,
and stored together with their mirror images, which halves the work. Results are therefore exactly symmetric, except for
the tiles on the diagonal, which are symmetric up to rounding. The other terms of the polynomial are added to the sums
in registers.

A program computes a pair of square tiles, one below the other. In every second row of tiles of a symmetric result, both
tiles of all pairs are on or below the diagonal. The remaining tiles on the diagonal are computed singly, at the end.
With sides of 4,096 there are 256 pairs and 16 single tiles, and 132 multiprocessors compute all of them in the time of
two pairs.

Sums are fp32, over k in one order, whatever the number of matrices. A matrix therefore has the same bits alone and in a
batch. Operands are read and results are written through tensor descriptors (TMA).

Shapes: b matrices, results p × q, sums over k.
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
"""Number that all sides must be a multiple of, because rows of a tensor descriptor are multiples of 16 bytes."""


@triton.jit
def _operands(a, b, i0, j0, k0, batch, p, q, k, A_COLUMNS: tl.constexpr, B_COLUMNS: tl.constexpr):
    """Load tiles of a, `[rows, TILE_K]`, and of b, `[TILE_K, TILE]`."""
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
    """Return sums of products, `[ROWS, TILE]`.

    Tiles may reach into the next matrix. Such elements are multiplied by zero, or belong to rows that are not stored.
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
    """Store tile (i, j) of the result, and if SYMMETRIC its mirror image."""
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
    """Compute two tiles of the result of one matrix, or one tile on the diagonal.

    `a` and `b` contain the matrices one below the other: `[b·p, k]` and `[b·q, k]`, or with A_COLUMNS and B_COLUMNS
    `[b·k, p]` and `[b·k, q]`. `a_single` describes a for single tiles.
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
    """Compute alpha · scale · a·bᵀ, plus beta · addend + gamma · I if there is an `addend`.

    All matrices are contiguous, and their sides are multiples of `ALIGNMENT`.

    Args:
        a: First operand, `[b, p, k]`, or `[b, k, p]` with `a_columns`.
        b: Second operand, `[b, q, k]`, or `[b, k, q]` with `b_columns`.
        out_dtype: Dtype of the result.
        a_columns: Whether a is transposed.
        b_columns: Whether b is transposed.
        symmetric: Whether the result is symmetric up to rounding, so that half of it need not be computed.
        alpha: Factor of the product.
        scale_b: Additional factor of each matrix's product, fp32 `[b]`, or None.
        addend: Matrices with the shape and dtype of the result, or None.
        beta: Factor of the addend.
        gamma: Factor of the identity matrix.

    Returns:
        The result, `[b, p, q]`.
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
