"""FP8 recipes and their registry. Each recipe is one file: options, capabilities, quantizers, reference, and state."""

from collections.abc import Collection
from dataclasses import fields

from megafp8.numerics.recipes.base import Fp8Recipe, config_key
from megafp8.numerics.recipes.blockwise import BlockwiseScaling
from megafp8.numerics.recipes.current import CurrentScaling
from megafp8.numerics.recipes.custom import CustomScaling, Rule
from megafp8.numerics.recipes.delayed import DelayedScaling
from megafp8.numerics.recipes.mxfp8 import MXFP8Scaling
from megafp8.numerics.recipes.nvfp4 import NVFP4Scaling
from megafp8.numerics.recipes.rowwise import RowwiseScaling
from megafp8.numerics.recipes.static import StaticScaling
from megafp8.numerics.tensor import TENSOR

RECIPES: dict[str, type[Fp8Recipe]] = {
    recipe.name: recipe
    for recipe in (
        DelayedScaling, CurrentScaling, RowwiseScaling, BlockwiseScaling, StaticScaling, MXFP8Scaling, NVFP4Scaling,
        CustomScaling,
    )
}  # fmt: skip
"""Recipes by their names in configs. Add a new recipe here and in `config/schema.py`, which must not import torch."""


def keys_of(names: Collection[str]) -> set[str]:
    """Return the keys of the config section fp8 that are options of the recipes `names`."""
    return {config_key(option) for name in names for option in fields(RECIPES[name])}


def per_tensor_keys_of(names: Collection[str]) -> set[str]:
    """Return the keys of the config section fp8 that need one scale per weight, if a recipe in `names` has one."""
    scales = [RECIPES[name].capabilities.granularity for name in names if name != CustomScaling.name]
    return {"param_gather"} if any(granularity.weight is TENSOR for granularity in scales) else set()


__all__ = [
    "RECIPES",
    "BlockwiseScaling",
    "CurrentScaling",
    "CustomScaling",
    "DelayedScaling",
    "Fp8Recipe",
    "MXFP8Scaling",
    "NVFP4Scaling",
    "RowwiseScaling",
    "Rule",
    "StaticScaling",
    "keys_of",
    "per_tensor_keys_of",
]
