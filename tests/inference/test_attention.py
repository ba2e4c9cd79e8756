"""Attention to pages against that of whole sequences, whatever the chunks, the pages and the scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.inference.attention import DecodeInputs, PackedStep, PagedAttention
from megafp8.inference.paged_cache import PagedCache
from megafp8.inference.scheduler import Chunk, GrowingSequence
from megafp8.kernels.arithmetic import INTERPRETED
from megafp8.layers.attention import paged_kernel as paged_attention
from megafp8.layers.attention.mask import causal_mask
from megafp8.layers.attention.op import attention
from megafp8.layers.attention.scores import Scores, alibi_slopes
from megafp8.layers.mixer import TokenCache

HEADS, GROUPS, D, PAGE, LAYER = 4, 2, 8, 3, 5
CHUNKS = [[[0, 1, 2, 3, 4], [5], [6], [7, 8]], [[0], [1], [2, 3, 4, 5, 6, 7], [8]], [[0, 1], [2, 3, 4], [5, 6, 7], [8]]]
"""For each sequence its positions in each step."""
PAGES = [[7, 0, 3], [2, 8, 1], [4, 6, 5]]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 4},
    "chunk": {"chunk": 4},
    "sinks": {"sink": True},
    "soft cap": {"softcap": 1.5, "window": 2},
    "alibi": {"alibi": True},
    "narrow values": {"value_width": 5},
    "padding": {"multiple": 8},
    "in FP8": {"stored": torch.float8_e4m3fn},
    "in int8": {"stored": torch.int8, "value_width": 5},
}


def _alibi(t: int) -> Tensor:
    slopes = torch.tensor(alibi_slopes(HEADS), dtype=torch.float64)
    return slopes[:, None] * torch.arange(1 - t, t)


def _rounded(x: Tensor, stored: torch.dtype | None) -> Tensor:
    """What a cache keeps of x `[..., d]`: each row as multiples of its amax / 127, or in E4M3 with the amax at 448."""
    if stored is None:
        return x
    unit = x.float().abs().amax(-1, keepdim=True) / (127 if stored == torch.int8 else 448)
    scaled = x.float() / torch.where(unit == 0, 1.0, unit)
    return ((scaled.round() if stored == torch.int8 else scaled.to(stored).float()) * unit).to(x.dtype)


COVERED = ["plain", "window", "sinks", "narrow values", "padding"]
"""Kinds of which the kernels are tested with others: "soft cap" has a window and "in int8" narrow values too, and
tests.layers.attention.test_paged_kernel has sinks."""


INTERPRETER = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


@pytest.mark.parametrize(
    ("kind", "in_place"),
    [
        *((kind, False) for kind in KINDS),
        *(pytest.param(kind, True, marks=INTERPRETER) for kind in KINDS if kind not in COVERED),
        *(pytest.param(kind, True, marks=[INTERPRETER, pytest.mark.slow]) for kind in COVERED),
    ],
)
def test_chunks_of_sequences(kind: str, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`in_place`: by the kernels, in Triton's interpreter, with tiles of four keys, in fp32."""
    given, dtype = KINDS[kind], torch.float32 if in_place else torch.float64
    monkeypatch.setattr(paged_attention, "_KEYS", 4)
    monkeypatch.setattr(paged_attention, "_PROGRAMS", 8)
    window, width, multiple = given.get("window"), given.get("value_width", D), given.get("multiple", 1)
    chunk = given.get("chunk")
    sink = torch.randn(HEADS, dtype=dtype) if "sink" in given else None
    n = len(PAGES[0]) * PAGE
    q, k, v = (torch.randn(n, len(PAGES), heads, D, dtype=dtype) for heads in (HEADS, GROUPS, GROUPS))
    v = v[..., :width]
    k[0, 0, 0] = 0.0
    stored = given.get("stored")
    of_all = Scores(softcap=given.get("softcap"), distance_bias_ar=_alibi(n).to(dtype) if "alibi" in given else None)
    kept = _rounded(k, stored), _rounded(v, stored)
    expected = attention(q, *kept, causal_mask(None, window, n, q.device, chunk), sink, of_all)
    cache = PagedCache(
        {LAYER: TokenCache(GROUPS, D, width)}, num_pages=9, page_size=PAGE, dtype=dtype, device=q.device, stored=stored,
    )  # fmt: skip
    cache.in_place = in_place
    for step in range(len(CHUNKS[0])):
        own = sorted(((positions[step], i) for i, positions in enumerate(CHUNKS)), key=lambda x: len(x[0]) > 1)
        batch = [Chunk(GrowingSequence([], 9), at, at[0], PAGES[i][: at[-1] // PAGE + 1], last=True) for at, i in own]
        packed = PackedStep.pack(batch, cache, q.device, multiple)
        where = [(position, i) for at, i in own for position in at]
        where += where[-1:] * packed.padding
        assert len(where) % multiple == 0
        bias = _alibi(packed.keys).to(dtype) if "alibi" in given else None
        scores = Scores(softcap=of_all.softcap, distance_bias_ar=bias)
        rows, columns = map(list, zip(*where))
        q_n1ad, k_n1gd, v_n1gd = (x[rows, columns].unsqueeze(1) for x in (q, k, v))
        found = PagedAttention(packed, cache, LAYER, window, chunk)(q_n1ad, k_n1gd, v_n1gd, sink, scores)
        begins = torch.tensor([at[0] == 0 and len(at) > 1 for at, _ in own for _ in at] + [False] * packed.padding)
        if stored is not None:  # a chunk that begins its sequence attends to its keys as they are
            found, rows, columns = found[~begins], *(torch.tensor(x)[~begins].tolist() for x in (rows, columns))
        tolerance = 1e-5 if in_place else 1e-12 if stored is None else 1e-6
        torch.testing.assert_close(found, expected[rows, columns].unsqueeze(1), rtol=tolerance, atol=tolerance)
        assert packed.positions_1n[0].tolist() == [position for position, _ in where]
        assert [where[row] for row in packed.rows_r.tolist()] == [(at[-1], i) for at, i in own]


def test_inputs_at_fixed_addresses() -> None:
    """They are those of a step that is packed, with the last sequence repeated."""
    cache = PagedCache(
        {LAYER: TokenCache(1, D, D)}, num_pages=9, page_size=PAGE, dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    inputs = DecodeInputs(4, 3, 9, cache, torch.device("cpu"))
    pointers = inputs.step.tokens_1n.data_ptr(), inputs.step.table_bm.data_ptr()
    for starts in ([8, 0, 4], [2, 5]):
        batch = [
            Chunk(GrowingSequence([], 9 + i), [50 + i], start, PAGES[i][: start // PAGE + 1], last=True)
            for i, start in enumerate(starts)
        ]
        inputs.fill(batch)
        found, packed = inputs.step, PackedStep.pack(batch, cache, torch.device("cpu"), 4)
        for name in ("tokens_1n", "positions_1n", "slots_n", "lengths_n"):
            assert torch.equal(getattr(found, name), getattr(packed, name)), name
        for row, chunk in enumerate([*batch, *batch[-1:] * (4 - len(batch))]):
            assert found.table_bm[row, : len(chunk.pages)].tolist() == chunk.pages
        assert pointers == (found.tokens_1n.data_ptr(), found.table_bm.data_ptr())
