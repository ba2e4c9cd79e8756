"""Hyper-connections in plain PyTorch, in fp32 or wider: the reference of `megafp8.layers.hyper_connections.kernel`.

Devices without the kernels run these functions. `megafp8.layers.hyper_connections.op` explains the weights.

Shapes: r tokens, n streams, h channels, k = n·h, m = n·(n + 2) products (m = n without `post` and `comb`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.numerics.sources import wide


class HyperConnectionRule(NamedTuple):
    """Constants of the weight computation.

    Args:
        streams: Number of streams, n.
        iterations: Number of Sinkhorn iterations.
        eps: Number added to weights and sums.
        norm_eps: Number added to the mean square of the streams.
    """

    streams: int
    iterations: int
    eps: float
    norm_eps: float


class Weights(NamedTuple):
    """Weights of the streams, or their gradients. `post` and `comb` are empty for `collapse`."""

    pre: Tensor
    """Weights of the streams in a part's input, `[r, n]`."""
    post: Tensor
    """Weights of the part's output in each stream, `[r, n]`."""
    comb: Tensor
    """Matrices that mix the streams, `[r, n, n]`."""


def project(x_rk: Tensor, fn_mk: Tensor, norm_eps: float) -> tuple[Tensor, Tensor]:
    """Return the products `[r, m]` of normalized streams with `fn_mk`, and the inverse root mean squares `[r]`."""
    x = wide(x_rk)
    inverse_r = (x.square().mean(dim=1) + norm_eps).rsqrt()
    return x @ wide(fn_mk).t() * inverse_r.unsqueeze(1), inverse_r


def weights(products_rm: Tensor, base_m: Tensor, scale: Tensor, rule: HyperConnectionRule) -> Weights:
    """Compute the weights from the products.

    `scale` is `[3]` for pre, post and comb, or `[1]` for `collapse`.
    """
    n, base, scale = rule.streams, wide(base_m), wide(scale)
    pre = (products_rm[:, :n] * scale[0] + base[:n]).sigmoid() + rule.eps
    if len(base) == n:
        return Weights(pre, pre[:, :0], pre.new_empty(len(pre), 0, 0))
    post = 2 * (products_rm[:, n : 2 * n] * scale[1] + base[n : 2 * n]).sigmoid()
    comb = (products_rm[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n)).softmax(dim=2) + rule.eps
    comb = comb / (comb.sum(dim=1, keepdim=True) + rule.eps)
    for _ in range(rule.iterations - 1):
        comb = comb / (comb.sum(dim=2, keepdim=True) + rule.eps)
        comb = comb / (comb.sum(dim=1, keepdim=True) + rule.eps)
    return Weights(pre, post, comb)


class WeightsGrad(NamedTuple):
    """Gradients of the products `[r, m]`, of `base` `[m]` and of `scale`."""

    products: Tensor
    base: Tensor
    scale: Tensor


def weights_backward(
    products_rm: Tensor, base_m: Tensor, scale: Tensor, rule: HyperConnectionRule, grad: Weights
) -> tuple[Tensor, WeightsGrad]:
    """Recompute `pre`, and return it with the gradients of the inputs of `weights`."""
    products, base, factors = inputs = [x.detach().requires_grad_() for x in (products_rm, wide(base_m), wide(scale))]
    with torch.enable_grad():
        made = weights(products, base, factors, rule)
        used = [(y, dy) for y, dy in zip(made, grad, strict=True) if y.numel()]
        gradients = torch.autograd.grad([y for y, _ in used], inputs, [dy for _, dy in used])
    return made.pre.detach(), WeightsGrad(*gradients)


def read(x_rk: Tensor, pre_rn: Tensor) -> Tensor:
    """Return the weighted sum of the streams, `[r, h]`."""
    return (pre_rn.unsqueeze(2) * wide(x_rk).unflatten(1, (pre_rn.shape[1], -1))).sum(dim=1).to(x_rk.dtype)


def read_backward(x_rk: Tensor, dy_rh: Tensor, n: int) -> Tensor:
    """Return the gradient of the weights of `read`, `[r, n]`."""
    return (wide(dy_rh).unsqueeze(1) * wide(x_rk).unflatten(1, (n, -1))).sum(dim=2)


def streams_backward(
    x_rk: Tensor, passed_rk: Tensor | None, dy_rh: Tensor, pre_rn: Tensor, fn_mk: Tensor, products_rm: Tensor,
    inverse_r: Tensor, dproducts_rm: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradient of the streams, with `passed_rk` added, and the gradient of `fn` in fp32 or wider."""
    x, scaled_rm = wide(x_rk), dproducts_rm * inverse_r.unsqueeze(1)
    norm_gradient_r = (dproducts_rm * products_rm).sum(dim=1) * inverse_r.square() / x.shape[1]
    dx = (pre_rn.unsqueeze(2) * wide(dy_rh).unsqueeze(1)).flatten(1) + scaled_rm @ wide(fn_mk)
    dx = dx - norm_gradient_r.unsqueeze(1) * x
    return (dx if passed_rk is None else dx + wide(passed_rk)).to(x_rk.dtype), scaled_rm.t() @ x


def mixed(x_rk: Tensor, y_rh: Tensor, post_rn: Tensor, comb_rnn: Tensor) -> Tensor:
    """Return the streams `[r, k]` after a part with output `y_rh`."""
    x = wide(x_rk).unflatten(1, (post_rn.shape[1], -1))
    return (comb_rnn.transpose(1, 2) @ x + post_rn.unsqueeze(2) * wide(y_rh).unsqueeze(1)).to(x_rk.dtype).flatten(1)


def mixed_backward(
    d_rk: Tensor, x_rk: Tensor, y_rh: Tensor, post_rn: Tensor, comb_rnn: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, y, post and comb."""
    n = post_rn.shape[1]
    d, x, y = wide(d_rk).unflatten(1, (n, -1)), wide(x_rk).unflatten(1, (n, -1)), wide(y_rh)
    dx = (comb_rnn @ d).to(x_rk.dtype).flatten(1)
    dy = (post_rn.unsqueeze(2) * d).sum(dim=1).to(y_rh.dtype)
    return dx, dy, (d * y.unsqueeze(1)).sum(dim=2), x @ d.transpose(1, 2)
