"""Kernels of hyper-connections. Reference: `megafp8.layers.hyper_connections.reference`.

The cost is memory traffic, because the streams are n times as wide as any other tensor. Forward reads the streams three
times: for the products, for the weighted sum, and for mixing. The products are summed per stream first, so that there
are enough programs to fill a GPU. Backward reads the streams for the gradients of the mixing weights, for the gradients
of the reading weights, and for the gradients of the streams and of `fn`, which one kernel sums over tokens. The small
functions of the weights use one thread per token, which holds the token's matrix in registers, so Sinkhorn's sums need
no communication between threads. Backward recomputes the iterations and keeps their sums; multiplying by the sums
undoes each iteration.

All sums have a fixed order. Tensor cores compute the products in the dtype of the streams in forward, and in TF32 in
backward. Products of fp32 streams are computed in full fp32.

Shapes: r tokens, n streams, h channels, k = n·h, m = n·(n + 2) products, or n. Small tensors have tokens last.
"""

# mypy: disable-error-code="assignment, misc"
# Tuples in kernels grow in unrolled loops.

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import jit

from megafp8.kernels.arithmetic import ceil_div, next_power_of_2
from megafp8.kernels.launch import TritonKernel
from megafp8.layers.hyper_connections.reference import HyperConnectionRule, Weights, WeightsGrad

PROJECT: dict[str, Any] = {"T": 64, "C": 64, "num_warps": 4, "num_stages": 4}
WEIGHTS: dict[str, Any] = {"T": 32, "num_warps": 1}
STREAMS: dict[str, Any] = {"T": 4, "C": 256, "num_warps": 4, "num_stages": 2}
STREAMS_BACKWARD: dict[str, Any] = {"T": 64, "C": 128, "num_warps": 8, "num_stages": 2}
_SPLITS = 2
"""Number of parts of the tokens that sum their contributions to the gradient of `fn` separately."""


@TritonKernel
def _project(x, fn, partial, squares, r, h, k, N: tl.constexpr, P: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
             C: tl.constexpr):  # fmt: skip
    """Compute the products of one stream with all P rows of `fn`, `[n, P, r]`, and its sums of squares, `[n, r]`."""
    token, stream, row = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1), tl.arange(0, M)
    at = token.to(tl.int64)[:, None] * k + stream * h
    products, square = tl.zeros((T, M), tl.float32), tl.zeros((T, C), tl.float32)
    for first in range(0, h, C):
        c = first + tl.arange(0, C)
        values = tl.load(x + at + c[None, :], mask=(token < r)[:, None] & (c < h)[None, :], other=0.0)
        factors = tl.load(fn + row[None, :] * k + stream * h + c[:, None], mask=(row < P)[None, :] & (c < h)[:, None],
                          other=0.0)  # fmt: skip
        products = tl.dot(values, factors.to(values.dtype), products, input_precision="ieee")
        square += values.to(tl.float32) * values.to(tl.float32)
    to = (stream * P + row).to(tl.int64)[None, :] * r + token[:, None]
    tl.store(partial + to, products, mask=(token < r)[:, None] & (row < P)[None, :])
    tl.store(squares + stream * r + token, tl.sum(square, axis=1), mask=token < r)


@jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@jit
def _row_sums(cells, eps, N: tl.constexpr):
    """Return the sum of each row of an N x N matrix, plus eps."""
    sums = ()
    for i in tl.static_range(N):
        total = cells[i * N]
        for j in tl.static_range(1, N):
            total = total + cells[i * N + j]
        sums = sums + (total + eps,)
    return sums


@jit
def _column_sums(cells, eps, N: tl.constexpr):
    """Return the sum of each column of an N x N matrix, plus eps."""
    sums = ()
    for j in tl.static_range(N):
        total = cells[j]
        for i in tl.static_range(1, N):
            total = total + cells[i * N + j]
        sums = sums + (total + eps,)
    return sums


@jit
def _times(cells, factors, COLUMNS: tl.constexpr, N: tl.constexpr):
    """Multiply each row, or each column with COLUMNS, by its factor."""
    products = ()
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            products = products + (cells[i * N + j] * (factors[j] if COLUMNS else factors[i]),)
    return products


@jit
def _products_of(a, b, N: tl.constexpr):
    """Multiply two N x N matrices element by element."""
    products = ()
    for i in tl.static_range(N * N):
        products = products + (a[i] * b[i],)
    return products


