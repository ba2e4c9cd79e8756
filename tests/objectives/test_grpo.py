"""GRPO against its formula in Python's floats, and its gradient in closed form."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from megafp8.objectives.grpo import group_advantages, token_losses

LOW, HIGH, KL = 0.2, 0.28, 0.04


def _inputs(dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    sampled, noise, away, advantages = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((6, 9), (6, 9), (6, 9), (6,))
    )
    sampled = -sampled.abs()
    mask = torch.rand(6, 9, generator=generator) < 0.7
    mask[0] = False  # a text without tokens
    return tuple(x.to(dtype) for x in (sampled + 0.3 * noise, sampled, sampled + 0.5 * away, advantages, mask))


def mean_over_texts(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean over texts of the mean over each one's tokens with mask 1; a text without any counts as 0."""
    return (torch.where(mask.bool(), values, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()


def _twin(
    p: torch.Tensor, old: torch.Tensor, reference: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> tuple[float, list[list[float]]]:
    """The objective's negative and its gradient with respect to each log-probability, number by number."""
    total, gradient = 0.0, [[0.0] * p.shape[1] for _ in range(p.shape[0])]
    for i in range(p.shape[0]):
        length = sum(mask[i].tolist())
        for t in range(p.shape[1]):
            if not mask[i, t]:
                continue
            x, a = p[i, t].item(), advantages[i].item()
            ratio, q = math.exp(x - old[i, t].item()), math.exp(reference[i, t].item() - x)
            clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
            weight = 1 / (length * p.shape[0])
            total += weight * (-min(ratio * a, clipped * a) + KL * (q - math.log(q) - 1))
            is_cut = (a > 0 and ratio > 1 + HIGH) or (a < 0 and ratio < 1 - LOW)
            gradient[i][t] = weight * ((0.0 if is_cut else -ratio * a) + KL * (1 - q))
    return total, gradient


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient(dtype: torch.dtype, error: float, seed: int) -> None:
    p, old, reference, advantages, mask = _inputs(dtype, seed)
    p.requires_grad_()
    losses = token_losses(p, old, advantages.unsqueeze(1), reference_logprobs_bs=reference, low=LOW, high=HIGH, beta=KL)
    loss = mean_over_texts(losses.loss_bs, mask)
    loss.backward()
    expected, gradient = _twin(*_inputs(torch.float64, seed))
    assert loss.item() == pytest.approx(expected, abs=error)
    assert p.grad is not None
    torch.testing.assert_close(p.grad.double(), torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=error)
    assert losses.clipped_bs.any()
    assert not losses.clipped_bs.all()
    assert (losses.kl_bs >= -error).all()


def test_the_first_update_is_a_policy_gradient() -> None:
    """Sampled with the same weights the loss is -A, and its gradient that of -A log p."""
    p, _, _, advantages, mask = _inputs(torch.float64, 0)
    p.requires_grad_()
    losses = token_losses(p, p.detach(), advantages.unsqueeze(1))
    mean_over_texts(losses.loss_bs, mask).backward()
    own = torch.autograd.grad(mean_over_texts(-advantages.unsqueeze(1) * p, mask), p)[0]
    assert p.grad is not None
    torch.testing.assert_close(p.grad, own, rtol=0, atol=1e-15)
    assert not losses.clipped_bs.any()


def test_advantages() -> None:
    rewards = [[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0]]
    advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64))
    for row, values in zip(advantages.tolist(), rewards, strict=True):
        mean, std = statistics.mean(values), statistics.stdev(values)
        assert row == pytest.approx([(x - mean) / (std + 1e-4) for x in values], abs=1e-14)
    with pytest.raises(ValueError, match="sample at least 2 of each prompt"):
        group_advantages(torch.ones(3, 1))
