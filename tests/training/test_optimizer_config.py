"""The config's optimizer section: what updates which weights, patterns of groups, muP's factors."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest

from megafp8.config import Config
from megafp8.conversion.flat import differences
from megafp8.conversion.huggingface.config import choose, write_config
from megafp8.optimizer.adamw import AdamW
from megafp8.optimizer.muon import Muon
from megafp8.parallel.sharding import spec_of
from megafp8.training.describe import check_optimizer, planned_stage
from tests.training.presets import DP2, EP2, LAYERS_4, MOE, PP2, TIED, TP2, ZERO, Preset, config, config_of
from tests.training.runs import Runs


def test_what_updates_which_weights() -> None:
    adamw = config(optimizer={"beta2": 0.9}).optimizer
    assert adamw.update(hidden_matrix=True) == adamw.update(hidden_matrix=False) == AdamW(beta2=0.9)
    options = {"momentum": 0.9, "nesterov": False, "scaling": "original"}
    muon = config(optimizer={"name": "muon", "beta2": 0.9, "muon": options}).optimizer
    assert muon.update(hidden_matrix=True) == Muon(**options)
    assert muon.update(hidden_matrix=False) == AdamW(beta2=0.9)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({}, 1 / 4),
        ({"name": "muon"}, 1 / 2),
        ({"name": "muon", "muon": {"scaling": "original", "learning_rate": 0.02}}, 20.0),
        ({"name": "muon", "muon": {"learning_rate": 0.02}}, 10.0),
    ],
)
def test_learning_rate_of_hidden_matrices(optimizer: dict[str, Any], expected: float) -> None:
    """In a model 4 times as wide as the base."""
    found = config(model={"mup": {"base_hidden_size": 16}}, optimizer=optimizer)
    o, width = found.optimizer, found.spec.width_multiplier
    assert o.chosen.hidden_learning_rate_scale(o.learning_rate, width) == pytest.approx(expected)


def test_groups_of_a_stage_are_checked_against_the_whole_model() -> None:
    given = [{"match": ["embedding.*"], "learning_rate_scale": 0.1}, {"match": ["*.mlp.*"], "weight_decay": 0.0}]
    found = config_of(TP2 | PP2, optimizer={"groups": given})
    check_optimizer(found)


@pytest.mark.parametrize(
    ("preset", "pattern", "error"),
    [
        (LAYERS_4 | PP2, "layers.3.*", None),
        (
            MOE | DP2 | EP2,
            "*.experts.7.*",
            "but not layers.0.mlp.experts.0.gate.weight, and both are parts of one parameter",
        ),
        (TIED, "output.*", "'output.\\*', which no tensor of the model fits"),
    ],
)
def test_patterns_are_checked_against_the_whole_model(preset: Preset, pattern: str, error: str | None) -> None:
    """Layers and experts of other ranks included."""
    found = config_of(preset, optimizer={"groups": [{"match": [pattern]}]})
    with pytest.raises(ValueError, match=error) if error else nullcontext():
        check_optimizer(found)


# --- muP -------------------------------------------------------------------------------------------------------------


def _stds(found: Config) -> dict[str, float]:
    params = planned_stage(found, 0).parameters()
    return {piece.name: spec_of(param).init.std for param in params for piece in spec_of(param).shards}


def test_the_base_of_mup_is_the_usual_model(runs: Runs) -> None:
    """Bit for bit."""
    usual, same = runs.of(DP2 | ZERO), runs.of(DP2 | ZERO, model={"mup": {"base_hidden_size": 64, "base_head_dim": 8}})
    assert same.curve == usual.curve
    assert same.state == usual.state


def test_mup_in_a_wider_model() -> None:
    """Table 8 of arXiv:2203.03466 for a model that is 4 times as wide as the base, with heads twice as wide."""
    usual, wide = config(), config(model={"mup": {"base_hidden_size": 16, "base_head_dim": 4}})
    for name, std in _stds(wide).items():
        hidden = name.startswith("layers.") and "norm" not in name
        assert std == pytest.approx(_stds(usual)[name] / (2 if hidden else 1)), name
    assert wide.spec.head.logits_divisor == 4
    assert wide.spec.layers[0].mixer.attention_scale == pytest.approx(math.sqrt(4) / 8)
    more_heads = config(model={"mup": {"base_hidden_size": 16}}).spec.layers[0].mixer
    assert more_heads.attention_scale is None  # scores are divided by the root of a head's width, as usual


def test_a_model_of_mup_as_one_without() -> None:
    """What is converted, and compared with checkpoints, computes the same: Granite has both scales."""
    wide = config(model={"mup": {"base_hidden_size": 16, "base_head_dim": 4}, "vocab_size": 128}).spec
    plain = config(model={"logits_scaling": 4.0, "attention_scale": 0.25, "vocab_size": 128}).spec
    assert differences(wide, plain) == differences(plain, wide) == []
    assert differences(wide, config(model={"vocab_size": 128}).spec) == ["attention_scale", "logits_scaling"]
    family = choose(wide)
    written = write_config(family, wide)
    assert (written["model_type"], written["logits_scaling"], written["attention_multiplier"]) == ("granite", 4.0, 0.25)
