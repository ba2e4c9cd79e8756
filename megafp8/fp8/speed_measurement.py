"""Measurement of the speed of a linear layer in FP8 and in high precision on this device.

The layer runs as in training: forward, backward, and the addition of the weight gradient to an fp32 buffer. GPU time is
measured, not host time. Before each run, a millisecond of other work is queued, so that the host runs ahead as it does
in training on a busy GPU. L2 is then overwritten, because in training a layer reads its operands from memory. The
compared runs alternate, so that clock drift affects all of them equally.

Limits: a GPU that pauses between runs draws less power than in training and runs at higher clocks. There is no process
group, so collectives, such as amax reductions under tensor parallelism, are not measured.

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
_WARM_STEPS = 2  # delayed scaling knows its scales after two steps
_WEIGHT_STD = 0.02


def time_round_robin(
    runs: Sequence[Callable[[], object]], device: torch.device, *, rounds: int, warm_up: int = 2
) -> list[list[float]]:
    """Measure each of `runs` once per round, and return the seconds as one list per run.

    On a GPU, the result is GPU time starting from a cold L2; on a CPU, it is wall-clock time. `warm_up` rounds run
    first.
    """
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
    """Gradient sink that sums weight gradients over micro-batches in fp32 or wider, as in training."""

    wgrads: WgradStore | None = None
    pair: WgradPair | None = None

    def __init__(self, weight: Tensor) -> None:
        self.main_grad = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        self.is_empty = False

    def added(self) -> None:
        """Do nothing: nobody needs to know that a gradient has been added."""
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
    """Measure forward and backward of a linear layer, and return the median times per micro-batch.

    Args:
        size: Size of the layer.
        recipe: Recipe of the FP8 layer.
        device: Device to run on.
        layer: Name of the layer; recipes may treat layers differently.
        micro_batches: Number of micro-batches per step. They share one quantization of the weight.
        dtype: Dtype of the high-precision layer.
        gemm_backend: Backend of FP8 GEMMs.
        gemm_autotune: Whether the backend measures its algorithms first.
        rounds: Number of measurements.

    Raises:
        ValueError: The backend is not available.
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
    assert state.plan.fp8, f"{layer} is not an FP8 layer"
    manager.materialize(device)
    step = 0
    while step < _WARM_STEPS or state.plan.calibrating:  # static scales need several steps to calibrate
        run()
        manager.end_step()
        step += 1

    def first_of_a_step() -> None:
        state.invalidate_weight()
        run()

    runs = (run_high_precision, first_of_a_step, run)
    high, first, later = (statistics.median(times) for times in time_round_robin(runs, device, rounds=rounds))
    return LinearSeconds(high, (first + (micro_batches - 1) * later) / micro_batches)
