"""Ranges and codes of the formats against their definition."""

from __future__ import annotations

import math

import pytest
import torch

from megafp8.fp8 import E4M3, E5M2, Format
from tests.fp8.reference import decode, finite_values


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_all_codes_mean_what_the_definition_says(fmt: Format) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).tolist()
    for code, value in enumerate(values):
        expected = decode(code, fmt)
        assert value == expected or (math.isnan(value) and math.isnan(expected)), hex(code)


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_max_is_the_largest_finite_value(fmt: Format) -> None:
    assert fmt.max == finite_values(fmt)[-1]
