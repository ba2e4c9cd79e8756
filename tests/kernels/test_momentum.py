"""Momentum and update of a matrix optimizer in one pass each, against PyTorch's operations."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import DEVICE, noise

# The interpreter rounds to bf16 in another way.
DIRECTION, MOMENTUM = (torch.bfloat16 if DEVICE == "cuda" else dtype for dtype in (torch.float32, torch.float16))


@pytest.mark.parametrize("n", [5, 2048, 4099])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("skip", [None, False, True])
def test_as_torch_does(n: int, nesterov: bool, skip: bool | None) -> None:
    from megafp8.kernels import momentum  # once Triton knows where its kernels run

    m, g, w, update = (noise(n, seed=i) for i in range(4))
    in_bf16 = m.bfloat16().to(MOMENTUM)
    found, x = m.clone(), w.clone()
    direction = torch.zeros(n, dtype=DIRECTION, device=DEVICE)
    flag = None if skip is None else torch.tensor(skip, device=DEVICE)
    momentum.accumulate(found, g, direction, 0.95, nesterov=nesterov, skip=flag)
    momentum.decayed_add_(x, update.to(DIRECTION), 0.9, -0.25, skip=flag)
    if skip:
        assert torch.equal(found, m)
        assert torch.equal(x, w)
        return
    expected = m.lerp(g, 0.05)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(direction, (g.lerp(expected, 0.95) if nesterov else expected).to(DIRECTION))
    torch.testing.assert_close(x, w * 0.9 - 0.25 * update.to(DIRECTION).float())
    momentum.accumulate(found, g, None, 0.95, nesterov=nesterov, skip=flag)
    torch.testing.assert_close(found, expected.lerp(g, 0.05))
    expected = in_bf16.float().lerp(g, 0.05)
    momentum.accumulate(in_bf16, g, direction, 0.95, nesterov=nesterov, skip=flag)
    torch.testing.assert_close(in_bf16, expected.to(MOMENTUM))
    torch.testing.assert_close(direction, (g.lerp(expected, 0.95) if nesterov else expected).to(DIRECTION))
