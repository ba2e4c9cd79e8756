"""Muon: the momentum of a matrix, orthogonalized by Newton-Schulz iterations.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces the momentum M = U S Vᵀ of a matrix by about U Vᵀ,
so that all directions of an update are equally large. With μ the momentum's decay, η the learning rate, λ the decay:

    M ← μ M + (1 - μ) G        N = (1 - μ) G + μ M (Nesterov), or M
    W ← (1 - η λ) W - η · scale · newton_schulz(N)

Scale is 0.2 √max(rows, columns), with which updates have the RMS of AdamW's, so that its learning rate and decay serve
Muon too ("match_rms_adamw": Liu et al. 2025, Moonlight, arXiv:2502.16982, equation 4), or √max(1, rows / columns)
("original"). The arithmetic is that of `torch.optim.Muon`. Matrices that are divided over ranks: `matrices`.

Shapes: n rows, m columns of a matrix.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from megafp8.optimizer.base import MatrixUpdate
from megafp8.section import PositiveFloat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megafp8.distributed.sharding import Shape

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x³ and x⁵, to whose sum each iteration maps a singular value x."""
ITERATIONS = 5
EPS = 1e-7
"""Least norm that a matrix is divided by."""


class Muon(MatrixUpdate):
    """Muon (Jordan et al. 2024), which updates the weights of blocks that are matrices; AdamW updates all others."""

    learning_rate: PositiveFloat | None = None
    """Peak learning rate of the matrices; it follows the same schedule. Default: optimizer.learning_rate."""
    nesterov: bool = True
    """Orthogonalize Nesterov's momentum."""
    scaling: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """What updates of matrices are multiplied by (torch.optim.Muon's adjust_lr_fn). match_rms_adamw: 0.2 √max(rows,
    columns), so that learning rate and weight decay of AdamW serve Muon too (Moonlight, arXiv:2502.16982). original:
    √max(1, rows / columns), with learning rates around 0.02."""
    newton_schulz_dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype in which matrices are orthogonalized and travel between ranks. bf16: that of all published results. fp32:
    twice the traffic, and results that hardly depend on the layout."""

    def exchange_dtype(self, master: torch.dtype) -> torch.dtype:
        from megafp8.dtypes import state_dtype

        return state_dtype(self.newton_schulz_dtype, master)

    def direction(self, momentum: Tensor, gradient: Tensor) -> Tensor:
        return gradient.lerp(momentum, self.momentum) if self.nesterov else momentum

    def transform(self, x_nm: Tensor) -> Tensor:
        return newton_schulz(x_nm)

    def scale(self, shape: Shape) -> float:
        rows, columns = shape
        if self.scaling == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))

    def flops(self, shape: Shape) -> int:
        """FLOPs of `newton_schulz`."""
        short, long = sorted(shape)
        return 2 * ITERATIONS * (2 * short * short * long + short**3)

    def hidden_learning_rate_scale(self, learning_rate: float, width: float) -> float:
        """The spectral norm of updates scaled like AdamW's grows with the root of the width, the original's not."""
        relative = 1.0 if self.learning_rate is None else self.learning_rate / learning_rate
        return relative / math.sqrt(width) if self.scaling == "match_rms_adamw" else relative


def newton_schulz(x_nm: Tensor) -> Tensor:
    """About U Vᵀ of x = U S Vᵀ, in the dtype of x. Singular values that are more than 0.003 of the norm of x, and so
    most, become values between 0.68 and 1.21."""
    a, b, c = COEFFICIENTS
    tall = x_nm.shape[0] > x_nm.shape[1]
    x = x_nm.mT if tall else x_nm
    x = x / x.norm().clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = x.addmm(gram.addmm(gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
