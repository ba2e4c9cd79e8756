"""FP8 linear layers: formats, scaling, casts, GEMMs, and the manager that hands each layer its operation."""

from megafp8.fp8.formats import E4M3, E5M2, Format
from megafp8.fp8.linear import Fp8Linear, GradSlot, InputCast, LinearOp, Quantized, carrier
from megafp8.fp8.manager import Fp8Manager
from megafp8.fp8.recipe import BlockwiseScaling, CurrentScaling, DelayedScaling, Fp8Recipe, RowwiseScaling

__all__ = [
    "E4M3",
    "E5M2",
    "BlockwiseScaling",
    "CurrentScaling",
    "DelayedScaling",
    "Format",
    "Fp8Linear",
    "Fp8Manager",
    "Fp8Recipe",
    "GradSlot",
    "InputCast",
    "LinearOp",
    "Quantized",
    "RowwiseScaling",
    "carrier",
]
