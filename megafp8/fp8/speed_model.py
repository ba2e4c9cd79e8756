"""Model of the speed of a linear layer in FP8 and in high precision, simple enough to check by hand.

FP8 doubles the speed of a GEMM's arithmetic, but needs casts, which read and write whole tensors. The arithmetic grows
as m·k·n, the casts as m·k + k·n + m·n, and every kernel costs a few microseconds whatever its size. FP8 therefore
speeds up large layers and slows down small ones. The model predicts the boundary:

    GEMM   max(operations / rate, bytes / bandwidth) + launch
    cast   bytes / bandwidth + launch for each of its passes

The time of a layer is the time of its three GEMMs, forward and backward, and in FP8 of the casts of x, w and dy. x and
dy are cast in every micro-batch, w once per optimizer step.

The model has limits. Real kernels slow down gradually towards small sizes, not at a sharp corner. The chip's power
limit, communication, host time and fast accumulation (a few percent) are left out. Casts with scales per row or block
do not reach the bandwidth of a copy, so the predictions for these recipes are too fast by about a tenth. A cast that is
fused with a norm or an activation is counted as a separate cast, so a layer that is predicted to be slightly slower may
be slightly faster. `megafp8.fp8.speed_measurement` runs the layer instead.

Shapes: m tokens, k inputs, n outputs.
"""

from __future__ import annotations

from typing import NamedTuple

from megafp8.host.gpus import Ceilings
from megafp8.numerics.recipes.base import GEMMS, OPERANDS, Fp8Recipe, OperandName, PerOperand
from megafp8.numerics.tensor import on_hopper


class LinearSize(NamedTuple):
    """Size of a linear layer on one rank: `m` tokens per micro-batch, `k` inputs, `n` outputs."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"

    @property
    def elements(self) -> dict[OperandName, int]:
        """Number of elements of each operand."""
        m, k, n = self
        return {"input": m * k, "weight": n * k, "grad_output": m * n}


class LinearSeconds(NamedTuple):
    """Seconds of forward and backward of a layer on one micro-batch, in high precision and in FP8."""

    high_precision: float
    fp8: float

    @property
    def speedup(self) -> float:
        """Ratio of the time in high precision to the time in FP8; above 1 if FP8 is faster."""
        return self.high_precision / self.fp8


_RESULT: dict[str, OperandName] = {"fprop": "grad_output", "dgrad": "input", "wgrad": "weight"}  # operand of that shape
BF16, FP8, _FP32 = 2, 1, 4
"""Bytes per element."""


def predict(
    size: LinearSize, recipe: Fp8Recipe, ceilings: Ceilings, *, layer: str = "", micro_batches: int = 1
) -> LinearSeconds:
    """Predict the time of a linear layer in bf16 and in FP8.

    Args:
        size: Size of the layer.
        recipe: Recipe of the FP8 layer.
        ceilings: Rates, bandwidth and launch time of the GPU.
        layer: Name of the layer; recipes may treat layers differently.
        micro_batches: Number of micro-batches per optimizer step. They share one cast of the weight.

    Raises:
        ValueError: Hopper's tensor cores do not support the recipe's blocks.
    """
    recipes = recipe.operands(layer)
    assert recipes is not None, f"{layer} is not an FP8 layer"
    bf16 = fp8 = 0.0
    copies = dict.fromkeys(OPERANDS, 0)  # FP8 copies of each operand: one for each GEMM that reads it
    for (gemm, operands), high in zip(GEMMS.items(), recipe.override_linear_precision, strict=True):
        in_bf16 = gemm_seconds(size, gemm, BF16, ceilings.bf16, ceilings)
        bf16 += in_bf16
        if high:
            fp8 += in_bf16
            continue
        fp8 += gemm_seconds(size, gemm, FP8, ceilings.fp8[granularities(recipes, operands)], ceilings)
        for operand in operands:
            copies[operand] += 1
    for operand, operand_recipe in zip(OPERANDS, recipes, strict=True):
        if copies[operand]:
            cast = cast_seconds(
                size.elements[operand], operand_recipe.capabilities.cast_passes, copies[operand], ceilings
            )
            fp8 += cast / micro_batches if operand == "weight" else cast
    return LinearSeconds(bf16, fp8)


def granularities(recipes: PerOperand[Fp8Recipe], operands: tuple[OperandName, OperandName]) -> str:
    """Return the granularities of the two operands of a GEMM as a key of `Ceilings.fp8`."""
    if is_dequantized(recipes, operands):
        names = " and ".join(dict.fromkeys(getattr(recipes, operand).name for operand in operands))
        raise ValueError(f"the speed of {names} cannot be predicted: its GEMMs run in bf16")
    return "·".join(getattr(recipes, operand).granularity(operand).name for operand in operands)


def is_dequantized(recipes: PerOperand[Fp8Recipe], operands: tuple[OperandName, ...]) -> bool:
    """Return whether casts dequantize and GEMMs run in bf16, because Hopper does not support an operand's blocks."""
    return not all(on_hopper(getattr(recipes, operand).granularity(operand)) for operand in operands)


def gemm_seconds(size: LinearSize, gemm: str, element: int, rate: float, ceilings: Ceilings) -> float:
    """Return the seconds of a GEMM with operands of `element` bytes per element.

    wgrad reads and writes an fp32 sum; the other GEMMs write bf16.
    """
    result = size.elements[_RESULT[gemm]] * (2 * _FP32 if gemm == "wgrad" else BF16)
    moved = result + element * sum(size.elements[operand] for operand in GEMMS[gemm])
    return max(2 * size.m * size.k * size.n / rate, moved / ceilings.bandwidth) + ceilings.launch


def cast_seconds(elements: int, passes: int, copies: int, ceilings: Ceilings, element: int = FP8) -> float:
    """Return the seconds of a cast that reads bf16 in `passes` kernels and writes `copies` copies.

    A copy has `element` bytes per element.
    """
    return elements * (passes * BF16 + copies * element) / ceilings.bandwidth + passes * ceilings.launch
