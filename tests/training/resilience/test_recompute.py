"""Recomputation: the same bits twice, in all layouts that allow it; a flipped bit of one rank is found and named."""

from __future__ import annotations

from typing import Any

import pytest

from megafp8.training.errors import ComputationDiffers
from megafp8.training.resilience.faults import flip_bit
from megafp8.training.resilience.recompute import check_recompute
from tests.marks import slow_but
from tests.training.runs import batches, config_of, start
from tests.world import World

CASES: dict[str, tuple[int, list[int]]] = {  # ranks; those that are named for a bit of rank 1
    "dp2 delayed dropout": (2, [1]),
    "tp2 delayed": (2, [1]),
    "tp2 pp2 zb-h1": (4, [1]),
    "dp2 zero nvfp4": (2, [1]),
    "dp2 zero delayed fp8-gather": (2, [1]),
    "dp2 ep2 deepseek": (2, [1]),
    "cp2 bf16 current": (2, [1]),
}


def _check(words: str) -> dict[str, Any]:
    config = config_of(words)
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


@pytest.mark.parametrize("words", slow_but(CASES, "dp2 delayed dropout"))
def test_a_wrong_gradient_is_found(world4: World, words: str) -> None:
    ranks, named = CASES[words]
    found = world4.run(_check, words, ranks=ranks)
    for own in found:
        assert own["checked"] == own["plain"], "the check changes the training"
        assert own["message"] == found[0]["message"]
        lines = own["message"].splitlines()
        assert [int(line.split()[1]) for line in lines if line.startswith("rank ")] == named
        assert "other gradients" in lines[1]
        assert own["flips"] == 1
