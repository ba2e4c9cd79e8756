"""`PackedWeight`: a linear layer's weight in a form made for products without gradients.

Quantized to a few bits, or in the order in which a kernel of this processor reads it. `LinearState.packed_weight` has a
layer compute with one (`megafp8.ops.linear.linear`).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PackedWeight(Protocol):
    """A weight w of `shape` `(n, k)`."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def product(self, x_mk: Tensor, bias_n: Tensor | None = None) -> Tensor:
        """`x wᵀ + bias`, `[m, n]` in x's dtype."""
        ...
