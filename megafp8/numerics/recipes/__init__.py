"""FP8 recipes and their registry. Each recipe is one file: options, capabilities, quantizers, reference, and state."""

from collections.abc import Collection
from dataclasses import fields
from importlib import import_module
from typing import get_args

from megafp8.numerics.recipe_names import RecipeName
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


def _recipe_class(name: str) -> type[Fp8Recipe]:
    """Return the recipe that the file with this name defines."""
    module = import_module(f"{__name__}.{name}")
    classes = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, Fp8Recipe)]
    return next(recipe for recipe in classes if recipe.__module__ == module.__name__)


RECIPES = {name: _recipe_class(name) for name in (*get_args(RecipeName), "custom")}
"""Recipes by their names in configs. To add one, write its file and add its name to `RecipeName`."""


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
