"""Log line that says how a recipe's GEMMs are computed on a device: on tensor cores or by emulation.

mxfp8 and nvfp4 run in bf16 on every GPU. Only Blackwell has tensor cores for them, and megafp8 has no GEMMs for
Blackwell; the line says so, because a user of a Blackwell GPU expects otherwise.
"""

from __future__ import annotations

import torch

from megafp8.gemm.dispatch import GemmBackend
from megafp8.numerics.recipes.base import GEMMS, Fp8Recipe
from megafp8.numerics.tensor import HOPPER_PAIRS, on_hopper


def describe_path(recipe: Fp8Recipe | None, device: torch.device, backend: GemmBackend = "auto") -> str:
    """Return a log line with the recipe and whether its GEMMs run on tensor cores or are emulated on `device`."""
    if recipe is None:
        return "fp8: none, all layers in high precision"
    parts = list({part.name: part for operands in recipe.combinations for part in operands}.values())
    fine = [part.name for part in parts if not on_hopper(part.granularity("input"))]
    name = f"{recipe.name} ({', '.join(part.name for part in parts)})" if len(parts) > 1 else parts[0].name
    if backend == "emulated" or (backend == "auto" and device.type != "cuda"):
        return f"fp8: {name}, GEMMs emulated on {device.type}: the same FP8 values, products in fp32"
    if not fine:
        return f"fp8: {name}, GEMMs on {'FP8 tensor cores' if device.type == 'cuda' else f'{device.type} by {backend}'}"
    which = f"GEMMs of {' and '.join(fine)}" if len(fine) < len(parts) else "GEMMs"
    line = f"fp8: {name}, {which} in bf16, with the same values: megafp8 does not use Blackwell's tensor cores for them"
    pairs: dict[str, None] = {}
    for operands in recipe.combinations:
        for (a, b), high in zip(GEMMS.values(), recipe.override_linear_precision, strict=True):
            first, second = getattr(operands, a), getattr(operands, b)
            pair = first.granularity(a), second.granularity(b)
            if not high and pair not in HOPPER_PAIRS and any(map(on_hopper, pair)):
                pairs["·".join(sorted((first.name, second.name)))] = None
    return f"{line}, but {', '.join(pairs)} emulated in fp32: no tensor core multiplies such a pair" if pairs else line
