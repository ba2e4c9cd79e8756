"""`PackedWeight`: a linear layer's weight in a form made for products without gradients.

Quantized to a few bits, or in the order in which a kernel of this processor reads it. `LinearState.packed_weight` has a
layer compute with one (`megafp8.linear.linear.linear`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megafp8.gemm.dispatch import gemm


class PackedWeight(Protocol):
    """A weight w of `shape` `(n, k)`."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def product(self, x_mk: Tensor, bias_n: Tensor | None = None) -> Tensor:
        """`x wᵀ + bias`, `[m, n]` in x's dtype."""
        ...


@dataclass(frozen=True)
class VectorWeight:
    """A weight in bf16 on a GPU, whose product with one token is computed by `megafp8.kernels.packed_weights`.

    It reads memory 3 to 20 % faster than cuBLAS does for such products.
    """

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.weight.shape
        return n, k

    def product(self, x_mk: Tensor, bias_n: Tensor | None = None) -> Tensor:
        if len(x_mk) > 1:
            return gemm(x_mk, self.weight.t(), x_mk.dtype, bias=bias_n)
        from megafp8.kernels.packed_weights import PackedData, multiply  # needs Triton, which comes with torch for CUDA

        return multiply(x_mk, PackedData("bf16", self.weight, self.shape[1]), bias_n)
