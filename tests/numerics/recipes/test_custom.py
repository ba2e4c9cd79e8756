"""Rules: which layer gets which, and every mistake with a message that names it."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from megafp8.fp8 import (
    E4M3,
    RECIPES,
    CurrentScaling,
    CustomScaling,
    DelayedScaling,
    Fp8Manager,
    Fp8Recipe,
    Rule,
    StaticScaling,
)
from megafp8.numerics.recipes.base import OPERANDS, by_recipe
from megafp8.numerics.recipes.custom import can_multiply
from tests.fp8.test_manager import NAMES, ask
from tests.linear.test_linear import assert_product, cast_exactly, managed, run, tensors

SIMPLE = [name for name in RECIPES if name != "custom"]
# Which go together, written down a second time.
KINDS = [{"delayed", "current", "static"}, {"rowwise"}, {"blockwise"}]
WITH_ANY = {"mxfp8", "nvfp4"}


def rule(layers: str, *recipes: str) -> Rule:
    """One recipe for all operands, or one for each."""
    made = [RECIPES[name]() for name in (recipes * 3 if len(recipes) == 1 else recipes)]
    return Rule(layers=layers, input=made[0], weight=made[1], grad_output=made[2])


def custom(*rules: Rule, **options: Any) -> CustomScaling:
    return CustomScaling(rules=rules, **options)


def meet(a: str, b: str) -> bool:
    return a in WITH_ANY or b in WITH_ANY or any({a, b} <= kind for kind in KINDS)


def test_operands_that_meet_must_go_together() -> None:
    for x, w, dy in itertools.product(SIMPLE, repeat=3):
        pairs = {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}
        broken = [gemm for gemm, pair in pairs.items() if not meet(*pair)]
        if broken:
            with pytest.raises(ValueError, match=rf"rule '\*\.down': no GEMM computes {broken[0]}, "):
                custom(rule("*.up", "current"), rule("*.down", x, w, dy))
        override = tuple(gemm in broken for gemm in pairs)
        custom(rule("*", x, w, dy), override_linear_precision=override)


def test_meeting_is_mutual_and_says_what_is_wrong() -> None:
    granularities = {RECIPES[name]().granularity(operand) for name in SIMPLE for operand in OPERANDS}
    assert all(can_multiply(a, b) == can_multiply(b, a) for a, b in itertools.product(granularities, repeat=2))
    message = (
        "FP8 custom rule '*.down': no GEMM computes wgrad, grad_output (current, a scale for each tensor) times input "
        "(rowwise, a scale for each row); give both operands the same recipe, or keep wgrad in high precision"
    )
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        custom(rule("*.down", "rowwise", "mxfp8", "current"))
    with pytest.raises(ValueError, match="no rules"):
        custom()


def fp8_layers(recipe: Fp8Recipe, **patterns: Any) -> list[str]:
    manager = Fp8Manager(recipe, amax_group=None, **patterns)
    return [name for name in NAMES if ask(manager, name).state.plan.fp8]


def test_the_first_match_counts_and_what_none_matches_is_not_fp8() -> None:
    recipe = custom(rule("layers.0.*", "delayed"), rule("*.fc2", "rowwise"), rule("*.fc?", "current"))
    found = {
        name: None if (operands := recipe.operands(name)) is None else {own.name for own in operands} for name in NAMES
    }
    assert {name for name, own in found.items() if own is None} == {
        f"layers.{i}.attention.{part}" for i in (1, 2, 3) for part in ("qkv", "proj")
    }
    assert found["layers.0.mlp.fc2"] == {"delayed"}
    assert found["layers.1.mlp.fc2"] == {"rowwise"}
    assert found["layers.1.mlp.fc1"] == {"current"}
    assert fp8_layers(recipe) == [name for name, own in found.items() if own is not None]
    assert fp8_layers(recipe, exclude=("layers.0.*",)) == [f"layers.{i}.mlp.fc{j}" for i in (1, 2, 3) for j in (1, 2)]


def test_operands_are_grouped_by_recipe() -> None:
    recipe = custom(rule("a", "delayed", "current", "delayed"), rule("b", "current", "delayed", "current"))
    grouped = by_recipe(recipe, ["a", "b"])
    assert {own.name: tensors for own, tensors in grouped.items()} == {
        "delayed": [("a", "input"), ("a", "grad_output"), ("b", "weight")],
        "current": [("a", "weight"), ("b", "input"), ("b", "grad_output")],
    }


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            custom(rule("*", "current"), rule("*.fc3", "current")),
            "custom pattern '*.fc3' matches no layer; the nearest",
        ),
        (custom(rule("*.mlp.*", "current"), rule("*.fc1", "current")), "custom rule 1 never applies: rules before it"),
        (StaticScaling(amax=(("*.fc3.*", 1.0),), calibration_steps=1), "static_amax pattern '*.fc3.*' matches no"),
        (StaticScaling(amax=(("*.fc1.*", 1.0), ("*.weight", 1.0))), "24 of 48 tensors, layers.0.attention.qkv.input"),
        (StaticScaling(), "or set fp8.calibration_steps, 20 for example"),
        (custom(rule("*", "static", "current", "current")), "no amax for 16 of 16 tensors"),
    ],
)
def test_patterns_that_do_not_fit_the_model(recipe: Fp8Recipe, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Fp8Manager(recipe, amax_group=None).check_patterns(NAMES)


def test_patterns_that_fit() -> None:
    for recipe in (
        custom(rule("*.fc1", "current"), rule("*.mlp.*", "rowwise")),
        StaticScaling(amax=(("*.fc1.*", 1.0), ("*", 1.0))),
        StaticScaling(calibration_steps=1),
    ):
        Fp8Manager(recipe, amax_group=None).check_patterns(NAMES)
    excluded = StaticScaling(amax=(("*.fc1.*", 1.0),))
    Fp8Manager(excluded, amax_group=None, include=("*.fc1",)).check_patterns(NAMES)
    with pytest.raises(ValueError, match=r"static_amax pattern '.*fc1.*' matches no tensor with a static scale"):
        Fp8Manager(excluded, amax_group=None, exclude=("*.fc1",)).check_patterns(NAMES)


def test_delayed_operands_of_a_mixture_advance() -> None:
    """Only theirs: the state of a custom recipe is that of the operands that have any."""
    delayed = DelayedScaling(amax_history_len=3)
    rule = Rule(layers="*", input=delayed, weight=CurrentScaling(), grad_output=delayed)
    manager, op = managed(CustomScaling(rules=(rule,)))
    x, weight, dy = tensors()
    run(op, x, weight, dy)
    manager.end_step()
    state = manager.state_dict()
    assert sorted(state) == [
        f"fp8.layer.{operand}.{what}" for operand in ("grad_output", "input") for what in ("amax_history", "scale")
    ]
    assert state["fp8.layer.input.amax_history"].tolist() == [0, x.detach().abs().max(), 0]
    y, _, _ = run(op, x, weight, dy)
    assert_product(y, cast_exactly(x, E4M3).flatten(0, 1), cast_exactly(weight, E4M3).t())
