"""Names of the FP8 recipes, in a file that imports no torch, since the config needs them before torch is loaded."""

from typing import Literal

RecipeName = Literal["delayed", "current", "rowwise", "blockwise", "static", "mxfp8", "nvfp4"]
"""Recipes of one operand. Each name is also the name of a file in `megafp8/numerics/recipes/`, which defines it."""
