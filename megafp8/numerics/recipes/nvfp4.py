"""NVFP4: four-bit values under two levels of scales (NVIDIA 2025, arXiv:2509.25149).

E2M1 has eight magnitudes, so 16 neighbours share a block scale. That is itself only E4M3, so the tensor has one more,
in fp32, which puts the largest block scale at E4M3's maximum. With S = 448·6 / amax of the tensor:

    block scale b = E4M3(amax of the block · S / 6)        value = E2M1(x · S / b)        x ≈ value · b / S

S / 6 and S / b are computed first, and multiply in fp32, as in the paper.

A matrix has b as its scale_inv, and 1 / S as its `tensor_scale_inv`. Only Blackwell's tensor cores multiply such
matrices, and megafp8 does not use them: the cast multiplies by b, which bf16 holds exactly, and GEMMs in bf16 multiply
their sums by 1 / S (`megafp8.numerics.tensor`).

Three measures keep training stable at four bits, each where it helps:
  squares of 16×16 on weights, whose forward and backward casts then are transposes of each other, so that the gradient
    belongs to the function that was computed;
  a 16-point Hadamard transform of both operands of wgrad along the dim that is summed: it spreads an outlier over its
    block, and leaves the product as it was because the transform is orthogonal (sums of 16 are cast, and 1 / S has
    the factor of 1/4);
  stochastic rounding of gradients, which is right on average where rounding to nearest loses small values every time.

What is given up: b is rounded to nearest, so the largest values of a block may lie up to 1/16 beyond 6 (further where b
is subnormal) and saturate, under stochastic rounding too, which is unbiased within ±6.

Edges. A tensor of zeros, or one that is not finite, has S = 1; S is at most 2^118, so that S / b is finite. A block
whose scale rounds to zero (about 459,000 times smaller than the tensor's amax) is zeros. A block with an infinity or a
NaN has the largest scale, 448: infinities saturate, and a NaN stays a NaN. Hardware's E2M1 cannot hold one, E4M3 can,
and a broken step should show.

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
    """The value of E2M1 for each of x: fp32 to fp32 of that shape, saturating at ±6; NaN stays NaN.

    To nearest, ties to the even mantissa. With `noise`, uniform multiples of 2^-16 in [0, 1): down to a value, or up
    where the noise and the fraction of the step that x has gone make 1 or more, so that the mean is x. Their sum is
    rounded to 2^-16, ties to even: values stay what they are, and what lies between is right to 2^-17 of a step.
    """
    clamped = x.clamp(-E2M1.max, E2M1.max)
    magnitude = clamped.abs()
    step = torch.full_like(x, 0.5).masked_fill_(magnitude >= 2, 1.0).masked_fill_(magnitude >= 4, 2.0)
    steps = (clamped / step).double()  # exact; a value's count is even where its last bit is 0
    whole = steps.round() if noise is None else (((steps + noise) * 2**16).round() * 2.0**-16).floor()
    return (whole.float() * step).copysign(x)


def hadamard_sums(x_rc: Tensor) -> Tensor:
    """Four times the orthogonal Hadamard transform of every 16 neighbours in a row: any float dtype to fp32 `[r, c]`.

    A tail shorter than 16 is multiplied by four only. Sums are taken in pairs, in an order that is the same everywhere.
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
    """x `[r, c]`, any float dtype, to E2M1 values `[r, c]` held in E4M3, scale_inv b, and 1 / S.

    `whole_amax`: the amax, fp32 `[]`, of the tensor that x is a shard of; by default x is all of it. `weight`: blocks
    of 16×16 instead of 1×16. `stochastic`: round stochastically, with this noise.
    """
    x_rc = x_rc.float()
    r, c = x_rc.shape
    granularity = BLOCK_16X16 if weight else BLOCK_1X16
    tensor_scale = scale_from_amax(amax(x_rc) if whole_amax is None else whole_amax, E4M3.max * E2M1.max)
    tensor_scale = tensor_scale.clamp(max=_GREATEST_SCALE)
    # Tensor by tensor: CUDA divides by a number as a product with its reciprocal, which rounds twice.
    sixth = tensor_scale / torch.full_like(tensor_scale, E2M1.max)
    block = block_amax(x_rc, granularity) * sixth
    block = quantize(block, torch.ones_like(block), E4M3).float()
    factor = torch.where(block == 0, 0.0, block.reciprocal() * tensor_scale)
    values = x_rc * expand(factor, granularity, r, c)
    values = round_to_e2m1(values, None if stochastic is None else uniform(r, c, stochastic))
    return ScaledTensor(values.to(E2M1.dtype), block, granularity, tensor_scale.reciprocal())


