"""Context-parallel attention and its gradients against an unsharded float64 reference that masks a matrix of scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.layers.attention import op as attention
from megafp8.layers.attention.context_parallel import ContextAttention, merge, plan
from megafp8.layers.attention.mask import AttentionMask, causal_mask
from megafp8.parallel import placement
from megafp8.parallel.context import shard_positions
from megafp8.parallel.parallel_state import Group, initialize_model_parallel
from megafp8.parallel.placement import Placement
from tests.layers.attention.test_op import B, allowed, offsets, scores_of, twin
from tests.marks import slow_but
from tests.world import World

D, CPU = 6, torch.device("cpu")
DOCUMENTS = {
    24: offsets([5, 1, 15, 0, 3], [1, 1, 1, 1, 20]),
    48: offsets([48, 0, 0, 0], [7, 24, 1, 16]),
    32: offsets([8, 8, 8, 8], [16, 8, 4, 4]),
    96: offsets([5, 3, 70, 2, 9, 7], [24, 20, 16, 23, 1, 12]),
}


def _context_group() -> Group:
    return initialize_model_parallel(context_parallel_size=torch.distributed.get_world_size()).context


def _random(s: int, heads: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(s, B, n, D, dtype=dtype, generator=generator) for n in heads]


def _shard(x_sbad: Tensor, cu_seqlens: Tensor | None, group: Group, chunks: Tensor | None = None) -> Tensor:
    """Each sample's tokens of this rank."""
    s, b = x_sbad.shape[:2]
    positions = shard_positions(cu_seqlens, s, group.rank, group.size, CPU, chunks).expand(b, -1)
    return torch.stack([x_sbad[positions[sample], sample] for sample in range(b)], dim=1)


