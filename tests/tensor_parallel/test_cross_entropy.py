"""Vocab-parallel cross-entropy against torch's on the whole logits, in float64, with padding, masks and z-loss."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megafp8.parallel_state import initialize_model_parallel
from megafp8.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.world import World

S, B, PADDED = 5, 3, 32


def _case(vocab_size: int, z_loss: float, scale: float) -> None:
    tp = initialize_model_parallel(torch.distributed.get_world_size()).tensor
    logits = torch.randn(S, B, PADDED, dtype=torch.float64) * scale
    labels, mask = torch.randint(vocab_size, (S, B)), torch.rand(S, B, dtype=torch.float64).round()
    own = logits.chunk(tp.size, -1)[tp.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(own, labels, tp.group, vocab_size=vocab_size, z_loss=z_loss)
    (loss * mask).sum().backward()

    whole = logits.clone().requires_grad_()
    kept = whole[..., :vocab_size]
    expected = F.cross_entropy(kept.flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    expected = expected + z_loss * kept.logsumexp(-1).square()
    (expected * mask).sum().backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.grad, whole.grad.chunk(tp.size, -1)[tp.rank], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("vocab_size", "z_loss", "scale"), [(32, 0.0, 1.0), (29, 0.0, 1.0), (7, 0.1, 1.0), (32, 1e-4, 300.0)]
)
def test_equals_torch(world4: World, ranks: int, vocab_size: int, z_loss: float, scale: float) -> None:
    world4.run(_case, vocab_size, z_loss, scale, ranks=ranks)


def _bf16() -> None:
    tp = initialize_model_parallel(torch.distributed.get_world_size()).tensor
    logits = torch.randn(S, B, PADDED).bfloat16()
    labels = torch.randint(PADDED, (S, B))
    own = logits.chunk(tp.size, -1)[tp.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(own, labels, tp.group, vocab_size=PADDED)
    loss.sum().backward()
    assert (loss.dtype, own.grad.dtype) == (torch.float32, torch.bfloat16)
    expected = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)


def test_bf16_logits_are_summed_in_fp32(world4: World) -> None:
    world4.run(_bf16, ranks=2)
