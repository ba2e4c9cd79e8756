"""`autocast`: the context in which layers outside megafp8's own models run in FP8.

The context is a value, read when a layer's forward begins: by converted layers (`megafp8.fp8.convert`), by the modules
of `megafp8.nn`, and by torch.compile, which guards on it.
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
    """What `autocast` was entered with. `group`: None for the default process group.

    `recipe_key`: a name of the recipe in this process; empty for the layer's own. `ran_together`: weak references to
    what has run in the outermost context around this one.
    """

    enabled: bool
    recipe: Fp8Recipe | None = None
    group: ProcessGroup | None = None
    calibrating: bool = False
    recipe_key: str = ""
    ran_together: list[Any] = field(default_factory=list)

    @property
    def amax_group(self) -> ProcessGroup | None:
        """The ranks over which amaxes are reduced; None for this one alone."""
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
    """The innermost context of this thread.

    In torch.compile the one that any thread entered or left last: the compiler of torch 2.11 does not see a thread's
    own attributes, and would take the layer to be outside. The compiled layer checks that of its thread when it runs.
    """
    return _newest.context if torch.compiler.is_compiling() else _current.context


def in_torch_autocast_dtype(x: Tensor) -> Tensor:
    """x as `torch.autocast` wants it: in its dtype within one, else as it is."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


@contextmanager
def autocast(
    enabled: bool = True,
    recipe: Fp8Recipe | None = None,
    group: ProcessGroup | None = None,
    calibrating: bool = False,
) -> Iterator[None]:
    """Context in which layers run in FP8; without it, and with `enabled=False`, they run in high precision.

    Contexts nest, and the innermost counts: one around some layers gives these another recipe. It is local to the
    thread. Only the forward has to run within.

    Args:
        enabled: Run in FP8.
        recipe: How to scale. By default each layer's own, with which it was converted or constructed.
        group: The ranks that run the same layers, over which amaxes are reduced. By default all ranks.
        calibrating: Record the amaxes of what runs in high precision, for later scales. No effect where `enabled`.
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
