"""Muon: the momentum of a matrix, orthogonalized by Newton-Schulz iterations.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces the momentum M = U S Vᵀ of a matrix by about U Vᵀ,
so that all directions of an update are equally large. With μ the momentum's decay, η the learning rate, λ the decay:

    M ← μ M + (1 - μ) G        N = (1 - μ) G + μ M (Nesterov), or M
    W ← (1 - η λ) W - η · scale · newton_schulz(N)

Scale is 0.2 √max(rows, columns), with which updates have the RMS of AdamW's, so that its learning rate and decay serve
Muon too ("match_rms_adamw": Liu et al. 2025, Moonlight, arXiv:2502.16982, equation 4), or √max(1, rows / columns)
("original"). The arithmetic is that of `torch.optim.Muon`. Matrices that are divided over ranks: `matrices`.

On GPUs, in bf16, the same polynomial is computed with fewer products (`gram_newton_schulz`).

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
    import torch
    from torch import Tensor

    from megafp8.parallel.sharding import Shape

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x³ and x⁵, to whose sum each iteration maps a singular value x."""
ITERATIONS = 5
EPS = 1e-7
"""Least norm that a matrix is divided by."""
SPANS = (3, 2)
"""Iterations between which `gram_newton_schulz` computes the matrix itself."""

LARGE = 2048
"""Shorter side of matrices from which cuBLAS multiplies one at a time; its sums may depend on how many there are."""


class Muon(MatrixUpdate):
    """Muon (Jordan et al. 2024), which updates the weights of blocks that are matrices; AdamW updates all others."""

    learning_rate: Annotated[PositiveFloat | None, Field(examples=[4e-4, 2e-2])] = None
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
        from megafp8.numerics.dtypes import state_dtype

        return state_dtype(self.newton_schulz_dtype, master)

    def accumulate(
        self, momentum_n: Tensor, gradient_n: Tensor, direction_n: Tensor | None, skip: Tensor | None
    ) -> None:
        if momentum_n.is_cuda and momentum_n.itemsize == 4:
            from megafp8.kernels import momentum  # needs Triton, which comes with torch's CUDA builds

            momentum.accumulate(momentum_n, gradient_n, direction_n, self.momentum, nesterov=self.nesterov, skip=skip)
            return
        if skip is None or not skip:
            momentum_n.lerp_(gradient_n, 1 - self.momentum)
        if direction_n is not None:
            direction_n.copy_(gradient_n.lerp(momentum_n, self.momentum) if self.nesterov else momentum_n)

    def transform(self, x_bnm: Tensor) -> Tensor:
        if takes_gram_matrices(x_bnm):
            return gram_newton_schulz(x_bnm)
        import torch

        return torch.stack([newton_schulz(x) for x in x_bnm])

    def scale(self, shape: Shape) -> float:
        rows, columns = shape
        if self.scaling == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))

    def flops(self, shape: Shape) -> int:
        """FLOPs of `gram_newton_schulz`; of a symmetric result, those of its half."""
        short, long = sorted(shape)
        products = sum(4 * count - 3 for count in SPANS)  # of polynomials
        return short * short * (3 * len(SPANS) * long + products * short)

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


def takes_gram_matrices(x_bnm: Tensor) -> bool:
    """Whether `gram_newton_schulz` runs: its kernels are for GPUs, its precision is chosen for bf16."""
    import torch

    if not x_bnm.is_cuda or x_bnm.dtype != torch.bfloat16:
        return False
    from megafp8.kernels.products import ALIGNMENT  # needs Triton, which comes with torch's CUDA builds

    return not any(side % ALIGNMENT for side in x_bnm.shape[1:])


def gram_newton_schulz(x_bnm: Tensor) -> Tensor:
    """What `newton_schulz` computes of each matrix, by polynomials of Gram matrices.

    An iteration is X ← Q X, where Q = a I + b A + c A² is a polynomial of A = X Xᵀ. So the next A is Q A Q, and several
    iterations are one product of X with the product of their Q. All of these are symmetric, and as large as the
    shorter side only; half of each is computed. With sides s < l, multiply-adds of a matrix:

        iterations one by one       5 · (2 s² l + s³)
        all at once                 1.5 s² l + 8.5 s³
        here, three and then two    3 s² l + 7 s³

    *Precision.* Eigenvalues of A are squares of singular values, and rounding moves small ones by some part of the
    largest, even below zero. From there they grow twelvefold (a²) with each iteration, like all small ones, until the
    result is without value: all five at once would not do, even in fp16. After three X is computed, with small
    singular values forty times as large, and A anew. A is fp16, which has three bits more than bf16, and is kept times
    a power of two because its range is smaller: eigenvalues of a random matrix are 1 / s at first. Errors are between
    a quarter and 1.1 of those of `newton_schulz` in bf16 (tests/kernels/test_products.py).
    """
    import torch

    from megafp8.kernels.products import product

    a, b, c = COEFFICIENTS
    n, m = x_bnm.shape[1:]
    tall, dtype = n > m, x_bnm.dtype
    inverse_b = torch.linalg.vector_norm(x_bnm, dim=(1, 2), dtype=torch.float32).clamp(min=EPS).reciprocal()
    norms: list[tuple[Tensor | None, Tensor | None]] = [(inverse_b.square(), inverse_b), (None, None)]
    product_of = partial(product, out_dtype=torch.float16 if dtype == torch.bfloat16 else dtype, symmetric=True)
    scale_of = [2.0 ** max(0, round(math.log2(min(n, m) / a ** (2 * i)))) for i in range(ITERATIONS)]  # of A

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
