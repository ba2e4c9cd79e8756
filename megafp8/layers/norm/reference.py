"""RMSNorm and LayerNorm in plain PyTorch: the reference of `megafp8.layers.norm.kernel`.

(Zhang & Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450.) Forward needs a row's statistics before any
of the row can be scaled; the scaling itself is a `MatrixSource`, computed by the kernel that quantizes. The residual
addition before a norm is part of it in both directions: statistics are taken from the sum, and the sum's gradient is
the norm's plus the one that bypasses it.

Elements are computed in fp32. Sums are float64 and rounded once, so the result does not depend on their order and is
the same on every device.

Norms of query and key heads, before their rotation, are those of `megafp8.layers.rotary.kernel`.

Shapes: r rows (tokens), c columns (hidden); h heads of width d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.numerics.sources import norm_factor, rotate, wide

EXACT = torch.float64


def statistics(x_rc: Tensor, eps: float, *, centered: bool) -> tuple[Tensor | None, Tensor]:
    """Mean (None unless `centered`) and reciprocal standard deviation `[r]`, fp32 or wider."""
    x, c = wide(x_rc), x_rc.shape[1]
    mean_r = (x.sum(dim=1, dtype=EXACT) / c).to(x.dtype) if centered else None
    if mean_r is not None:
        x = x - mean_r.unsqueeze(-1)
    return mean_r, reciprocal_deviation((x.to(EXACT).square().sum(dim=1) / c).to(x.dtype), eps)


def reciprocal_deviation(variance: Tensor, eps: float) -> Tensor:
    """`1 / √(variance + eps)`."""
    deviation = (variance + eps).to(EXACT).sqrt().to(variance.dtype)  # a CPU's fp32 root is not always rounded right
    return torch.ones_like(deviation) / deviation


def backward(
    dy_rc: Tensor, x_rc: Tensor, mean_r: Tensor | None, rstd_r: Tensor, weight_c: Tensor, dresidual_rc: Tensor | None,
    *, zero_centered: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of x `[r, c]` (`dresidual_rc` added) in its dtype, of the weight and of the bias, `[c]` fp32 or wider.

    The bias's is None without `mean_r`.
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
    """Sums of the squares of each head `[r, h]`, fp32 or wider, divided by `count`."""
    return (x_rhd.to(EXACT).square().sum(dim=-1) / count).to(wide(x_rhd).dtype)


def normalized_and_rotated(
    x_sbhd: Tensor, rstd_rh: Tensor, weight_hd: Tensor | None, cos: Tensor, sin: Tensor, *, zero_centered: bool
) -> Tensor:
    """Heads times the reciprocals of their root mean squares and their weights, rotated, in x's dtype."""
    y_sbhd = wide(x_sbhd) * rstd_rh.view(*x_sbhd.shape[:3], 1)
    if weight_hd is not None:
        y_sbhd = y_sbhd * norm_factor(weight_hd, zero_centered)
    return rotate(y_sbhd, cos, sin).to(x_sbhd.dtype)


def head_gradients(
    dy_sbhd: Tensor, x_sbhd: Tensor, rstd_rh: Tensor, weight_hd: Tensor | None, cos: Tensor, sin: Tensor, count: int,
    *, zero_centered: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Statistics for the gradient of `normalized_and_rotated` (`HeadNorms.statistics_2rh`, sums over `count`), and
    the gradient of the weight of each head `[h, d]`, fp32 or wider."""
    dy = rotate(dy_sbhd, cos, -sin).flatten(0, 1)
    normalized = wide(x_sbhd).flatten(0, 1) * rstd_rh.unsqueeze(-1)
    scaled = dy if weight_hd is None else dy * norm_factor(weight_hd, zero_centered)
    along_rh = ((scaled * normalized).sum(dim=-1, dtype=EXACT) / count).to(dy.dtype)
    return torch.stack([rstd_rh, along_rh]), (dy * normalized).sum(dim=0, dtype=EXACT).to(dy.dtype)
