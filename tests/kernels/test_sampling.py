"""The largest of logits and noise by the kernel, against the same in PyTorch."""

from __future__ import annotations

import itertools

import pytest
import torch

from megafp8.inference.options import SamplingOptions
from megafp8.inference.sampling import SamplingRow, VocabShard, choose, stream_of
from tests.marks import slow_but


@pytest.mark.parametrize(
    ("columns", "first"),
    slow_but(itertools.product([1, 999, 2500], [0, 2, 5000]), (1, 2), (999, 0), (999, 5000), (2500, 2)),
)
def test_equals_pytorch(columns: int, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter or on a GPU: the same tokens of a slice that begins anywhere, also of equal logits."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x_nv = (4 * torch.randn(5, columns, device=device)).bfloat16().float()
    options = [
        SamplingOptions(temperature=temperature, min_p=min_p)
        for temperature, min_p in ((1.0, 0.0), (0.3, 0.0), (2.0, 0.1), (1.0, 1.0), (0.0, 0.0))
    ]
    rows = [SamplingRow(each, stream_of(i, [i], 0), [0] * (3 + i)) for i, each in enumerate(options)]
    shard = VocabShard(x_nv, first + columns, None)
    shard.first = first
    shard.logits = x_nv
    found = []
    for by_kernel in (True, False):
        monkeypatch.setattr(shard, "by_kernel", by_kernel)
        found.append(choose(shard, rows))
    assert found[0].tokens.tolist() == found[1].tokens.tolist()
    torch.testing.assert_close(found[0].logprobs, found[1].logprobs, rtol=0, atol=1e-5)
    assert all(first <= token < first + columns for token in found[0].tokens.tolist())
    assert found[0].tokens[-1] == first + x_nv[-1].cpu().numpy().argmax()
