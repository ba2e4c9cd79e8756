"""GPUs: every constant of the speed models, each with its source.

`CEILINGS` are rates of single kernels, which `fp8.auto_filter` and the planner use. The other constants hold for all
models, layouts and recipes. A comment names the file of docs/measurements that a number was read from, or NVIDIA's data
sheet; "fitted" numbers are chosen for the smallest error over the runs of docs/measurements/2026-11-23-planner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_GIB = 2**30


@dataclass(frozen=True)
class Ceilings:
    """What one GPU reaches at best.

    Rates in FLOP/s; `fp8` by the granularities of the two operands; `bandwidth` of a copy, bytes read and written per
    second; `launch`: seconds that a kernel takes whatever its size.
    """

    bf16: float
    fp8: dict[str, float]
    bandwidth: float
    launch: float


#: By the device's name. Medians over large GEMMs of random data, each timed alone, tuned cuBLASLt with split
#: accumulation; `launch` is what a GEMM of 1024x2048x1024 takes longer than its arithmetic (2026-11-21).
CEILINGS = {
    "NVIDIA H200": Ceilings(
        bf16=674e12,
        fp8={"tensor·tensor": 1242e12, "row·row": 1344e12, "1x128·128x128": 1135e12, "1x128·1x128": 922e12},
        bandwidth=4.2e12,
        launch=6e-6,
    )
}


def device_name(device: torch.device) -> str:
    """As `CEILINGS` has it."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def ceilings_of(name: str) -> Ceilings:
    """The ceilings of the device `name`. ValueError where they are not known."""
    if name not in CEILINGS:
        raise ValueError(f"the speeds of {name!r} are not known, only those of {', '.join(CEILINGS)}")
    return CEILINGS[name]


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU and its links. Seconds, bytes, FLOP/s and bytes/s.

    `chip`: as in the name of the device. `peaks` (dense, by precision) and `memory_bandwidth` are NVIDIA's.

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
    for casts by rows and blocks, `column_sums` for gradients of biases, `optimizer` for AdamW. `fp8_moment`: bytes that
    take as long as loading a moment stored in FP8, its update, and storing it. `small_kernel`: seconds of a kernel that
    moves little.

    Communication: `nvlink_latency`, `network_latency`: of a collective. `hidden`: seconds by which a second of NCCL
    beside computation delays this, as it takes multiprocessors and bandwidth; `hidden_copies`: the same of copy
    engines.

    `host_block`, `host_block_fp8`: the host's time for forward and backward of a block without CUDA graphs.
    """

    name: str
    chip: str
    memory: int
    memory_bandwidth: float
    peaks: dict[str, float]
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
    optimizer: float = 0.96
    fp8_moment: float = 114
    small_kernel: float = 3e-6
    nvlink_latency: float = 30e-6
    network_latency: float = 40e-6
    hidden: float = 0.45
    hidden_copies: float = 0.45
    host_block: float = 1.4e-3
    host_block_fp8: float = 1.5e-3


# memory: nvidia-smi, 143,771 and 81,559 MiB.
# load: 2026-11-21-h200-fp8-layers, "The floor", without attention: 35 and 65 ms where the ceilings give 33.5 and 63.6.
# fast_accumulation: 2026-11-21-h200-gemms-and-graphs, the twelve GEMMs of a layer, 7.64 over 7.00 ms.
# attention_forward, attention_backward: 2026-11-22-layout/kernels.txt. narrow_heads: 2026-11-22-attention,
# attention-d64.txt. scored_*: 2026-11-23-any-model. deterministic: 2026-11-21-h200-scale, 684 over 274 ms.
# elementwise, fine_casts: 2026-11-21-h200-fp8-layers, "Casts". column_sums: 2026-11-23-nn, 110 µs for 100 MB.
# nvlink: NCCL on these chips, 297 GB/s from GPU to GPU and 315 in all-gathers.
# host_*: 2026-11-22-graphs.
# network: one 400 Gb/s adapter a GPU (NVIDIA's data sheets of DGX H100 and H200), nine tenths of it. Not measured.
# optimizer, fp8_moment: 2026-11-26-optimizer-step.
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
)
_H100_BANDWIDTH = 3.35e12

GPUS = {
    gpu.name: gpu
    for gpu in (
        H200,
        # The same chip and power limit. Not measured.
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
    """Dense peak of a device by its data sheet, in FLOP/s; None where it is not known.

    `precision`: of what is not in FP8. `fp8`: the layers are.
    """
    name = device_name(device)
    peaks = next((gpu.peaks for gpu in GPUS.values() if gpu.chip in name), {})
    return peaks.get("fp8" if fp8 else precision) if precision in peaks else None
