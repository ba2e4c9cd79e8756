"""Megatron-style pretraining of GPT models in FP8, launched by torchrun from one YAML file.

The names in `__all__` need torch and are imported at first use, so `import megafp8` itself takes milliseconds.
"""

from importlib import import_module
from typing import Any

import megafp8.kernels  # noqa: F401  registers how quantizers find their kernels, without importing the kernels

__version__ = "0.1.0"

_MODULES = {
    "Completion": "megafp8.inference",
    "Config": "megafp8.config",
    "ConfigError": "megafp8.config",
    "Generator": "megafp8.inference",
    "SamplingOptions": "megafp8.inference",
    "Trainer": "megafp8.api",
    "TrainingError": "megafp8.training.errors",
    "load_config": "megafp8.api",
    "read_metrics": "megafp8.api",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import and return one of the names in `__all__`."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
