"""MXFP8: blocks of 32 that share a power of two, cast in plain PyTorch (OCP microscaling formats 1.0).

Blackwell's tensor cores multiply such matrices (`megafp8.fp8.gemm.scaled_mm`); elsewhere their product is emulated.
A factor is one byte, E8M0: the code e stands for 2^(e-127), there is no sign and no zero, and 255 is NaN.

The exponent is that of amax / 448 rounded **up**, as Blackwell's own conversion does (PTX `cvt.rp.satfinite.ue8m0x2`):
a block's largest value is scaled into (224, 448], and nothing saturates. The specification suggests the exponent of
amax alone, rounded down, which scales up to 512, clips what is above 448, and trains worse (Mishra et al. 2025,
arXiv:2506.08027).

Edges. A block of zeros has code 0. So has a block whose amax is 448·2^-127 or less: its values are multiplied by 2^127
like any others, so they keep what precision they have. A block with an infinity or a NaN has code 254, the largest: the
infinity becomes 448·2^127, which is infinite again in fp32, the NaN stays a NaN, and their finite neighbours vanish.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.fp8.blocks import block_amax
from megafp8.fp8.formats import E4M3, Format
from megafp8.fp8.quantize import quantize
from megafp8.fp8.tensor import BLOCK_1X32, ScaledTensor, expand

_MANTISSA = 0x7FFFFF  # of fp32
_SMALLEST = 0x400000  # the bits of 2^-127, an fp32 subnormal
_LARGEST_CODE, _NAN_CODE = 254, 255


def e8m0_encode(value: Tensor) -> Tensor:
    """The code of the smallest power of two that is not below `value`: fp32, not negative, to uint8 of that shape.

    0 and whatever is below 2^-127 give 0, an infinity and whatever is above 2^127 give 254, NaN gives 255.
    """
    assert value.dtype == torch.float32
    bits = value.view(torch.int32)
    code = ((bits + _MANTISSA) >> 23).clamp(max=_LARGEST_CODE)  # the exponent, one more if any mantissa bit is set
    code = torch.where(bits <= _SMALLEST, 0, code)
    return torch.where(value.isnan(), _NAN_CODE, code).to(torch.uint8)


def e8m0_decode(code: Tensor) -> Tensor:
    """2^(code-127), exactly: uint8 to fp32 of that shape. 0 gives a subnormal, 255 gives NaN."""
    return code.view(torch.float8_e8m0fnu).float()


def quantize_mxfp8(x_rc: Tensor, fmt: Format = E4M3) -> ScaledTensor:
    """One power of two for 32 neighbours in a row: x `[r, c]`, any float dtype; factors `[r, ⌈c/32⌉]`."""
    largest = block_amax(x_rc, BLOCK_1X32)
    # Tensor by tensor: CUDA divides by a number as a product with its reciprocal, which rounds twice.
    code = e8m0_encode(largest / torch.full_like(largest, fmt.max))
    scale = e8m0_decode(_LARGEST_CODE - code)
    data = quantize(x_rc, expand(scale, BLOCK_1X32, *x_rc.shape), fmt)
    return ScaledTensor(data, e8m0_decode(code), BLOCK_1X32)
