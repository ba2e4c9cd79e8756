"""Text generation from any checkpoint: paged cache of keys and values, continuous batching, sampling.

The names in `__all__` are imported at first use, because they need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megafp8.inference.generator import Completion, Generator, TextDelta
    from megafp8.inference.options import SamplingOptions

__all__ = ["Completion", "Generator", "SamplingOptions", "TextDelta"]


def __getattr__(name: str) -> Any:
    """Import and return one of the names in `__all__`."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'options' if name == 'SamplingOptions' else 'generator'}"), name)
