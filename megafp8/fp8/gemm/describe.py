"""Which way a recipe's GEMMs are computed on a device, in a line: emulation is no matter for a footnote.

Blocks of 32 and of 16 (mxfp8, nvfp4) run on Blackwell's tensor cores, where a trial product comes out right, and are
emulated elsewhere. They have not run on Blackwell yet, so this line is what to look at there first.
"""

from __future__ import annotations

import torch

from megafp8.fp8.gemm.dispatch import GemmBackend
from megafp8.fp8.gemm.scaled_mm_check import why_emulated
from megafp8.fp8.recipes.base import Fp8Recipe
from megafp8.fp8.recipes.custom import GEMMS, CustomScaling, needs_blackwell
from megafp8.fp8.tensor import BLOCK_1X16


def describe_path(recipe: Fp8Recipe | None, device: torch.device, backend: GemmBackend = "auto") -> str:
    """A line for the log: the recipe, and whether its GEMMs run on tensor cores or are emulated on `device`."""
    if recipe is None:
        return "fp8: none, all layers in high precision"
    parts = _parts(recipe)
    fine = [part.name for part in parts if needs_blackwell(part.granularity("input"))]
    name = f"{recipe.name} ({', '.join(part.name for part in parts)})" if len(parts) > 1 else parts[0].name
    if backend == "emulated" or (backend == "auto" and device.type != "cuda"):
        return f"fp8: {name}, GEMMs emulated on {device.type}: the same FP8 values, products in fp32"
    if not fine:
        return f"fp8: {name}, GEMMs on {'FP8 tensor cores' if device.type == 'cuda' else f'{device.type} by {backend}'}"
    why = why_emulated(device)
    if why is None:
        return f"fp8: {name}, {_on_blackwell(recipe, parts, fine)}"
    which = f"those GEMMs with {' or '.join(fine)}" if len(fine) < len(parts) else "GEMMs"
    return f"fp8: {name}, {which} emulated in fp32: {why}"


def _parts(recipe: Fp8Recipe) -> list[Fp8Recipe]:
    """The recipes that scale, each once."""
    if not isinstance(recipe, CustomScaling):
        return [recipe]
    return list({part.name: part for rule in recipe.rules for part in rule.operands}.values())


def _on_blackwell(recipe: Fp8Recipe, parts: list[Fp8Recipe], fine: list[str]) -> str:
    """`fine`: the names of the parts whose GEMMs are Blackwell's."""
    formats = dict.fromkeys("FP4" if part.granularity("input") is BLOCK_1X16 else "FP8" for part in parts)
    of_them = f", {' and '.join(fine)}" if len(fine) < len(parts) else ""
    line = f"GEMMs on {' and '.join(formats)} tensor cores{of_them} by scaled_mm"
    pairs = _pairs_apart(recipe)
    return f"{line}, but {', '.join(pairs)} emulated in fp32: no tensor core multiplies such a pair" if pairs else line


def _pairs_apart(recipe: Fp8Recipe) -> list[str]:
    """Recipes of operands that meet in a GEMM and differ, one of them Blackwell's."""
    if not isinstance(recipe, CustomScaling):
        return []
    found: dict[str, None] = {}
    for rule in recipe.rules:
        for (a, b), high in zip(GEMMS.values(), recipe.override_linear_precision, strict=True):
            pair = (getattr(rule, a), getattr(rule, b))
            if not high and pair[0].name != pair[1].name and any(needs_blackwell(p.granularity("input")) for p in pair):
                found["·".join(sorted(p.name for p in pair))] = None
    return list(found)
