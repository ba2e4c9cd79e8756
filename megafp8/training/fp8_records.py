"""Helpers for tools that show a run's FP8 report: order of layers, grids of values, and advice as text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megafp8.config import Config, load_config
from megafp8.fp8.health import Fp8Record, advice, as_yaml
from megafp8.numerics.recipes.nvfp4 import NVFP4Scaling
from megafp8.training.fp8_config import fp8_recipe


def read_config(folder: Path) -> Config:
    """Return the config that the run was last started with. Raises ValueError if it cannot be loaded."""
    resumed = sorted(folder.glob("config-from-step-*.yaml"))
    return load_config(resumed[-1] if resumed else folder / "config.yaml")


def place(layer: str) -> tuple[str, int]:
    """Return the kind and the block of a layer, such as ("mlp.down", 3) for "layers.3.mlp.down"."""
    block = re.search(r"\.(\d+)\.", layer)
    return (layer, 0) if block is None else (layer[block.end() :], int(block[1]))


def ordered_layers(records: Sequence[Fp8Record]) -> list[str]:
    """Return the names of all layers, sorted by their place in a block, then by block."""
    kinds = list(dict.fromkeys(place(record.layer)[0] for record in records))
    return sorted({record.layer for record in records}, key=lambda a: (kinds.index(place(a)[0]), place(a)[1]))


def grid(records: Sequence[Fp8Record], operand: str, field: str) -> NDArray[np.float64]:
    """Return the values of `field` for an operand, float64 `[layers, sampled steps]`, NaN if missing.

    Layers are in the order of `ordered_layers`. Amaxes are returned as log2.
    """
    layers, steps = ordered_layers(records), sorted({record.step for record in records})
    row, column = ({key: i for i, key in enumerate(keys)} for keys in (layers, steps))
    values = np.full((len(layers), len(steps)), np.nan)
    for record in records:
        value = getattr(record, field)
        if record.operand == operand and value is not None:
            values[row[record.layer], column[record.step]] = value
    if field == "amax":
        return np.log2(values, out=np.full_like(values, np.nan), where=values > 0)
    return values


def advice_text(records: Sequence[Fp8Record], config: Config) -> str:
    """Return the advice of `megafp8.fp8.health` as text, with a YAML config that follows the advice."""
    recipe = fp8_recipe(config)
    if recipe is None:
        return "Advice: none, since the run was last started with fp8.recipe none."
    gradients = [operands.grad_output for r in records if (operands := recipe.operands(r.layer)) is not None]
    uses_nvfp4 = any(isinstance(gradient, NVFP4Scaling) for gradient in gradients)
    advised = advice(records, fp8_format=None if uses_nvfp4 else recipe.fp8_format)
    broken = [record for record in records if record.step == records[-1].step and record.amax is None]
    if not advised and broken:
        step, layer, operand = broken[0].step, broken[0].layer, broken[0].operand
        return f"Advice: none, as {len(broken)} tensors are not finite in step {step}, {layer} {operand} among them."
    if not advised:
        return "Advice: none, all tensors are healthy."
    lines = ["Advice"]
    for a in advised:
        lines += textwrap.wrap(f"{a.layer} {a.operand}: {a.reason}", 110, initial_indent="- ", subsequent_indent="  ")
    return "\n".join([*lines, "", "As a config:", "", as_yaml(advised, config.fp8.exclude)])
