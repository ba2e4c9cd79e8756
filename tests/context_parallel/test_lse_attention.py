"""Attention with log-sum-exps, and its merging, against autograd through torch's own attention in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.context_parallel import lse_attention

S, T, B, A, G = 24, 40, 2, 6, 2
KINDS = ("causal", "whole", "masked")
CUDNN = pytest.param("cuda", marks=pytest.mark.gpu)


def problem(kind: str, device: str, d: int) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v, do, float64, and a mask with something in every row; larger and rounded to bf16 on a GPU."""
    generator, scale = torch.Generator().manual_seed(0), 16 if device == "cuda" else 1
    s, t = S * scale, (S if kind == "causal" else T) * scale
    shapes = ((s, B, A, d), (t, B, G, d), (t, B, G, d), (s, B, A, d))
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator).to(device) for shape in shapes]
    if device == "cuda":
        tensors = [x.bfloat16().double() for x in tensors]
    if kind != "masked":
        return tensors, None
    mask = torch.rand(B, 1, s, t, generator=generator) < 0.4
    mask[..., -1] = True
    mask[:, :, : s // 2, : t // 2] = False  # whole tiles in which some rows have no key
    return tensors, mask.to(device)


def check(found: list[Tensor], tensors: list[Tensor], mask: Tensor | None, causal: bool) -> None:
    """o, dq, dk, dv against autograd in float64."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    q_, k_, v_ = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask, is_causal=causal, enable_gqa=True)
    o = o.permute(2, 0, 1, 3)
    o.backward(tensors[3])
    for ours, theirs in zip(found, (o.detach(), q.grad, k.grad, v.grad), strict=True):
        assert theirs is not None
        if ours.dtype == torch.float64:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        else:
            assert (ours.double() - theirs).norm() / theirs.norm() < 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("device", ["cpu", CUDNN])
def test_forward_and_backward(kind: str, device: str, d: int) -> None:
    """On a GPU, that the operators behind torch's attention take and return in bf16 what is documented here."""
    exact, mask = problem(kind, device, d)
    causal = kind == "causal"
    q, k, v, do = exact if device == "cpu" else [x.bfloat16() for x in exact]
    o, lse = lse_attention.forward(q, k, v, mask, causal=causal)
    check([o, *lse_attention.backward(do, q, k, v, o, lse, mask, causal=causal)], exact, mask, causal)
    _, exact_lse = lse_attention.forward(*exact[:3], mask, causal=causal)
    tolerance = 1e-3 if device == "cuda" else 0.0
    torch.testing.assert_close(lse.double(), exact_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", ["cpu", CUDNN])
def test_parts_merge_to_the_whole(device: str) -> None:
    exact, _ = problem("whole", device, 128)
    q, k, v, do = exact if device == "cpu" else [x.bfloat16() for x in exact]
    parts = slice(0, len(k) // 4), slice(len(k) // 4, None)
    o, lse = lse_attention.merge(
        *(x for part in parts for x in lse_attention.forward(q, k[part], v[part], None, causal=False))
    )
    first, second = (
        lse_attention.backward(do, q, k[part], v[part], o, lse.contiguous(), None, causal=False) for part in parts
    )
    dk, dv = (torch.cat([first[i], second[i]]) for i in (1, 2))
    check([o, first[0] + second[0], dk, dv], exact, None, False)


def test_a_part_of_negligible_weight_changes_nothing() -> None:
    (q, k, v, _), _ = problem("whole", "cpu", 8)
    o, lse = lse_attention.forward(q, k, v, None, causal=False)
    merged, merged_lse = lse_attention.merge(o, lse, torch.full_like(o, 1e3), lse - 1e4)
    assert torch.equal(merged, o)
    assert torch.equal(merged_lse, lse)
    merged, _ = lse_attention.merge(torch.full_like(o, 1e3), lse - 1e4, o, lse)
    assert torch.equal(merged, o)
