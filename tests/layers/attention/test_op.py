"""Attention, forward and backward, against a float64 twin that masks a matrix of scores."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megafp8.layers.attention import flash_kernel
from megafp8.layers.attention import op as module
from megafp8.layers.attention import reference as attention_reference
from megafp8.layers.attention.mask import CAUSAL, AttentionMask, causal_mask
from megafp8.layers.attention.op import attention, backward, forward
from megafp8.layers.attention.scores import PLAIN, AttentionDropout, Scores
from tests.marks import slow_but
from tests.numerics.test_philox import philox_by_hand

os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # processes share the kernels that they compile
B = 2


def twin(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, allowed_bst: Tensor, do_sbad: Tensor, *,
    scores: Scores = PLAIN, sink_a: Tensor | None = None, positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Output, log-sum-exps, and gradients of q, k, v, bias and sinks, as far as there are any, by autograd in float64.

    A query without keys has the output 0. `allowed_bst` may have heads, `[b, a, s, t]`. `positions`: of queries.
    """
    given = [x for x in (q_sbad, k_tbgd, v_tbgd, scores.distance_bias_ar, sink_a) if x is not None]
    leaves = [x.detach().double().requires_grad_() for x in given]
    (q, k, v), rest = leaves[:3], leaves[3:]
    (s, b, a, d), t, repeat = q.shape, len(k), q.shape[2] // k.shape[2]
    i_bs = (torch.arange(s) if positions is None else positions).expand(b, s).to(q.device)
    x = torch.einsum("sbad,tbad->bast", q, k.repeat_interleave(repeat, 2))
    x = x / math.sqrt(d) if scores.scale is None else x * scores.scale
    if scores.softcap is not None:
        x = torch.tanh(x / scores.softcap) * scores.softcap
    if scores.distance_bias_ar is not None:
        zero = rest[0].shape[1] - t
        x = x + rest[0][:, torch.arange(t, device=q.device) - i_bs[..., None] + zero].transpose(0, 1)
    visible = allowed_bst.to(q.device) if allowed_bst.dim() == 4 else allowed_bst.to(q.device)[:, None]
    weights = torch.where(visible, x.exp(), 0.0)
    total = weights.sum(-1)
    if sink_a is not None:
        total = total + rest[-1].exp()[:, None]
    p = weights / total.clamp(min=1e-300)[..., None]
    if scores.dropout is not None:
        p = p * dropped_by_hand(scores.dropout, a, i_bs, t).to(q.device)
    o = torch.einsum("bast,tbad->sbad", p, v.repeat_interleave(repeat, 2))
    return o.detach(), total.detach().log().permute(2, 0, 1), list(torch.autograd.grad(o, leaves, do_sbad.double()))


