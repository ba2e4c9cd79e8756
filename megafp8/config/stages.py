"""Stages of a run: parts of the run in which some config keys have other values.

The config of a stage is the config of the run with the stage's overrides, as if the command had been started again with
these overrides at that step. Overrides of earlier stages do not apply in later stages. Steps before the first stage use
the config without overrides.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from pydantic import ValidationError

from megafp8.config.choices import leave_out_options, report
from megafp8.config.load import explain, holder_of
from megafp8.config.schema import Config, StageConfig
from megafp8.host.problems import ConfigError, Problem

_SECTIONS = ("model", "parallel", "fp8", "training", "optimizer", "data", "checkpoint", "logging")
_OF_THE_RUN = {
    "training.steps": "it is the length of the run; a stage ends where the next one begins",
    "training.stop_after": "it is the step at which the run stops; a stage ends where the next one begins",
    "training.evaluate": "evaluations are the same in the whole run",
    "data.tokenizer": "the weights belong to one vocabulary",
    "checkpoint.resume": "it applies only to the beginning of a run",
    "checkpoint.init_from": "it applies only to the beginning of a run",
    "checkpoint.init_optimizer": "it applies only to the beginning of a run",
}
"""Keys that have the same value in all stages, with the reason."""


class PlannedStage(NamedTuple):
    """Config of a run from one step on. `source` is the file and the stage's name, for error messages."""

    name: str | None
    begin: int
    config: Config
    source: str


def stage_at(config: Config, step: int) -> StageConfig | None:
    """Return the stage that contains the step after step `step`, or None before the first stage."""
    return next((stage for stage in reversed(config.stages) if stage.begin <= step), None)


def end_of_stage(config: Config, step: int) -> int:
    """Return the last step of the stage `stage_at(config, step)`, or of the run if it stops earlier."""
    begins = [stage.begin for stage in config.stages if stage.begin > step]
    return min([*begins, config.training.last_step])


def config_at(config: Config, step: int, source: str = "config") -> Config:
    """Return the config for the step after step `step`. Raises ConfigError if an override does not work."""
    stage = stage_at(config, step)
    return config if stage is None else _overridden(config, stage, source)


def planned_stages(config: Config, source: str) -> list[PlannedStage]:
    """Return all stages of a run with their configs. Raises ConfigError if the list or an override is wrong."""
    problems = list(_problems(config))
    if problems:
        raise ConfigError(source, problems)
    begins = [0, *(stage.begin for stage in config.stages if stage.begin)]
    stages = []
    for begin in begins:
        stage = stage_at(config, begin)
        where = source if stage is None else _place(source, stage)
        stages.append(
            PlannedStage(None if stage is None else stage.name, begin, config_at(config, begin, source), where)
        )
    return stages


def _place(source: str, stage: StageConfig) -> str:
    return f"{source}, stage {stage.name} from step {stage.begin}"


def _problems(config: Config) -> Iterator[Problem]:
    names = [stage.name for stage in config.stages]
    for i, stage in enumerate(config.stages):
        if stage.name in names[:i]:
            yield Problem(f"stages.{i}.name", stage.name, "an earlier stage has this name", "choose another")
        if stage.begin >= config.training.steps:
            rule = f"the run has only training.steps = {config.training.steps}"
            works = "try an earlier step, or a larger training.steps"
            yield Problem(f"stages.{i}.begin", stage.begin, rule, works)
    for i, (one, other) in enumerate(pairwise(config.stages), 1):
        if other.begin <= one.begin:
            rule = f"stage {one.name}, listed before it, begins at step {one.begin}"
            yield Problem(f"stages.{i}.begin", other.begin, rule, "list stages in order, each with at least one step")


def _overridden(config: Config, stage: StageConfig, source: str) -> Config:
    where = _place(source, stage)
    problems = [problem for key, value in stage.overrides.items() for problem in _refused(key, value)]
    if problems:
        raise ConfigError(where, problems)
    before = config.model_dump(mode="json")
    tree, changes = copy.deepcopy(before), dict[str, Any]()
    for key, value in stage.overrides.items():
        for of in (tree, changes):
            section, name = holder_of(of, key, value, where)
            section[name] = value
    left_out = list(leave_out_options(before, tree, changes, Config))
    try:
        changed = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(where, explain(error.errors())) from None
    report(left_out, changed, where)
    return changed


def _refused(key: str, value: Any) -> Iterator[Problem]:
    parts = key.split(".")
    if len(parts) < 2 or parts[0] not in _SECTIONS:
        rule = f"a stage can only override keys of the sections {', '.join(_SECTIONS)}"
        yield Problem(key, value, rule, "name one by its dotted path, for example training.seq_length")
    elif (why := _OF_THE_RUN.get(".".join(parts[:2]))) is not None:
        yield Problem(key, value, why, "leave it out of the stage's overrides")
