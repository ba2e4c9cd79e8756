"""Context-parallel attention and its gradients against an unsharded float64 reference that loops over heads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megafp8.context_parallel.attention import ContextAttention, context_attention
from megafp8.context_parallel.blocks import plan
from megafp8.context_parallel.split import shard_sequence
from megafp8.parallel_state import Group, initialize_model_parallel
from tests.context_parallel.test_blocks import is_visible
from tests.world import World

B, D = 2, 6


def reference(
    inputs: list[Tensor], do_sbad: Tensor, window: int | None, ids_bs: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """The output, and the gradients of q, k and v, in float64."""
    q_sbad, k_sbgd, v_sbgd = inputs = [x.detach().double().requires_grad_() for x in inputs]
    s, b, heads, d = q_sbad.shape
    allowed = torch.tensor(
        [[[is_visible(i, j, window, ids_bs, sample) for j in range(s)] for i in range(s)] for sample in range(b)]
    )
    out = []
    for head in range(heads):
        group = head * k_sbgd.shape[2] // heads
        q, k, v = (x.transpose(0, 1) for x in (q_sbad[:, :, head], k_sbgd[:, :, group], v_sbgd[:, :, group]))
        scores = (q @ k.mT / math.sqrt(d)).masked_fill(~allowed, -math.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    o_sbad = torch.stack(out, dim=2)
    o_sbad.backward(do_sbad.double())
    return o_sbad.detach(), [x.grad for x in inputs]


def _context_group() -> Group:
    return initialize_model_parallel(context_parallel_size=torch.distributed.get_world_size()).context


def _random(s: int, heads: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(s, B, n, D, dtype=dtype, generator=generator) for n in heads]


def _compare(s: int, heads: int, groups: int, window: int | None, documents: bool, max_mask: int) -> None:
    group, widths = _context_group(), (heads, groups, groups)
    *qkv, do = _random(s, (*widths, heads), torch.float64)
    generator = torch.Generator().manual_seed(8)
    ids = torch.randint(2, (B, s), generator=generator).cumsum(1) // 3 if documents else None
    o, gradients = reference(qkv, do, window, ids)
    # Views of one packed tensor, as the model's are.
    packed = torch.cat([shard_sequence(x, group.rank, group.size, dim=0) for x in qkv], dim=2).requires_grad_()
    blocks = plan(s, group.rank, group.size, window=window, documents=documents, max_mask=max_mask)
    found = ContextAttention(group.group, blocks, window, ids)(*packed.split(widths, dim=2))
    found.backward(shard_sequence(do, group.rank, group.size, dim=0))
    assert packed.grad is not None
    for ours, theirs in zip((found, *packed.grad.split(widths, dim=2)), (o, *gradients), strict=True):
        torch.testing.assert_close(ours, shard_sequence(theirs, group.rank, group.size, dim=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("heads", "groups", "window", "documents", "max_mask"),
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
def test_output_and_gradients_equal_the_reference(
    world4: World, heads: int, groups: int, window: int | None, documents: bool, max_mask: int, ranks: int
) -> None:
    world4.run(_compare, 24, heads, groups, window, documents, max_mask, ranks=ranks)


def _in_bf16(window: int | None) -> float:
    """Relative error of the gradient of k, which is summed over ranks."""
    group = _context_group()
    *qkv, do = (x.bfloat16() for x in _random(16, (2, 1, 1, 2), torch.float32))
    _, (_, dk, _) = reference(qkv, do, window, None)
    own = [shard_sequence(x, group.rank, group.size, dim=0).requires_grad_() for x in qkv]
    found = context_attention(group.group, 16, window=window, document_ids_bs=None)(*own)
    found.backward(shard_sequence(do, group.rank, group.size, dim=0))
    assert found.dtype == own[1].grad.dtype == torch.bfloat16
    expected = shard_sequence(dk, group.rank, group.size, dim=0)
    return ((own[1].grad.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("window", [None, 5])
def test_bf16_is_as_exact_as_bf16_can_be(world4: World, window: int | None) -> None:
    assert max(world4.run(_in_bf16, window)) < 2**-7
