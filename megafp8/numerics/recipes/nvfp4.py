"""NVFP4: four-bit values with two levels of scales (NVIDIA 2025, arXiv:2509.25149).

E2M1 has eight magnitudes, so only 16 neighbors share a block scale. The block scale is stored in E4M3, so the tensor
has an additional fp32 scale, which maps the largest block scale to E4M3's maximum. With S = 448·6 / amax of the tensor:

    block scale b = E4M3(amax of the block · S / 6)        value = E2M1(x · S / b)        x ≈ value · b / S

S / 6 and S / b are computed first and multiplied in fp32, as in the paper.

A quantized matrix has b as its scale_inv, and 1 / S as its `tensor_scale_inv`. Only Blackwell's tensor cores multiply
such matrices, and megafp8 does not use them: the cast multiplies the values by b, which is exact in bf16, and bf16
GEMMs multiply their results by 1 / S (`megafp8.numerics.tensor`).

Three measures keep training stable with four bits:

- Weights have blocks of 16×16. Their forward and backward casts are then transposes of each other, so the gradient
  belongs to the function that was computed.
- Both operands of wgrad pass a 16-point Hadamard transform along the summed dim. It spreads an outlier over its block,
  and does not change the product because it is orthogonal. (The sums of 16 are cast, and 1 / S includes the factor
  1/4.)
- Gradients are rounded stochastically, which is correct on average. Rounding to nearest would lose small values every
  time.

Limit: b is rounded to nearest, so the largest values of a block may exceed 6 by up to 1/16 (or more if b is subnormal)
and saturate. This also happens with stochastic rounding, which is unbiased only within ±6.

Edge cases: A tensor of zeros, or a tensor that is not finite, has S = 1. S is at most 2^118, so that S / b is finite. A
block is set to zeros if its scale rounds to zero, which happens if its amax is about 459,000 times smaller than the
tensor's amax. A block with an infinity or a NaN has the largest scale, 448: infinities saturate, and a NaN stays a NaN.
The hardware's E2M1 cannot represent a NaN, but E4M3 can, and a broken step should be visible.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megafp8.numerics.formats import E2M1, E4M3
from megafp8.numerics.quantize import amax, block_amax, quantize, scale_from_amax
from megafp8.numerics.quantizers import implementation
from megafp8.numerics.recipes.base import Built, Capabilities, Fp8Recipe, Fp8Tensor, PerOperand, RecipeQuantizer, option
from megafp8.numerics.sources import MatrixSource
from megafp8.numerics.stochastic_rounding import CastNoise, NoiseClock, TensorNoise, uniform
from megafp8.numerics.tensor import BLOCK_1X16, BLOCK_16X16, QuantizedTensor, ScaledTensor, expand
from megafp8.parallel.collectives import all_reduce

_POINTS = 16
_GREATEST_SCALE = 2.0**118


def round_to_e2m1(x: Tensor, noise: Tensor | None = None) -> Tensor:
    """Round x, fp32 of any shape, to values of E2M1, saturating at ±6. NaN stays NaN.

    Without noise, round to nearest, ties to the even mantissa. With `noise`, uniform multiples of 2^-16 in [0, 1),
    round stochastically: x lies between two values at a fraction of the step between them, and is rounded up if
    fraction plus noise is at least 1, so that the mean is x. Fraction plus noise is rounded to 2^-16, ties to even.
    Exact values therefore do not change, and the mean of others is correct within 2^-17 of a step.
    """
    clamped = x.clamp(-E2M1.max, E2M1.max)
    magnitude = clamped.abs()
    step = torch.full_like(x, 0.5).masked_fill_(magnitude >= 2, 1.0).masked_fill_(magnitude >= 4, 2.0)
    steps = (clamped / step).double()  # exact; the number of steps is even if the last mantissa bit is 0
    whole = steps.round() if noise is None else (((steps + noise) * 2**16).round() * 2.0**-16).floor()
    return (whole.float() * step).copysign(x)


def hadamard_sums(x_rc: Tensor) -> Tensor:
    """Return four times the orthogonal Hadamard transform of every 16 neighbors in a row, fp32 `[r, c]`.

    x has any float dtype. A tail shorter than 16 is multiplied by four without a transform. Sums are computed pairwise
    in a fixed order, so that all implementations agree.
    """
    r, c = x_rc.shape
    whole = c - c % _POINTS
    y = x_rc[:, :whole].float()
    distance = 1
    while distance < _POINTS:
        a, b = y.view(r, whole // (2 * distance), 2, distance).unbind(2)
        y = torch.stack([a + b, a - b], dim=2).view(r, whole)
        distance *= 2
    return torch.cat([y, x_rc[:, whole:].float() * _POINTS**0.5], dim=1)


def quantize_nvfp4(
    x_rc: Tensor, whole_amax: Tensor | None = None, *, weight: bool, stochastic: CastNoise | None
) -> ScaledTensor:
    """Quantize x to E2M1 values stored in E4M3, with block scales b and the tensor's scale S.

    Args:
        x_rc: Matrix `[r, c]` of any float dtype.
        whole_amax: Amax of the whole tensor, fp32 `[]`, if x is a shard. Default: the amax of x.
        weight: Whether blocks are 16×16 instead of 1×16.
        stochastic: Noise for stochastic rounding, or None for rounding to nearest.

    Returns:
        Values `[r, c]`, with b as scale_inv and 1 / S as tensor_scale_inv.
    """
    x_rc = x_rc.float()
    r, c = x_rc.shape
    granularity = BLOCK_16X16 if weight else BLOCK_1X16
    tensor_scale = scale_from_amax(amax(x_rc) if whole_amax is None else whole_amax, E4M3.max * E2M1.max)
    tensor_scale = tensor_scale.clamp(max=_GREATEST_SCALE)
    # Divide tensors: CUDA divides by a number as a product with its reciprocal, which rounds twice.
    sixth = tensor_scale / torch.full_like(tensor_scale, E2M1.max)
    block = block_amax(x_rc, granularity) * sixth
    block = quantize(block, torch.ones_like(block), E4M3).float()
    factor = torch.where(block == 0, 0.0, block.reciprocal() * tensor_scale)
    values = x_rc * expand(factor, granularity, r, c)
    values = round_to_e2m1(values, None if stochastic is None else uniform(r, c, stochastic))
    return ScaledTensor(values.to(E2M1.dtype), block, granularity, tensor_scale.reciprocal())


def nvfp4_amaxes(source: MatrixSource, *, transformed: bool) -> Tensor:
    """Return two amaxes, fp32 `[2]`: of the source, and of its columns' `hadamard_sums` (0 if not `transformed`)."""
    x_rc = source.values()
    row_amaxes = amax(x_rc)
    if not transformed:
        return torch.stack([row_amaxes, torch.zeros_like(row_amaxes)])
    return torch.stack([row_amaxes, amax(hadamard_sums(x_rc.t().contiguous()))])


