"""`autocast`: context in which converted layers and the modules of `megafp8.nn` run in FP8.

The context is a value that a layer reads when its forward begins. Readers are converted layers
(`megafp8.fp8.convert`), modules of `megafp8.nn`, and torch.compile, which guards on the value.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from megafp8.numerics.recipes.base import Fp8Recipe


@dataclass(frozen=True, eq=False)
class Autocast:
    """Arguments of an `autocast` context.

    Attributes:
        enabled: Whether layers run in FP8.
        recipe: Recipe, or None for each layer's default recipe.
        group: Ranks over which amaxes are reduced, or None for the default process group.
        calibrating: Whether amaxes are recorded while layers run in high precision.
        recipe_key: Name of the recipe within this process; empty if `recipe` is None.
        ran_together: Weak references to the layers that have run in the outermost context around this one.
    """

    enabled: bool
    recipe: Fp8Recipe | None = None
    group: ProcessGroup | None = None
    calibrating: bool = False
    recipe_key: str = ""
    ran_together: list[Any] = field(default_factory=list)

    @property
    def amax_group(self) -> ProcessGroup | None:
        """Ranks over which amaxes are reduced, or None for this rank alone."""
        if self.group is not None or not (distributed.is_available() and distributed.is_initialized()):
            return self.group
        return distributed.group.WORLD


OUTSIDE = Autocast(False)


class _Current(threading.local):
    context = OUTSIDE


class _Newest:
    context = OUTSIDE


_current, _newest = _Current(), _Newest()
_recipe_keys: dict[Fp8Recipe, str] = {}


def current() -> Autocast:
    """Return the innermost context of this thread.

    While torch.compile traces, return the context that any thread entered or left last: the compiler of torch 2.11 does
    not see thread-local attributes, and would assume that the layer is outside `autocast`. The compiled layer checks
    its thread's context when it runs.
    """
    return _newest.context if torch.compiler.is_compiling() else _current.context


def in_torch_autocast_dtype(x: Tensor) -> Tensor:
    """Cast x to the dtype of `torch.autocast`; return x itself outside `torch.autocast`."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


@contextmanager
def autocast(
    enabled: bool = True,
    recipe: Fp8Recipe | None = None,
    group: ProcessGroup | None = None,
    calibrating: bool = False,
) -> Iterator[None]:
    """Run converted layers and modules of `megafp8.nn` in FP8.

    Outside the context, and with `enabled=False`, layers run in high precision. Contexts may be nested, and the
    innermost one applies, so a context around some layers can give them another recipe. A context is local to its
    thread. Only the forward pass must run within it.

    Args:
        enabled: Run in FP8.
        recipe: Recipe that determines the scales. Default: the recipe with which each layer was converted or
            constructed.
        group: Ranks that run the same layers; amaxes are reduced over them. Default: all ranks.
        calibrating: Record amaxes while layers run in high precision, for later scales. No effect with `enabled=True`.
    """
    if recipe is not None and not isinstance(recipe, Fp8Recipe):
        raise ValueError(
            f"autocast: recipe is {recipe!r}; it must be an Fp8Recipe, for example megafp8.fp8.DelayedScaling()"
        )
    before = _current.context
    key = "" if recipe is None else _recipe_keys.setdefault(recipe, str(len(_recipe_keys) + 1))
    ran_together = [] if before is OUTSIDE else before.ran_together
    _current.context = _newest.context = Autocast(enabled, recipe, group, calibrating, key, ran_together)
    try:
        yield
    finally:
        _current.context = _newest.context = before
