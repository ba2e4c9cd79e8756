"""FP8 linear layers: formats, scaling, casts, GEMMs, and the manager that hands each layer its operation."""

from megafp8.fp8.formats import E4M3, E5M2, Format
from megafp8.fp8.linear import LinearOp
from megafp8.fp8.manager import Fp8Manager
from megafp8.fp8.recipe import CurrentScaling, DelayedScaling, Fp8Recipe

__all__ = ["E4M3", "E5M2", "CurrentScaling", "DelayedScaling", "Format", "Fp8Manager", "Fp8Recipe", "LinearOp"]
