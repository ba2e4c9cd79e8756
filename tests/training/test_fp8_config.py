"""From the config's fp8 section to the recipe, and to the layers that are FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megafp8.config import Config, ConfigError, load_config
from megafp8.fp8 import (
    BlockwiseScaling,
    CurrentScaling,
    CustomScaling,
    DelayedScaling,
    Fp8Recipe,
    MXFP8Scaling,
    NVFP4Scaling,
    RowwiseScaling,
    Rule,
    StaticScaling,
)
from megafp8.plan import LinearSite
from megafp8.planner.outline import linear_sites
from megafp8.training.cuda_graphs import why_not
from megafp8.training.fp8_config import build_fp8, check_recipe, fp8_recipe
from tests.config.test_config import MINIMAL


def configured(**fp8: Any) -> Config:
    return Config.model_validate({**MINIMAL, "fp8": fp8})


def rule(layers: str, x: str, w: str, dy: str) -> dict[str, str]:
    return {"layers": layers, "input": x, "weight": w, "grad_output": dy}


@pytest.mark.parametrize(
    ("fp8", "recipe"),
    [
        ({}, None),
        ({"recipe": "none", "custom": [rule("*", "rowwise", "current", "mxfp8")]}, None),
        (
            {"recipe": "delayed", "margin": 2, "interval": 3, "amax_history_len": 4, "amax_compute_algo": "most_recent",
             "power_of_two_scale": True, "format": "e4m3", "fast_accumulation": [False, True, False]},
            DelayedScaling(
                margin=2, interval=3, amax_history_len=4, amax_compute_algo="most_recent", power_of_two_scale=True,
                fp8_format="e4m3", use_fast_accum=(False, True, False),
            ),
        ),
        ({"recipe": "current", "amax_epsilon": 1e-6}, CurrentScaling(amax_epsilon=1e-6)),
        (
            {"recipe": "rowwise", "override_linear_precision": [False, True, True]},
            RowwiseScaling(override_linear_precision=(False, True, True)),
        ),
        ({"recipe": "blockwise", "power_of_two_scale": False}, BlockwiseScaling(power_of_two=False)),
        (
            {"recipe": "static", "static_amax": {"*.down.input": 12.5, "*": 3}, "calibration_steps": 7, "margin": 1},
            StaticScaling(amax=(("*.down.input", 12.5), ("*", 3.0)), calibration_steps=7, margin=1),
        ),
        ({"recipe": "mxfp8", "format": "hybrid"}, MXFP8Scaling(fp8_format="hybrid")),
        ({"recipe": "nvfp4"}, NVFP4Scaling()),
    ],
)  # fmt: skip
def test_recipes(fp8: dict[str, Any], recipe: Fp8Recipe | None) -> None:
    assert fp8_recipe(configured(**fp8)) == recipe


OPTION_VALUES: dict[str, Any] = {
    "format": "e4m3",
    "custom": [rule("*", "current", "current", "current")],
    "static_amax": {"*": 3.0},
    "calibration_steps": 5,
    "margin": 2,
    "interval": 3,
    "amax_history_len": 4,
    "amax_compute_algo": "most_recent",
    "power_of_two_scale": True,
    "amax_epsilon": 1e-6,
    "fast_accumulation": [False, False, False],
    "override_linear_precision": [False, False, True],
}
SCALED = {"power_of_two_scale", "amax_epsilon"}
OPTIONS_OF = {
    "delayed": {
        "margin", "interval", "amax_history_len", "amax_compute_algo", "power_of_two_scale", "fast_accumulation"
    },
    "current": {*SCALED, "fast_accumulation"},
    "rowwise": {*SCALED, "fast_accumulation"},
    "blockwise": SCALED,
    "static": {"static_amax", "calibration_steps", "margin", "power_of_two_scale", "fast_accumulation"},
    "mxfp8": set(),
    "nvfp4": set(),
    "none": set(OPTION_VALUES),
}  # fmt: skip
"""What each recipe has besides COMMON, by the descriptions of the keys."""
COMMON = {"format", "override_linear_precision"}


@pytest.mark.parametrize(("key", "value"), OPTION_VALUES.items())
@pytest.mark.parametrize("recipe", OPTIONS_OF)
def test_an_option_that_the_recipe_does_not_have_is_an_error(recipe: str, key: str, value: Any) -> None:
    config = configured(recipe=recipe, **{key: value})
    if key in OPTIONS_OF[recipe] | COMMON:
        check_recipe(config, "run.yaml")
        return
    with pytest.raises(ConfigError) as error:
        check_recipe(config, "run.yaml")
    have = [name for name, keys in OPTIONS_OF.items() if key in keys and name != "none"] or ["custom"]
    (problem,) = error.value.problems
    assert str(problem).startswith(f"fp8.{key} = ")
    assert f"fp8.recipe {recipe} has no such option; {have[0]}" in problem.rule
    assert all(name in problem.rule for name in have)
    assert f"try fp8.recipe={have[0]}" in problem.works
    default = type(config.fp8).model_fields[key].default
    check_recipe(configured(recipe=recipe, **{key: default}), "run.yaml")  # as good as left out


def test_custom_has_the_options_of_the_recipes_it_names() -> None:
    mixed = {"recipe": "custom", "custom": [rule("*", "static", "current", "current")], "calibration_steps": 2}
    check_recipe(configured(**mixed, amax_epsilon=1e-6, margin=1), "run.yaml")
    with pytest.raises(ConfigError, match=r"fp8.recipe custom, of current, static, has no such option"):
        check_recipe(configured(**mixed, interval=3), "run.yaml")


FINER_WEIGHTS = "finer scales for weights than one"


@pytest.mark.parametrize(
    ("switch", "fp8", "message"),
    [
        ("param_gather", {"recipe": "delayed"}, None),
        ("param_gather", {"recipe": "rowwise"}, FINER_WEIGHTS),
        ("param_gather", {"recipe": "custom", "custom": [rule("*", "current", "mxfp8", "current")]}, FINER_WEIGHTS),
        ("keep_weight_transposes", {"recipe": "delayed"}, None),
        ("keep_weight_transposes", {"recipe": "blockwise"}, FINER_WEIGHTS),
        ("cuda_graphs", {"recipe": "nvfp4"}, None),
    ],
)
def test_what_a_recipe_cannot_do_is_refused(switch: str, fp8: dict[str, Any], message: str | None) -> None:
    section = "training" if switch == "cuda_graphs" else "fp8"
    tree = {**MINIMAL, "fp8": fp8}
    value = switch != "keep_weight_transposes"
    config = Config.model_validate({**tree, section: {**tree[section], switch: value}})
    if message is None:
        check_recipe(config, "run.yaml")
        return
    with pytest.raises(ConfigError, match=rf"{section}.{switch} = {value}: .*{message}"):
        check_recipe(config, "run.yaml")


ONE_BY_ONE: list[tuple[dict[str, Any], int, str]] = [
    ({"recipe": "delayed"}, 32, ""),
    ({"recipe": "current"}, 32, ""),
    ({"recipe": "blockwise"}, 384, ""),
    ({"recipe": "rowwise"}, 32, ""),
    ({"recipe": "mxfp8", "exclude": ["*.experts.*"]}, 32, ""),
    ({"recipe": "delayed", "exclude": ["*.experts.1.down"]}, 32, "some experts of a layer are not FP8"),
    ({"recipe": "mxfp8"}, 32, "no kernel computes all experts together under this recipe"),
    ({"recipe": "blockwise"}, 32, "the recipe needs widths that are multiples of 128, but experts have 64"),
    ({"recipe": "current"}, 40, "the recipe needs widths that are multiples of 16, but experts have 40"),
    ({"recipe": "delayed", "report_interval": 10}, 32, "a recorder samples"),
    ({"recipe": "delayed", "param_gather": True}, 32, ""),
]


@pytest.mark.parametrize(("fp8", "width", "reason"), ONE_BY_ONE, ids=str)
def test_a_graph_holds_fp8_experts_that_kernels_compute_at_once(fp8: dict[str, Any], width: int, reason: str) -> None:
    tree = {**MINIMAL, "fp8": fp8}
    tree["model"] = {**tree["model"], "hidden_size": 256, "moe": {"num_experts": 4, "ffn_hidden_size": width}}
    why = why_not(Config.model_validate(tree), "cuda")
    assert (reason in why) if reason else not why
    if reason:
        assert why.startswith("the host reads how many tokens each expert has")


CUSTOM = """
recipe: custom
amax_history_len: 4
calibration_steps: 5
power_of_two_scale: true
custom:
  - {layers: "*.mlp.down", input: rowwise, weight: rowwise, grad_output: rowwise}
  - {layers: "*", input: delayed, weight: static, grad_output: delayed}
