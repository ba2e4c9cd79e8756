"""GPUs: all constants of the speed models, each with its source.

`CEILINGS` are rates of single kernels, for `fp8.auto_filter` and the planner. The other constants apply to all models,
layouts and recipes. A comment names the file in docs/measurements from which a number was read, or NVIDIA's data sheet.
Numbers marked as "fitted" minimize the error over the runs in docs/measurements/2026-11-23-planner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_GIB = 2**30


@dataclass(frozen=True)
class Ceilings:
    """Best rates of one GPU.

    `bf16`, `fp8`: GEMM rates in FLOP/s; `fp8` by the granularities of the two operands. `bandwidth`: bytes read and
    written per second in a copy. `launch`: seconds that any kernel takes, whatever its size.
    """

    bf16: float
    fp8: dict[str, float]
    bandwidth: float
    launch: float


#: Best rates by device name. Medians over large GEMMs of random data, each timed separately, with tuned cuBLASLt and
#: split accumulation. `launch` is the extra time of a GEMM of 1024x2048x1024 over its arithmetic (2026-11-21).
CEILINGS = {
    "NVIDIA H200": Ceilings(
        bf16=674e12,
        fp8={"tensor·tensor": 1242e12, "row·row": 1344e12, "1x128·128x128": 1135e12, "1x128·1x128": 922e12},
        bandwidth=4.2e12,
        launch=6e-6,
    )
}


def device_name(device: torch.device) -> str:
    """Return the name of a device, as used in `CEILINGS`."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def ceilings_of(name: str) -> Ceilings:
    """Return the ceilings of the device `name`. Raises ValueError if they are not known."""
    if name not in CEILINGS:
        raise ValueError(f"the speeds of {name!r} are not known; known are {', '.join(CEILINGS)}")
    return CEILINGS[name]


@dataclass(frozen=True)
class Gpu:
    """Kind of GPU and its links, in seconds, bytes, FLOP/s and bytes/s.

    `chip`: part of the device name. `peaks` (dense, by precision) and `memory_bandwidth`: NVIDIA's figures.

    `memory`: bytes that the driver reports. `reserved`: bytes for CUDA's context, NCCL's buffers and fragmentation, in
    addition to the memory formula. `ceilings`: best rates of GEMMs and copies. `nvlink`, `network`: bandwidth of a GPU
    to other GPUs of its node and to other nodes, in each direction.

    GEMMs: `load_bf16`, `load_fp8`: fractions of the rates in `ceilings` that GEMMs reach in training, at the chip's
    power limit. `fast_accumulation`: speedup of FP8 GEMMs with one scale per tensor by fast accumulation.

    Attention: `attention_forward`, `attention_backward`: rates for heads 128 wide, in FLOPs as `planner.flops` counts
    them. `attention_tile`: number of extra keys that each query costs. `narrow_heads`: factor for heads up to 64 wide.
    `scored_forward`, `scored_backward`: rates of the kernels for caps, sinks and biases. `deterministic`: slowdown of
    attention with `deterministic`.

    Other kernels, as fractions of the bandwidth of a copy: `elementwise` for norms, activations and casts, `fine_casts`
    for casts by rows and blocks, `column_sums` for bias gradients, `optimizer` for AdamW. `fp8_moment`: number of bytes
    that take as long as reading, updating and writing a moment in FP8. `small_kernel`: seconds of a kernel that moves
    little data.

    Communication: `nvlink_latency`, `network_latency`: latency of a collective. `hidden`: seconds by which one second
    of overlapped NCCL communication delays computation, because it uses multiprocessors and bandwidth. `hidden_copies`:
    same for copy engines.

    `host_block`, `host_block_fp8`: host time for forward and backward of a block without CUDA graphs.
    """

    name: str
    chip: str
    memory: int
    memory_bandwidth: float
    peaks: dict[str, float]
    ceilings: Ceilings
    nvlink: float
    network: float
    host_link: float
    reserved: int = 4 * _GIB
    load_bf16: float = 0.985
    load_fp8: float = 0.955
    fast_accumulation: float = 1.09
    attention_forward: float = 690e12
    attention_backward: float = 438e12
    attention_tile: float = 256
    narrow_heads: float = 0.87
    scored_forward: float = 390e12
    scored_backward: float = 243e12
    deterministic: float = 1.09
    elementwise: float = 0.85
    fine_casts: float = 0.65
    column_sums: float = 0.22
    optimizer: float = 0.96
    fp8_moment: float = 3
    small_kernel: float = 3e-6
    nvlink_latency: float = 30e-6
    network_latency: float = 40e-6
    hidden: float = 0.45
    hidden_copies: float = 0.45
    host_block: float = 1.4e-3
    host_block_fp8: float = 1.5e-3


# memory: nvidia-smi, 143,771 and 81,559 MiB.
# load: 2026-11-21-h200-fp8-layers, "The floor", without attention: 35 and 65 ms; the ceilings give 33.5 and 63.6.
# fast_accumulation: 2026-11-21-h200-gemms-and-graphs, the twelve GEMMs of a layer, 7.64 over 7.00 ms.
# attention_forward, attention_backward, narrow_heads, deterministic: 2026-11-30-flash-attention-4. scored_*:
# 2026-11-23-any-model.
# elementwise, fine_casts: 2026-11-21-h200-fp8-layers, "Casts". column_sums: 2026-11-23-nn, 110 µs for 100 MB.
# nvlink: NCCL on these chips, 297 GB/s from GPU to GPU and 315 in all-gathers.
# host_*: 2026-11-22-graphs.
# network: nine tenths of one 400 Gb/s adapter per GPU (NVIDIA's data sheets of DGX H100 and H200). Not measured.
# host_link: PCIe 5 x16, each direction while both copy, and while another GPU of the host copies too:
# 2026-11-30-records. One GPU alone had 50e9 (2026-11-30-optimizer-offload).
# optimizer: 2026-11-26-optimizer-step. fp8_moment: 2026-11-29-fp8-moments.
# Fitted: attention_tile, small_kernel, nvlink_latency, hidden, hidden_copies.
H200 = Gpu(
    "h200-141gb",
    "H200",
    memory=143_771 * 2**20,
    memory_bandwidth=4.8e12,
    peaks={"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12},
    ceilings=CEILINGS["NVIDIA H200"],
    nvlink=300e9,
    network=45e9,
    host_link=39e9,
)
_H100_BANDWIDTH = 3.35e12

GPUS = {
    gpu.name: gpu
    for gpu in (
        H200,
        # Assumes the chip and power limit of the H200. Not measured.
        replace(
            H200,
            name="h100-80gb",
            chip="H100",
            memory=81_559 * 2**20,
            memory_bandwidth=_H100_BANDWIDTH,
            ceilings=replace(
                H200.ceilings, bandwidth=H200.ceilings.bandwidth * _H100_BANDWIDTH / H200.memory_bandwidth
            ),
        ),
    )
}


def peak_flops(device: torch.device, precision: str, *, fp8: bool) -> float | None:
    """Return the dense peak of a device from its data sheet, in FLOP/s, or None if it is not known.

    `precision` is the precision outside FP8. With `fp8`, layers run in FP8 and the FP8 peak is returned.
    """
    name = device_name(device)
    peaks = next((gpu.peaks for gpu in GPUS.values() if gpu.chip in name), {})
    return peaks.get("fp8" if fp8 else precision) if precision in peaks else None
