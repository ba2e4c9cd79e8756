"""Links of a cluster, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megafp8.host.cluster import Cluster, gathering_is_faster
from megafp8.host.gpus import GPUS, H200

GPU = replace(GPUS["h200-141gb"], nvlink=100.0, network=10.0, nvlink_latency=1.0, network_latency=2.0)


@pytest.mark.parametrize(
    ("size", "stride", "seconds"),
    [
        (1, 1, 0.0),
        (8, 1, 1 + 5.0),  # one node
        (4, 2, 1 + 5.0),
        (16, 1, 2 + 500 / 80),  # eight ranks of each node share eight adapters
        (16, 4, 2 + 500 / 20),
        (16, 8, 2 + 500 / 10),
        (16, 64, 2 + 500 / 10),
    ],
)
def test_ranks_of_a_node_share_their_adapters(size: int, stride: int, seconds: float) -> None:
    assert Cluster(GPU, 1024).collective(size, stride, 500.0) == pytest.approx(seconds)


@pytest.mark.parametrize(("size", "seconds"), [(1, 0.0), (8, 1 + 5.0), (16, 2 + 500 * 8 / 15 / 10)])
def test_in_an_all_to_all_a_rank_has_one_adapter(size: int, seconds: float) -> None:
    assert Cluster(GPU, 1024).all_to_all(size, 1, 500.0) == pytest.approx(seconds)


@pytest.mark.parametrize(("ranks", "microseconds"), [(8, 1265), (16, 5774), (32, 8059), (64, 9164)])
def test_all_to_all_of_published_measurements(ranks: int, microseconds: float) -> None:
    """arXiv 2603.07685, table 7: dispatch on H100 of 4,096 tokens, 7,168 wide, in bf16, each to 8 of 256 experts."""
    received = 4096 * 8 * 7168 * 2 * (ranks - 1) / ranks
    seconds = Cluster(GPUS["h100-80gb"], ranks).all_to_all(ranks, 1, received)
    assert seconds * 1e6 == pytest.approx(microseconds, rel=0.12)


def test_transfers_leave_the_node_where_the_other_rank_is_elsewhere() -> None:
    cluster = Cluster(GPU, 1024)
    assert cluster.transfer(4, 500.0) == pytest.approx(1 + 5)
    assert cluster.transfer(8, 500.0) == pytest.approx(2 + 50)


@pytest.mark.parametrize("top_k", [1, 2, 4, 8, 10])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
def test_the_collective_with_less_time_is_chosen(ranks: int, top_k: int) -> None:
    """Compare with times by hand: bytes in a node; between nodes NVLink for a gather, an adapter for an all-to-all."""
    tokens_by_nvlink = ranks - 1
    rows = top_k * (ranks - 1) / ranks
    if ranks <= 8:
        assert gathering_is_faster(ranks, top_k) == (tokens_by_nvlink <= rows)
        return
    rows_by_adapter = rows * (ranks - 8) / (ranks - 1)
    expected = tokens_by_nvlink / min(H200.nvlink, 8 * H200.network) <= rows_by_adapter / H200.network
    assert gathering_is_faster(ranks, top_k) == expected
