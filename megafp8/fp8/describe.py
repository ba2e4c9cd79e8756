"""Which way a recipe's GEMMs are computed on a device, in a line: emulation is no matter for a footnote.

Blackwell's tensor cores take blocks of 32 and of 16. megafp8 has no backend for those yet and emulates them there too.
"""

from __future__ import annotations

import torch

from megafp8.fp8.custom import CustomScaling, emulated
from megafp8.fp8.gemm import GemmBackend
from megafp8.fp8.recipe import Fp8Recipe

_BLACKWELL = (10, 0)


def describe_path(recipe: Fp8Recipe | None, device: torch.device, backend: GemmBackend = "auto") -> str:
    """A line for the log: the recipe, and whether its GEMMs run on tensor cores or are emulated on `device`."""
    if recipe is None:
        return "fp8: none, all layers in high precision"
    parts = _parts(recipe)
    slow = [part.name for part in parts if emulated(part.granularity("input"))]
    name = f"{recipe.name} ({', '.join(part.name for part in parts)})" if len(parts) > 1 else parts[0].name
    if backend == "emulated" or (backend == "auto" and device.type != "cuda"):
        return f"fp8: {name}, GEMMs emulated on {device.type}: the same FP8 values, products in fp32"
    if not slow:
        return f"fp8: {name}, GEMMs on {'FP8 tensor cores' if device.type == 'cuda' else f'{device.type} by {backend}'}"
    which = f"those GEMMs with {' or '.join(slow)}" if len(slow) < len(parts) else "GEMMs"
    return f"fp8: {name}, {which} emulated in fp32: {_why(device)}"


def _parts(recipe: Fp8Recipe) -> list[Fp8Recipe]:
    """The recipes that scale, each once."""
    if not isinstance(recipe, CustomScaling):
        return [recipe]
    return list({part.name: part for rule in recipe.rules for part in rule.operands}.values())


def _why(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is not None and capability >= _BLACKWELL:
        return "this GPU has tensor cores for them, but megafp8 no backend"
    here = device.type if capability is None else f"capability {capability[0]}.{capability[1]}"
    return f"tensor cores for them come with compute capability 10.0, and this is {here}"
