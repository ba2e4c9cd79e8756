"""Model of the speed of a linear layer in FP8 and in high precision, simple enough to check by hand.

FP8 doubles the speed of a GEMM's arithmetic and pays for it with casts, which read and write whole tensors. Arithmetic
grows as m·k·n, casts as m·k + k·n + m·n, and every kernel costs a few microseconds whatever its size. So FP8 speeds up
large layers and slows down small ones; the model says where:

    GEMM   max(operations / rate, bytes / bandwidth) + launch
    cast   bytes / bandwidth + launch for each of its passes

A layer is its three GEMMs, forward and backward, and in FP8 the casts of x, w and dy. x and dy are cast in every
micro-batch, w once an optimizer step.

What it gives up. Kernels slow down gradually towards small sizes, not at a corner; the chip's power limit,
communication, the host's time and fast accumulation (a few percent) are left out. Casts of rows and blocks do not reach
the bandwidth of a copy, so their layers are predicted too fast by about a tenth. A cast fused with a norm or an
activation is counted as one by itself, so a layer predicted to be slightly slower may be slightly faster.
`megafp8.fp8.speed_measurement` runs the layer instead.

Shapes: m tokens, k inputs, n outputs.
"""

from __future__ import annotations

from typing import NamedTuple

from megafp8.host.gpus import Ceilings
from megafp8.numerics.recipes.base import GEMMS, OPERANDS, Fp8Recipe, OperandName, PerOperand
from megafp8.numerics.tensor import on_hopper


class LinearSize(NamedTuple):
    """`m` tokens of a micro-batch, `k` inputs and `n` outputs of what one rank computes."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"

    @property
    def elements(self) -> dict[OperandName, int]:
        m, k, n = self
        return {"input": m * k, "weight": n * k, "grad_output": m * n}


class LinearSeconds(NamedTuple):
    """Forward and backward of a layer on one micro-batch."""

    high_precision: float
    fp8: float

    @property
    def speedup(self) -> float:
        """How many times as fast FP8 is."""
        return self.high_precision / self.fp8


_RESULT: dict[str, OperandName] = {"fprop": "grad_output", "dgrad": "input", "wgrad": "weight"}  # of the same shape
BF16, FP8, _FP32 = 2, 1, 4
"""Bytes of an element."""


def predict(
    size: LinearSize, recipe: Fp8Recipe, ceilings: Ceilings, *, layer: str = "", micro_batches: int = 1
) -> LinearSeconds:
    """The time of a layer of this size, in bf16 and as `recipe` has `layer`.

    `micro_batches` of an optimizer step share one cast of the weight. ValueError for a recipe whose blocks
    Hopper's tensor cores do not take.
    """
    recipes = recipe.operands(layer)
    assert recipes is not None, f"{layer} is no FP8 layer"
    bf16 = fp8 = 0.0
    copies = dict.fromkeys(OPERANDS, 0)  # FP8 copies of each operand: one for each GEMM that takes it
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
    """The granularities of the two operands of a GEMM, as in `Ceilings.fp8`."""
    if is_dequantized(recipes, operands):
        names = " and ".join(dict.fromkeys(getattr(recipes, operand).name for operand in operands))
        raise ValueError(f"the speed of {names} cannot be predicted: its GEMMs run in bf16")
    return "·".join(getattr(recipes, operand).granularity(operand).name for operand in operands)


def is_dequantized(recipes: PerOperand[Fp8Recipe], operands: tuple[OperandName, ...]) -> bool:
    """Whether Hopper's tensor cores do not take an operand's blocks: then casts dequantize, and GEMMs are in bf16."""
    return not all(on_hopper(getattr(recipes, operand).granularity(operand)) for operand in operands)


def gemm_seconds(size: LinearSize, gemm: str, element: int, rate: float, ceilings: Ceilings) -> float:
    """Seconds of a GEMM whose operands have `element` bytes. wgrad reads and writes the fp32 sum, others write bf16."""
    result = size.elements[_RESULT[gemm]] * (2 * _FP32 if gemm == "wgrad" else BF16)
    moved = result + element * sum(size.elements[operand] for operand in GEMMS[gemm])
    return max(2 * size.m * size.k * size.n / rate, moved / ceilings.bandwidth) + ceilings.launch


def cast_seconds(elements: int, passes: int, copies: int, ceilings: Ceilings, element: int = FP8) -> float:
    """Seconds of a cast that reads bf16 in `passes` kernels, and writes `copies` of `element` bytes an element."""
    return elements * (passes * BF16 + copies * element) / ceilings.bandwidth + passes * ceilings.launch
