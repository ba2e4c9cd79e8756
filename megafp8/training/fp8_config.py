"""From the config's section `fp8` to the recipe it names and the manager that applies it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from megafp8.config import Config, ConfigError, Fp8Config, Problem
from megafp8.fp8 import RECIPES, ContextGroups, CustomScaling, Fp8Manager, Fp8Recipe, Rule
from megafp8.fp8.health import Recorder
from megafp8.models.gpt import fp8_layer_names
from megafp8.parallel_state import ParallelState

_KEYS = {
    "fp8_format": "format",
    "use_fast_accum": "fast_accumulation",
    "power_of_two": "power_of_two_scale",
    "amax": "static_amax",
    "rules": "custom",
}
"""Fields of recipes that have another name in the config."""


def _key(field: str) -> str:
    return _KEYS.get(field, field)


def fp8_recipe(config: Config) -> Fp8Recipe | None:
    """The recipe that `fp8` in the config describes."""
    f = config.fp8
    if f.recipe == "none":
        return None
    return _recipe(f, f.recipe)


def _recipe(f: Fp8Config, name: str) -> Fp8Recipe:
    """The recipe `name` with those of its options that `f` gives."""
    recipe = RECIPES[name]
    fprop, dgrad, wgrad = f.override_linear_precision
    options: dict[str, Any] = {field.name: getattr(f, _key(field.name)) for field in fields(recipe)}
    options |= {"override_linear_precision": (fprop, dgrad, wgrad or f.wgrad_in_bf16)}
    if "amax" in options:
        options["amax"] = tuple(f.static_amax.items())
    if "rules" in options:
        options["rules"] = tuple(
            Rule(
                layers=rule.layers,
                input=_recipe(f, rule.input),
                weight=_recipe(f, rule.weight),
                grad_output=_recipe(f, rule.grad_output),
            )
            for rule in f.custom
        )
    return recipe(**{field: value for field, value in options.items() if value is not None})


def _option_keys(recipe: type[Fp8Recipe]) -> set[str]:
    """Keys of the config's section `fp8` that have an effect under `recipe` and not under every recipe."""
    return {_key(field.name) for field in fields(recipe) if field.name not in recipe.without_effect}


def _shown(default: object) -> str:
    return "null" if default is None else str(default)


def check_recipe_options(config: Config, source: str) -> None:
    """Raise ConfigError for each option under `fp8` that the recipe in use does not have and would ignore.

    Options at their defaults are not set. fp8.recipe none switches the whole section off, whatever else is in it.
    """
    problems = list(_foreign_options(config.fp8))
    if problems:
        raise ConfigError(source, problems)


def _foreign_options(f: Fp8Config) -> Iterator[Problem]:
    if f.recipe == "none":
        return
    used = {f.recipe}
    if f.recipe == CustomScaling.name:
        used |= {name for rule in f.custom for name in (rule.input, rule.weight, rule.grad_output)}
    effective = set().union(*(_option_keys(RECIPES[name]) for name in used))
    for key, field in Fp8Config.model_fields.items():
        have = [name for name, recipe in RECIPES.items() if key in _option_keys(recipe)]
        value, default = getattr(f, key), field.get_default(call_default_factory=True)
        if have and key not in effective and value != default:
            who = f"fp8.recipe {f.recipe}" + (f", of {', '.join(sorted(used - {f.recipe}))}," if len(used) > 1 else "")
            yield Problem(
                f"fp8.{key}", value, f"{who} has no such option; {', '.join(have)} {'have' if have[1:] else 'has'} it",
                f"leave it out (its default is {_shown(default)}), or try fp8.recipe={have[0]}",
            )  # fmt: skip


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
