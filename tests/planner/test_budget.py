"""What a predicted speed means for a whole run, by hand."""

from __future__ import annotations

import pytest

from megafp8.host.gpus import GPUS
from megafp8.planner.budget import budget, mfu, number_of_tokens, tokens_per_day
from megafp8.planner.predict import Prediction

STEP = Prediction(seconds=4.0, terms={}, memory=[], tokens=4_000_000, gpus=100)
"""10,000 tokens/s of each GPU."""


def test_by_hand() -> None:
    assert tokens_per_day(STEP) == 86_400_000_000  # 10^6 a second
    found = budget(STEP, 15 * 10**12, 2.5)  # 15 million seconds
    assert found.days == pytest.approx(15e6 / 86_400)
    assert found.gpu_hours == pytest.approx(15e6 * 100 / 3600)
    assert found.cost == pytest.approx(1_041_666.67, abs=0.01)
    assert budget(STEP, 86_400_000_000, None).days == 1.0
    assert budget(STEP, 1, None).cost is None


def test_mfu_is_of_the_peak_of_the_layers() -> None:
    h100, flops = GPUS["h100-80gb"], 50e9  # 500 TFLOP/s
    assert mfu(STEP, flops, h100, "bf16", fp8=False) == pytest.approx(500 / 989)
    assert mfu(STEP, flops, h100, "bf16", fp8=True) == pytest.approx(500 / 1979)
    assert mfu(STEP, flops, h100, "fp32", fp8=False) is None


def test_numbers_of_tokens() -> None:
    texts = {"15T": 15 * 10**12, "1.5b": 1_500_000_000, "300M": 300_000_000, "2e12": 2 * 10**12, "1_000": 1000, "7": 7}
    assert {text: number_of_tokens(text) for text in texts} == texts
    for wrong in ("", "T", "15X", "-1", "0", "nan", "1e30", "1.5.2", "15 T B"):
        with pytest.raises(ValueError, match="is not a number of tokens, such as 15T"):
            number_of_tokens(wrong)
