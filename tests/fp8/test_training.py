"""A small network learns in FP8 what it learns in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megafp8.fp8 import CurrentScaling, DelayedScaling, Fp8Manager, Fp8Recipe
from tests.fp8.linear_layer import LinearLayer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def final_loss(recipe: Fp8Recipe | None, device: str) -> float:
    """Mean loss of the last ten of fifty steps of a two-layer network that imitates a fixed one."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(32, 16, generator=generator).to(device)
    weights = [torch.randn(64, 32, generator=generator) / 32**0.5, torch.randn(16, 64, generator=generator) / 8]
    parameters = [nn.Parameter(w.to(device)) for w in weights]
    manager = Fp8Manager(recipe, amax_group=None)
    ops = [LinearLayer(manager, name) for name in ("fc1", "fc2")]
    manager.materialize(torch.device(device))
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for _ in range(50):
        x = torch.randn(128, 32, generator=generator).to(device)
        y = ops[1](torch.relu(ops[0](x, parameters[0])), parameters[1])
        loss = (y - torch.tanh(x @ target)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        manager.end_step()
        losses.append(loss.item())
    assert losses[0] > 2 * losses[-1]
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(DelayedScaling(), marks=pytest.mark.slow), CurrentScaling()],  # in test_recipes.py too
    ids=["delayed", "current"],
)
def test_fifty_steps_within_two_percent_of_fp32(recipe: Fp8Recipe, device: str) -> None:
    plain = final_loss(None, device)
    fp8 = final_loss(recipe, device)
    assert fp8 != plain
    assert abs(fp8 - plain) < 0.02 * plain
