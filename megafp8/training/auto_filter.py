"""fp8.auto_filter: keep layers in high precision that FP8 would slow down.

The speed of a layer depends on the tokens, inputs and outputs that one rank computes, and on its recipe. Blocks are
alike, so a model has only a few sizes. The first rank predicts or measures the speed of each size, for the layers of
all pipeline stages, and broadcasts the result. If ranks measured separately, they could disagree about a layer with a
small gain, and then deadlock in different collectives.

The choice is part of the run. Another measurement or layout might decide a close case differently, so the choice is
saved with each checkpoint. A resumed run keeps it as long as the fp8 section of its config is unchanged.

Cost: the precision of a layer depends on a rank's slice of the layer, and therefore on parallel.tensor.

Shapes: m tokens of a micro-batch, k inputs, n outputs, t tensor-parallel size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch

from megafp8.config import Config
from megafp8.fp8 import Fp8Manager
from megafp8.fp8.speed_measurement import measure
from megafp8.fp8.speed_model import LinearSeconds, LinearSize, predict
from megafp8.host.gpus import ceilings_of, device_name
from megafp8.numerics.recipes.base import Fp8Recipe, PerOperand
from megafp8.parallel.collectives import broadcast_object
from megafp8.parallel.parallel_state import ParallelState
from megafp8.planner.outline import linear_sites


@dataclass(frozen=True)
class Comparison:
    """Layers of the same size and recipe, and their speedup in FP8."""

    layers: tuple[str, ...]
    size: LinearSize
    speedup: float


@dataclass(frozen=True)
class FilterChoice:
    """Layers that the config selects for FP8 but that stay in high precision, and log lines with the reasons."""

    layers: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


Timing = Callable[[LinearSize, str], LinearSeconds]  # from a size, and the name of a layer with this size


def choose(config: Config, fp8: Fp8Manager, parallel: ParallelState, dtype: torch.dtype) -> FilterChoice:
    """Choose the layers that stay in high precision, `dtype`, among the layers that `fp8` selects. Collective.

    The choice is the same on all ranks. Raises ValueError if the speed of this device is unknown, or if the speed of
    the recipe cannot be predicted.
    """
    kind = config.fp8.auto_filter
    if kind == "none" or fp8.recipe is None:
        return FilterChoice()
    comparisons: list[Comparison] = []
    if parallel.world.is_first:
        micro_batches = config.training.global_batch_size // (config.training.micro_batch_size * parallel.data.size)
        timing = (
            _prediction(fp8, device_name(parallel.device), micro_batches)
            if kind == "predicted"
            else _measurement(fp8, parallel.device, micro_batches, dtype)
        )
        comparisons = compare(config, fp8, timing)
        if parallel.device.type == "cuda":  # do not count the memory of the measurement as memory of the run
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(parallel.device)
    return verdict(broadcast_object(comparisons, parallel.world.group), kind)


def check(config: Config, fp8: Fp8Manager, device: torch.device) -> None:
    """Raise the ValueError that `choose` would raise. Needs no process group."""
    if config.fp8.auto_filter != "predicted" or fp8.recipe is None:
        return
    try:
        compare(config, fp8, _prediction(fp8, device_name(device), 1))
    except ValueError as error:
        raise ValueError(f"fp8.auto_filter = predicted: {error}; try measured or none") from None


def _prediction(fp8: Fp8Manager, device: str, micro_batches: int) -> Timing:
    assert fp8.recipe is not None
    if fp8.gemm_backend == "emulated":
        raise ValueError("the speed of fp8.gemm_backend = emulated is not known")
    recipe, ceilings = fp8.recipe, ceilings_of(device)
    return lambda size, layer: predict(size, recipe, ceilings, layer=layer, micro_batches=micro_batches)


def _measurement(fp8: Fp8Manager, device: torch.device, micro_batches: int, dtype: torch.dtype) -> Timing:
    assert fp8.recipe is not None
    run = partial(measure, dtype=dtype, gemm_backend=fp8.gemm_backend, gemm_autotune=fp8.gemm_autotune)
    recipe = fp8.recipe
    return lambda size, layer: run(size, recipe, device, layer=layer, micro_batches=micro_batches)


def compare(config: Config, fp8: Fp8Manager, timing: Timing) -> list[Comparison]:
    """Group the layers that `fp8` selects in the whole model by size and recipe, and time each group once."""
    assert fp8.recipe is not None
    m = config.training.micro_batch_size * config.training.seq_length // config.parallel.context
    alike: dict[tuple[LinearSize, PerOperand[Fp8Recipe] | None], list[str]] = {}
    for name, site in linear_sites(config):
        if fp8.selects(name) and not site.expert:
            size = LinearSize(m, site.inputs, site.outputs)
            alike.setdefault((size, fp8.recipe.operands(name)), []).append(name)
    return [Comparison(tuple(names), size, timing(size, names[0]).speedup) for (size, _), names in alike.items()]


def verdict(compared: Sequence[Comparison], kind: str) -> FilterChoice:
    """Return the choice that keeps layers in high precision if they are slower in FP8."""
    lines = []
    for c in compared:
        where = "stay in high precision" if c.speedup < 1 else "run in FP8"
        lines.append(
            f"fp8.auto_filter: {shown(c.layers)} {where}: {c.size} (tokens x inputs x outputs) is {kind} to be "
            f"{c.speedup:.2f} times as fast in FP8"
        )
    return FilterChoice(tuple(name for c in compared if c.speedup < 1 for name in c.layers), tuple(lines))


def kept_choice(layers: Sequence[str]) -> FilterChoice:
    """Return the saved choice of a resumed run, given its layers in high precision."""
    if not layers:
        return FilterChoice()
    return FilterChoice(
        tuple(layers), (f"fp8.auto_filter: {shown(layers)} stay in high precision, as in this run so far",)
    )


def shown(layers: Sequence[str]) -> str:
    """Return layer names in short form, such as `layers.0-3.mlp.down` for the same layer of four blocks."""
    parts = []
    blocks: dict[str, list[int]] = {}
    for layer in layers:
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", layer)
        assert match is not None, layer
        blocks.setdefault(match[2], []).append(int(match[1]))
    for kind, numbers in blocks.items():
        for _, run in groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0]):
            first, *rest = [number for _, number in run]
            parts.append(f"layers.{first}{f'-{rest[-1]}' if rest else ''}.{kind}")
    return ", ".join(parts)
