"""Links of a cluster, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megafp8.gpus import GPUS
from megafp8.planner.hardware import Cluster

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


def test_transfers_leave_the_node_where_the_other_rank_is_elsewhere() -> None:
    cluster = Cluster(GPU, 1024)
    assert cluster.transfer(4, 500.0) == pytest.approx(1 + 5)
    assert cluster.transfer(8, 500.0) == pytest.approx(2 + 50)
