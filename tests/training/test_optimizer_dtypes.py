"""What bf16 moments, and gradients that travel in bf16 or FP8, cost in loss: the quickstart against itself in fp32."""

from __future__ import annotations

import pytest

from tests.quickstart_data import QuickstartData
from tests.training.test_equivalence import ALONE, SMALL, Curve, curve
from tests.world import World

STEPS = 60


def _last(found: Curve) -> float:
    return sum(loss for loss, _ in found[-5:]) / 5


@pytest.fixture(scope="module")
def fp32(world2: World, quickstart_data: QuickstartData) -> Curve:
    return _run(world2, quickstart_data)


def _run(world: World, data: QuickstartData, *options: str) -> Curve:
    return world.run(curve, [*SMALL, *data.overrides, *ALONE, "fp8.recipe=none", *options], STEPS, ranks=2)[0]


@pytest.mark.parametrize("option", ["moments_dtype=bf16", "reduce_dtype=bf16", "reduce_dtype=fp8"])
def test_the_loss_hardly_changes(world2: World, quickstart_data: QuickstartData, fp32: Curve, option: str) -> None:
    found = _run(world2, quickstart_data, f"optimizer.{option}", f"parallel.zero={int('fp8' in option)}")
    assert found != fp32, "the option does nothing"
    learnt = fp32[0][0] - _last(fp32)
    assert learnt > 0.5
    assert abs(_last(found) - _last(fp32)) < 0.001 * learnt
