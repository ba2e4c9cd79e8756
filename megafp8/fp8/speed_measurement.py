"""Measures the speed of a linear layer in FP8 and in high precision on this device.

What runs is the layer as trained: forward, backward, weight gradient added to its fp32 buffer. GPU time is measured,
not host time: before each run the queue gets a millisecond of work, in which the host runs ahead, as in training where
a GPU is busy. Meanwhile L2 is overwritten, because in training a layer reads its operands from memory. The runs that
are compared alternate, so that clock drift affects all alike.

Limits: a GPU that pauses between runs draws less power than in training and runs at higher clocks; and there is no
process group, so collectives, such as those of amaxes under tensor parallelism, are left out.

Shapes: m tokens, k inputs, n outputs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megafp8.fp8.manager import Fp8Manager
from megafp8.fp8.speed_model import LinearSeconds, LinearSize
from megafp8.gemm.dispatch import GemmBackend
from megafp8.linear.deferred_wgrad import WgradPair, WgradStore
from megafp8.linear.grad_sink import set_grad_sink
from megafp8.linear.linear import high_precision_linear, linear
from megafp8.numerics.recipes.base import Fp8Recipe
from megafp8.plan import LinearSite

_HEAD_START_CYCLES = 2_000_000  # about a millisecond
_WARM_STEPS = 2  # delayed scaling knows its scales then
_WEIGHT_STD = 0.02


def time_round_robin(
    runs: Sequence[Callable[[], object]], device: torch.device, *, rounds: int, warm_up: int = 2
) -> list[list[float]]:
    """Seconds of each of `runs` in each of `rounds`, after `warm_up` rounds: GPU time from a cold L2, or CPU time."""
    time_round = _cuda_round if device.type == "cuda" else _cpu_round
    timed = [time_round(runs, device) for _ in range(warm_up + rounds)][warm_up:]
    return [list(times) for times in zip(*timed, strict=True)]


def _cpu_round(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    times = []
    for run in runs:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def _cuda_round(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    flush = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)
    spans = []
    for run in runs:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START_CYCLES)
        flush.zero_()
        start.record()
        run()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) * 1e-3 for start, end in spans]


class _Sum:
    """Gradient sink of the weight: a sum over micro-batches, fp32 or wider, as in training."""

    wgrads: WgradStore | None = None
    pair: WgradPair | None = None

    def __init__(self, weight: Tensor) -> None:
        self.main_grad = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        self.is_empty = False

    def added(self) -> None:
        return


def measure(
    size: LinearSize,
    recipe: Fp8Recipe,
    device: torch.device,
    *,
    layer: str = "layer",
    micro_batches: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    gemm_backend: GemmBackend = "auto",
    gemm_autotune: bool = True,
    rounds: int = 7,
) -> LinearSeconds:
    """Median times of a layer of this size in `dtype` and in FP8, as `recipe` quantizes `layer`.

    The `micro_batches` of a step share one cast of the weight. Raises ValueError if the backend is not available.
    """
    generator = torch.Generator(device).manual_seed(0)

    def noise(r: int, c: int) -> Tensor:
        return torch.randn(r, c, generator=generator, device=device, dtype=dtype)

    x_mk, dy_mn = noise(size.m, size.k), noise(size.m, size.n)
    weight = nn.Parameter(noise(size.n, size.k) * _WEIGHT_STD)
    set_grad_sink(weight, _Sum(weight))

    def run() -> None:
        linear(x_mk.detach().requires_grad_(), weight, state).backward(dy_mn)

    def run_high_precision() -> None:
        high_precision_linear(x_mk.detach().requires_grad_(), weight).backward(dy_mn)

    manager = Fp8Manager(recipe, amax_group=None, gemm_backend=gemm_backend, gemm_autotune=gemm_autotune)
    state = manager.linear(LinearSite(layer))
    assert state.plan.fp8, f"{layer} is no FP8 layer"
    manager.materialize(device)
    step = 0
    while step < _WARM_STEPS or state.plan.calibrating:  # until static scales are calibrated
        run()
        manager.end_step()
        step += 1

    def first_of_a_step() -> None:
        state.invalidate_weight()
        run()

    runs = (run_high_precision, first_of_a_step, run)
    high, first, later = (statistics.median(times) for times in time_round_robin(runs, device, rounds=rounds))
    return LinearSeconds(high, (first + (micro_batches - 1) * later) / micro_batches)
