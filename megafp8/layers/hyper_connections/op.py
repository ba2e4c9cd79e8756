"""Autograd functions of hyper-connections: they compute weights from the residual streams, and read and write them.

A token has n streams of h channels, concatenated into `x` with k = n·h numbers. `x` is divided by its root mean square
and multiplied by the m rows of `fn`; the products, times a scale and plus a base, are the logits of the weights. The
weights are `pre` (n weights of the streams in a part's input), `post` (n weights of the part's output in the streams),
and `comb` (a matrix `[n, n]` that mixes the streams). Sinkhorn iterations make the matrix doubly stochastic; they end
with its columns.

    connect     x -> Σ pre_j · x_j, post, comb
    mix         x, y, post, comb -> post_k · y + Σ_j comb_jk · x_j
    collapse    x -> Σ pre_j · x_j, without other weights

`connect` saves `x`, the products and the inverse root mean squares for backward, and recomputes the rest. The gradient
of the streams from `mix` passes through `connect`, which adds its own gradient to it, so that it is read and written
only once. All is computed in fp32 or wider. On a GPU, `megafp8.layers.hyper_connections.kernel` computes it; the
reference is `megafp8.layers.hyper_connections.reference`.

Shapes: r tokens, n streams, h channels, k = n·h, m = n·(n + 2) products (m = n for `collapse`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from megafp8.layers.hyper_connections.reference import (
    HyperConnectionRule,
    Weights,
    mixed,
    mixed_backward,
    project,
    read,
    read_backward,
    streams_backward,
    weights,
    weights_backward,
)
from megafp8.linear.autograd import once_differentiable
from megafp8.numerics.implementations import has_kernel, triton_module

_kernels = triton_module("megafp8.layers.hyper_connections.kernel")


def _project_and_read(
    x_rk: Tensor, fn_mk: Tensor, base_m: Tensor, scale: Tensor, rule: HyperConnectionRule
) -> tuple[Tensor, Weights, Tensor, Tensor]:
    """Return the weighted sum of the streams, the weights, the products and the inverse root mean squares."""
    if has_kernel(x_rk):
        outputs: tuple[Tensor, Weights, Tensor, Tensor] = _kernels().project_and_read(x_rk, fn_mk, base_m, scale, rule)
        return outputs
    products_rm, inverse_r = project(x_rk, fn_mk, rule.norm_eps)
    w = weights(products_rm, base_m, scale, rule)
    return read(x_rk, w.pre), w, products_rm, inverse_r


def _project_and_read_backward(ctx: Any, passed: Tensor | None, dy: Tensor, dpost: Tensor, dcomb: Tensor) -> Any:
    """Return the gradients of the streams and the parameters."""
    x, fn, base, scale, products_rm, inverse_r = ctx.saved_tensors
    x_rk, dy_rh = _rows(x), _rows(dy)
    passed_rk = None if passed is None else _rows(passed)
    if has_kernel(x):
        dx, dfn, grad = _kernels().project_and_read_backward(
            x_rk, passed_rk, dy_rh, dpost, dcomb, fn, base, scale, products_rm, inverse_r, ctx.rule
        )
    else:
        dpre = read_backward(x_rk, dy_rh, ctx.rule.streams)
        pre, grad = weights_backward(products_rm, base, scale, ctx.rule, Weights(dpre, dpost, dcomb))
        dx, dfn = streams_backward(x_rk, passed_rk, dy_rh, pre, fn, products_rm, inverse_r, grad.products)
    param_grads = (g.to(p.dtype) for g, p in zip((dfn, grad.base, grad.scale), (fn, base, scale), strict=True))
    return dx.view(x.shape), *param_grads, None


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().flatten(0, -2)


class _Connect(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rule: HyperConnectionRule
    ) -> tuple[Tensor, ...]:
        y_rh, w, products_rm, inverse_r = _project_and_read(_rows(x), fn, base, scale, rule)
        ctx.save_for_backward(x, fn, base, scale, products_rm, inverse_r)
        ctx.rule = rule
        return x.view_as(x), y_rh.view(*x.shape[:-1], -1), w.post, w.comb

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dy: Tensor, dpost: Tensor, dcomb: Tensor) -> Any:
        return _project_and_read_backward(ctx, dx, dy, dpost, dcomb)


class _Collapse(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rule: HyperConnectionRule) -> Tensor:
        y_rh, _, products_rm, inverse_r = _project_and_read(_rows(x), fn, base, scale, rule)
        ctx.save_for_backward(x, fn, base, scale, products_rm, inverse_r)
        ctx.rule = rule
        return y_rh.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        products_rm = ctx.saved_tensors[4]
        none = products_rm.new_empty(len(products_rm), 0)
        return _project_and_read_backward(ctx, None, dy, none, none.unsqueeze(1))


class _Mix(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, post_rn: Tensor, comb_rnn: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, post_rn, comb_rnn)
        compute = _kernels().mixed if has_kernel(x) else mixed
        mixed_rk: Tensor = compute(_rows(x), _rows(y), post_rn, comb_rnn)
        return mixed_rk.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, ...]:
        x, y, post_rn, comb_rnn = ctx.saved_tensors
        compute = _kernels().mixed_backward if has_kernel(x) else mixed_backward
        dx, dy, dpost, dcomb = compute(_rows(d), _rows(x), _rows(y), post_rn, comb_rnn)
        return dx.view(x.shape), dy.view(y.shape), dpost, dcomb


def connect(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rule: HyperConnectionRule) -> tuple[Tensor, ...]:
    """Compute the input of a part from the streams.

    Args:
        x: Streams, `[..., k]`.
        fn: Weight of the linear map, `[m, k]`.
        base: Bias of the logits, `[m]`.
        scale: Scale of the logits of pre, post and comb, `[3]`.
        rule: Constants of the weight computation.

    Returns:
        The streams, the part's input `[..., h]`, post `[r, n]` and comb `[r, n, n]`. Pass the returned streams to
        `mix`; backward then adds the gradients of both uses in one pass.
    """
    outputs: tuple[Tensor, ...] = _Connect.apply(x, fn, base, scale, rule)
    return outputs


def mix(x: Tensor, y: Tensor, post_rn: Tensor, comb_rnn: Tensor) -> Tensor:
    """Return the streams `[..., k]` after a part with output `y` `[..., h]`."""
    mixed: Tensor = _Mix.apply(x, y, post_rn, comb_rnn)
    return mixed


def collapse(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, rule: HyperConnectionRule) -> Tensor:
    """Return the hidden states `[..., h]` after the last layer from the streams `[..., k]`."""
    collapsed: Tensor = _Collapse.apply(x, fn, base, scale, rule)
    return collapsed
