"""FP8 recipes, one file each: options, capabilities, quantizers, reference casts and state. The registry of all."""

from megafp8.numerics.recipes.base import Fp8Recipe
from megafp8.numerics.recipes.blockwise import BlockwiseScaling
from megafp8.numerics.recipes.current import CurrentScaling
from megafp8.numerics.recipes.custom import CustomScaling, Rule
from megafp8.numerics.recipes.delayed import DelayedScaling
from megafp8.numerics.recipes.mxfp8 import MXFP8Scaling
from megafp8.numerics.recipes.nvfp4 import NVFP4Scaling
from megafp8.numerics.recipes.rowwise import RowwiseScaling
from megafp8.numerics.recipes.static import StaticScaling

RECIPES: dict[str, type[Fp8Recipe]] = {
    recipe.name: recipe
    for recipe in (
        DelayedScaling, CurrentScaling, RowwiseScaling, BlockwiseScaling, StaticScaling, MXFP8Scaling, NVFP4Scaling,
        CustomScaling,
    )
}  # fmt: skip
"""Recipes by their names in configs. A new recipe is entered here and in `config/schema.py`, which imports no torch."""

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
]
