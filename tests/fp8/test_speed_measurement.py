"""The measurement of a layer's speed: what is run, in which order, and what becomes of the times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from megafp8.fp8 import CurrentScaling, Fp8Recipe, StaticScaling, speed_measurement
from megafp8.fp8.speed_measurement import measure, time_round_robin
from megafp8.fp8.speed_model import LinearSize
from megafp8.numerics import reference

CPU = torch.device("cpu")
SIZE = LinearSize(16, 32, 48)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_runs_take_turns_and_the_warm_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 90.0, 100.0, 190.0, 200.0, 201.0, 210.0, 212.0, 220.0, 223.0, 230.0, 234.0])
    monkeypatch.setattr(speed_measurement.time, "perf_counter", lambda: next(clock))
    log: list[str] = []
    times = time_round_robin([lambda: log.append("a"), lambda: log.append("b")], CPU, rounds=2, warm_up=1)
    assert log == ["a", "b"] * 3
    assert times == [[1.0, 3.0], [2.0, 4.0]]


@pytest.mark.parametrize(("micro_batches", "fp8"), [(1, 5.0), (4, (5.0 + 3 * 1.0) / 4)])
@pytest.mark.parametrize(
    ("recipe", "cast"), [(CurrentScaling(), "cast_current"), (StaticScaling(calibration_steps=5), "cast_tensor")]
)
def test_the_weight_is_cast_once_a_step(
    monkeypatch: pytest.MonkeyPatch, recipe: Fp8Recipe, cast: str, micro_batches: int, fp8: float
) -> None:
    """Counts the casts of each run that `measure` times, and lets these take 6, 5 and 1 seconds."""
    casts: list[tuple[bool, bool]] = []
    original = getattr(reference, cast)

    def counting(*arguments: Any, rowwise: bool, columnwise: bool, **options: Any) -> Any:
        casts.append((rowwise, columnwise))
        return original(*arguments, rowwise=rowwise, columnwise=columnwise, **options)

    counts: list[int] = []

    def timed(runs: Sequence[Callable[[], object]], device: torch.device, *, rounds: int) -> list[list[float]]:
        for run in runs:
            casts.clear()
            run()
            assert all(both == (True, True) for both in casts)
            counts.append(len(casts))
        return [[6.0] * rounds, [5.0] * rounds, [1.0] * rounds]

    monkeypatch.setattr(reference, cast, counting)
    monkeypatch.setattr(speed_measurement, "time_round_robin", timed)
    seconds = measure(SIZE, recipe, CPU, micro_batches=micro_batches, dtype=torch.float32)
    assert counts == [0, 3, 2]
    assert (seconds.high_precision, seconds.fp8) == (6.0, fp8)


def test_gradients_are_added_to_an_fp32_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training, on both paths: no gradient reaches autograd."""
    sums: list[Any] = []
    original = speed_measurement._Sum

    class Recorded(original):  # type: ignore[misc, valid-type]
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__(weight)
            sums.append((self, weight))

    monkeypatch.setattr(speed_measurement, "_Sum", Recorded)
    measure(SIZE, CurrentScaling(), CPU, rounds=1)
    ((sink, weight),) = sums
    assert weight.grad is None
    assert sink.main_grad.dtype == torch.float32
    assert sink.main_grad.abs().sum() > 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_real_measurement(device: str) -> None:
    """The GPU case compares the best of several rounds, as other processes on the GPU make some rounds slow."""
    size = SIZE if device == "cpu" else LinearSize(8192, 4096, 4096)
    rounds = [measure(size, CurrentScaling(), torch.device(device), rounds=1) for _ in range(5)]
    high_precision, fp8 = min(x.high_precision for x in rounds), min(x.fp8 for x in rounds)
    assert high_precision > 0
    assert fp8 > 0
    if device == "cuda":
        assert 1.0 < high_precision / fp8 < 2.2
