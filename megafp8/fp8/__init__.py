"""FP8 linear layers: formats, recipes, casts, GEMMs, and the manager that gives each layer its operation."""

from megafp8.fp8.convert import autocast, convert, end_step, load_state_dict, state_dict
from megafp8.fp8.formats import E4M3, E5M2, Format
from megafp8.fp8.gemm.describe import describe_path
from megafp8.fp8.manager import ContextGroups, Fp8Manager
from megafp8.fp8.recipes import (
    RECIPES,
    BlockwiseScaling,
    CurrentScaling,
    CustomScaling,
    DelayedScaling,
    Fp8Recipe,
    MXFP8Scaling,
    NVFP4Scaling,
    RowwiseScaling,
    Rule,
    StaticScaling,
)
from megafp8.ops.fusion import Computed, Input, InputCast, Quantized, QuantizedGradHandoff, carrier
from megafp8.ops.linear import Fp8Linear, LinearOp
from megafp8.ops.quantized_gather import TPComm

__all__ = [
    "E4M3",
    "E5M2",
    "RECIPES",
    "BlockwiseScaling",
    "Computed",
    "ContextGroups",
    "CurrentScaling",
    "CustomScaling",
    "DelayedScaling",
    "Format",
    "Fp8Linear",
    "Fp8Manager",
    "Fp8Recipe",
    "Input",
    "InputCast",
    "LinearOp",
    "MXFP8Scaling",
    "NVFP4Scaling",
    "Quantized",
    "QuantizedGradHandoff",
    "RowwiseScaling",
    "Rule",
    "StaticScaling",
    "TPComm",
    "autocast",
    "carrier",
    "convert",
    "describe_path",
    "end_step",
    "load_state_dict",
    "state_dict",
]
