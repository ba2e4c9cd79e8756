"""Access to kernels, which need Triton, and which implement this package.

The kernels import formats, quantizers and recipes, so this package must not import the kernels. Instead,
`megafp8.kernels` registers a function that loads them. `import megafp8` imports `megafp8.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_load: Callable[[str], ModuleType] | None = None


def set_kernels(load: Callable[[str], ModuleType]) -> None:
    """Register `load`, a function that imports a kernel module by name."""
    global _load
    _load = load


@cache
def kernels(name: str) -> ModuleType:
    """Return the kernel module `name`.

    It is imported at first use, because it needs Triton, which comes only with torch's CUDA builds.
    """
    assert _load is not None, "import megafp8.kernels first"
    return _load(name)


def triton_module(name: str) -> Callable[[], ModuleType]:
    """Return a function that returns the module `name`, which it imports at its first call.

    The module needs Triton, which comes only with torch's CUDA builds.
    """
    return cache(partial(import_module, name))


def has_kernel(x: Tensor) -> bool:
    """Return whether kernels compute with the numbers `x`: on CUDA, in any dtype but float64."""
    return x.is_cuda and x.element_size() < 8
