"""Blockwise scaling: one scale for 128 neighbors of x and dy, and for 128×128 elements of w (arXiv:2412.19437).

DeepSeek-V3 introduced this recipe. An outlier affects only its block (compare `megafp8.numerics.recipes.rowwise`).
Weights have square blocks: a square block is also a block of the transpose, so columnwise data is rowwise data
transposed. Gradients never have square blocks, because training is known to diverge with them. If the size of a matrix
is not a multiple of 128, the blocks at the edges are smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch

from megafp8.numerics.formats import Format
from megafp8.numerics.quantize import quantize_blocks
from megafp8.numerics.quantizers import Cast, implementation
from megafp8.numerics.recipes.base import AmaxOptions, Capabilities, Fp8Tensor, PerOperand, format_option, option
from megafp8.numerics.sources import MatrixSource
from megafp8.numerics.tensor import BLOCK_1X128, BLOCK_128X128, Granularity, QuantizedTensor


def cast_1x128(
    source: MatrixSource, fmt: Format, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float
) -> QuantizedTensor:
    """Cast the matrix and its transpose with one scale for each 128 neighbors in a row."""
    return _cast(source, fmt, BLOCK_1X128, rowwise, columnwise, power_of_two, eps)


def cast_128x128(
    source: MatrixSource, fmt: Format, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float
) -> QuantizedTensor:
    """Cast with one scale for each square block. Columnwise data and scales are the transpose of rowwise ones."""
    return _cast(source, fmt, BLOCK_128X128, rowwise, columnwise, power_of_two, eps)


def _cast(
    source: MatrixSource, fmt: Format, granularity: Granularity, rowwise: bool, columnwise: bool, power_of_two: bool,
    eps: float,
) -> QuantizedTensor:  # fmt: skip
    cast = partial(quantize_blocks, fmt=fmt, granularity=granularity, power_of_two=power_of_two, eps=eps)
    return QuantizedTensor.cast_both(source.values(), cast, rowwise=rowwise, columnwise=columnwise)


@dataclass(frozen=True, kw_only=True)
class BlockwiseScaling(AmaxOptions):
    """Recipe with one scale for each 128 neighbors of x and dy, and for each 128×128 elements of w.

    Scales are powers of two by default. Hopper's block-scaled GEMMs always promote their sums to fp32, so there is no
    option `use_fast_accum`.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        granularity=PerOperand(input=BLOCK_1X128, weight=BLOCK_128X128, grad_output=BLOCK_1X128), shard_alignment=128
    )

    fp8_format: Literal["hybrid", "e4m3"] = format_option("e4m3")
    power_of_two: bool = option(True, key="power_of_two_scale")

    def bound_cast(self, tensor: Fp8Tensor, device: torch.device) -> Cast:
        """Return the cast of `tensor` on `device`."""
        cast = implementation(cast_128x128 if tensor.operand == "weight" else cast_1x128, device)
        fmt = self.format_of(tensor.operand)
        return partial(cast, fmt=fmt, power_of_two=self.power_of_two, eps=self.amax_epsilon)
