"""bench_packed_weights: what it compares with, on a CPU; its times need a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import bench_packed_weights as bench
from megafp8.linear.quantized_weight import QuantizedWeight


@pytest.mark.parametrize("kind", bench.KINDS)
def test_error_is_that_of_a_product(kind: str) -> None:
    weight, x = bench.random_weight(kind, 700, 256, torch.device("cpu")), torch.randn(3, 256)
    y = weight.product(x) if isinstance(weight, QuantizedWeight) else x @ weight.float().t()
    assert bench.error(y, x, bench.values(weight)) < 1e-6
    y[0, 699] = 0
    assert bench.error(y, x, bench.values(weight)) > 1e-4


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--kinds", "int5"]) == 2
    assert bench.main(["--device", "cpu"]) == 2
    assert "int8" in capsys.readouterr().err
