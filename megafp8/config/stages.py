"""Stages of a run: from which step which keys of its config have which values.

The config of a stage is that of the run with the stage's overrides, as if the command had been started again with these
at that step. Overrides of earlier stages do not hold in later ones. Steps before the first stage have the config as it
is.
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
    "training.steps": "it is the length of the run; where a stage ends says the next one's begin",
    "training.stop_after": "it is where the run stops; where a stage ends says the next one's begin",
    "training.evaluate": "evaluations are those of the run",
    "data.tokenizer": "weights are of one vocabulary",
    "checkpoint.resume": "it is for the beginning of a run",
    "checkpoint.init_from": "it is for the beginning of a run",
    "checkpoint.init_optimizer": "it is for the beginning of a run",
}
"""Keys that are the same in all stages, and why."""


class PlannedStage(NamedTuple):
    """What a run has from one step on. `source`: for error messages, the file and the stage's name."""

    name: str | None
    begin: int
    config: Config
    source: str


def stage_at(config: Config, step: int) -> StageConfig | None:
    """The stage of the step after the first `step`; None before the first stage."""
    return next((stage for stage in reversed(config.stages) if stage.begin <= step), None)


def end_of_stage(config: Config, step: int) -> int:
    """The step after which the stage of `stage_at(config, step)` ends or the run stops."""
    begins = [stage.begin for stage in config.stages if stage.begin > step]
    return min([*begins, config.training.last_step])


def config_at(config: Config, step: int, source: str = "config") -> Config:
    """The config of a run for the step after the first `step`. Raises ConfigError if an override does not work."""
    stage = stage_at(config, step)
    return config if stage is None else _overridden(config, stage, source)


def planned_stages(config: Config, source: str) -> list[PlannedStage]:
    """All that a run goes through, with the config of each. Raises ConfigError if the list or an override is wrong."""
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
            yield Problem(f"stages.{i}.begin", other.begin, rule, "list stages in their order, each with steps")


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
        rule = f"a stage overrides keys of the sections {', '.join(_SECTIONS)}"
        yield Problem(key, value, rule, "name one by its dotted path, for example training.seq_length")
    elif (why := _OF_THE_RUN.get(".".join(parts[:2]))) is not None:
        yield Problem(key, value, why, "leave it out of the stage's overrides")
