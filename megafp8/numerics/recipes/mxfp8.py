"""MXFP8: one power-of-two scale for each block of 32 neighbors (OCP microscaling formats 1.0).

Only Blackwell's tensor cores multiply such matrices, and megafp8 does not use them: the cast multiplies the values by
the scales, and GEMMs run in bf16 (`megafp8.numerics.tensor`). scale_inv is one byte in the format E8M0: the byte e
means 2^(e-127), without sign or zero, and 255 is NaN.

The scale is computed as in NVIDIA's recipe (Mishra et al. 2025, "Recipes for Pre-training LLMs with MXFP8",
arXiv:2506.08027; `float_to_e8m0(amax / 448)` in Transformer Engine): the exponent of amax / 448 is rounded **up**, like
Blackwell's conversion instruction (PTX `cvt.rp.satfinite.ue8m0x2`). A block's largest value is scaled into (224, 448],
and nothing saturates. OCP MX 1.0 (section 6.3) suggests floor(log2 amax) - 8 instead, which scales up to 512, clips
values above 448, and trains worse according to that paper.

Edge cases: A block of zeros has byte 0, and so does a block with an amax of 448·2^-127 or less. The values of the
latter are multiplied by 2^127 like any others, and keep their precision. A block with an infinity or a NaN has byte
254, the largest: the infinity becomes 448·2^127, which is infinite again in fp32, the NaN stays a NaN, and their finite
neighbors become zero.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megafp8.numerics.formats import E4M3, Format
from megafp8.numerics.quantize import block_amax, quantize
from megafp8.numerics.quantizers import Cast, implementation
from megafp8.numerics.recipes.base import Capabilities, Fp8Recipe, Fp8Tensor, PerOperand, format_option
from megafp8.numerics.sources import MatrixSource
from megafp8.numerics.tensor import BLOCK_1X32, QuantizedTensor, ScaledTensor, expand

_MANTISSA = 0x7FFFFF  # of fp32
_SMALLEST = 0x400000  # the bits of 2^-127, an fp32 subnormal
_LARGEST_BYTE, _NAN_BYTE = 254, 255


def e8m0_encode(value: Tensor) -> Tensor:
    """Return the byte of the smallest power of two that is not below `value`, uint8.

    `value` is fp32 of any shape and not negative. Values below 2^-127, including 0, give the byte 0. Values above
    2^127, including an infinity, give 254. NaN gives 255.
    """
    assert value.dtype == torch.float32
    bits = value.view(torch.int32)
    byte = ((bits + _MANTISSA) >> 23).clamp(max=_LARGEST_BYTE)  # the exponent, one more if any mantissa bit is set
    byte = torch.where(bits <= _SMALLEST, 0, byte)
    return torch.where(value.isnan(), _NAN_BYTE, byte).to(torch.uint8)


def e8m0_decode(byte: Tensor) -> Tensor:
    """Return 2^(byte-127), exact in fp32; byte is uint8 of any shape. 0 gives a subnormal, 255 gives NaN."""
    return byte.view(torch.float8_e8m0fnu).float()


def quantize_mxfp8(x_rc: Tensor, fmt: Format = E4M3) -> ScaledTensor:
    """Cast x, `[r, c]` of any float dtype, with one power-of-two scale for each 32 neighbors in a row."""
    largest = block_amax(x_rc, BLOCK_1X32)
    # Divide tensors: CUDA divides by a number as a product with its reciprocal, which rounds twice.
    byte = e8m0_encode(largest / torch.full_like(largest, fmt.max))
    scale = e8m0_decode(_LARGEST_BYTE - byte)
    data = quantize(x_rc, expand(scale, BLOCK_1X32, *x_rc.shape), fmt)
    return ScaledTensor(data, e8m0_decode(byte), BLOCK_1X32)


def cast_mxfp8(source: MatrixSource, fmt: Format, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
    """Cast rows and columns, and dequantize both."""
    cast = partial(quantize_mxfp8, fmt=fmt)
    return QuantizedTensor.cast_both(source.values(), cast, rowwise=rowwise, columnwise=columnwise).dequantized()


@dataclass(frozen=True, kw_only=True)
class MXFP8Scaling(Fp8Recipe):
    """Recipe with one power-of-two scale for each 32 neighbors, computed as in arXiv:2506.08027: nothing saturates."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        granularity=PerOperand(BLOCK_1X32, BLOCK_1X32, BLOCK_1X32), shard_alignment=32, row_multiple=32
    )

    fp8_format: Literal["hybrid", "e4m3"] = format_option("e4m3")

    def bound_cast(self, tensor: Fp8Tensor, device: torch.device) -> Cast:
        """Return the cast of `tensor` on `device`."""
        return partial(implementation(cast_mxfp8, device, "fine_blocks"), fmt=self.format_of(tensor.operand))
