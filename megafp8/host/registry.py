"""Registries of records that stand in files of their own, each found by being in a package."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any


def records_of(package: ModuleType, name: str) -> list[Any]:
    """What the modules of `package` that define `name` define, in the order of their file names."""
    modules = (importlib.import_module(f"{package.__name__}.{x.name}") for x in pkgutil.iter_modules(package.__path__))
    return [getattr(module, name) for module in modules if hasattr(module, name)]