def cast_nvfp4(
    source: MatrixSource, amaxes: Tensor, noise: TensorNoise | None, *, weight: bool, rowwise: bool, columnwise: bool
) -> QuantizedTensor:
    """Cast rows and columns, and dequantize both. A zero may have either sign.

    Columns of an input or a gradient pass the Hadamard transform. Columns of a weight are a view of its rows.

    Args:
        source: Matrix to cast.
        amaxes: `nvfp4_amaxes` of the whole tensor; the source may be a shard of it.
        noise: Noise for stochastic rounding, or None for rounding to nearest.
        weight: Whether the source is a weight, with blocks of 16×16.
        rowwise: Whether to return rowwise data.
        columnwise: Whether to return columnwise data.
    """
    x_rc, cast = source.values(), partial(quantize_nvfp4, weight=weight)
    row_noise, column_noise = (None, None) if noise is None else (noise.rowwise, noise.columnwise)
    by_rows = cast(x_rc, amaxes[0], stochastic=row_noise) if rowwise or weight else None
    if weight:
        dequantized = QuantizedTensor(by_rows, None).dequantized().required_rowwise
        transposed = dequantized._replace(data=dequantized.data.t())
        return QuantizedTensor(dequantized if rowwise else None, transposed if columnwise else None)
    by_columns = None
    if columnwise:
        sums = cast(hadamard_sums(x_rc.t().contiguous()), amaxes[1], stochastic=column_noise)
        assert sums.tensor_scale_inv is not None
        by_columns = sums._replace(tensor_scale_inv=sums.tensor_scale_inv * _POINTS**-0.5)
    return QuantizedTensor(by_rows, by_columns).dequantized()


@dataclass(eq=False)
class NVFP4Quantizer(RecipeQuantizer):
    """Quantizer of the NVFP4 recipe. Ranks that hold shards of a tensor use one tensor scale.

    If `noise` is not None, values are rounded stochastically, and micro-batches are counted while `recording`.
    """

    noise: TensorNoise | None
    recording: bool = True

    def __post_init__(self) -> None:
        self._amaxes = implementation(nvfp4_amaxes, self.device, "fine_blocks")
        self._cast_nvfp4 = implementation(cast_nvfp4, self.device, "fine_blocks")

    def __call__(self, source: MatrixSource, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        """Cast `source` in the given orientations, and count a micro-batch."""
        weight = self.tensor.operand == "weight"
        amaxes = all_reduce(self._amaxes(source, transformed=columnwise and not weight), self.tensor.group, "max")
        made = self._cast_nvfp4(source, amaxes, self.noise, weight=weight, rowwise=rowwise, columnwise=columnwise)
        self.skip()
        return made

    def skip(self) -> None:
        """Count a micro-batch."""
        if self.noise is not None and self.recording:
            self.noise.advance()


@dataclass(frozen=True, kw_only=True)
class NVFP4Scaling(Fp8Recipe):
    """Recipe with four-bit values, a scale for each 16 neighbors (16×16 weights), and a scale for the tensor.

    Output gradients are rounded stochastically, and both operands of wgrad are Hadamard-transformed.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        granularity=PerOperand(input=BLOCK_1X16, weight=BLOCK_16X16, grad_output=BLOCK_1X16),
        shard_alignment=None,  # noise and tensor scale belong to the whole tensor
        cast_passes=2,
        row_multiple=128,
    )

    fp8_format: Literal["hybrid", "e4m3"] = option(
        "e4m3", "'e4m3', which holds its four-bit values", lambda value: value == "e4m3", key="format"
    )

    def build(self, tensors: Sequence[Fp8Tensor], device: torch.device, clock: NoiseClock) -> Built:
        """Build the quantizers of `tensors`; their state is the noise clock."""
        noise = {t: clock.tensor(t.name, t.group) if t.operand == "grad_output" else None for t in tensors}
        return Built({t.name: NVFP4Quantizer(self, t, device, noise[t]) for t in tensors}, clock)
