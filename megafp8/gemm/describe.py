"""How a recipe's GEMMs are computed on a device, in a line for the log: tensor cores or emulation.

mxfp8 and nvfp4 run on Blackwell's tensor cores, where a trial product comes out right, and elsewhere in bf16. They have
not run on Blackwell yet, so this line is what to look at there first.
"""

from __future__ import annotations

import torch

from megafp8.gemm.dispatch import GemmBackend
from megafp8.gemm.scaled_mm_check import why_not_block_scaled
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
    why = why_not_block_scaled(device)
    if why is not None:
        which = f"those GEMMs of {' and '.join(fine)}" if len(fine) < len(parts) else "GEMMs"
        return _with_emulated(f"fp8: {name}, {which} in bf16, with the same values: {why}", recipe, in_bf16=True)
    formats = dict.fromkeys(f"FP{part.capabilities.bits}" for part in parts)
    fine_parts = f", {' and '.join(fine)}" if len(fine) < len(parts) else ""
    line = f"fp8: {name}, GEMMs on {' and '.join(formats)} tensor cores{fine_parts} by scaled_mm"
    return _with_emulated(line, recipe, in_bf16=False)


def _with_emulated(line: str, recipe: Fp8Recipe, *, in_bf16: bool) -> str:
    """`line`, and which pairs of recipes' operands meet in a GEMM that no tensor core computes.

    `in_bf16`: operands with blocks of 32 and 16 are multiplied in bf16.
    """
    pairs: dict[str, None] = {}
    for operands in recipe.combinations:
        for (a, b), high in zip(GEMMS.values(), recipe.override_linear_precision, strict=True):
            first, second = getattr(operands, a), getattr(operands, b)
            pair = first.granularity(a), second.granularity(b)
            multiplied = pair in HOPPER_PAIRS or (not any(map(on_hopper, pair)) if in_bf16 else pair in BLACKWELL_PAIRS)
            if not high and not multiplied:
                pairs["·".join(sorted((first.name, second.name)))] = None
    return f"{line}, but {', '.join(pairs)} emulated in fp32: no tensor core multiplies such a pair" if pairs else line
