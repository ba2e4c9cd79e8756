"""DotProductAttention against a loop over pairs in float64: every mask and layout, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8 import nn
from megafp8.layers.attention.scores import alibi_slopes
from tests.nn import twin
from tests.nn.compare import TIGHT, assert_same, random

B, HEADS, GROUPS, D = 2, 4, 2, 4
Q_LENGTHS, K_LENGTHS = [4, 7], [6, 5]


def attends(kind: str, window: tuple[int, int], s: list[int], t: list[int]) -> twin.Attends:
    """Transformer Engine's definition, pair by pair; `s`, `t`: queries and keys of each sample."""

    def pair(sample: int, i: int, j: int) -> bool:
        if i >= s[sample] or j >= t[sample]:
            return False
        top_left = kind in ("causal", "padding_causal")
        diagonal = i if top_left else i + t[sample] - s[sample]
        left, right = window
        if "causal" in kind:
            right = 0
        return (left < 0 or j >= diagonal - left) and (right < 0 or j <= diagonal + right)

    return pair


def check(run: Callable[..., Tensor], pairs: twin.Attends, s: int, t: int, v_width: int = D, **scores: Any) -> None:
    def expected(p: twin.Params, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return twin.attention(q, k, v, pairs, **scores).flatten(-2)

    inputs = [random(s, B, HEADS, D), random(t, B, GROUPS, D, seed=1), random(t, B, GROUPS, v_width, seed=2)]
    assert_same(torch.nn.Module(), run, expected, inputs)


def module(**options: Any) -> nn.DotProductAttention:
    return nn.DotProductAttention(HEADS, D, GROUPS, **options)


@pytest.mark.parametrize(
    ("kind", "window", "s", "t"),
    [
        ("no_mask", (-1, -1), 5, 7),
        ("no_mask", (2, 2), 7, 7),
        ("no_mask", (1, 3), 5, 7),
        ("no_mask", (-1, 1), 7, 5),
        ("causal", (-1, 0), 7, 7),
        ("causal", (2, 0), 7, 7),
        ("causal", (-1, -1), 5, 7),
        ("causal", (2, -1), 7, 5),
        ("causal_bottom_right", (-1, 0), 5, 7),
        ("causal_bottom_right", (-1, 0), 7, 5),
        ("causal_bottom_right", (2, 0), 5, 7),
    ],
)
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_masks_of_whole_sequences(kind: str, window: tuple[int, int], s: int, t: int, form: str) -> None:
    attention = module(attn_mask_type=kind, window_size=window, qkv_format=form)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if form == "sbhd":
            return attention(q, k, v)
        return attention(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)

    check(run, attends(kind, window, [s] * B, [t] * B), s, t)


@pytest.mark.parametrize("given", ["mask", "cu_seqlens"])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(
    ("kind", "window"),
    [
        ("padding", (-1, -1)),
        ("padding", (1, 1)),
        ("padding_causal", (-1, 0)),
        ("padding_causal", (2, 0)),
        ("padding_causal_bottom_right", (-1, 0)),
    ],
)
def test_padded_samples(kind: str, window: tuple[int, int], cross: bool, given: str) -> None:
    """Padding gives zeros, and takes no part in anything."""
    s = 8
    t, k_lengths = (7, K_LENGTHS) if cross else (s, Q_LENGTHS)
    masks = [
        torch.tensor([[i >= length for i in range(n)] for length in lengths])[:, None, None]
        for n, lengths in ((s, Q_LENGTHS), (t, k_lengths))
    ]
    cu = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (Q_LENGTHS, k_lengths)]
    options: dict[str, Any] = {"attention_mask": tuple(masks) if cross else masks[0]}
    if given == "cu_seqlens":
        options = {"cu_seqlens_q": cu[0], "cu_seqlens_kv": cu[1] if cross else cu[0]}
    attention = module(attn_mask_type=kind, window_size=window, attention_type="cross" if cross else "self")
    check(lambda *x: attention(*x, **options), attends(kind, window, Q_LENGTHS, k_lengths), s, t)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_packed_sequences(kind: str, cross: bool, gaps: bool) -> None:
    """thd: each sequence as if alone. Tokens between sequences give zeros and have no gradient."""
    k_lengths = K_LENGTHS if cross else Q_LENGTHS
    starts = [[0, n + 2 * gaps] for n in (Q_LENGTHS[0], k_lengths[0])]
    totals = [start[1] + lengths[1] + 3 * gaps for start, lengths in zip(starts, (Q_LENGTHS, k_lengths), strict=True)]
    cu = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (Q_LENGTHS, k_lengths)]
    padded = [torch.tensor([*start, total]).int() for start, total in zip(starts, totals, strict=True)]
    if not cross:
        cu[1], padded[1] = cu[0], padded[0]
    options: dict[str, Any] = {"cu_seqlens_q": cu[0], "cu_seqlens_kv": cu[1]}
    if gaps:
        options |= {"cu_seqlens_q_padded": padded[0], "cu_seqlens_kv_padded": padded[1], "pad_between_seqs": True}
    attention = module(attn_mask_type=kind, qkv_format="thd")
    of_lengths = attends(kind, (-1, -1), Q_LENGTHS, k_lengths)

    def pairs(_: int, i: int, j: int) -> bool:
        for n in range(B):
            own_i, own_j = i - starts[0][n], j - starts[1][n]
            if 0 <= own_i < Q_LENGTHS[n] and 0 <= own_j < k_lengths[n]:
                return of_lengths(n, own_i, own_j)
        return False

    def expected(p: twin.Params, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return twin.attention(q[:, None], k[:, None], v[:, None], pairs).squeeze(1).flatten(-2)

    shapes = [(totals[0], HEADS, D), (totals[1], GROUPS, D), (totals[1], GROUPS, D)]
    inputs = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
    assert_same(torch.nn.Module(), lambda *x: attention(*x, **options), expected, inputs)


def test_an_arbitrary_mask() -> None:
    """Of each sample and head, and with a window besides."""
    masked = torch.rand(B, 1, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.4
    attention = module(attn_mask_type="arbitrary", window_size=(3, 1))
    band = attends("arbitrary", (3, 1), [5] * B, [7] * B)
    check(
        lambda *x: attention(*x, attention_mask=masked, checkpoint_core_attention=True),
        lambda n, i, j: not masked[n, 0, i, j] and band(n, i, j),
        5,
        7,
    )


@pytest.mark.parametrize(
    ("made", "call", "how"),
    [
        ({"softcap": 2.0, "softmax_scale": 0.3}, {}, {"softcap": 2.0, "scale": 0.3}),
        ({"softmax_type": "off-by-one"}, {}, {"sink_a": torch.zeros(HEADS).double()}),
        ({}, {"core_attention_bias_type": "alibi"}, {"slopes": [2**-2, 2**-4, 2**-6, 2**-8], "shift": 2}),
        (
            {"attn_mask_type": "causal"},
            {"core_attention_bias_type": "alibi", "alibi_slopes": torch.tensor([1.0, 0.5, 0.25, 0.0])},
            {"slopes": [1.0, 0.5, 0.25, 0.0]},
        ),
    ],
)
def test_scores(made: dict[str, Any], call: dict[str, Any], how: dict[str, Any]) -> None:
    attention = module(**({"attn_mask_type": "no_mask"} | made))
    kind = attention.attn_mask_type
    check(lambda *x: attention(*x, **call), attends(kind, (-1, -1), [5] * B, [7] * B), 5, 7, **how)


@pytest.mark.parametrize("v_width", [3, 6])
def test_values_of_another_width(v_width: int) -> None:
    attention = nn.DotProductAttention(HEADS, (D, v_width), GROUPS)
    check(attention, attends("causal", (-1, 0), [5] * B, [5] * B), 5, 5, v_width)


def test_a_learned_sink() -> None:
    attention = module(softmax_type="learnable").double().cpu()
    torch.nn.init.normal_(attention.softmax_offset)
    pairs = attends("causal", (-1, 0), [5] * B, [5] * B)

    def expected(p: twin.Params, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return twin.attention(q, k, v, pairs, sink_a=p["softmax_offset"]).flatten(-2)

    inputs = [random(5, B, HEADS, D), random(5, B, GROUPS, D, seed=1), random(5, B, GROUPS, D, seed=2)]
    assert_same(attention, attention, expected, inputs)


def test_alibi_slopes_of_a_number_that_is_no_power_of_two() -> None:
    """As in the paper's code: those of four heads, and every other one of eight."""
    assert alibi_slopes(6) == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]


def test_dropout_of_probabilities() -> None:
    """Values that are one give the kept share of each query's weights, whose mean stays 1; a seed decides which."""
    attention = module(attn_mask_type="no_mask", attention_dropout=0.25)
    q, k = random(40, B, HEADS, D), random(40, B, GROUPS, D, seed=1)
    v = torch.ones(40, B, GROUPS, D, dtype=torch.float64)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(attention(q, k, v))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert abs(results[0].mean() - 1) < 0.05
    assert results[0].std() > 0.05
    torch.testing.assert_close(attention.eval()(q, k, v), torch.ones_like(results[0]), **TIGHT)
    forks: list[str] = []

    class Tracker:
        def fork(self, name: str = "model-parallel-rng") -> Any:
            forks.append(name)
            return torch.random.fork_rng(devices=[])

    tracked = module(attn_mask_type="no_mask", attention_dropout=0.25, get_rng_state_tracker=Tracker)
    torch.manual_seed(0)
    assert torch.equal(tracked(q, k, v), tracked(q, k, v))  # the tracker here gives the same numbers again
    assert forks == ["model-parallel-rng"] * 2


@pytest.mark.parametrize(
    ("made", "call", "says"),
    [
        ({"attn_mask_type": "prefix"}, {}, "attn_mask_type is 'prefix'"),
        ({"window_size": (-2, 0)}, {}, r"window_size is \(-2, 0\)"),
        ({}, {"core_attention_bias_type": "post_scale_bias"}, "post_scale_bias"),
        ({}, {"attn_mask_type": "padding"}, "needs an attention_mask"),
        ({}, {"attn_mask_type": "arbitrary"}, "needs an attention_mask"),
        ({"qkv_format": "thd"}, {}, "needs cu_seqlens_q"),
        ({"num_gqa_groups": 3}, {}, "multiple of the 3"),
        ({}, {"num_splits": 4}, "num_splits is 4"),
    ],
)
def test_what_is_refused(made: dict[str, Any], call: dict[str, Any], says: str) -> None:
    x = random(5, B, HEADS, D)
    with pytest.raises(ValueError, match=says):
        nn.DotProductAttention(HEADS, D, **made)(x, x, x, **call)
