"""RMSNorm and LayerNorm in plain PyTorch: the reference of `megafp8.layers.norm.kernel`.

Papers: Zhang & Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450. Forward needs the statistics of a
row before it can scale any element of the row. The scaling itself is a `MatrixSource`, which the kernel that quantizes
computes. The residual addition before a norm belongs to the norm in both directions: forward takes the statistics of
the sum, and backward adds the gradient that bypasses the norm to the norm's gradient.

Elements are computed in fp32. Sums are float64 and rounded once, so the result does not depend on the order of the
summands and is the same on every device.

The kernel for norms of query and key heads before their rotation is in `megafp8.layers.rotary.kernel`; its references
are the last three functions here.

Shapes: r rows (tokens), c columns (hidden); h heads of width d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.numerics.sources import norm_factor, rotate, wide

EXACT = torch.float64


def statistics(x_rc: Tensor, eps: float, *, centered: bool) -> tuple[Tensor | None, Tensor]:
    """Return the mean (None unless `centered`) and reciprocal standard deviation of each row, `[r]`, fp32 or wider.

    Without `centered`, the second is the reciprocal root mean square.
    """
    x, c = wide(x_rc), x_rc.shape[1]
    mean_r = (x.sum(dim=1, dtype=EXACT) / c).to(x.dtype) if centered else None
    if mean_r is not None:
        x = x - mean_r.unsqueeze(-1)
    return mean_r, reciprocal_deviation((x.to(EXACT).square().sum(dim=1) / c).to(x.dtype), eps)


def reciprocal_deviation(variance: Tensor, eps: float) -> Tensor:
    """Return `1 / √(variance + eps)` in the dtype of `variance`."""
    deviation = (variance + eps).to(EXACT).sqrt().to(variance.dtype)  # a CPU's fp32 root may be rounded incorrectly
    return torch.ones_like(deviation) / deviation


def backward(
    dy_rc: Tensor, x_rc: Tensor, mean_r: Tensor | None, rstd_r: Tensor, weight_c: Tensor, dresidual_rc: Tensor | None,
    *, zero_centered: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute the gradients of the input, the weight and the bias.

    Args:
        dy_rc: Gradient of the norm's output.
        x_rc: Input of the norm, which is the sum of the residual stream and the branch.
        mean_r: Mean of each row; None for RMSNorm.
        rstd_r: Reciprocal standard deviation of each row.
        weight_c: Weight.
        dresidual_rc: Gradient of the residual stream that bypasses the norm, added to the input's gradient.
        zero_centered: Whether the norm multiplies by `1 + weight`.

    Returns:
        Gradient of the input `[r, c]` in the dtype of `x_rc`; gradients of the weight and the bias `[c]`, fp32 or
        wider. The bias gradient is None without `mean_r`.
    """
    x, dy, c = wide(x_rc), wide(dy_rc), x_rc.shape[1]
    normalized = (x if mean_r is None else x - mean_r.unsqueeze(-1)) * rstd_r.unsqueeze(-1)
    dweight_c = (dy * normalized).sum(dim=0, dtype=EXACT).to(x.dtype)
    dbias_c = None if mean_r is None else dy.sum(dim=0, dtype=EXACT).to(x.dtype)
    scaled = dy * norm_factor(weight_c, zero_centered)
    along_r = ((scaled * normalized).sum(dim=1, dtype=EXACT) / c).to(x.dtype)
    dx = scaled - normalized * along_r.unsqueeze(-1)
    if mean_r is not None:
        dx = dx - (scaled.sum(dim=1, dtype=EXACT) / c).to(x.dtype).unsqueeze(-1)
    dx = dx * rstd_r.unsqueeze(-1)
    if dresidual_rc is not None:
        dx = dx + wide(dresidual_rc)
    return dx.to(x_rc.dtype), dweight_c, dbias_c


def square_means(x_rhd: Tensor, count: int) -> Tensor:
    """Return the sum of squares of each head divided by `count`, `[r, h]`, fp32 or wider."""
    return (x_rhd.to(EXACT).square().sum(dim=-1) / count).to(wide(x_rhd).dtype)


def normalized_and_rotated(
    x_sbhd: Tensor, rstd_rh: Tensor, weight_hd: Tensor | None, cos: Tensor, sin: Tensor, *, zero_centered: bool
) -> Tensor:
    """Multiply heads by their reciprocal root mean squares and weights, and rotate them; return x's dtype."""
    y_sbhd = wide(x_sbhd) * rstd_rh.view(*x_sbhd.shape[:3], 1)
    if weight_hd is not None:
        y_sbhd = y_sbhd * norm_factor(weight_hd, zero_centered)
    return rotate(y_sbhd, cos, sin).to(x_sbhd.dtype)


def head_gradients(
    dy_sbhd: Tensor, x_sbhd: Tensor, rstd_rh: Tensor, weight_hd: Tensor | None, cos: Tensor, sin: Tensor, count: int,
    *, zero_centered: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what the gradient of `normalized_and_rotated` needs, and the weight gradient of each head.

    Returns:
        Statistics `[2, r, h]` (`HeadNorms.statistics_2rh`): the reciprocal root mean squares, and the sums of gradient
        times normalized value divided by `count`. Then the weight gradients `[h, d]`. Both are fp32 or wider.
    """
    dy = rotate(dy_sbhd, cos, -sin).flatten(0, 1)
    normalized = wide(x_sbhd).flatten(0, 1) * rstd_rh.unsqueeze(-1)
    scaled = dy if weight_hd is None else dy * norm_factor(weight_hd, zero_centered)
    along_rh = ((scaled * normalized).sum(dim=-1, dtype=EXACT) / count).to(dy.dtype)
    return torch.stack([rstd_rh, along_rh]), (dy * normalized).sum(dim=0, dtype=EXACT).to(dy.dtype)