def dropped_by_hand(dropout: AttentionDropout, a: int, i_bs: Tensor, t: int) -> Tensor:
    """What probabilities `[b, a, s, t]` are multiplied by: 0 or 1/(1 - p)."""
    factors = torch.zeros(i_bs.shape[0], a, i_bs.shape[1], t, dtype=torch.float64)
    for sample, head, query, group in itertools.product(*map(range, factors.shape[:3]), range(-(-t // 4))):
        high = (dropout.first_head + head) << 64 | (int(dropout.sample_b[sample]) & 0xFFFFFFFF) << 96
        words = philox_by_hand(group | int(i_bs[sample, query]) << 32 | high, dropout.key)
        for key in range(4 * group, min(4 * group + 4, t)):
            if words[key % 4] >= round(dropout.p * 2**32):
                factors[sample, head, query, key] = 1 / (1 - dropout.p)
    return factors


def allowed(s: int, t: int, mask: AttentionMask) -> Tensor:
    """`[b, s, t]`, or `[b, a, s, t]`, pair by pair, as the docstring of AttentionMask says."""
    if mask.positions_bs is not None:
        whole = allowed(t, t, replace(mask, positions_bs=None))
        rows = mask.positions_bs.long().expand(B, s)
        return torch.stack([whole[sample, rows[sample]] for sample in range(B)])
    found = torch.zeros(B, s, t, dtype=torch.bool)
    for sample in range(B):
        ends_q, ends_k = (
            [0, n] if ends is None else ends[sample % len(ends)].tolist()
            for n, ends in ((s, mask.cu_seqlens_q), (t, mask.cu_seqlens_k))
        )
        for (q0, q1), (k0, k1) in zip(itertools.pairwise(ends_q), itertools.pairwise(ends_k), strict=True):
            for query, key in itertools.product(range(q0, q1), range(k0, k1)):
                distance = (q1 - query) - (k1 - key)  # from the latest key to this one; below 0 before it
                visible = not mask.causal or distance <= 0
                if mask.window is not None:
                    visible &= abs(distance) < mask.window
                if mask.prefix_b is not None:
                    visible |= key < int(mask.prefix_b[sample])
                found[sample, query, key] = visible
    return found if mask.visible is None else found[:, None] & mask.visible


def offsets(*lengths: list[int]) -> Tensor:
    return torch.tensor([[0, *itertools.accumulate(row)] for row in lengths], dtype=torch.int32)


DOCUMENTS = offsets([5, 1, 30, 0, 4], [1, 1, 18, 20, 0])
PARTS = offsets([3, 1, 10, 0, 2], [0, 1, 6, 9, 0])
"""Of queries: fewer than keys, or none."""
LESS = offsets([7, 0, 9, 0, 0], [0, 0, 6, 9, 1])
KEYS = offsets([0, 3, 10, 20, 7], [9, 0, 11, 20, 0])
"""None for some queries, queries for none."""
QUERIES, MORE_KEYS = offsets([5, 1, 34, 0], [1, 19, 20, 0]), offsets([5, 1, 34, 8], [1, 19, 20, 8])
SOME = torch.tensor([[0, 1, 2, 5, 20, 21, 38, 39], [3, 4, 1, 2, 39, 38, 37, 36]])
VISIBLE = torch.rand(B, 4, 40, 40, generator=torch.Generator().manual_seed(3)) > 0.3
VISIBLE[:, :, 7] = False
MASKS = {
    "causal": (40, 40, CAUSAL),
    "whole": (16, 40, AttentionMask(causal=False)),
    "documents": (40, 40, AttentionMask(DOCUMENTS, DOCUMENTS)),
    "window": (40, 40, causal_mask(None, 7, 40, torch.device("cpu"))),
    "documents window": (40, 40, AttentionMask(DOCUMENTS, DOCUMENTS, window=3)),
    "parts": (16, 40, AttentionMask(PARTS, DOCUMENTS)),
    "parts window": (16, 40, AttentionMask(PARTS, DOCUMENTS, window=3)),
    "keys without queries": (40, 48, AttentionMask(QUERIES, MORE_KEYS, window=3)),
    "parts whole": (16, 40, AttentionMask(LESS, KEYS, causal=False)),
    "both sides": (40, 40, AttentionMask(causal=False, window=7)),
    "documents both sides": (40, 40, AttentionMask(DOCUMENTS, DOCUMENTS, causal=False, window=3)),
    "prefix": (40, 40, AttentionMask(prefix_b=torch.tensor([13, 0]))),
    "documents prefix": (40, 40, AttentionMask(DOCUMENTS, DOCUMENTS, prefix_b=torch.tensor([13, 31]))),
    "last queries": (16, 40, CAUSAL),
    "some queries": (8, 40, AttentionMask(DOCUMENTS, DOCUMENTS, positions_bs=SOME)),
    "some queries window": (8, 40, AttentionMask(causal=False, window=5, positions_bs=SOME[:1])),
    "visible": (40, 40, AttentionMask(visible=VISIBLE)),
    "visible whole": (40, 40, AttentionMask(causal=False, visible=VISIBLE[:1, :1])),
}
LARGER = 25
"""On GPUs, where lengths then are odd multiples of no tile."""


def larger(mask: AttentionMask) -> AttentionMask:
    """For GPUs."""
    q, k, prefix_b = (
        None if x is None else (x * LARGER).cuda() for x in (mask.cu_seqlens_q, mask.cu_seqlens_k, mask.prefix_b)
    )
    same = mask.cu_seqlens_q is mask.cu_seqlens_k
    window = None if mask.window is None else mask.window * LARGER
    visible, positions = mask.visible, mask.positions_bs
    if visible is not None:
        visible = visible.repeat_interleave(LARGER, 2).repeat_interleave(LARGER, 3).cuda()
    if positions is not None:
        positions = (positions[..., None] * LARGER + torch.arange(LARGER)).flatten(1).cuda()
    return AttentionMask(
        q, q if same else k, causal=mask.causal, window=window, prefix_b=prefix_b, visible=visible,
        positions_bs=positions,
    )  # fmt: skip


def inputs(
    s: int, t: int, heads: int, groups: int, d: int, dtype: torch.dtype, device: str, w: int | None = None
) -> list[Tensor]:
    """q, k, v and the output's gradient. `w`: width of values, that of keys by default."""
    generator, w = torch.Generator().manual_seed(1), d if w is None else w
    shapes = [(s, B, heads, d), (t, B, groups, d), (t, B, groups, w), (s, B, heads, w)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).to(device) for shape in shapes]


def scores_of(name: str, s: int, t: int, heads: int, dtype: torch.dtype = torch.float64) -> Scores:
    """Scores by name; the bias is that of s queries and t keys."""
    bias = torch.randn(heads, s + t - 1, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).to(dtype)
    dropout = AttentionDropout(0.3, (7, 2**32 - 1), torch.tensor([2**40 + 5, 0]), first_head=3)
    return {
        "plain": PLAIN,
        "softcap": Scores(scale=0.7, softcap=2.0),
        "bias": Scores(scale=1.0, distance_bias_ar=bias),
        "dropout": Scores(dropout=dropout),
        "all": Scores(0.6, 3.0, bias, dropout),
    }[name]


@pytest.mark.parametrize(
    ("name", "rows", "groups"),
    slow_but(
        [(name, *at_once) for name in MASKS for at_once in ((512, 4), (5, 2))],
        *((name, 512, 4) for name in MASKS),
        *((name, 5, 2) for name in ("window", "documents prefix", "parts window", "some queries", "visible")),
    ),
)
def test_the_reference(name: str, rows: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With plain scores, or, where few queries are computed at once, with everything that scores can have."""
    monkeypatch.setattr(attention_reference, "_ROWS", rows)
    s, t, mask = MASKS[name]
    total = s if mask.positions_bs is None else t
    scores = scores_of("plain" if rows == 512 else "all", total, t, 4)
    q, k, v, do = inputs(s, t, 4, groups, 6, torch.float64, "cpu")
    o, lse, gradients = twin(q, k, v, allowed(s, t, mask), do, scores=scores, positions=mask.positions_bs)
    found, found_lse = forward(q, k, v, mask, scores)
    torch.testing.assert_close(found, o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found_lse, lse, rtol=1e-12, atol=1e-12)
    x = torch.einsum("sbad,tbad->bast", q, k.repeat_interleave(4 // groups, 2)) / math.sqrt(6)
    visible = allowed(s, t, mask).expand(4, B, s, t).transpose(0, 1) if mask.visible is None else allowed(s, t, mask)
    most = x.masked_fill(~visible, -math.inf).amax((0, 2, 3))
    torch.testing.assert_close(module.largest(q, k, mask, PLAIN), most, rtol=1e-12, atol=1e-12)
    ours = backward(do, q, k, v, found, found_lse, mask, scores, bias_grad=scores is not PLAIN)
    for one, other in itertools.zip_longest(ours[: len(gradients)], gradients):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("causal", "plain"), ("whole", "plain"), ("documents", "plain"), ("window", "plain"), ("visible", "plain"),
        ("documents", "softcap"), ("whole", "bias"), ("prefix", "bias"), ("window", "dropout"), ("visible", "all"),
        ("some queries", "all"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sinks", [False, True])
def test_autograd(name: str, kind: str, sinks: bool) -> None:
    s, t, mask = MASKS[name]
    total = s if mask.positions_bs is None else t
    scores, sink_a = scores_of(kind, total, t, 4), torch.tensor([-3.0, 0.0, 1.0, 40.0]).double() if sinks else None
    *qkv, do = inputs(s, t, 4, 2, 6, torch.float64, "cpu")
    o, _, gradients = twin(*qkv, allowed(s, t, mask), do, scores=scores, sink_a=sink_a, positions=mask.positions_bs)
    kv = torch.cat(qkv[1:], dim=2).requires_grad_()  # views of one tensor, as the model's are
    leaves = [x.requires_grad_() for x in (qkv[0], scores.distance_bias_ar, sink_a) if x is not None]
    found = attention(leaves[0], *kv.split([2, 2], dim=2), mask, sink_a, scores)
    torch.testing.assert_close(found, o, rtol=1e-12, atol=1e-12)
    dq, dkv, *rest = torch.autograd.grad(found, [leaves[0], kv, *leaves[1:]], do)
    for ours, theirs in zip((dq, *dkv.split([2, 2], dim=2), *rest), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def _run_and_kept(*given: Any) -> tuple[Tensor, list[Tensor]]:
    """Attention, and the tensors that autograd keeps."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        return attention(*given), kept


@pytest.mark.parametrize("narrow_values", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"), [("causal", "plain"), ("whole", "bias"), ("parts window", "plain"), ("visible", "all")]
)
def test_values_narrower_than_keys(name: str, kind: str, narrow_values: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a kernel that takes them, or gets them padded; nothing padded is kept for backward."""
    s, t, mask = MASKS[name]
    scores, sink_a = scores_of(kind, s, t, 4), torch.tensor([-3.0, 0.0, 1.0, 40.0]).double()
    *qkv, do = inputs(s, t, 4, 2, 6, torch.float64, "cpu", w=4)
    choice = module.KernelChoice("reference", "", narrow_values=narrow_values)
    monkeypatch.setattr(module, "choose", lambda *_, **__: choice)
    for sink in (None, sink_a):
        o, _, gradients = twin(*qkv, allowed(s, t, mask), do, scores=scores, sink_a=sink)
        leaves = [x.detach().requires_grad_() for x in (*qkv, scores.distance_bias_ar, sink) if x is not None]
        bias = None if scores.distance_bias_ar is None else leaves[3]
        given = replace(scores, distance_bias_ar=bias)
        found, kept = _run_and_kept(*leaves[:3], mask, None if sink is None else leaves[-1], given)
        assert found.is_contiguous()
        torch.testing.assert_close(found, o, rtol=1e-12, atol=1e-12)
        sizes = sorted(x.untyped_storage().nbytes() // 8 for x in kept)
        rest = [s * B * 4, *([] if bias is None else [bias.numel()])]
        assert sizes == sorted([*(x.numel() for x in qkv), s * B * 4 * 4, *rest])
        for ours, theirs in zip(torch.autograd.grad(found, leaves, do), gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("message", "mask", "scores"),
    [
        (r"prefix_b: without causal", lambda: AttentionMask(causal=False, prefix_b=torch.zeros(B)), PLAIN),
        (r"prefix_b: not with window = 3", lambda: AttentionMask(window=3, prefix_b=torch.zeros(B)), PLAIN),
        (r"prefix_b: \[1\] is not \[2\]", lambda: AttentionMask(prefix_b=torch.zeros(1)), PLAIN),
        (r"visible: \[1, 3, 4, 4\] is not \[1 or 2, 1 or 2, 4, 4\]",
         lambda: AttentionMask(visible=torch.ones(1, 3, 4, 4) > 0), PLAIN),
        (r"visible: torch.float32 is not", lambda: AttentionMask(visible=torch.ones(1, 2, 4, 4)), PLAIN),
        (r"distance_bias_ar: \[2, 6\] is not .* = \[2, 7\]", lambda: CAUSAL, {"distance_bias_ar": torch.ones(2, 6)}),
        (r"sample_b is \[3\], not \[2\]", lambda: CAUSAL, {"dropout": AttentionDropout(0.1, (0, 0), torch.arange(3))}),
        (r"p = 1.0 is not in \[0, 1\)", lambda: CAUSAL, {"dropout": AttentionDropout(1.0, (0, 0), torch.arange(2))}),
        (r"softcap: 0.0 is not above 0", lambda: CAUSAL, {"softcap": 0.0}),
    ],
)  # fmt: skip
def test_what_does_not_fit(message: str, mask: Any, scores: Any) -> None:
    q, k, v, _ = inputs(4, 4, 2, 2, 6, torch.float64, "cpu")
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, mask(), None, scores if scores is PLAIN else Scores(**scores))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["causal", "documents", "window"])
def test_sinks_on_a_gpu(name: str, deterministic: bool) -> None:
    s, t, mask = MASKS[name]
    s, t, mask = s * LARGER, t * LARGER, larger(mask)
    *qkv, do = inputs(s, t, 4, 2, 64, torch.bfloat16, "cuda")
    leaves = [x.requires_grad_() for x in (*qkv, torch.tensor([-3.0, 0.0, 1.0, 40.0], device="cuda"))]
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = attention(*leaves[:3], mask, leaves[3])
        gradients = torch.autograd.grad(found, leaves, do)
    finally:
        torch.use_deterministic_algorithms(False)
    on_cpu = AttentionMask(*(x if x is None else x.cpu() for x in mask.tensors[:2]), window=mask.window)
    o, _, expected = twin(*leaves[:3], allowed(s, t, on_cpu), do, sink_a=leaves[3])
    for ours, theirs in zip((found, *gradients), (o, *expected), strict=True):
        difference = (ours.double() - theirs).norm() / theirs.norm()
        assert difference < 0.01, "bf16's rounding, of some 0.004"


def test_a_window_of_the_whole_sequence_is_none() -> None:
    assert causal_mask(None, 40, 40, torch.device("cpu")) is CAUSAL
    assert causal_mask(DOCUMENTS, 40, 40, torch.device("cpu")).window is None


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("name", ["documents", "window"])
def test_no_matrix_of_scores(name: str) -> None:
    """A window of 100 in 4,096 tokens, and documents of 128."""
    s = 4096
    ends = torch.arange(0, s + 1, 128, dtype=torch.int32)[None]
    mask = AttentionMask(ends, ends) if name == "documents" else causal_mask(None, 100, s, torch.device("cpu"))
    q, k, v, do = inputs(s, s, 1, 1, 4, torch.float32, "cpu")
    with _Largest() as largest:
        o, lse = forward(q, k, v, mask)
        backward(do, q, k, v, o, lse, mask)
    assert largest.elements < s * 128


def test_a_line_says_which_kernel_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert module.describe(cpu, module.DOCUMENTS).endswith("the reference in PyTorch")

    def described(installed: str, capability: int, import_fails: bool = False, **options: Any) -> str:
        def imported() -> None:
            if import_fails:
                raise ImportError("no libcuda")

        monkeypatch.setattr(flash_kernel, "version", lambda name: installed)
        monkeypatch.setattr(flash_kernel, "_flash_attention_4", imported)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
        flash_kernel.why_unavailable.cache_clear()
        return module.describe(cuda, **{"mask": CAUSAL, **options})

    ours = flash_kernel.VERSION
    assert described(ours, 9) == "attention: FlashAttention-4"
    assert described(ours, 9, mask=module.DOCUMENTS) == "attention of documents and windows: FlashAttention-4"
    assert described(ours, 9, head_dim=80).endswith("torch's kernels, since FlashAttention-4 has other widths than 80")
    assert described(ours, 8) == "attention: torch's kernels, since FlashAttention-4 is used on Hopper only"
    assert described(ours, 9, True).endswith("since FlashAttention-4 cannot be imported: no libcuda")
    assert f"since flash-attn-4 is 4.0.0, not {ours} (pip install" in described("4.0.0", 9)
    monkeypatch.undo()
    flash_kernel.why_unavailable.cache_clear()


CHOICES = {
    "plain": (CAUSAL, {}, "flash"),
    "a scale": (CAUSAL, {"scale": 0.3}, "flash"),
    "all keys of some queries": (AttentionMask(causal=False, positions_bs=SOME[:1]), {}, "flash"),
    "documents": (MASKS["documents"][2], {"scale": 0.3}, "flash"),
    "both sides": (MASKS["both sides"][2], {}, "flash"),
    "documents both sides": (MASKS["documents both sides"][2], {}, "flash"),
    "prefix": (MASKS["prefix"][2], {}, "triton"),
    "visible": (MASKS["visible"][2], {}, "triton"),
    "some queries": (MASKS["some queries"][2], {}, "triton"),
    "softcap": (CAUSAL, {"softcap": 2.0}, "triton"),
    "bias": (MASKS["window"][2], {"distance_bias_ar": torch.zeros(1, 1)}, "triton"),
    "dropout": (CAUSAL, {"dropout": AttentionDropout(0.0, (0, 0), torch.zeros(1))}, "triton"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_which_kernel(name: str) -> None:
    mask, kind, expected = CHOICES[name]
    scores = Scores(**kind)

    def choice(
        d: int = 128, w: int = 128, device: str = "cuda", dtype: torch.dtype = torch.bfloat16,
        missing: str | None = None,
    ) -> module.KernelChoice:  # fmt: skip
        return module.choose(mask, scores, 40, 40, d, w, device, dtype, missing)

    assert choice().kernel == expected
    without = choice(missing="it is not installed")
    assert without.kernel == ("triton" if expected == "triton" else "torch")
    assert without.why.endswith("it is not installed") == (expected == "flash")
    assert choice(d=20).kernel == "triton"
    assert choice(d=80).kernel == without.kernel
    references = choice(d=512), choice(dtype=torch.float32), choice(device="cpu")
    assert {x.kernel for x in references} == {"reference"}
    assert all(x.narrow_values for x in references)
    assert choice(d=192).narrow_values == (expected == "flash")
    assert not choice(d=192, w=120).narrow_values
    cuda = torch.device("cuda")
    if expected == "triton":
        assert "our own kernel, since no other one computes" in module.describe(cuda, mask, scores)


def test_recomputation_drops_the_same() -> None:
    *qkv, do = inputs(40, 40, 4, 2, 6, torch.float64, "cpu")
    leaves, scores = [x.requires_grad_() for x in qkv], scores_of("dropout", 40, 40, 4)
    results = []
    for run in (attention, partial(checkpoint, attention, use_reentrant=False)):
        o = run(*leaves, CAUSAL, None, scores)
        results.append((o, *torch.autograd.grad(o, leaves, do)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- kernels of GPUs --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["default", "deterministic", "without FlashAttention-4"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    torch.use_deterministic_algorithms(request.param == "deterministic")
    if request.param.startswith("without"):
        monkeypatch.setattr(flash_kernel, "why_unavailable", lambda device: request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


KINDS = ("plain", "softcap", "bias", "dropout", "all")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MASKS)
def test_kernels(name: str, kind: str, mode: str) -> None:
    """Compare all widths with float64, or one width after the other if the kernel is our own."""
    if kind != "plain" and mode.startswith("without"):
        pytest.skip("computed by our own kernel in any case")
    widths = ((4, 4, 64), (4, 2, 128), (4, 1, 256), (4, 2, 80), (4, 4, 96), (4, 2, 192))
    index = list(MASKS).index(name) + KINDS.index(kind)
    for heads, groups, d in widths if kind == "plain" else [widths[index % 4]]:
        check_kernels(name, kind, mode, heads, groups, d)


def check_kernels(name: str, kind: str, mode: str, heads: int, groups: int, d: int) -> None:
    s, t, small = MASKS[name]
    mask = larger(small)
    s, t = s * LARGER, t * LARGER
    scores = scores_of(kind, s if mask.positions_bs is None else t, t, heads, torch.float32)
    bias, dropout = scores.distance_bias_ar, scores.dropout
    if dropout is not None:
        scores = replace(scores, dropout=dropout._replace(sample_b=dropout.sample_b.cuda()))
    if bias is not None:
        scores = replace(scores, distance_bias_ar=bias.cuda())
    q, k, v, do = inputs(s, t, heads, groups, d, torch.bfloat16, "cuda")
    exact = [x.double() for x in (q, k, v, do)]
    o, lse = attention_reference.forward(*exact[:3], mask, scores)
    gradients = attention_reference.backward(exact[3], *exact[:3], o, lse, mask, scores, bias is not None)
    found, found_lse = forward(q, k, v, mask, scores)
    torch.testing.assert_close(found_lse.double(), lse, rtol=1e-3, atol=1e-3)
    all_found = [found, *backward(do, q, k, v, found, found_lse, mask, scores, bias_grad=bias is not None)]
    for what, ours, theirs in zip(("o", "dq", "dk", "dv", "dbias"), all_found, (o, *gradients), strict=True):
        if theirs is None or ours is None:
            assert ours is theirs
            continue
        assert torch.isfinite(ours).all(), what
        error = ((ours.double() - theirs).norm() / theirs.norm()).item()
        assert error < 0.01, f"{what}: {error}"
    if mode == "deterministic":
        again = backward(do, q, k, v, found, found_lse, mask, scores, bias_grad=bias is not None)
        assert all(a is b or torch.equal(a, b) for a, b in zip(again, all_found[1:], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "w"), [(192, 128), (96, 64), (24, 16), (24, 12), (20, 12), (256, 64)])
@pytest.mark.parametrize("name", ["causal", "documents", "parts window", "visible"])
def test_narrow_values(name: str, d: int, w: int, mode: str) -> None:
    """By all kernels, those that take them as they are and those that get them padded; through autograd."""
    s, t, small = MASKS[name]
    mask, s, t = larger(small), s * LARGER, t * LARGER
    *qkv, do = inputs(s, t, 4, 4, d, torch.bfloat16, "cuda", w)
    exact = [x.double() for x in (*qkv, do)]
    o, lse = attention_reference.forward(*exact[:3], mask, PLAIN)
    gradients = attention_reference.backward(exact[3], *exact[:3], o, lse, mask, PLAIN, False)[:3]
    leaves = [x.requires_grad_() for x in qkv]
    for run in (attention, _by_kernels):
        found = run(*leaves, mask)
        all_found = [found, *torch.autograd.grad(found, leaves, do)]
        for what, ours, theirs in zip(("o", "dq", "dk", "dv"), all_found, (o, *gradients), strict=True):
            assert ours.shape == theirs.shape
            error = ((ours.double() - theirs).norm() / theirs.norm()).item()
            assert error < 0.01, f"{what}: {error}"


def _by_kernels(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Through `forward` and `backward`, also where `attention` calls torch's."""
    return module._Attention.apply(q, k, v, None, None, mask, PLAIN)
