"""Calibration with a timer that is no GPU's."""

from __future__ import annotations

import pytest
import torch

from megafp8.fp8.speed_model import LinearSeconds
from megafp8.host.gpus import GPUS
from megafp8.planner.measure import ON_H200, SIZE, measured, on_cuda

H200 = GPUS["h200-141gb"]


def test_a_gpu_of_half_the_speed_has_half_the_rates() -> None:
    def linear(size: object) -> LinearSeconds:
        assert size == SIZE
        return LinearSeconds(2 * ON_H200.high_precision, 4 * ON_H200.fp8)

    found = measured(GPUS["h100-80gb"], linear, lambda size: 2 * size / 2.07e12)
    assert found.ceilings.bf16 == pytest.approx(H200.ceilings.bf16 / 2)
    assert found.ceilings.fp8["row·row"] == pytest.approx(H200.ceilings.fp8["row·row"] / 4)
    assert found.ceilings.bandwidth == pytest.approx(H200.ceilings.bandwidth / 2)
    assert found.memory == GPUS["h100-80gb"].memory


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what to do without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ValueError, match="no GPU"):
        on_cuda()


@pytest.mark.gpu
def test_rates_of_this_gpu_are_plausible() -> None:
    """Needs 3.3 GiB, and the GPU to itself in one of five measurements: another process on it lowers the rates."""

    def plausible() -> bool:
        ceilings = measured(H200, *on_cuda()).ceilings
        ratios = (ceilings.bf16 / H200.ceilings.bf16, ceilings.bandwidth / H200.ceilings.bandwidth)
        return all(0.2 < ratio < 2 for ratio in ratios)

    assert any(plausible() for _ in range(5))
