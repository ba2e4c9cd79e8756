"""`model_init`: context in which modules of `megafp8.nn` are constructed with weights stored only in FP8."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from megafp8.fp8.weight import Fp8WeightFormat
from megafp8.numerics.recipes import DelayedScaling, Fp8Recipe


class ModelInit(NamedTuple):
    """Arguments of a `model_init` context."""

    enabled: bool = False
    recipe: Fp8Recipe | None = None
    preserve_high_precision_init_val: bool = False

    def weight_format(self, layer: str) -> Fp8WeightFormat | None:
        """Return the FP8 format of the weight of `layer`, or None if it is stored in high precision."""
        return Fp8WeightFormat.from_recipe(self.recipe or DelayedScaling(), layer) if self.enabled else None


class _Current(threading.local):
    value = ModelInit()


_current = _Current()


def current_model_init() -> ModelInit:
    """Return the innermost `model_init` of this thread."""
    return _current.value


@contextmanager
def model_init(
    enabled: bool = True, recipe: Fp8Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Construct modules of `megafp8.nn` with weights stored only in FP8 (`Fp8Weight`).

    Contexts may be nested, and the innermost one applies. A context is local to its thread. Biases and norms stay in
    `params_dtype`.

    Args:
        enabled: Store weights in FP8.
        recipe: Recipe that quantizes the weights. It is also the modules' default recipe in `autocast`. Default:
            `DelayedScaling()`. A weight must have one scale per tensor or 128×128 blocks; other recipes raise
            ValueError.
        preserve_high_precision_init_val: Keep the initial values on the CPU, so that an optimizer can create its
            masters from them: `weight.get_high_precision_init_val()`, then `weight.clear_high_precision_init_val()`.
    """
    if recipe is not None and not isinstance(recipe, Fp8Recipe):
        raise ValueError(
            f"model_init: recipe is {recipe!r}; it must be an Fp8Recipe, for example megafp8.fp8.DelayedScaling()"
        )
    before = _current.value
    _current.value = ModelInit(enabled, recipe, preserve_high_precision_init_val)
    try:
        yield
    finally:
        _current.value = before
