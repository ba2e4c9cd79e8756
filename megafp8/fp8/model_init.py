"""`model_init`: the context in which modules of `megafp8.nn` are constructed with weights that exist in FP8 only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from megafp8.fp8.weight import Fp8WeightFormat
from megafp8.numerics.recipes import DelayedScaling, Fp8Recipe


class ModelInit(NamedTuple):
    """What `model_init` was entered with."""

    enabled: bool = False
    recipe: Fp8Recipe | None = None
    preserve_high_precision_init_val: bool = False

    def weight_format(self, layer: str) -> Fp8WeightFormat | None:
        """How the weight of `layer` is stored; None in high precision."""
        return Fp8WeightFormat.from_recipe(self.recipe or DelayedScaling(), layer) if self.enabled else None


class _Current(threading.local):
    value = ModelInit()


_current = _Current()


def current_model_init() -> ModelInit:
    """The innermost context of this thread."""
    return _current.value


@contextmanager
def model_init(
    enabled: bool = True, recipe: Fp8Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Context in which modules of `megafp8.nn` are constructed with weights that exist in FP8 only (`Fp8Weight`).

    Contexts nest, and the innermost counts. It is local to the thread. Biases and norms stay in `params_dtype`.

    Args:
        enabled: Store weights in FP8.
        recipe: By which weights are cast, and the modules' own in `autocast`; by default `DelayedScaling()`. One scale
            per tensor or 128×128 blocks, else ValueError.
        preserve_high_precision_init_val: Keep the initial values on the CPU, from which an optimizer's masters can be
            made: `weight.get_high_precision_init_val()`, then `weight.clear_high_precision_init_val()`.
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
