"""Choosing another kind leaves out the options of the old one, wherever the choice stands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megafp8.config import Config, ConfigError, choices, load_config, planned_stages
from megafp8.config.checks import check_layout
from megafp8.training.fp8_config import check_recipe
from tests.config.test_config import MINIMAL, write


@dataclass
class Case:
    """`sections` of the file, overrides, and the dotted keys that are left out."""

    sections: dict[str, Any]
    overrides: list[str]
    left_out: list[str]


DELAYED = {"recipe": "delayed", "margin": 2, "amax_history_len": 16, "format": "e4m3", "exclude": ["layers.0.*"]}
NET = {"kind": "gated_delta_net", "num_key_heads": 2, "num_value_heads": 4}
RATES = {"learning_rate": 0.001}
CASES = {
    "recipe": Case({"fp8": DELAYED}, ["fp8.recipe=current"], ["fp8.amax_history_len", "fp8.margin"]),
    "shared option": Case({"fp8": DELAYED}, ["fp8.recipe=static"], ["fp8.amax_history_len"]),
    "none": Case({"fp8": DELAYED}, ["fp8.recipe=none"], []),
    "finer scales": Case(
        {"fp8": {"recipe": "delayed", "param_gather": True}, "parallel": {"zero": 1}},
        ["fp8.recipe=blockwise"],
        ["fp8.param_gather"],
    ),
    "no gather without FP8": Case(
        {"fp8": {"recipe": "delayed", "param_gather": True}, "parallel": {"zero": 1}},
        ["fp8.recipe=none"],
        ["fp8.param_gather"],
    ),
    "a whole section": Case({"fp8": DELAYED}, ["fp8={recipe: current}"], []),
    "optimizer": Case(
        {"optimizer": {**RATES, "name": "lion", "lion": {"beta1": 0.8}, "store_param_remainders": True}},
        ["optimizer.name=muon"],
        ["optimizer.lion", "optimizer.store_param_remainders"],
    ),
    "schedule": Case(
        {"optimizer": {**RATES, "schedule": "wsd", "decay_steps": 2, "decay_until": 9}},
        ["optimizer.schedule=constant"],
        ["optimizer.decay_steps", "optimizer.decay_until"],
    ),
    "precision": Case(
        {"training": {**MINIMAL["training"], "precision": "fp16", "loss_scale": {"hysteresis": 3}}},
        ["training.precision=bf16"],
        ["training.loss_scale"],
    ),
    "tokenizer": Case(
        {"data": {**MINIMAL["data"], "tokenizer": {"kind": "tiktoken", "path": "x", "pattern": "y"}}},
        ["data.tokenizer.kind=bytes"],
        ["data.tokenizer.path", "data.tokenizer.pattern"],
    ),
    "mixer": Case(
        {"model": {**MINIMAL["model"], "pattern": ["a"], "layer_kinds": {"a": {"mixer": NET}}}},
        ["model.layer_kinds.a.mixer.kind=attention", "model.layer_kinds.a.mixer.sliding_window=8"],
        ["model.layer_kinds.a.mixer.num_key_heads", "model.layer_kinds.a.mixer.num_value_heads"],
    ),
}


def without(tree: dict[str, Any], path: str) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        tree = tree[parent]
    del tree[leaf]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_one_override_changes_a_choice(case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = {**MINIMAL, **case.sections}
    before = load_config(write(tmp_path, tree)).model_dump(mode="json")
    config = load_config(tmp_path / "run.yaml", case.overrides)
    for path in case.left_out:
        without(before, path)
    by_hand = load_config(write(tmp_path, before), case.overrides)
    assert config == by_hand
    check_layout(config, 1)
    check_recipe(config, "run.yaml")
    assert all(f"{path} = " in caplog.text for path in case.left_out)
    assert bool(caplog.text) == bool(case.left_out)


def test_options_of_the_same_command_line_stay(tmp_path: Path) -> None:
    path = write(tmp_path, {**MINIMAL, "fp8": DELAYED})
    config = load_config(path, ["fp8.margin=3", "fp8.recipe=current"])
    assert (config.fp8.margin, config.fp8.amax_history_len) == (3, 1024)
    with pytest.raises(ConfigError, match=r"fp8.margin = 3: fp8.recipe current has no such option"):
        check_recipe(config, str(path))


def test_a_choice_that_is_not_changed_leaves_mistakes_where_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, {**MINIMAL, "fp8": {"recipe": "current", "margin": 2}})
    for overrides in (["fp8.recipe=current"], ["fp8.recipe=blockwise"]):
        assert load_config(path, overrides).fp8.margin == 2
    with pytest.raises(ConfigError, match=r"fp8.marge = 2: there is no such key"):
        load_config(write(tmp_path, {**MINIMAL, "fp8": {**DELAYED, "marge": 2}}), ["fp8.recipe=current"])


def test_stages_follow_the_rule(caplog: pytest.LogCaptureFixture) -> None:
    stage = {"name": "late", "begin": 5, "overrides": {"fp8.recipe": "blockwise"}}
    config = Config.model_validate({**MINIMAL, "fp8": DELAYED, "stages": [stage]})
    choices._log.cache_clear()
    for _ in range(2):
        first, late = planned_stages(config, "run.yaml")
    assert (first.config.fp8.margin, late.config.fp8.margin, late.config.fp8.format) == (2, 0, "e4m3")
    check_recipe(late.config, late.source)
    assert caplog.messages == [
        "run.yaml, stage late from step 5: left out, because fp8.recipe blockwise has no fp8.amax_history_len = 16, "
        "fp8.margin = 2"
    ]