@jit
def _inverses(sums, N: tl.constexpr):
    inverses = ()
    for i in tl.static_range(N):
        inverses = inverses + (1.0 / sums[i],)
    return inverses


@jit
def _store_sums(scratch, index, sums, token, r, N: tl.constexpr):
    for i in tl.static_range(N):
        tl.store(scratch + (index * N + i) * r + token, sums[i], mask=token < r)


@jit
def _load_sums(scratch, index, token, r, N: tl.constexpr):
    sums = ()
    for i in tl.static_range(N):
        sums = sums + (tl.load(scratch + (index * N + i) * r + token, mask=token < r, other=1.0),)
    return sums


@jit
def _undone(grad, cells, sums, COLUMNS: tl.constexpr, N: tl.constexpr):
    """Return the gradient and the values of a matrix before it was divided by its row or column sums."""
    along = (
        _column_sums(_products_of(grad, cells, N), 0.0, N)
        if COLUMNS
        else _row_sums(_products_of(grad, cells, N), 0.0, N)
    )
    gradients = ()
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            gradients = gradients + (
                (grad[i * N + j] - (along[j] if COLUMNS else along[i])) / (sums[j] if COLUMNS else sums[i]),
            )
    return gradients, _times(cells, sums, COLUMNS, N)


@jit
def _softmax(products, base, scale, token, r, eps, N: tl.constexpr):
    """Return the softmax of each row of the logits' matrix, plus eps."""
    weights = ()
    factor = tl.load(scale + 2).to(tl.float32)
    for i in tl.static_range(N):
        row = ()
        for j in tl.static_range(N):
            at = 2 * N + i * N + j
            product = tl.load(products + at * r + token, mask=token < r, other=0.0)
            row = row + (product * factor + tl.load(base + at).to(tl.float32),)
        most = row[0]
        for j in tl.static_range(1, N):
            most = tl.maximum(most, row[j])
        exponentials = ()
        for j in tl.static_range(N):
            exponentials = exponentials + (tl.exp(row[j] - most),)
        total = exponentials[0]
        for j in tl.static_range(1, N):
            total = total + exponentials[j]
        for j in tl.static_range(N):
            weights = weights + (exponentials[j] / total + eps,)
    return weights


