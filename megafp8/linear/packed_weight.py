"""Weight of a linear layer in a form made for products without gradients (`PackedWeight`).

The weight is quantized to a few bits, or stored in the order in which a kernel of this processor reads it. Setting
`LinearState.packed_weight` makes a layer compute with one (`megafp8.linear.linear.linear`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megafp8.gemm.dispatch import gemm


class PackedWeight(Protocol):
    """Weight w of `shape` `(n, k)`."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows n and columns k of the weight."""
        ...

    def product(self, x_mk: Tensor, bias_n: Tensor | None = None) -> Tensor:
        """Return `x wᵀ + bias`, `[m, n]` in x's dtype."""
        ...


@dataclass(frozen=True)
class VectorWeight:
    """Weight in bf16 on a GPU. `megafp8.kernels.packed_weights` computes its product with one token.

    The kernel reads memory 3 to 20 % faster than cuBLAS does for such products.
    """

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Rows n and columns k of the weight."""
        n, k = self.weight.shape
        return n, k

    def product(self, x_mk: Tensor, bias_n: Tensor | None = None) -> Tensor:
        """Return `x wᵀ + bias`, `[m, n]` in x's dtype."""
        if len(x_mk) > 1:
            return gemm(x_mk, self.weight.t(), x_mk.dtype, bias=bias_n)
        from megafp8.kernels.packed_weights import PackedData, multiply  # needs Triton, which comes with torch for CUDA

        return multiply(x_mk, PackedData("bf16", self.weight, self.shape[1]), bias_n)
