"""Layers whose activations wait on the host: the same bits, and which layers' activations do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8 import fp8, nn
from megafp8.layers.offload import ActivationOffload
from megafp8.nn import cpu_offload
from tests.nn.compare import random, randomized

S, B, H, LAYERS = 8, 2, 32, 3


def _trained(offload: Any) -> list[Tensor]:
    """Gradients and outputs of two micro-batches, both forwards first."""
    context, synchronize = offload
    layers = [
        randomized(nn.TransformerLayer(H, 2 * H, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"))
        for _ in range(LAYERS)
    ]
    outputs, inputs = [], [random(S, B, H, seed=seed).float().requires_grad_() for seed in range(2)]
    for x in inputs:
        for layer in layers:
            with fp8.autocast(recipe=fp8.CurrentScaling()), context:
                x = synchronize(layer(x))
        outputs.append(x)
    for y in reversed(outputs):
        y.square().sum().backward()
    return [*outputs, *(x.grad for x in inputs), *(p.grad for layer in layers for p in layer.parameters())]


def test_offloaded_layers_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0

    class Counting(ActivationOffload):
        def __init__(self, device: torch.device) -> None:
            super().__init__(torch.device("cpu"), smallest=1024)
            take = self.host.take

            def counted(size: int) -> Tensor:
                nonlocal taken
                taken += 1
                return take(size)

            self.host.take = counted  # type: ignore[method-assign]

    monkeypatch.setattr(cpu_offload, "ActivationOffload", Counting)
    offload = partial(nn.get_cpu_offload_context, model_layers=LAYERS)
    expected = _trained(offload(enabled=False))
    counts = []
    for number in (0, 1, 2):
        taken = 0
        found = _trained(offload(enabled=True, num_layers=number))
        assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))
        counts.append(taken)
    assert counts[0] == 0
    assert counts[2] == 2 * counts[1] > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"offload_weights": True}, "offload_weights is True: weights stay on the device; False works"),
        ({"offload_activations": False}, "offload_activations is False"),
        ({"offload_stream": object()}, "offload_stream is given"),
        ({"num_layers": 2}, "num_layers is 2; it must be 0 to model_layers=1"),
    ],
)
def test_what_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        nn.get_cpu_offload_context(enabled=True, **options)
