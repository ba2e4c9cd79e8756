"""The loss scale against a simulation of it, written from Megatron-LM's description, in Python's numbers."""

from __future__ import annotations

import random

import pytest
import torch

from megafp8.config.schema import LossScaleConfig
from megafp8.optimizer.loss_scale import LossScaler

CPU = torch.device("cpu")


def simulated(config: LossScaleConfig, steps: list[bool | None]) -> list[float]:
    """The scale after each step, whose gradients were finite, or not, or which does not count."""
    scale, clean_steps, tolerated, found = config.initial_scale, 0, config.hysteresis, []
    for finite in steps:
        if finite:
            clean_steps += 1
            if clean_steps == config.growth_interval:
                clean_steps, tolerated, scale = 0, config.hysteresis, scale * 2
        elif finite is False:
            clean_steps, tolerated = 0, tolerated - 1
            if tolerated <= 0:
                scale = max(scale / 2, config.min_loss_scale)
        found.append(scale)
    return found


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_equals_its_simulation(hysteresis: int) -> None:
    rng = random.Random(hysteresis)
    config = LossScaleConfig(initial_scale=64.0, growth_interval=3, hysteresis=hysteresis, min_loss_scale=0.5)
    steps = rng.choices([True, False, None], [9, 8, 1], k=500)
    scaler, found = LossScaler(CPU, **config.model_dump()), []
    for finite in steps:
        always = finite is not None and rng.random() < 0.5
        scaler.update(torch.tensor(bool(finite)), None if always else torch.tensor(finite is not None))
        found.append(scaler.scale.item())
    assert found == simulated(config, steps)
    assert min(found) == 0.5
    assert len(set(found)) > 5


def test_the_first_scale_is_megatrons() -> None:
    scaler = LossScaler(CPU, **LossScaleConfig().model_dump())
    assert scaler.scale.item() == 2.0**32
    for _ in range(2):
        scaler.update(torch.tensor(False))
    assert scaler.scale.item() == 2.0**31