@TritonKernel
def _weights(partial, squares, base, scale, products, inverse, pre, post, comb, r, k, eps, norm_eps, N: tl.constexpr,
             P: tl.constexpr, ITERATIONS: tl.constexpr, T: tl.constexpr):  # fmt: skip
    token = tl.program_id(0) * T + tl.arange(0, T)
    inside = token < r
    square = tl.zeros((T,), tl.float32)
    for j in tl.static_range(N):
        square += tl.load(squares + j * r + token, mask=inside, other=0.0)
    root = tl.rsqrt(square / k + norm_eps)
    tl.store(inverse + token, root, mask=inside)
    for at in tl.static_range(P):
        total = tl.zeros((T,), tl.float32)
        for j in tl.static_range(N):
            total += tl.load(partial + (j * P + at) * r + token, mask=inside, other=0.0)
        total *= root
        tl.store(products + at * r + token, total, mask=inside)
        if at < 2 * N:
            gate = _sigmoid(total * tl.load(scale + at // N).to(tl.float32) + tl.load(base + at).to(tl.float32))
            if at < N:
                tl.store(pre + at * r + token, gate + eps, mask=inside)
            else:
                tl.store(post + (at - N) * r + token, 2.0 * gate, mask=inside)
    if P > N:
        cells = _softmax(products, base, scale, token, r, eps, N)
        cells = _times(cells, _inverses(_column_sums(cells, eps, N), N), True, N)
        for _ in range(ITERATIONS - 1):
            cells = _times(cells, _inverses(_row_sums(cells, eps, N), N), False, N)
            cells = _times(cells, _inverses(_column_sums(cells, eps, N), N), True, N)
        for i in tl.static_range(N * N):
            tl.store(comb + i * r + token, cells[i], mask=inside)


@jit
def _store_grad(dlogit, product, factor, scaled, dbase, dscale, at, token, r, root, P: tl.constexpr, M: tl.constexpr):
    """Store the gradients of a logit `product · factor + base`; return the product's gradient times the product."""
    inside = token < r
    dlogit = tl.where(inside, dlogit, 0.0)
    dproduct = dlogit * factor
    tl.store(scaled + token.to(tl.int64) * M + at, dproduct * root, mask=inside)
    tl.store(dbase + tl.program_id(0) * P + at, tl.sum(dlogit, axis=0))
    tl.store(dscale + tl.program_id(0) * P + at, tl.sum(dlogit * product, axis=0))
    return dproduct * product


@TritonKernel
def _weights_backward(products, inverse, base, scale, dpre, dpost, dcomb, scratch, pre, scaled, of_norm, dbase, dscale,
                      r, k, eps, N: tl.constexpr, P: tl.constexpr, M: tl.constexpr, ITERATIONS: tl.constexpr,
                      T: tl.constexpr):  # fmt: skip
    """Compute the gradients of the weights' inputs, one thread per token.

    `scaled` `[r, M]` receives the gradients of the products times the inverse root mean square. `of_norm` `[r]`
    receives the factor of x that is subtracted from the gradient of x. `dbase` and `dscale` `[programs, P]` receive
    partial sums.
    """
    token = tl.program_id(0) * T + tl.arange(0, T)
    inside = token < r
    root = tl.load(inverse + token, mask=inside, other=0.0)
    total = tl.zeros((T,), tl.float32)
    for at in tl.static_range(2 * N if P > N else N):
        product = tl.load(products + at * r + token, mask=inside, other=0.0)
        factor = tl.load(scale + at // N).to(tl.float32)
        gate = _sigmoid(product * factor + tl.load(base + at).to(tl.float32))
        if at < N:
            grad = tl.load(dpre + at * r + token, mask=inside, other=0.0)
            tl.store(pre + at * r + token, gate + eps, mask=inside)
        else:
            grad = 2.0 * tl.load(dpost + (at - N) * r + token, mask=inside, other=0.0)
        dlogit = grad * gate * (1.0 - gate)
        total += _store_grad(dlogit, product, factor, scaled, dbase, dscale, at, token, r, root, P, M)
    if P > N:
        first = _softmax(products, base, scale, token, r, eps, N)
        sums = _column_sums(first, eps, N)
        _store_sums(scratch, 0, sums, token, r, N)
        cells = _times(first, _inverses(sums, N), True, N)
        for turn in range(ITERATIONS - 1):
            sums = _row_sums(cells, eps, N)
            _store_sums(scratch, 2 * turn + 1, sums, token, r, N)
            cells = _times(cells, _inverses(sums, N), False, N)
            sums = _column_sums(cells, eps, N)
            _store_sums(scratch, 2 * turn + 2, sums, token, r, N)
            cells = _times(cells, _inverses(sums, N), True, N)
        grads = ()
        for i in tl.static_range(N * N):
            grads = grads + (tl.load(dcomb + i * r + token, mask=inside, other=0.0),)
        for back in range(ITERATIONS - 1):
            last = 2 * (ITERATIONS - 1 - back)
            grads, cells = _undone(grads, cells, _load_sums(scratch, last, token, r, N), True, N)
            grads, cells = _undone(grads, cells, _load_sums(scratch, last - 1, token, r, N), False, N)
        grads, cells = _undone(grads, cells, _load_sums(scratch, 0, token, r, N), True, N)
        factor = tl.load(scale + 2).to(tl.float32)
        for i in tl.static_range(N):
            mean = grads[i * N] * (first[i * N] - eps)
            for j in tl.static_range(1, N):
                mean = mean + grads[i * N + j] * (first[i * N + j] - eps)
            for j in tl.static_range(N):
                at = 2 * N + i * N + j
                product = tl.load(products + at * r + token, mask=inside, other=0.0)
                dlogit = (first[i * N + j] - eps) * (grads[i * N + j] - mean)
                total += _store_grad(dlogit, product, factor, scaled, dbase, dscale, at, token, r, root, P, M)
    for at in tl.static_range(P, M):
        tl.store(scaled + token.to(tl.int64) * M + at, tl.zeros((T,), tl.float32), mask=inside)
    tl.store(of_norm + token, total * root * root / k, mask=inside)


@jit
def _vectors(source, token, r, COUNT: tl.constexpr):
    """Load the COUNT rows of a tensor `[COUNT, r]` at these tokens."""
    vectors = ()
    for i in tl.static_range(COUNT):
        vectors = vectors + (tl.load(source + i * r + token, mask=token < r, other=0.0),)
    return vectors


@jit
def _streams(x, token, c, r, h, N: tl.constexpr):
    """Load channels c of each stream, in fp32."""
    streams = ()
    for j in tl.static_range(N):
        at = token.to(tl.int64)[:, None] * (N * h) + j * h + c[None, :]
        values = tl.load(x + at, mask=(token < r)[:, None] & (c < h)[None, :], other=0.0)
        streams = streams + (values.to(tl.float32),)
    return streams


@jit
def _hidden(y, token, c, r, h):
    """Load channels c of a tensor `[r, h]`, in fp32."""
    at = token.to(tl.int64)[:, None] * h + c[None, :]
    return tl.load(y + at, mask=(token < r)[:, None] & (c < h)[None, :], other=0.0).to(tl.float32)


@TritonKernel
def _read(x, pre, y, r, h, N: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    token = tl.program_id(0) * T + tl.arange(0, T)
    factors = _vectors(pre, token, r, N)
    for first in range(0, h, C):
        c = first + tl.arange(0, C)
        streams = _streams(x, token, c, r, h, N)
        total = tl.zeros((T, C), tl.float32)
        for j in tl.static_range(N):
            total += factors[j][:, None] * streams[j]
        to = y + token.to(tl.int64)[:, None] * h + c[None, :]
        tl.store(to, total.to(y.dtype.element_ty), mask=(token < r)[:, None] & (c < h)[None, :])


@TritonKernel
def _read_backward(x, dy, dpre, r, h, N: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    token = tl.program_id(0) * T + tl.arange(0, T)
    sums = ()
    for _j in tl.static_range(N):
        sums = sums + (tl.zeros((T,), tl.float32),)
    for first in range(0, h, C):
        c = first + tl.arange(0, C)
        streams, grad = _streams(x, token, c, r, h, N), _hidden(dy, token, c, r, h)
        added = ()
        for j in tl.static_range(N):
            added = added + (sums[j] + tl.sum(streams[j] * grad, axis=1),)
        sums = added
    for j in tl.static_range(N):
        tl.store(dpre + j * r + token, sums[j], mask=token < r)


@TritonKernel
def _mixed(x, y, post, comb, out, r, h, N: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    token = tl.program_id(0) * T + tl.arange(0, T)
    output_weights, cells = _vectors(post, token, r, N), _vectors(comb, token, r, N * N)
    for first in range(0, h, C):
        c = first + tl.arange(0, C)
        inside = (token < r)[:, None] & (c < h)[None, :]
        streams, output = _streams(x, token, c, r, h, N), _hidden(y, token, c, r, h)
        for i in tl.static_range(N):
            total = output_weights[i][:, None] * output
            for j in tl.static_range(N):
                total += cells[j * N + i][:, None] * streams[j]
            to = out + token.to(tl.int64)[:, None] * (N * h) + i * h + c[None, :]
            tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@TritonKernel
def _mixed_backward(d, x, y, post, comb, dx, dy, dpost, dcomb, r, h, N: tl.constexpr, T: tl.constexpr,
                    C: tl.constexpr):  # fmt: skip
    token = tl.program_id(0) * T + tl.arange(0, T)
    output_weights, cells = _vectors(post, token, r, N), _vectors(comb, token, r, N * N)
    sums = ()
    for _i in tl.static_range(N + N * N):
        sums = sums + (tl.zeros((T,), tl.float32),)
    for first in range(0, h, C):
        c = first + tl.arange(0, C)
        inside = (token < r)[:, None] & (c < h)[None, :]
        grads, streams = _streams(d, token, c, r, h, N), _streams(x, token, c, r, h, N)
        output = _hidden(y, token, c, r, h)
        output_gradient = tl.zeros((T, C), tl.float32)
        added = ()
        for i in tl.static_range(N):
            output_gradient += output_weights[i][:, None] * grads[i]
            added = added + (sums[i] + tl.sum(grads[i] * output, axis=1),)
        for j in tl.static_range(N):
            total = tl.zeros((T, C), tl.float32)
            for i in tl.static_range(N):
                total += cells[j * N + i][:, None] * grads[i]
                added = added + (sums[N + j * N + i] + tl.sum(streams[j] * grads[i], axis=1),)
            to = dx + token.to(tl.int64)[:, None] * (N * h) + j * h + c[None, :]
            tl.store(to, total.to(dx.dtype.element_ty), mask=inside)
        to = dy + token.to(tl.int64)[:, None] * h + c[None, :]
        tl.store(to, output_gradient.to(dy.dtype.element_ty), mask=inside)
        sums = added
    for i in tl.static_range(N):
        tl.store(dpost + i * r + token, sums[i], mask=token < r)
    for i in tl.static_range(N * N):
        tl.store(dcomb + i * r + token, sums[N + i], mask=token < r)


@TritonKernel
def _streams_backward(x, passed, dy, pre, fn, scaled, of_norm, dx, dfn, r, h, k, tokens, N: tl.constexpr,
                      P: tl.constexpr, M: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
                      PRECISION: tl.constexpr):  # fmt: skip
    """Compute the gradients of C channels of one stream and of `fn`, over `tokens` tokens.

    `dfn` `[splits, M, k]` receives partial sums.
    """
    blocks = tl.cdiv(h, C)
    stream, split = tl.program_id(0) // blocks, tl.program_id(1)
    c, row = (tl.program_id(0) % blocks) * C + tl.arange(0, C), tl.arange(0, M)
    valid = (row < P)[:, None] & (c < h)[None, :]
    factors = tl.load(fn + row[:, None] * k + stream * h + c[None, :], mask=valid, other=0.0).to(tl.float32)
    dfactors = tl.zeros((M, C), tl.float32)
    for first in range(split * tokens, min((split + 1) * tokens, r), T):
        token = first + tl.arange(0, T)
        inside = (token < r)[:, None] & (c < h)[None, :]
        at = token.to(tl.int64)[:, None] * k + stream * h + c[None, :]
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        grads = tl.load(scaled + token.to(tl.int64)[:, None] * M + row[None, :], mask=(token < r)[:, None], other=0.0)
        total = tl.load(pre + stream * r + token, mask=token < r, other=0.0)[:, None] * _hidden(dy, token, c, r, h)
        total -= tl.load(of_norm + token, mask=token < r, other=0.0)[:, None] * values
        if passed is not None:
            total += tl.load(passed + at, mask=inside, other=0.0).to(tl.float32)
        total = tl.dot(grads, factors, total, input_precision=PRECISION)
        dfactors = tl.dot(tl.trans(grads), values, dfactors, input_precision=PRECISION)
        tl.store(dx + at, total.to(dx.dtype.element_ty), mask=inside)
    tl.store(dfn + (split * M + row).to(tl.int64)[:, None] * k + stream * h + c[None, :], dfactors, mask=valid)


def _tokens_last(x: Tensor) -> Tensor:
    """Move tokens last, `[r, n, ...]` -> `[n, ..., r]`; this copies nothing if a kernel here wrote the tensor."""
    return x.movedim(0, -1).contiguous()


def _new(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _rows(products: int) -> int:
    """Return the number of rows of `fn` in a tile."""
    return max(16, next_power_of_2(products))


def project_and_read(
    x_rk: Tensor, fn_mk: Tensor, base_m: Tensor, scale: Tensor, rule: HyperConnectionRule
) -> tuple[Tensor, Weights, Tensor, Tensor]:
    """Return the results of the reference's `read`, `weights` and `project`, in this order."""
    (r, k), n, products = x_rk.shape, rule.streams, len(base_m)
    h = k // n
    partial, squares = _new(x_rk, n, products, r), _new(x_rk, n, r)
    constants = {"N": n, "P": products}
    bound = _project.bind(**constants, M=_rows(products), **PROJECT)
    bound.launch((ceil_div(r, PROJECT["T"]), n), (x_rk, fn_mk, partial, squares), (r, h, k))
    products_mr, inverse_r = _new(x_rk, products, r), _new(x_rk, r)
    mixes = n if products > n else 0
    pre, post, comb = _new(x_rk, n, r), _new(x_rk, mixes, r), _new(x_rk, mixes, mixes, r)
    bound = _weights.bind(**constants, ITERATIONS=rule.iterations, **WEIGHTS)
    tensors = (partial, squares, base_m, scale, products_mr, inverse_r, pre, post, comb)
    bound.launch((ceil_div(r, WEIGHTS["T"]), 1), tensors, (r, k, rule.eps, rule.norm_eps))
    y_rh = x_rk.new_empty(r, h)
    _read.bind(N=n, **STREAMS).launch((ceil_div(r, STREAMS["T"]), 1), (x_rk, pre, y_rh), (r, h))
    return y_rh, Weights(pre.t(), post.t(), comb.movedim(2, 0)), products_mr.t(), inverse_r


def project_and_read_backward(
    x_rk: Tensor, passed_rk: Tensor | None, dy_rh: Tensor, dpost_rn: Tensor, dcomb_rnn: Tensor, fn_mk: Tensor,
    base_m: Tensor, scale: Tensor, products_rm: Tensor, inverse_r: Tensor, rule: HyperConnectionRule,
) -> tuple[Tensor, Tensor, WeightsGrad]:  # fmt: skip
    """Return the gradients of the streams, of `fn`, and of the products, base and scale."""
    (r, k), n, products = x_rk.shape, rule.streams, len(base_m)
    h, rows = k // n, _rows(products)
    dpre = _new(x_rk, n, r)
    _read_backward.bind(N=n, **STREAMS).launch((ceil_div(r, STREAMS["T"]), 1), (x_rk, dy_rh, dpre), (r, h))
    programs = ceil_div(r, WEIGHTS["T"])
    scratch = _new(x_rk, 2 * rule.iterations - 1, n, r) if products > n else None
    pre, scaled, norm_gradient = _new(x_rk, n, r), _new(x_rk, r, rows), _new(x_rk, r)
    dbase, dscale = _new(x_rk, programs, products), _new(x_rk, programs, products)
    constants = {"N": n, "P": products, "M": rows}
    small = (_tokens_last(x) for x in (dpost_rn, dcomb_rnn))
    tensors = (
        _tokens_last(products_rm), inverse_r, base_m, scale, dpre, *small, scratch, pre, scaled, norm_gradient, dbase,
        dscale,
    )  # fmt: skip
    bound = _weights_backward.bind(**constants, ITERATIONS=rule.iterations, **WEIGHTS)
    bound.launch((programs, 1), tensors, (r, k, rule.eps))
    dx, dfn = torch.empty_like(x_rk), _new(x_rk, _SPLITS, rows, k)
    tokens = ceil_div(r, _SPLITS * STREAMS_BACKWARD["T"]) * STREAMS_BACKWARD["T"]
    precision = "ieee" if x_rk.dtype == torch.float32 else "tf32"
    bound = _streams_backward.bind(**constants, PRECISION=precision, **STREAMS_BACKWARD)
    grid = n * ceil_div(h, STREAMS_BACKWARD["C"]), _SPLITS
    bound.launch(grid, (x_rk, passed_rk, dy_rh, pre, fn_mk, scaled, norm_gradient, dx, dfn), (r, h, k, tokens))
    parts = [n, n, n * n] if products > n else [n]
    scale_gradient = torch.stack([part.sum() for part in dscale.sum(dim=0).split(parts)])
    return dx, dfn[:, :products].sum(dim=0), WeightsGrad(scaled, dbase.sum(dim=0), scale_gradient)


def mixed(x_rk: Tensor, y_rh: Tensor, post_rn: Tensor, comb_rnn: Tensor) -> Tensor:
    """Return the streams `[r, k]` after a part with output `y_rh`."""
    (r, h), n, out = y_rh.shape, post_rn.shape[1], torch.empty_like(x_rk)
    tensors = (x_rk, y_rh, _tokens_last(post_rn), _tokens_last(comb_rnn), out)
    _mixed.bind(N=n, **STREAMS).launch((ceil_div(r, STREAMS["T"]), 1), tensors, (r, h))
    return out


def mixed_backward(
    d_rk: Tensor, x_rk: Tensor, y_rh: Tensor, post_rn: Tensor, comb_rnn: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, y, post and comb."""
    (r, h), n = y_rh.shape, post_rn.shape[1]
    dx, dy, dpost, dcomb = torch.empty_like(x_rk), torch.empty_like(y_rh), _new(x_rk, n, r), _new(x_rk, n, n, r)
    small = (_tokens_last(x) for x in (post_rn, comb_rnn))
    bound = _mixed_backward.bind(N=n, **STREAMS)
    bound.launch((ceil_div(r, STREAMS["T"]), 1), (d_rk, x_rk, y_rh, *small, dx, dy, dpost, dcomb), (r, h))
    return dx, dy, dpost.t(), dcomb.movedim(2, 0)
