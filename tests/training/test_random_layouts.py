"""The trial of random layouts: what it draws, what it compares with which limits, and what it reports."""

from __future__ import annotations

import pytest

from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset
from tests.training.random_layouts import differences, documented_difference, draws, sharper

CURVE = [(4.0, 2.0), (3.9, 1.9), (3.8, 0.0), (3.7, 62.0), (3.6, 1.7), (3.5, 1.6)]


def test_draws_are_those_of_the_seed() -> None:
    found = draws(3, 8)
    assert found == draws(3, 8)
    assert len({*found}) == 8
    assert max(preset.ranks for preset in found) <= 8


@pytest.mark.parametrize(
    ("preset", "step", "limit"),
    [
        (TP2, 5, 1e-5),
        (FP64 | CURRENT | TP2, 5, 1e-11),
        (FP64 | CURRENT | DP2, 4, 1e-11),
        (BF16_MOMENTS | DP2, 1, 1e-5),
        (FP64 | CURRENT | TP2 | BF16_MOMENTS, 1, 1e-11),
        (BF16 | DP2, 0, 2e-3),
        (FP64 | ROWWISE | TP2, 0, 2e-3),
    ],
)
def test_a_loss_beyond_the_limit_is_a_problem(preset: Preset, step: int, limit: float) -> None:
    for share, problems in ((0.5, 0), (2.0, 1)):
        found = [(loss * (1 + share * limit * (i == step)), norm) for i, (loss, norm) in enumerate(CURVE)]
        assert len(differences(found, CURVE, preset)) == problems


def test_what_decides_a_draw_with_loose_limits() -> None:
    assert documented_difference(MOE | FP64 | CURRENT | TP2) is None
    assert "several micro-batches" in (documented_difference(MOE | FP64 | CURRENT | DP2 | EP2) or "")
    assert sharper(MOE | FP64 | CURRENT | DP2 | EP2 | FSDP | FP8_GATHER) == (MOE | DP2 | EP2 | FSDP)
    assert sharper(DROPPING | CP2 | BF16) == (MOE | CP2)
    assert sharper(BF16 | CURRENT | TP2) == (FP64 | CURRENT | TP2)
    assert sharper(FP64 | CURRENT | TP2) is None
