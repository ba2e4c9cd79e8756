"""Blockwise scaling: one scale for 128 neighbours of x and dy, and for 128×128 elements of w (DeepSeek-V3,
arXiv:2412.19437).

An outlier costs its block and no other (compare `megafp8.numerics.recipes.rowwise`). Squares serve weights: their
blocks are those of their transpose, so columnwise is rowwise transposed. Gradients never use them, which is known to
diverge. Matrices that 128 does not divide have smaller blocks at the edges.
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
    """Cast by blocks of 128 neighbours in a row, of the matrix and of its transpose."""
    return _cast(source, fmt, BLOCK_1X128, rowwise, columnwise, power_of_two, eps)


def cast_128x128(
    source: MatrixSource, fmt: Format, *, rowwise: bool, columnwise: bool, power_of_two: bool, eps: float
) -> QuantizedTensor:
    """Cast by square blocks: columnwise is the transpose of rowwise, scales and data."""
    return _cast(source, fmt, BLOCK_128X128, rowwise, columnwise, power_of_two, eps)


def _cast(
    source: MatrixSource, fmt: Format, granularity: Granularity, rowwise: bool, columnwise: bool, power_of_two: bool,
    eps: float,
) -> QuantizedTensor:  # fmt: skip
    cast = partial(quantize_blocks, fmt=fmt, granularity=granularity, power_of_two=power_of_two, eps=eps)
    return QuantizedTensor.cast_both(source.values(), cast, rowwise=rowwise, columnwise=columnwise)


@dataclass(frozen=True, kw_only=True)
class BlockwiseScaling(AmaxOptions):
    """One scale for each 128 neighbours of x and dy, and for each 128×128 elements of w.

    Scales are powers of two unless said otherwise. Hopper's block-scaled GEMMs always promote their sums to fp32, so
    there is no `use_fast_accum`.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        granularity=PerOperand(input=BLOCK_1X128, weight=BLOCK_128X128, grad_output=BLOCK_1X128), shard_alignment=128
    )

    fp8_format: Literal["hybrid", "e4m3"] = format_option("e4m3")
    power_of_two: bool = option(True, key="power_of_two_scale")

    def bound_cast(self, tensor: Fp8Tensor, device: torch.device) -> Cast:
        cast = implementation(cast_128x128 if tensor.operand == "weight" else cast_1x128, device)
        fmt = self.format_of(tensor.operand)
        return partial(cast, fmt=fmt, power_of_two=self.power_of_two, eps=self.amax_epsilon)
