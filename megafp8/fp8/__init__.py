"""FP8 training of PyTorch models: conversion, `autocast`, FP8 weights, recipes, and the manager of all FP8 state."""

from megafp8.fp8.autocast import autocast
from megafp8.fp8.convert import convert, end_step, load_state_dict, state_dict
from megafp8.fp8.manager import ContextGroups, Fp8Manager
from megafp8.fp8.model_init import model_init
from megafp8.fp8.weight import Fp8Weight
from megafp8.gemm.describe import describe_path
from megafp8.numerics.formats import E4M3, E5M2, Format
from megafp8.numerics.recipes import (
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

__all__ = [
    "E4M3",
    "E5M2",
    "RECIPES",
    "BlockwiseScaling",
    "ContextGroups",
    "CurrentScaling",
    "CustomScaling",
    "DelayedScaling",
    "Format",
    "Fp8Manager",
    "Fp8Recipe",
    "Fp8Weight",
    "MXFP8Scaling",
    "NVFP4Scaling",
    "RowwiseScaling",
    "Rule",
    "StaticScaling",
    "autocast",
    "convert",
    "describe_path",
    "end_step",
    "load_state_dict",
    "model_init",
    "state_dict",
]
