"""Attention across ranks, and its gradients, against an unsharded float64 twin that loops over heads and pairs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megafp8.context_parallel.attention import ContextAttention, context_attention
from megafp8.context_parallel.blocks import plan
from megafp8.context_parallel.split import cut
from megafp8.parallel_state import initialize_model_parallel
from tests.world import World

B, D = 2, 6


def twin(q_sbad: Tensor, k_sbgd: Tensor, v_sbgd: Tensor, window: int | None, ids_bs: Tensor | None) -> Tensor:
    s, b, heads, d = q_sbad.shape
    allowed = torch.zeros(b, s, s, dtype=torch.bool)
    for sample in range(b):
        for i in range(s):
            for j in range(i + 1):
                near = window is None or i - j < window
                allowed[sample, i, j] = near and (ids_bs is None or bool(ids_bs[sample, i] == ids_bs[sample, j]))
    out = []
    for head in range(heads):
        group = head * k_sbgd.shape[2] // heads
        q, k, v = (x.transpose(0, 1) for x in (q_sbad[:, :, head], k_sbgd[:, :, group], v_sbgd[:, :, group]))
        scores = (q @ k.mT / math.sqrt(d)).masked_fill(~allowed, -math.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.stack(out, dim=2)


def _compare(s: int, heads: int, groups: int, window: int | None, documents: bool, most: int) -> None:
    group = initialize_model_parallel(context_parallel_size=torch.distributed.get_world_size()).context
    generator = torch.Generator().manual_seed(7)
    widths = (heads, groups, groups, heads)
    q, k, v, do = (torch.randn(s, B, n, D, dtype=torch.float64, generator=generator) for n in widths)
    ids = torch.randint(2, (B, s), generator=generator).cumsum(1) // 3 if documents else None
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = twin(*whole, window, ids)
    expected.backward(do)
    # Views of one packed tensor, as the model's are.
    packed = torch.cat([cut(x, group.rank, group.size, dim=0) for x in (q, k, v)], dim=2).requires_grad_()
    own = packed.split(widths[:3], dim=2)
    blocks = plan(s, group.rank, group.size, window=window, documents=documents, most=most)
    attend = ContextAttention(group.group, blocks, window, ids)
    found = attend(*own)
    found.backward(cut(do, group.rank, group.size, dim=0))
    assert packed.grad is not None
    gradients = packed.grad.split(widths[:3], dim=2)
    for ours, theirs in zip((found, *gradients), (expected, *(x.grad for x in whole)), strict=True):
        torch.testing.assert_close(ours, cut(theirs, group.rank, group.size, dim=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("heads", "groups", "window", "documents", "most"),
    [
        (3, 3, None, False, 1),
        (6, 2, None, False, 1),
        (4, 1, 5, False, 10**6),
        (4, 2, 5, False, 30),
        (4, 2, 11, False, 30),
        (4, 2, 24, False, 1),
        (4, 2, None, True, 10**6),
        (4, 2, None, True, 30),
        (4, 4, 7, True, 60),
    ],
)
def test_output_and_gradients_equal_the_twin(
    world4: World, heads: int, groups: int, window: int | None, documents: bool, most: int, ranks: int
) -> None:
    world4.run(_compare, 24, heads, groups, window, documents, most, ranks=ranks)


def _in_bf16(window: int | None) -> float:
    """Relative error of the gradients of k, whose shares are added up over ranks."""
    group = initialize_model_parallel(context_parallel_size=torch.distributed.get_world_size()).context
    generator = torch.Generator().manual_seed(7)
    q, k, v, do = (torch.randn(16, B, n, D, generator=generator).bfloat16() for n in (2, 1, 1, 2))
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    twin(*whole, window, None).backward(do.double())
    own = [cut(x, group.rank, group.size, dim=0).requires_grad_() for x in (q, k, v)]
    found = context_attention(group.group, 16, window=window, document_ids_bs=None)(*own)
    found.backward(cut(do, group.rank, group.size, dim=0))
    assert found.dtype == own[1].grad.dtype == torch.bfloat16
    expected = cut(whole[1].grad, group.rank, group.size, dim=0)
    return ((own[1].grad.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("window", [None, 5])
def test_bf16_is_as_exact_as_bf16_can_be(world4: World, window: int | None) -> None:
    assert max(world4.run(_in_bf16, window)) < 2**-7
