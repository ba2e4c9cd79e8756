"""Muon: updates by the momentum of a matrix, orthogonalized with Newton-Schulz iterations.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces the momentum M = U S Vᵀ of a matrix by
approximately U Vᵀ, so that all directions of an update are equally large. Let μ be the decay of the momentum, η the
learning rate and λ the weight decay:

    M ← μ M + (1 - μ) G        N = (1 - μ) G + μ M (Nesterov), or M
    W ← (1 - η λ) W - η · scale · newton_schulz(N)

With scale = 0.2 √max(rows, columns), updates have the same RMS as AdamW's updates, so that AdamW's learning rate and
weight decay also work for Muon ("match_rms_adamw": Liu et al. 2025, Moonlight, arXiv:2502.16982, equation 4). The
alternative is scale = √max(1, rows / columns) ("original"). The arithmetic is the same as in `torch.optim.Muon`.
`matrices` handles matrices that are sharded over ranks.

On GPUs in bf16, the same polynomial is computed with fewer products (`gram_newton_schulz`).

Shapes: b matrices of n rows and m columns.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from megafp8.optimizer.base import MatrixUpdate
from megafp8.section import PositiveFloat

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from megafp8.parallel.sharding import Shape

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x³ and x⁵ in the polynomial that each iteration applies to a singular value x."""
ITERATIONS = 5
"""Number of Newton-Schulz iterations."""
EPS = 1e-7
"""Lower limit of the norm that divides a matrix."""
SPANS = (3, 2)
"""Number of iterations before each product with the matrix itself in `gram_newton_schulz`."""

LARGE = 2048
"""Shorter side from which cuBLAS multiplies matrices one at a time. Its sums may depend on the size of a batch."""


class Muon(MatrixUpdate):
    """Muon (Jordan et al. 2024), which updates the matrices of blocks. AdamW updates all other weights."""

    learning_rate: Annotated[PositiveFloat | None, Field(examples=[4e-4, 2e-2])] = None
    """Peak learning rate of the matrices, which follows the same schedule. Default: optimizer.learning_rate."""
    nesterov: bool = True
    """Orthogonalize Nesterov's momentum."""
    scaling: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of the updates of matrices (torch.optim.Muon's adjust_lr_fn). match_rms_adamw: 0.2 √max(rows, columns), so
    that AdamW's learning rate and weight decay also work for Muon (Moonlight, arXiv:2502.16982). original: √max(1, rows
    / columns), with learning rates around 0.02."""
    newton_schulz_dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype in which matrices are orthogonalized and sent between ranks. bf16 is the dtype of all published results.
    fp32 doubles the traffic, but results hardly depend on the layout."""

    def exchange_dtype(self, master: torch.dtype) -> torch.dtype:
        """Return `newton_schulz_dtype`, or float64 for float64 masters."""
        from megafp8.numerics.dtypes import state_dtype

        return state_dtype(self.newton_schulz_dtype, master)

    @property
    def decay_rates(self) -> Mapping[str, float]:
        """Decay rate of the momentum, by config key."""
        return {"optimizer.muon.momentum": self.momentum}

    def accumulate(
        self, momentum_n: Tensor, gradient_n: Tensor, direction_n: Tensor | None, skip: Tensor | None
    ) -> None:
        """Update the momentum in place, and write the (Nesterov) momentum to `direction_n`."""
        if gradient_n.is_cuda and gradient_n.itemsize == 4:
            from megafp8.kernels import momentum  # needs Triton, which comes with torch's CUDA builds

            momentum.accumulate(momentum_n, gradient_n, direction_n, self.momentum, nesterov=self.nesterov, skip=skip)
            return
        average_n = momentum_n.to(gradient_n)
        if skip is None or not skip:
            average_n = average_n.lerp(gradient_n, 1 - self.momentum)
            momentum_n.copy_(average_n)
        if direction_n is not None:
            direction_n.copy_(gradient_n.lerp(average_n, self.momentum) if self.nesterov else average_n)

    def transform(self, x_bnm: Tensor) -> Tensor:
        """Orthogonalize each matrix."""
        if takes_gram_matrices(x_bnm):
            return gram_newton_schulz(x_bnm)
        import torch

        return torch.stack([newton_schulz(x) for x in x_bnm])

    def scale(self, shape: Shape) -> float:
        """Return the scale of the update of a matrix of `shape`."""
        rows, columns = shape
        if self.scaling == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))

    def flops(self, shape: Shape) -> int:
        """Return the FLOPs of `gram_newton_schulz`, which computes only half of each symmetric product."""
        short, long = sorted(shape)
        products = sum(4 * count - 3 for count in SPANS)  # products of Gram matrices
        return short * short * (3 * len(SPANS) * long + products * short)

    def hidden_learning_rate_scale(self, learning_rate: float, width: float) -> float:
        """Return the factor of `learning_rate` for matrices.

        The spectral norm of updates grows with the root of the width with match_rms_adamw, and does not grow with the
        original scale.
        """
        relative = 1.0 if self.learning_rate is None else self.learning_rate / learning_rate
        return relative / math.sqrt(width) if self.scaling == "match_rms_adamw" else relative


