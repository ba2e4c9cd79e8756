"""Attention that says its log-sum-exp, against autograd through torch's own attention in float64; and merging."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.context_parallel import kernels

S, T, B, A, G, D = 24, 40, 2, 6, 2, 8
KINDS = ("causal", "whole", "masked")


def problem(kind: str, *, scale: int = 1, d: int = D, seed: int = 0) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v, do in float64, and a mask with something in every row."""
    generator = torch.Generator().manual_seed(seed)
    s, t = S * scale, (S if kind == "causal" else T) * scale
    shapes = ((s, B, A, d), (t, B, G, d), (t, B, G, d), (s, B, A, d))
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    if kind != "masked":
        return tensors, None
    mask = torch.rand(B, 1, s, t, generator=generator) < 0.4
    mask[..., -1] = True
    mask[:, :, : s // 2, : t // 2] = False  # whole tiles that some rows see nothing of
    return tensors, mask


def autograd(tensors: list[Tensor], mask: Tensor | None, causal: bool) -> list[Tensor]:
    """o, dq, dk, dv."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    q_, k_, v_ = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask, is_causal=causal, enable_gqa=True)
    o = o.permute(2, 0, 1, 3)
    o.backward(tensors[3])
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return [o.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward(kind: str) -> None:
    (q, k, v, do), mask = problem(kind)
    causal = kind == "causal"
    o, lse = kernels.forward(q, k, v, mask, causal=causal)
    found = [o, *kernels.backward(do, q, k, v, o, lse, mask, causal=causal)]
    for ours, theirs in zip(found, autograd([q, k, v, do], mask, causal), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_parts_merge_to_the_whole() -> None:
    (q, k, v, do), _ = problem("whole")
    first, second = slice(0, 11), slice(11, None)
    parts = [kernels.forward(q, k[part], v[part], None, causal=False) for part in (first, second)]
    o, lse = kernels.merge(*parts[0], *parts[1])
    shares = [kernels.backward(do, q, k[p], v[p], o, lse, None, causal=False) for p in (first, second)]
    dq, dk, dv = shares[0][0] + shares[1][0], *(torch.cat([shares[0][i], shares[1][i]]) for i in (1, 2))
    for ours, theirs in zip((o, dq, dk, dv), autograd([q, k, v, do], None, False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_part_with_next_to_no_weight_changes_nothing() -> None:
    (q, k, v, _), _ = problem("whole")
    o, lse = kernels.forward(q, k, v, None, causal=False)
    merged, merged_lse = kernels.merge(o, lse, torch.full_like(o, 1e3), lse - 1e4)
    assert torch.equal(merged, o)
    assert torch.equal(merged_lse, lse)
    merged, _ = kernels.merge(torch.full_like(o, 1e3), lse - 1e4, o, lse)
    assert torch.equal(merged, o)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_cudnn_against_float64(kind: str, d: int) -> None:
    """The operators behind torch's attention take and give what is said here, in bf16."""
    tensors, mask = problem(kind, scale=16, d=d)
    q, k, v, do = (x.to("cuda", torch.bfloat16) for x in tensors)
    mask = None if mask is None else mask.cuda()
    causal = kind == "causal"
    o, lse = kernels.forward(q, k, v, mask, causal=causal)
    found = [o, *kernels.backward(do, q, k, v, o, lse, mask, causal=causal)]
    _, exact = kernels.forward(q.double(), k.double(), v.double(), mask, causal=causal)
    torch.testing.assert_close(lse.double(), exact, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(found, autograd([x.double() for x in (q, k, v, do)], mask, causal), strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < 0.01


@pytest.mark.gpu
def test_cudnn_merges_to_the_whole() -> None:
    tensors, _ = problem("whole", scale=16, d=128)
    q, k, v, do = (x.to("cuda", torch.bfloat16) for x in tensors)
    first, second = slice(0, 256), slice(256, None)
    parts = [kernels.forward(q, k[part], v[part], None, causal=False) for part in (first, second)]
    o, lse = kernels.merge(*parts[0], *parts[1])
    shares = [kernels.backward(do, q, k[p], v[p], o, lse.contiguous(), None, causal=False) for p in (first, second)]
    dq, dk, dv = shares[0][0] + shares[1][0], *(torch.cat([shares[0][i], shares[1][i]]) for i in (1, 2))
    for ours, theirs in zip((o, dq, dk, dv), autograd([x.double() for x in (q, k, v, do)], None, False), strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < 0.01
