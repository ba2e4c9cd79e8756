"""Choice between the two collectives that send tokens to experts."""

from __future__ import annotations

import pytest

from megafp8.host.gpus import H200
from megafp8.layers.experts.record import gathering_is_faster


@pytest.mark.parametrize("top_k", [1, 2, 4, 8, 10])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
def test_the_collective_with_less_time_is_chosen(ranks: int, top_k: int) -> None:
    """By hand: in a node by bytes; between nodes a gather is bound by NVLink, and an all-to-all by a rank's adapter."""
    tokens_by_nvlink = ranks - 1
    rows = top_k * (ranks - 1) / ranks
    if ranks <= 8:
        assert gathering_is_faster(ranks, top_k) == (tokens_by_nvlink <= rows)
        return
    rows_by_adapter = rows * (ranks - 8) / (ranks - 1)
    expected = tokens_by_nvlink / min(H200.nvlink, 8 * H200.network) <= rows_by_adapter / H200.network
    assert gathering_is_faster(ranks, top_k) == expected
