"""Registries of records that are each defined in their own module of a package."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any


def records_of(package: ModuleType, name: str) -> list[Any]:
    """Return the objects called `name` from all modules of `package` that define it, in order of file names."""
    modules = (importlib.import_module(f"{package.__name__}.{x.name}") for x in pkgutil.iter_modules(package.__path__))
    return [getattr(module, name) for module in modules if hasattr(module, name)]
