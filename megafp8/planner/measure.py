"""Measured rates of this machine's GPU, to replace recorded rates: copies, and GEMMs in bf16 and FP8.

A short measurement on an idle GPU runs at a higher clock than training. Therefore one linear layer and one copy are
timed the same way as they were on an H200, and the H200's rates under load are scaled by the ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megafp8.fp8 import CurrentScaling
from megafp8.fp8.speed_measurement import measure, time_round_robin
from megafp8.fp8.speed_model import LinearSeconds, LinearSize
from megafp8.host.gpus import GPUS, Gpu

SIZE = LinearSize(8192, 8192, 16384)
ON_H200 = LinearSeconds(high_precision=9.455e-3, fp8=5.236e-3)
"""Seconds of a layer of `SIZE` under current scaling, forward and backward
(2026-11-21-h200-gemms-and-graphs/sweep.txt)."""
_COPIED = 2**30
_BANDWIDTH_OF_COPY = 4.14e12
"""Bytes read and written per second on an H200: 2026-11-21-h200-fp8-layers, "Casts"."""


def measured(gpu: Gpu, linear: Callable[[LinearSize], LinearSeconds], copy: Callable[[int], float]) -> Gpu:
    """Return `gpu` with the measured rates of a device.

    Args:
        gpu: GPU with recorded rates.
        linear: Function that returns the seconds of a linear layer.
        copy: Function that returns the seconds to copy a number of bytes.
    """
    seconds, base = linear(SIZE), GPUS["h200-141gb"].ceilings
    bf16_ratio, fp8_ratio = (before / now for before, now in zip(ON_H200, seconds, strict=True))
    bandwidth = 2 * _COPIED / copy(_COPIED) / _BANDWIDTH_OF_COPY
    ceilings = replace(
        base,
        bf16=base.bf16 * bf16_ratio,
        fp8={kind: rate * fp8_ratio for kind, rate in base.fp8.items()},
        bandwidth=base.bandwidth * bandwidth,
    )
    return replace(gpu, name=f"{gpu.name}, measured", ceilings=ceilings)


def on_cuda() -> tuple[Callable[[LinearSize], LinearSeconds], Callable[[int], float]]:
    """Return the two timers for `measured` on this machine's first GPU. Raises ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError("--measure: this machine has no GPU; leave it out to use recorded rates")
    device = torch.device("cuda")

    def copy(size: int) -> float:
        source = torch.empty(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        times = time_round_robin([lambda: target.copy_(source)], device, rounds=5)[0]
        return sorted(times)[len(times) // 2]

    return lambda size: measure(size, CurrentScaling(), device), copy
