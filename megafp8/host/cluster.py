"""Clusters of GPUs and the time of communication within them."""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.host.gpus import H200, Gpu


@dataclass(frozen=True)
class Cluster:
    """`gpus` GPUs in nodes of `gpus_per_node`; NVLink within a node, one network adapter per GPU between nodes."""

    gpu: Gpu
    gpus: int
    gpus_per_node: int = 8

    @property
    def memory(self) -> int:
        """Bytes of GPU memory that the memory formula may fill."""
        return self.gpu.memory - self.gpu.reserved

    def collective(self, size: int, stride: int, received: float) -> float:
        """Return the seconds of an all-gather or reduce-scatter in which each rank receives `received` bytes.

        `size` is the number of ranks, and `stride` the distance of neighbors among the global ranks. The ranks of a
        node share their adapters: a group with k ranks in each node has k times the bandwidth of one adapter, up to the
        bandwidth of NVLink.
        """
        if size == 1 or not received:
            return 0.0
        here = self.ranks_of_node(size, stride)
        if here >= size:
            return received / self.gpu.nvlink + self.gpu.nvlink_latency
        bandwidth = min(self.gpu.nvlink, here * self.gpu.network)
        return received / bandwidth + self.gpu.network_latency

    def all_to_all(self, size: int, stride: int, received: float) -> float:
        """Return the seconds of an all-to-all in which each of `size` ranks receives `received` bytes in total.

        Data from other nodes arrives through the rank's own adapter: unlike in a gather, no two ranks of a node receive
        the same data.
        """
        here = self.ranks_of_node(size, stride)
        if size == 1 or here >= size:
            return self.collective(size, stride, received)
        far = received * (size - here) / (size - 1)
        return max(far / self.gpu.network, (received - far) / self.gpu.nvlink) + self.gpu.network_latency

    def ranks_of_node(self, size: int, stride: int) -> int:
        """Return the number of a group's ranks that are in one node, at least one."""
        return max(1, min(size, self.gpus_per_node // stride))

    def transfer(self, stride: int, sent: float) -> float:
        """Return the seconds until `sent` bytes arrive at the rank that is `stride` ranks away."""
        near = stride < self.gpus_per_node
        bandwidth, latency = (
            (self.gpu.nvlink, self.gpu.nvlink_latency) if near else (self.gpu.network, self.gpu.network_latency)
        )
        return sent / bandwidth + latency


_TOKENS = 2**24  # bytes of 4,096 tokens of 2,048 channels in bf16, for `gathering_is_faster`


def gathering_is_faster(ranks: int, top_k: int) -> bool:
    """Return whether `ranks` ranks exchange tokens at least as fast by all-gather as by all-to-all.

    A gather sends each token to every rank, and an all-to-all to `top_k` experts, each on any rank. Both are compared
    on H200 nodes of 8 GPUs, whose NVLink and adapters have the same ratio on H100.
    """
    cluster, others = Cluster(H200, ranks), ranks - 1
    gathered = cluster.collective(ranks, 1, _TOKENS * others)
    return gathered <= cluster.all_to_all(ranks, 1, _TOKENS * top_k * others / ranks)