def newton_schulz(x_nm: Tensor) -> Tensor:
    """Return approximately U Vᵀ of x = U S Vᵀ, in the dtype of x.

    Singular values above 0.003 times the norm of x, which are most of them, become values between 0.68 and 1.21.
    """
    a, b, c = COEFFICIENTS
    tall = x_nm.shape[0] > x_nm.shape[1]
    x = x_nm.mT if tall else x_nm
    x = x / x.norm().clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = x.addmm(gram.addmm(gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def takes_gram_matrices(x_bnm: Tensor) -> bool:
    """Return whether `gram_newton_schulz` runs: its kernels need a GPU, and its precision is chosen for bf16."""
    import torch

    if not x_bnm.is_cuda or x_bnm.dtype != torch.bfloat16:
        return False
    from megafp8.kernels.products import ALIGNMENT  # needs Triton, which comes with torch's CUDA builds

    return not any(side % ALIGNMENT for side in x_bnm.shape[1:])


def gram_newton_schulz(x_bnm: Tensor) -> Tensor:
    """Compute `newton_schulz` of each matrix with polynomials of Gram matrices.

    An iteration is X ← Q X, where Q = a I + b A + c A² is a polynomial of A = X Xᵀ. So the next A is Q A Q, and several
    iterations are one product of X with the product of their Q. All these factors are symmetric and have the size of
    the shorter side, and only half of each is computed. With sides s < l, a matrix takes these multiply-adds:

        iterations one by one       5 · (2 s² l + s³)
        all at once                 1.5 s² l + 8.5 s³
        here, three and then two    3 s² l + 7 s³

    *Precision.* Eigenvalues of A are squares of singular values. Rounding moves small eigenvalues by a fraction of the
    largest, even below zero. From there they grow twelvefold (a²) with each iteration, like all small eigenvalues,
    until the result is useless. So all five iterations at once would fail, even in fp16. After three iterations, X is
    computed, in which small singular values are forty times as large, and A is computed again. A is fp16, which has
    three more bits than bf16. It is scaled by a power of two, because the range of fp16 is smaller: eigenvalues of a
    random matrix are 1 / s at first. Errors are between 0.25 and 1.1 times the errors of `newton_schulz` in bf16
    (tests/kernels/test_products.py).
    """
    import torch

    from megafp8.kernels.products import product

    a, b, c = COEFFICIENTS
    n, m = x_bnm.shape[1:]
    tall, dtype = n > m, x_bnm.dtype
    inverse_b = torch.linalg.vector_norm(x_bnm, dim=(1, 2), dtype=torch.float32).clamp(min=EPS).reciprocal()
    norms: list[tuple[Tensor | None, Tensor | None]] = [(inverse_b.square(), inverse_b), (None, None)]
    product_of = partial(product, out_dtype=torch.float16 if dtype == torch.bfloat16 else dtype, symmetric=True)
    scale_of = [2.0 ** max(0, round(math.log2(min(n, m) / a ** (2 * i)))) for i in range(ITERATIONS)]

    def polynomial(gram: Tensor, scale: float) -> Tensor:
        return product_of(gram, gram, alpha=c / scale**2, addend=gram, beta=b / scale, gamma=a)

    x, end = x_bnm, 0
    for count, (gram_norm_b, norm_b) in zip(SPANS, norms, strict=True):
        start, end = end, end + count
        gram = product_of(x, x, a_columns=tall, b_columns=tall, alpha=scale_of[start], scale_b=gram_norm_b)
        total = q = polynomial(gram, scale_of[start])
        for i in range(start + 1, end):
            gram = product_of(product_of(gram, q), q, alpha=scale_of[i] / scale_of[i - 1])
            q = polynomial(gram, scale_of[i])
            last: dict[str, Any] = {"out_dtype": dtype, "scale_b": norm_b} if i == end - 1 else {}
            total = product_of(q, total, **last)
        if min(n, m) >= LARGE:
            factors = (x, total) if tall else (total, x)
            x = torch.empty_like(x)
            for *pair, result in zip(*factors, x):
                torch.mm(*pair, out=result)
        else:
            x = product(x, total, dtype) if tall else product(total, x, dtype, b_columns=True)
    return x
