"""How a recipe's GEMMs are computed on a device, in a line for the log: tensor cores or emulation.

mxfp8 and nvfp4 run on Blackwell's tensor cores, where a trial product comes out right, and are emulated elsewhere. They
have not run on Blackwell yet, so this line is what to look at there first.
"""

from __future__ import annotations

import torch

from megafp8.gemm.dispatch import GemmBackend
from megafp8.gemm.scaled_mm_check import why_emulated
from megafp8.numerics.recipes.base import GEMMS, Fp8Recipe
from megafp8.numerics.tensor import BLACKWELL_PAIRS, HOPPER_PAIRS, on_hopper


def describe_path(recipe: Fp8Recipe | None, device: torch.device, backend: GemmBackend = "auto") -> str:
    """A line for the log: the recipe, and whether its GEMMs run on tensor cores or are emulated on `device`."""
    if recipe is None:
        return "fp8: none, all layers in high precision"
    parts = list({part.name: part for operands in recipe.combinations for part in operands}.values())
    fine = [part.name for part in parts if not on_hopper(part.granularity("input"))]
    name = f"{recipe.name} ({', '.join(part.name for part in parts)})" if len(parts) > 1 else parts[0].name
    if backend == "emulated" or (backend == "auto" and device.type != "cuda"):
        return f"fp8: {name}, GEMMs emulated on {device.type}: the same FP8 values, products in fp32"
    if not fine:
        return f"fp8: {name}, GEMMs on {'FP8 tensor cores' if device.type == 'cuda' else f'{device.type} by {backend}'}"
    why = why_emulated(device)
    if why is not None:
        which = f"those GEMMs with {' or '.join(fine)}" if len(fine) < len(parts) else "GEMMs"
        return f"fp8: {name}, {which} emulated in fp32: {why}"
    formats = dict.fromkeys(f"FP{part.capabilities.bits}" for part in parts)
    fine_parts = f", {' and '.join(fine)}" if len(fine) < len(parts) else ""
    line = f"fp8: {name}, GEMMs on {' and '.join(formats)} tensor cores{fine_parts} by scaled_mm"
    pairs = _emulated_pairs(recipe)
    return f"{line}, but {', '.join(pairs)} emulated in fp32: no tensor core multiplies such a pair" if pairs else line


def _emulated_pairs(recipe: Fp8Recipe) -> list[str]:
    """Names of recipes whose operands meet in a GEMM that no tensor core computes."""
    pairs: dict[str, None] = {}
    for operands in recipe.combinations:
        for (a, b), high in zip(GEMMS.values(), recipe.override_linear_precision, strict=True):
            first, second = getattr(operands, a), getattr(operands, b)
            if not high and (first.granularity(a), second.granularity(b)) not in HOPPER_PAIRS + BLACKWELL_PAIRS:
                pairs["·".join(sorted((first.name, second.name)))] = None
    return list(pairs)