def nvfp4_amaxes(source: MatrixSource, *, transformed: bool) -> Tensor:
    """Amaxes, fp32 `[2]`: of the source, and if `transformed` of the `hadamard_sums` of its columns, else 0."""
    x_rc = source.values()
    row_amaxes = amax(x_rc)
    if not transformed:
        return torch.stack([row_amaxes, torch.zeros_like(row_amaxes)])
    return torch.stack([row_amaxes, amax(hadamard_sums(x_rc.t().contiguous()))])


def cast_nvfp4(
    source: MatrixSource, amaxes: Tensor, noise: TensorNoise | None, *, weight: bool, rowwise: bool, columnwise: bool
) -> QuantizedTensor:
    """Cast the rows, and the columns, and dequantize both. A zero may have either sign.

    Columns of an input or a gradient are transformed; those of a weight are a view of its rows.

    Args:
        source: The matrix.
        amaxes: `nvfp4_amaxes` of the tensor that the source is all or a shard of.
        noise: Noise for stochastic rounding; None rounds to nearest.
        weight: Whether the source is a weight, with blocks of 16×16.
        rowwise: Return the rows.
        columnwise: Return the columns.
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
    """Casts under one scale for the whole tensor, of which ranks may hold shards.

    `noise`: round stochastically; its micro-batches are counted while `recording`.
    """

    noise: TensorNoise | None
    recording: bool = True

    def __post_init__(self) -> None:
        self._amaxes = implementation(nvfp4_amaxes, self.device, "fine_blocks")
        self._cast_nvfp4 = implementation(cast_nvfp4, self.device, "fine_blocks")

    def __call__(self, source: MatrixSource, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        weight = self.tensor.operand == "weight"
        amaxes = all_reduce(self._amaxes(source, transformed=columnwise and not weight), self.tensor.group, "max")
        made = self._cast_nvfp4(source, amaxes, self.noise, weight=weight, rowwise=rowwise, columnwise=columnwise)
        self.skip()
        return made

    def skip(self) -> None:
        if self.noise is not None and self.recording:
            self.noise.advance()


@dataclass(frozen=True, kw_only=True)
class NVFP4Scaling(Fp8Recipe):
    """Four bits, a scale for each 16 neighbours and for each 16×16 weights, under one for the tensor.

    Output gradients are rounded stochastically, and both operands of wgrad are Hadamard transforms.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        granularity=PerOperand(input=BLOCK_1X16, weight=BLOCK_16X16, grad_output=BLOCK_1X16),
        shard_alignment=None,  # noise and tensor scale are those of the whole
        cast_passes=2,
        row_multiple=128,
    )

    fp8_format: Literal["hybrid", "e4m3"] = option(
        "e4m3", "'e4m3', which holds its four-bit values", lambda value: value == "e4m3", key="format"
    )

    def build(self, tensors: Sequence[Fp8Tensor], device: torch.device, clock: NoiseClock) -> Built:
        noise = {t: clock.tensor(t.name, t.group) if t.operand == "grad_output" else None for t in tensors}
        return Built({t.name: NVFP4Quantizer(self, t, device, noise[t]) for t in tensors}, clock)
