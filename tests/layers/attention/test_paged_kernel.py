"""Kernels of the paged cache on a GPU, against attention to what is read from the pages.

tests/inference/test_attention.py has them in Triton's interpreter, with every kind of scores.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.inference.paged_cache import PagedCache
from megafp8.layers.attention.mask import AttentionMask
from megafp8.layers.attention.op import attention
from megafp8.layers.attention.scores import Scores
from megafp8.layers.mixer import TokenCache

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "one sequence": {"positions": [4095]},
    "chunk": {"chunk": 100},
    "window, sinks": {"window": 100, "sink": True, "d": 64},
    "soft cap, wide": {"softcap": 30.0, "d": 256, "window": 1000},
    "narrow values, no groups": {"d": 192, "w": 128, "heads": 16, "groups": 16},
    "fp8": {"stored": torch.float8_e4m3fn},
    "int8": {"stored": torch.int8},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_equals_attention_to_what_is_read(name: str) -> None:
    given, device = CASES[name], torch.device("cuda")
    d, heads, groups, page = given.get("d", 128), given.get("heads", 32), given.get("groups", 8), 16
    width, window = given.get("w", d), given.get("window")
    positions = given.get("positions", [0, 5, 63, 64, 999, 1500])
    n, most = len(positions), max(positions) // page + 1
    torch.manual_seed(0)
    cache = PagedCache(
        {0: TokenCache(groups, d, width)}, num_pages=n * most, page_size=page, dtype=torch.bfloat16, device=device,
        stored=given.get("stored"),
    )  # fmt: skip
    assert cache.in_place
    table = torch.randperm(n * most, device=device).int().view(n, most)
    slots = (table.long().unsqueeze(-1) * page + torch.arange(page, device=device)).flatten()
    k, v = (torch.randn(len(slots), groups, d, device=device, dtype=torch.bfloat16) for _ in range(2))
    v[..., width:] = 0
    cache.append(0, k, v, slots, slots)
    k_tbgd, v_tbgd = cache.read(0, table)
    v_tbgd = torch.nn.functional.pad(v_tbgd, (0, d - width))
    amax = (k.float().abs().amax(-1, keepdim=True), v.float().abs().amax(-1, keepdim=True))
    step = 0.0 if given.get("stored") is None else 1 / 127 if given["stored"] == torch.int8 else 1 / 14
    for found, x, most_of_row in ((k_tbgd, k, amax[0]), (v_tbgd, v, amax[1])):
        assert ((found.transpose(0, 1).flatten(0, 1) - x).abs() <= step / 2 * most_of_row + x.abs() * 2**-7).all()
    q = torch.randn(n, heads, d, device=device, dtype=torch.bfloat16)
    positions_n = torch.tensor(positions, device=device)
    sink = torch.randn(heads, device=device, dtype=torch.bfloat16) if "sink" in given else None
    scores = Scores(softcap=given.get("softcap"))
    found = cache.attend(0, q, table, positions_n, window, given.get("chunk"), sink, scores)
    mask = AttentionMask(window=window, chunk=given.get("chunk"), positions_bs=positions_n[:, None])
    exact = attention(
        q[None].double(), k_tbgd.double(), v_tbgd.double(), mask, None if sink is None else sink.double(), scores
    )  # fmt: skip
    torch.testing.assert_close(found.double(), exact[0], rtol=2e-2, atol=1e-2)
