"""GPUs and clusters: every constant of the time model, each with its source.

Rates of GEMMs are those of `megafp8.fp8.speed_model`, which `fp8.auto_filter` uses too. The other constants hold for
all models, layouts and recipes. A comment names the folder of docs/measurements that a number is from, or NVIDIA's
data sheet; "fitted" numbers are chosen for the smallest error over the runs of docs/measurements/2026-11-23-planner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megafp8.fp8.speed_model import CEILINGS, Ceilings

_GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU and its links. Seconds, bytes, FLOP/s and bytes/s.

    `memory`: what the driver reports. `reserved`: CUDA's context, NCCL's buffers and fragmentation, on top of the
    memory formula. `ceilings`: of GEMMs and copies. `nvlink`, `network`: of a GPU to others of its node and to other
    nodes, each way.

    GEMMs: `load_bf16`, `load_fp8`: share of the rates of `ceilings` that they reach in training, at the chip's power
    limit. `fast_accumulation`: speed of FP8 GEMMs with one scale per tensor that accumulate fast, over others.

    Attention: `attention_forward`, `attention_backward`: of heads 128 wide, in FLOPs of `planner.flops`.
    `attention_tile`: keys that each query costs beside its own. `narrow_heads`: factor for heads up to 64 wide.
    `scored_forward`, `scored_backward`: of the kernels for caps, sinks and biases. `deterministic`: how much longer
    attention takes under `deterministic`.

    Other kernels, as shares of the bandwidth of a copy: `elementwise` for norms, activations and casts, `fine_casts`
    for casts by rows and blocks, `column_sums` for gradients of biases, `optimizer` for AdamW. `small_kernel`: seconds
    of a kernel that moves little.

    Communication: `nvlink_latency`, `network_latency`: of a collective. `hidden`: seconds by which a second of NCCL
    beside computation delays this, as it takes multiprocessors and bandwidth; `hidden_copies`: the same of copy
    engines. `chunked`: time of exchanges that NCCL makes in parts, over those that nothing hides.

    `host_block`, `host_block_fp8`: the host's time for forward and backward of a block without CUDA graphs.
    """

    name: str
    memory: int
    ceilings: Ceilings
    nvlink: float
    network: float
    reserved: int = 4 * _GIB
    load_bf16: float = 0.985
    load_fp8: float = 0.955
    fast_accumulation: float = 1.09
    attention_forward: float = 605e12
    attention_backward: float = 385e12
    attention_tile: float = 256
    narrow_heads: float = 0.78
    scored_forward: float = 390e12
    scored_backward: float = 243e12
    deterministic: float = 2.45
    elementwise: float = 0.85
    fine_casts: float = 0.65
    column_sums: float = 0.22
    optimizer: float = 0.54
    small_kernel: float = 3e-6
    nvlink_latency: float = 30e-6
    network_latency: float = 40e-6
    hidden: float = 0.45
    hidden_copies: float = 0.45
    chunked: float = 1.5
    host_block: float = 1.4e-3
    host_block_fp8: float = 1.5e-3


# memory: nvidia-smi, 143,771 and 81,559 MiB.
# load: 2026-11-21-h200-fp8-layers, "The floor", without attention: 35 and 65 ms where the ceilings give 33.5 and 63.6.
# fast_accumulation: 2026-11-21-h200-gemms-and-graphs, the twelve GEMMs of a layer, 7.64 over 7.00 ms.
# attention_forward, attention_backward: 2026-11-22-layout. narrow_heads: 2026-11-22-attention, "Heads of 64".
# scored_*: 2026-11-23-any-model. deterministic: 2026-11-21-h200-scale, 684 over 274 ms.
# elementwise, fine_casts: 2026-11-21-h200-fp8-layers, "Casts". column_sums: 2026-11-23-nn, 110 µs for 100 MB.
# nvlink: NCCL on these chips, 297 GB/s from GPU to GPU and 315 in all-gathers.
# host_*: 2026-11-22-graphs.
# network: one 400 Gb/s adapter a GPU (NVIDIA's data sheets of DGX H100 and H200), nine tenths of it. Not measured.
# Fitted: attention_tile, optimizer, small_kernel, nvlink_latency, hidden, hidden_copies, chunked.
_H200 = Gpu("h200-141gb", 143_771 * 2**20, CEILINGS["NVIDIA H200"], nvlink=300e9, network=45e9)

GPUS = {
    gpu.name: gpu
    for gpu in (
        _H200,
        # The same chip and power limit; NVIDIA's data sheets give 3.35 TB/s where H200 has 4.8. Not measured.
        replace(
            _H200,
            name="h100-80gb",
            memory=81_559 * 2**20,
            ceilings=replace(_H200.ceilings, bandwidth=_H200.ceilings.bandwidth * 3.35 / 4.8),
        ),
    )
}


@dataclass(frozen=True)
class Cluster:
    """`gpus` GPUs, `gpus_per_node` of them to a node: these have NVLink, the others a network adapter each."""

    gpu: Gpu
    gpus: int
    gpus_per_node: int = 8

    @property
    def memory(self) -> int:
        """Bytes that the memory formula may fill."""
        return self.gpu.memory - self.gpu.reserved

    def collective(self, size: int, stride: int, received: float) -> float:
        """Seconds of an all-gather or reduce-scatter in which each of `size` ranks receives `received` bytes.

        `stride`: distance of neighbors among the global ranks. The ranks of a node share their adapters: a group with
        k ranks in each node moves k times the bandwidth of one adapter, at most that of NVLink.
        """
        if size == 1 or not received:
            return 0.0
        here = self.ranks_of_node(size, stride)
        if here >= size:
            return received / self.gpu.nvlink + self.gpu.nvlink_latency
        bandwidth = min(self.gpu.nvlink, here * self.gpu.network)
        return received / bandwidth + self.gpu.network_latency

    def ranks_of_node(self, size: int, stride: int) -> int:
        """How many of a group's ranks are in one node, at least one."""
        return max(1, min(size, self.gpus_per_node // stride))

    def transfer(self, stride: int, sent: float) -> float:
        """Seconds until `sent` bytes are at the rank `stride` further."""
        near = stride < self.gpus_per_node
        bandwidth, latency = (
            (self.gpu.nvlink, self.gpu.nvlink_latency) if near else (self.gpu.network, self.gpu.network_latency)
        )
        return sent / bandwidth + latency