"""


def test_custom_gives_each_recipe_its_options() -> None:
    config = configured(**yaml.safe_load(CUSTOM))
    rowwise = RowwiseScaling(power_of_two=True)
    delayed = DelayedScaling(amax_history_len=4, power_of_two_scale=True)
    static = StaticScaling(calibration_steps=5, power_of_two=True)
    rules = (
        Rule(layers="*.mlp.down", input=rowwise, weight=rowwise, grad_output=rowwise),
        Rule(layers="*", input=delayed, weight=static, grad_output=delayed),
    )
    assert fp8_recipe(config) == CustomScaling(rules=rules)


def fp8_layers(config: Config) -> list[str]:
    manager = build_fp8(config, None)
    return [name for name, _ in linear_sites(config) if manager.linear(LinearSite(name)).plan.fp8]


@pytest.mark.parametrize(
    ("first", "last", "left"), [(0, 0, {0, 1, 2, 3}), (1, 0, {1, 2, 3}), (0, 2, {0, 1}), (1, 2, {1})]
)
def test_first_and_last_blocks_stay_in_high_precision(first: int, last: int, left: set[int]) -> None:
    config = configured(recipe="current", first_blocks_bf16=first, last_blocks_bf16=last, exclude=["*.mlp.down"])
    layers = fp8_layers(config)
    assert {int(name.split(".")[1]) for name in layers} == left
    assert len(layers) == 3 * len(left)


@pytest.mark.parametrize(
    ("fp8", "message"),
    [
        ({"recipe": "static"}, "no amax for 48 of 48 tensors.*fp8.calibration_steps, 20 for example"),
        (
            {"recipe": "static", "static_amax": {"layers.*.mlp.donw.input": 12.5}, "calibration_steps": 3},
            r"static_amax pattern 'layers.\*.mlp.donw.input' matches no tensor.*'layers.\*.mlp.down.input' would work",
        ),
        (
            {"recipe": "custom", "custom": [rule("*.dwon", "current", "current", "current")]},
            r"custom pattern '\*.dwon' matches no layer",
        ),
        (
            {"recipe": "custom", "custom": [rule("*", "rowwise", "current", "current")]},
            r"rule '\*': no GEMM computes fprop, input \(rowwise, .* times weight \(current",
        ),
        ({"recipe": "nvfp4", "format": "hybrid"}, "NVFP4Scaling: fp8_format is 'hybrid'; it must be 'e4m3'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_training(fp8: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_fp8(configured(**fp8), None)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "fp8.custom=[{layers: a, input: delayed, weight: current}]",
            "fp8.custom.0.grad_output is required: add it; its meaning: Recipe of the output gradients.",
        ),
        (
            "fp8.custom=[{layers: a, input: none, weight: current, grad_output: current}]",
            "fp8.custom.0.input = 'none': input should be 'delayed'",
        ),
        ("fp8.static_amax={a: -1.0}", "fp8.static_amax.a = -1.0: input should be greater than 0"),
        ("fp8.calibration_steps=-1", "fp8.calibration_steps = -1: input should be greater than or equal to 0"),
    ],
)
def test_wrong_values_name_their_place(tmp_path: Path, override: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    with pytest.raises(ConfigError, match=message):
        load_config(path, [override])
