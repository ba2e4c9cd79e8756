"""MXFP8: one power of two for each block of 32 neighbours (OCP microscaling formats 1.0).

Only Blackwell's tensor cores multiply such matrices, and megafp8 does not use them: the cast multiplies by the scales,
and GEMMs are in bf16 (`megafp8.numerics.tensor`). scale_inv is one byte, E8M0: the byte e stands for
2^(e-127), there is no sign and no zero, and 255 is NaN.

The scale is that of NVIDIA's recipe (Mishra et al. 2025, "Recipes for Pre-training LLMs with MXFP8", arXiv:2506.08027;
Transformer Engine's `float_to_e8m0(amax / 448)`): the exponent of amax / 448 rounded **up**, as Blackwell's own
conversion does (PTX `cvt.rp.satfinite.ue8m0x2`). A block's largest value is scaled into (224, 448], and nothing
saturates. OCP MX 1.0 (section 6.3) suggests floor(log2 amax) - 8 instead, which scales up to 512, clips what is above
448, and trains worse according to that paper.

Edges. A block of zeros has byte 0. So has a block whose amax is 448·2^-127 or less: its values are multiplied by 2^127
like any others, so they keep what precision they have. A block with an infinity or a NaN has byte 254, the largest: the
infinity becomes 448·2^127, which is infinite again in fp32, the NaN stays a NaN, and their finite neighbours vanish.

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
    """The byte of the smallest power of two that is not below `value`: fp32, not negative, to uint8 of that shape.

    0 and whatever is below 2^-127 give 0, an infinity and whatever is above 2^127 give 254, NaN gives 255.
    """
    assert value.dtype == torch.float32
    bits = value.view(torch.int32)
    byte = ((bits + _MANTISSA) >> 23).clamp(max=_LARGEST_BYTE)  # the exponent, one more if any mantissa bit is set
    byte = torch.where(bits <= _SMALLEST, 0, byte)
    return torch.where(value.isnan(), _NAN_BYTE, byte).to(torch.uint8)


def e8m0_decode(byte: Tensor) -> Tensor:
    """2^(byte-127), exactly: uint8 to fp32 of that shape. 0 gives a subnormal, 255 gives NaN."""
    return byte.view(torch.float8_e8m0fnu).float()


def quantize_mxfp8(x_rc: Tensor, fmt: Format = E4M3) -> ScaledTensor:
    """Cast x `[r, c]`, any float dtype, by one power of two for 32 neighbours in a row."""
    largest = block_amax(x_rc, BLOCK_1X32)
    # Tensor by tensor: CUDA divides by a number as a product with its reciprocal, which rounds twice.
    byte = e8m0_encode(largest / torch.full_like(largest, fmt.max))
    scale = e8m0_decode(_LARGEST_BYTE - byte)
    data = quantize(x_rc, expand(scale, BLOCK_1X32, *x_rc.shape), fmt)
    return ScaledTensor(data, e8m0_decode(byte), BLOCK_1X32)


def cast_mxfp8(source: MatrixSource, fmt: Format, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
    """Cast the rows, and the columns, and dequantize both."""
    cast = partial(quantize_mxfp8, fmt=fmt)
    return QuantizedTensor.cast_both(source.values(), cast, rowwise=rowwise, columnwise=columnwise).dequantized()


@dataclass(frozen=True, kw_only=True)
class MXFP8Scaling(Fp8Recipe):
    """A power of two for each 32 neighbours, rounded up as in NVIDIA's recipe (arXiv:2506.08027): nothing saturates."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        granularity=PerOperand(BLOCK_1X32, BLOCK_1X32, BLOCK_1X32), shard_alignment=32, row_multiple=32
    )

    fp8_format: Literal["hybrid", "e4m3"] = format_option("e4m3")

    def bound_cast(self, tensor: Fp8Tensor, device: torch.device) -> Cast:
        return partial(implementation(cast_mxfp8, device, "fine_blocks"), fmt=self.format_of(tensor.operand))
