"""Recomputation: the same bits twice, in all layouts that allow it; a flipped bit of one rank is found and named."""

from __future__ import annotations

from typing import Any

import pytest

from megafp8.training.errors import ComputationDiffers
from megafp8.training.resilience.faults import flip_bit
from megafp8.training.resilience.recompute import check_recompute
from tests.marks import slow_but
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config_of
from tests.training.runs import batches, start
from tests.world import World

CASES: dict[str, tuple[int, list[int]]] = {  # ranks; those that are named for a bit of rank 1
    DP2 | DELAYED | DROPOUT: (2, [1]),
    TP2 | DELAYED: (2, [1]),
    TP2 | PP2 | ZB_H1: (4, [1]),
    DP2 | ZERO | NVFP4: (2, [1]),
    DP2 | ZERO | DELAYED | FP8_GATHER: (2, [1]),
    DP2 | EP2 | DEEPSEEK: (2, [1]),
    CP2 | BF16 | CURRENT: (2, [1]),
}


def _check(preset: Preset) -> dict[str, Any]:
    config = config_of(preset)
    trainer, parallel = start(config)

    def train(checked: bool) -> list[tuple[float, float]]:
        curve = []
        for step in range(3):
            own = batches(step, config, parallel)
            if checked:
                check_recompute(trainer, step, own)
            loss, result = trainer.train_step(step, own)
            curve.append((loss.mean, result.grad_norm))
        return curve

    plain = train(False)
    trainer, parallel = start(config)
    checked = train(True)
    flips = [0]

    def flip() -> None:
        flips[0] += 1
        if parallel.rank == 1:
            flip_bit(trainer.strategy.owned[0])

    try:
        check_recompute(trainer, 3, batches(3, config, parallel), flip)
        message = ""
    except ComputationDiffers as error:
        message = str(error)
    return {"plain": plain, "checked": checked, "message": message, "flips": flips[0]}


@pytest.mark.parametrize("preset", slow_but(CASES, DP2 | DELAYED | DROPOUT))
def test_a_wrong_gradient_is_found(world4: World, preset: Preset) -> None:
    ranks, named = CASES[preset]
    found = world4.run(_check, preset, ranks=ranks)
    for own in found:
        assert own["checked"] == own["plain"], "the check changes the training"
        assert own["message"] == found[0]["message"]
        lines = own["message"].splitlines()
        assert [int(line.split()[1]) for line in lines if line.startswith("rank ")] == named
        assert "different gradients" in lines[1]
        assert own["flips"] == 1
