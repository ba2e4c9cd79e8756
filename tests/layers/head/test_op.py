"""Vocab-parallel cross-entropy and z-loss against torch on the whole logits, with padding and masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.layers.head.op import vocab_parallel_losses
from megafp8.parallel.parallel_state import initialize_model_parallel
from tests.world import World

S, B, PADDED = 5, 3, 32


def reference(logits: Tensor, labels: Tensor, weight: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's cross-entropy and z-loss in float64, and the gradient of the weighted sum of both.

    `logits` are without padding.
    """
    x = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    of_norm = z_loss * x.logsumexp(-1).square()
    (loss + of_norm).backward(weight.double())
    assert x.grad is not None
    return loss.detach(), of_norm.detach(), x.grad


def _case(dtype: torch.dtype, vocab_size: int, z_loss: float, scale: float) -> None:
    tp = initialize_model_parallel(torch.distributed.get_world_size()).tensor
    logits = (torch.randn(S, B, PADDED, dtype=torch.float64) * scale).to(dtype)
    labels, mask = torch.randint(vocab_size, (S, B)), torch.rand(S, B, dtype=torch.float64).round()
    own = logits.chunk(tp.size, -1)[tp.rank].clone().requires_grad_()
    loss, of_norm = vocab_parallel_losses(own, labels, tp.group, vocab_size=vocab_size, z_loss=z_loss)
    assert loss.dtype == of_norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not of_norm.requires_grad
    loss.backward(mask.to(loss.dtype))
    assert own.grad is not None
    assert own.grad.dtype == dtype
    expected, expected_of_norm, gradient = reference(logits[..., :vocab_size], labels, mask, z_loss)
    gradient = F.pad(gradient, (0, PADDED - vocab_size)).chunk(tp.size, -1)[tp.rank]
    of_loss, of_gradient = (1e-12, 1e-12) if dtype == torch.float64 else (1e-6, 2**-8)
    torch.testing.assert_close(loss.double(), expected, rtol=of_loss, atol=of_loss)
    torch.testing.assert_close(of_norm.double(), expected_of_norm, rtol=of_loss, atol=of_loss)
    torch.testing.assert_close(own.grad.double(), gradient, rtol=of_gradient, atol=of_gradient / 100)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "vocab_size", "z_loss", "scale"),
    [
        (torch.float64, 32, 0.0, 1.0),
        (torch.float64, 29, 0.0, 1.0),
        (torch.float64, 7, 0.1, 1.0),
        (torch.float64, 32, 1e-4, 300.0),
        (torch.bfloat16, 32, 0.0, 1.0),
    ],
)
def test_equals_torch(
    world4: World, ranks: int, dtype: torch.dtype, vocab_size: int, z_loss: float, scale: float
) -> None:
    """In bf16, the loss is in fp32."""
    world4.run(_case, dtype, vocab_size, z_loss, scale, ranks=ranks)
