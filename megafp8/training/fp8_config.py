"""From the config's section `fp8` to the recipe it names and the manager that applies it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megafp8.config import Config, Fp8Config
from megafp8.fp8 import RECIPES, ContextGroups, CustomScaling, Fp8Manager, Fp8Recipe, Rule
from megafp8.fp8.report import Recorder
from megafp8.models.gpt import fp8_layer_names
from megafp8.parallel_state import ParallelState


def fp8_recipe(config: Config) -> Fp8Recipe | None:
    """The recipe that `fp8` in the config describes."""
    f = config.fp8
    if f.recipe == "none":
        return None
    return _recipe(f, f.recipe)


def _recipe(f: Fp8Config, name: str) -> Fp8Recipe:
    """The recipe `name` with those of its options that `f` gives."""
    fprop, dgrad, wgrad = f.override_linear_precision
    options: dict[str, Any] = {
        "fp8_format": f.format,
        "override_linear_precision": (fprop, dgrad, wgrad or f.wgrad_in_bf16),
        "use_fast_accum": f.fast_accumulation,
        "margin": f.margin,
        "interval": f.interval,
        "amax_history_len": f.amax_history_len,
        "amax_compute_algo": f.amax_compute_algo,
        "power_of_two_scale": f.power_of_two_scale,  # delayed scaling's name for it
        "power_of_two": f.power_of_two_scale,
        "amax_epsilon": f.amax_epsilon,
        "amax": tuple(f.static_amax.items()),
        "calibration_steps": f.calibration_steps,
    }
    if name == CustomScaling.name:
        options["rules"] = tuple(
            Rule(
                layers=rule.layers,
                input=_recipe(f, rule.input),
                weight=_recipe(f, rule.weight),
                grad_output=_recipe(f, rule.grad_output),
            )
            for rule in f.custom
        )
    recipe = RECIPES[name]
    return recipe(**{o.name: options[o.name] for o in fields(recipe) if options[o.name] is not None})


def _kept_blocks(config: Config) -> list[str]:
    """Patterns of the blocks that stay in high precision: so many from the first, and from the last."""
    f, n = config.fp8, config.model.num_layers
    return [f"layers.{i}.*" for i in range(n) if i < f.first_blocks_bf16 or i >= n - f.last_blocks_bf16]


def build_fp8(config: Config, parallel: ParallelState | None) -> Fp8Manager:
    """The manager that `fp8` in the config describes; None: on one rank.

    ValueError for a pattern that no layer of the model matches, and for what the recipe refuses.
    """
    interval = config.fp8.report_interval
    context = None
    if parallel is not None and parallel.context.size > 1:
        context = ContextGroups(parallel.context.group, parallel.tensor_context.group)
    manager = Fp8Manager(
        fp8_recipe(config),
        amax_group=None if parallel is None else parallel.amax.group,
        context=context,
        include=tuple(config.fp8.include),
        exclude=(*config.fp8.exclude, *_kept_blocks(config)),
        gemm_backend=config.fp8.gemm_backend,
        gemm_autotune=config.tunes_gemms,
        recorder=Recorder(interval) if interval and config.fp8.recipe != "none" else None,
        seed=config.seed,
        data_parallel=(0, 1) if parallel is None else (parallel.data.rank, parallel.data.size),
        smooth_swiglu=config.fp8.smooth_swiglu,
    )
    manager.check_patterns(list(fp8_layer_names(config.model)))
    return manager
