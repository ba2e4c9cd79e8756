"""Scales bit for bit against fp32 arithmetic done number by number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafp8.fp8.quantize import amax_of_history, roll_history, scale_from_amax
from tests.fp8.reference import scale_of

FP32_MAX = torch.finfo(torch.float32).max
AMAXES = [1e-45, 1e-40, 1.17e-38, 1e-30, 0.1, 1 / 3, 1.0, 447.0, 448.0, 449.0, 57344.0, 1e30, FP32_MAX]


@pytest.mark.parametrize("fp8_max", [448.0, 57344.0])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("margin", [0, 1, 3])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_scale_bit_for_bit(fp8_max: float, power_of_two: bool, margin: int, eps: float) -> None:
    options: dict[str, Any] = {"margin": margin, "eps": eps, "power_of_two": power_of_two}
    amax = torch.cat([torch.tensor(AMAXES), torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 9])
    expected = [scale_of(a, fp8_max, **options) for a in amax.tolist()]
    assert scale_from_amax(amax, fp8_max, **options).tolist() == expected
    assert scale_from_amax(amax, torch.full_like(amax, fp8_max), **options).tolist() == expected


def test_tiny_amax_gives_the_largest_scale() -> None:
    assert scale_from_amax(torch.tensor(1e-45), 448.0).item() == FP32_MAX
    assert scale_from_amax(torch.tensor(1e-45), 448.0, power_of_two=True).item() == 2.0**127


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_unusable_amax_gives_one_or_the_previous_scale(amax: float, power_of_two: bool) -> None:
    x = torch.tensor([amax, 1.0])
    assert scale_from_amax(x, 448.0, power_of_two=power_of_two)[0].item() == 1
    previous = torch.tensor([0.7, 0.7])
    kept = scale_from_amax(x, 448.0, power_of_two=power_of_two, previous=previous)
    assert kept[0] == previous[0]
    assert kept[1] == (256 if power_of_two else 448)


def test_eps_applies_to_zero_but_not_to_infinity() -> None:
    scale = scale_from_amax(torch.tensor([0.0, math.inf, math.nan]), 448.0, eps=2.0)
    assert scale.tolist() == [224, 1, 1]


@given(amax=st.floats(2.0**-100, 2.0**100, width=32), margin=st.integers(0, 4), fp8_max=st.sampled_from([448, 57344]))
def test_power_of_two_with_margin_is_the_older_definition(amax: float, margin: int, fp8_max: int) -> None:
    """2^(floor(log2(fp8_max / amax)) - margin), the logarithm taken exactly (of the fp32 quotient)."""
    quotient = float(np.float32(fp8_max) / np.float32(amax))
    expected = 2.0 ** (math.frexp(quotient)[1] - 1 - margin)
    assert scale_from_amax(torch.tensor(amax), float(fp8_max), margin=margin, power_of_two=True).item() == expected


def test_scaled_amax_never_exceeds_the_format() -> None:
    amax = torch.rand(10000, generator=torch.Generator().manual_seed(1)) * 100 + 1e-3
    power = scale_from_amax(amax, 448.0, power_of_two=True)
    assert ((amax * power) <= 448).all()
    assert ((amax * power) > 224 * (1 - 1e-6)).all()


def test_scale_keeps_any_shape() -> None:
    amax = torch.rand(2, 3, 4) + 1
    assert scale_from_amax(amax, 448.0).shape == amax.shape
    assert scale_from_amax(amax[0, 0, 0], 448.0).shape == ()


def test_amax_of_history() -> None:
    history = torch.tensor([[1.0, 5.0, 2.0], [7.0, 0.0, 3.0]])
    assert amax_of_history(history, "max").tolist() == [5, 7]
    assert amax_of_history(history, "most_recent").tolist() == [1, 7]
    assert amax_of_history(history, lambda h: h[:, 2]).tolist() == [2, 3]
    with pytest.raises(ValueError, match=r"one value a row, torch.float32 \[2\]"):
        amax_of_history(history, lambda h: h.amax())


def test_roll_history() -> None:
    history = torch.tensor([[1.0, 5.0, 2.0], [7.0, 0.0, 3.0]])
    assert roll_history(history).tolist() == [[0, 1, 5], [0, 7, 0]]
    assert history.tolist() == [[1, 5, 2], [7, 0, 3]]
    assert roll_history(torch.tensor([[3.0]])).tolist() == [[0]]
