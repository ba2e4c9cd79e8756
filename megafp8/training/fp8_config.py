"""FP8 recipe and FP8 manager of the config section `fp8`.

The checks in this module depend on the options and capabilities of recipes, so they need torch. All other rules of the
section are in `megafp8.config.checks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import torch

from megafp8.config import Config, ConfigError, Fp8Config, Problem
from megafp8.fp8 import (
    RECIPES,
    ContextGroups,
    CustomScaling,
    Fp8Manager,
    Fp8Recipe,
)
from megafp8.fp8.health import Recorder
from megafp8.layers.context import planning_context
from megafp8.layers.recompute import KEEP_ALL
from megafp8.models.build import build_layer
from megafp8.numerics.recipes import keys_of
from megafp8.numerics.recipes.base import OPERANDS, OperandName, config_key
from megafp8.numerics.tensor import TENSOR
from megafp8.parallel.parallel_state import ParallelState
from megafp8.planner.outline import linear_sites


def fp8_recipe(config: Config) -> Fp8Recipe | None:
    """Return the recipe of the config section `fp8`, or None for fp8.recipe none."""
    return None if config.fp8.recipe == "none" else _recipe(config.fp8, config.fp8.recipe)


def _recipe(f: Fp8Config, name: str) -> Fp8Recipe:
    """Return the recipe `name` with the options that `f` sets."""
    recipe = RECIPES[name]
    options = {option.name: getattr(f, config_key(option)) for option in fields(recipe)}
    for option in fields(recipe):
        if (read := option.metadata.get("read")) is not None:
            options[option.name] = read(options[option.name], lambda other: _recipe(f, other))
    return recipe(**{name: value for name, value in options.items() if value is not None})


def check_recipe(config: Config, source: str) -> None:
    """Raise ConfigError for options under `fp8` that the recipe lacks, and for settings that it does not support.

    Options at their defaults count as not set. fp8.recipe none turns the whole section off, whatever its other keys.
    """
    if config.fp8.recipe == "none":
        return
    problems = [problem for rule in (_foreign_options, _finer_scales, _cuda_graphs) for problem in rule(config)]
    if problems:
        raise ConfigError(source, problems)


def _foreign_options(config: Config) -> Iterator[Problem]:
    f = config.fp8
    others = _operand_recipes(f) - {f.recipe}
    effective = keys_of({f.recipe} | others)
    for key, field in Fp8Config.model_fields.items():
        have = [name for name in RECIPES if key in keys_of([name])]
        value, default = getattr(f, key), field.get_default(call_default_factory=True)
        if have and key not in effective and value != default:
            who = f"fp8.recipe {f.recipe}" + (f", of {', '.join(sorted(others))}," if others else "")
            shown = "null" if default is None else default
            yield Problem(
                f"fp8.{key}", value, f"{who} has no such option; {', '.join(have)} {'have' if have[1:] else 'has'} it",
                f"leave it out (its default is {shown}), or try fp8.recipe={have[0]}",
            )  # fmt: skip


def _operand_recipes(f: Fp8Config, *operands: OperandName) -> set[str]:
    """Return the names of the recipes that scale these operands in any layer. Without operands, use all operands."""
    if f.recipe != CustomScaling.name:
        return {f.recipe}
    return {getattr(rule, operand) for rule in f.custom for operand in operands or OPERANDS}


def _finer_scales(config: Config) -> Iterator[Problem]:
    """Yield a problem if weights that are to be gathered or transposed in FP8 have more than one scale."""
    f = config.fp8
    recipes = [RECIPES[name] for name in _operand_recipes(f, "weight")]
    if any(recipe.capabilities.granularity.weight is TENSOR for recipe in recipes):
        return
    if f.param_gather:
        rule = (
            f"fp8.recipe {f.recipe} has finer scales for weights than one per tensor: shard boundaries would cut "
            "through its blocks, or both orientations would have to be gathered, as many bytes as in bf16"
        )
        yield Problem("fp8.param_gather", True, rule, "try fp8.recipe=current, or fp8.param_gather=false")
    if not f.keep_weight_transposes:
        rule = f"fp8.recipe {f.recipe} has finer scales for weights than one per tensor"
        yield Problem("fp8.keep_weight_transposes", False, rule, "leave it out, or try fp8.recipe=delayed")


def _cuda_graphs(config: Config) -> Iterator[Problem]:
    return cuda_graph_problems(config) if config.training.cuda_graphs is True else iter(())


def cuda_graph_problems(config: Config) -> Iterator[Problem]:
    """Yield the FP8 settings with which a step cannot be replayed, whatever `training.cuda_graphs` says.

    `config.checks` has the other rules for CUDA graphs.
    """
    fp8_experts = config.spec.has_experts and config.fp8.recipe != "none"
    one_by_one = _experts_one_by_one(config) if fp8_experts else ""
    if one_by_one:
        rule = f"the host reads how many tokens each expert has before it starts its FP8 GEMMs, as {one_by_one}"
        yield Problem(
            "training.cuda_graphs", True, rule, 'try training.cuda_graphs=auto, or fp8.exclude=["*.experts.*"]'
        )


def _experts_one_by_one(config: Config) -> str:
    """Return the reason why FP8 GEMMs of experts are launched one by one.

    The text is empty if kernels compute all experts at once, or if no expert is FP8.
    """
    fp8 = build_fp8(config, None)
    whole = config.model_copy(update={"parallel": config.parallel.model_copy(update={"expert": 1})})
    kinds = {config.spec.kinds[index]: index for index in config.spec.indices}
    for index in kinds.values():
        build_layer(config.spec, planning_context(whole, fp8), index, KEEP_ALL)
    fp8.materialize(torch.device("cpu"))
    return next(filter(None, (group.one_by_one() for group in fp8.groups)), "")


def build_fp8(config: Config, parallel: ParallelState | None) -> Fp8Manager:
    """Return the FP8 manager of the config section `fp8`. `parallel` is None for a single rank.

    Raises ValueError if no layer of the model matches a pattern, or if the recipe does not support a setting.
    """
    interval, f, n = config.fp8.report_interval, config.fp8, config.spec.num_blocks
    kept_blocks = [f"layers.{i}.*" for i in range(n) if i < f.first_blocks_bf16 or i >= n - f.last_blocks_bf16]
    context = None
    if parallel is not None and parallel.context.size > 1:
        context = ContextGroups(parallel.context.group, parallel.tensor_context.group)
    manager = Fp8Manager(
        fp8_recipe(config),
        amax_group=None if parallel is None else parallel.amax.group,
        context=context,
        include=tuple(config.fp8.include),
        exclude=(*config.fp8.exclude, *kept_blocks),
        gemm_backend=config.fp8.gemm_backend,
        gemm_autotune=config.tunes_gemms,
        recorder=Recorder(interval) if interval and config.fp8.recipe != "none" else None,
        seed=config.seed,
        data_parallel=(0, 1) if parallel is None else (parallel.data.rank, parallel.data.size),
        batch_invariant=config.inference.batch_invariant,
    )
    manager.check_patterns([name for name, _ in linear_sites(config)])
    return manager