def _compare(
    s: int, heads: int, groups: int, window: int | None, documents: bool, kind: str = "plain", causal: bool = True,
    prefix: bool = False, width: int = D, whole: tuple[int, ...] | None = None,
) -> None:  # fmt: skip
    """`width`: of values; `whole`: longest documents of each sample that stay on one rank."""
    group, widths = _context_group(), (heads, groups, groups)
    *qkv, do = _random(s, (*widths, heads), torch.float64)
    qkv[2][..., width:] = 0.0
    do = do[..., :width]
    ends, scores = DOCUMENTS[s] if documents else None, scores_of(kind, s, s, heads)
    prefix_b = torch.tensor([s // 2 + 3, 1]) if prefix else None
    placed = None if whole is None else _placed(ends, group.size, whole)
    chunks = None if placed is None else placed.chunks_bml
    mask = AttentionMask(ends, ends, causal, window, prefix_b=prefix_b)
    o, _, (*expected, dbias) = twin(*qkv[:2], qkv[2][..., :width], allowed(s, s, mask), do, scores=scores)
    if scores.distance_bias_ar is None:
        expected.append(dbias)
    else:
        scores.distance_bias_ar.requires_grad_()
    # Views of one packed tensor, as the model's are.
    packed = torch.cat([_shard(x, ends, group, chunks) for x in qkv], dim=2).requires_grad_()
    calls = plan(
        s, group.rank, group.size, window=window, cu_seqlens_bm=ends, device=CPU, causal=causal, prefix_b=prefix_b,
        positions=scores.depend_on_positions, placement=placed,
    )  # fmt: skip
    q, k, v = packed.split(widths, dim=2)
    found = ContextAttention(group.group, calls)(q, k, v[..., :width], None, scores)
    found.backward(_shard(do, ends, group, chunks))
    assert packed.grad is not None
    dq, dk, dv = packed.grad.split(widths, dim=2)
    for ours, theirs in zip((found, dq, dk, dv[..., :width]), (o, *expected), strict=True):
        expected_shard = _shard(theirs, ends, group, chunks)
        torch.testing.assert_close(ours, expected_shard, rtol=1e-11, atol=1e-12)
    if scores.distance_bias_ar is not None:
        of_all_ranks = scores.distance_bias_ar.grad
        torch.distributed.all_reduce(of_all_ranks, group=group.group)
        torch.testing.assert_close(of_all_ranks, dbias, rtol=1e-11, atol=1e-12)


def _placed(ends: Tensor, ranks: int, whole: tuple[int, ...]) -> Placement:
    """Placement in which documents of at most `whole` tokens, by sample, stay on one rank where they fit."""
    tokens, chunks, gathered = int(ends[0, -1]) // ranks, [], []
    for sample, longest in zip(ends, whole, strict=True):
        lengths = sample.diff().numpy().astype("int64")
        owners = placement._owners(lengths, ranks, longest)
        chunks.append(torch.from_numpy(placement._chunks(lengths, owners, ranks)))
        gathered.append(placement._gathered(placement._rooms(lengths, owners, ranks), tokens))
    return Placement(torch.stack(chunks), max(gathered))


SHAPES = [
    (24, 3, 3, None, False), (48, 6, 2, None, False), (24, 4, 1, 5, False), (48, 4, 2, 11, False),
    (24, 4, 2, 24, False), (24, 4, 2, None, True), (48, 4, 2, None, True), (24, 4, 4, 7, True), (48, 4, 2, 2, True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("s", "heads", "groups", "window", "documents", "ranks"),
    slow_but(
        [(*shape, ranks) for shape in SHAPES for ranks in (2, 4)],
        *((*shape, 4 if shape[0] == 48 else 2) for shape in SHAPES if shape != SHAPES[6]),
    ),
)
def test_output_and_gradients_equal_the_reference(
    world4: World, s: int, heads: int, groups: int, window: int | None, documents: bool, ranks: int
) -> None:
    world4.run(_compare, s, heads, groups=groups, window=window, documents=documents, ranks=ranks)


@pytest.mark.parametrize(
    ("kind", "window", "whole", "ranks"),
    slow_but(
        [
            ("plain", None, (0, 24), 4), ("plain", None, (12, 24), 2), ("plain", None, (0, 48), 2),
            ("plain", 11, (9, 24), 2), ("plain", 5, (9, 20), 4), ("bias", None, (9, 24), 2), ("all", 7, (5, 24), 4),
            ("plain", None, (16, 16), 2), ("plain", 5, (16, 16), 2),  # all documents
        ],
        ("plain", None, (0, 24), 4), ("plain", None, (12, 24), 2), ("plain", 5, (9, 20), 4), ("all", 7, (5, 24), 4),
    ),
)  # fmt: skip
def test_whole_documents_on_one_rank(
    world4: World, kind: str, window: int | None, whole: tuple[int, ...], ranks: int
) -> None:
    """Keep some or all documents of both samples whole; the ranks gather as many tokens for both."""
    s = 32 if whole == (16, 16) else 96
    world4.run(_compare, s, 4, groups=2, window=window, documents=True, kind=kind, whole=whole, ranks=ranks)


def _in_bf16(window: int | None) -> float:
    """Relative error of the gradient of k, which is summed over ranks."""
    group = _context_group()
    *qkv, do = (x.bfloat16() for x in _random(16, (2, 1, 1, 2), torch.float32))
    _, _, (_, dk, _) = twin(*qkv, allowed(16, 16, causal_mask(None, window, 16, CPU)), do)
    own = [_shard(x, None, group).requires_grad_() for x in qkv]
    calls = plan(16, group.rank, group.size, window=window, cu_seqlens_bm=None, device=CPU)
    found = ContextAttention(group.group, calls)(*own)
    found.backward(_shard(do, None, group))
    assert found.dtype == own[1].grad.dtype == torch.bfloat16
    expected = _shard(dk, None, group)
    return ((own[1].grad.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("kind", "window", "documents", "causal", "prefix"),
    [
        ("all", None, True, False, False),
        ("all", 11, True, True, False),
        ("bias", None, False, True, True),
        ("softcap", 11, True, True, False),
        ("plain", 7, False, False, False),
        ("plain", None, False, False, False),
    ],
)
def test_scores_and_masks_of_the_whole_sequence(
    world4: World, kind: str, window: int | None, documents: bool, causal: bool, prefix: bool
) -> None:
    """Dropout too is that of one process, and the bias's gradient a sum over ranks."""
    world4.run(
        _compare, 48, 4, groups=2, window=window, documents=documents, kind=kind, causal=causal, prefix=prefix, ranks=2
    )


@pytest.mark.parametrize(("window", "documents", "causal"), [(None, False, True), (5, True, True), (None, True, False)])
def test_values_narrower_than_keys(world4: World, window: int | None, documents: bool, causal: bool) -> None:
    world4.run(_compare, 48, 4, groups=2, window=window, documents=documents, causal=causal, width=4, ranks=2)


@pytest.mark.parametrize("window", [None, 5])
def test_bf16_is_as_exact_as_bf16_can_be(world4: World, window: int | None) -> None:
    assert max(world4.run(_in_bf16, window)) < 2**-7


# --- merging ----------------------------------------------------------------------------------------------------------

WHOLE = AttentionMask(causal=False)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_parts_merge_to_the_whole(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    s, t, dtype = (24, 40, torch.float64) if device == "cpu" else (384, 640, torch.bfloat16)
    q, k, v, do = (
        torch.randn(n, B, heads, 64, generator=generator, dtype=torch.float64).to(device, dtype)
        for n, heads in ((s, 4), (t, 2), (t, 2), (s, 4))
    )
    o, _, gradients = twin(q, k, v, torch.ones(B, s, t, dtype=torch.bool, device=device), do)
    parts = slice(0, t // 4), slice(t // 4, None)
    found, lse = merge(*(x for part in parts for x in attention.forward(q, k[part], v[part], WHOLE)))
    first, second = (attention.backward(do, q, k[part], v[part], found, lse, WHOLE)[:3] for part in parts)
    dk, dv = (torch.cat([first[i], second[i]]) for i in (1, 2))
    for ours, theirs in zip((found, first[0] + second[0], dk, dv), (o, *gradients), strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < (1e-12 if device == "cpu" else 0.01)


def test_a_part_of_negligible_weight_or_without_keys_changes_nothing() -> None:
    q, k, v = (torch.randn(24, B, 2, 8, dtype=torch.float64) for _ in range(3))
    o, lse = attention.forward(q, k, v, WHOLE)
    for less in (lse - 1e4, torch.full_like(lse, -torch.inf)):
        merged, merged_lse = merge(o, lse, torch.full_like(o, 1e3), less)
        assert torch.equal(merged, o)
        assert torch.equal(merged_lse, lse)
    merged, _ = merge(torch.full_like(o, 1e3), lse - 1e4, o, lse)
    assert torch.equal(merged, o)
