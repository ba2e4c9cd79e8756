"""Where the kernels are that compute what this package specifies.

Formats, quantizers and recipes are below the kernels, which take their types. So nothing here imports a kernel:
`megafp8.kernels` says how they are found when it is imported, which `megafp8` itself does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

_load: Callable[[str], ModuleType] | None = None


def set_kernels(load: Callable[[str], ModuleType]) -> None:
    """Let `load` import modules of kernels by name."""
    global _load
    _load = load


@cache
def kernels(name: str) -> ModuleType:
    """The module of kernels `name`, imported at first use: it needs Triton, which comes with torch's CUDA builds."""
    assert _load is not None, "import megafp8.kernels first"
    return _load(name)
