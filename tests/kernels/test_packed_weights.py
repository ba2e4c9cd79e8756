"""Products with quantized weights: by kernels, against the dequantized weight in float64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from megafp8.linear.quantized_weight import WEIGHT_FORMATS, QuantizedWeight, WeightFormatName, quantize_weight
from tests.kernels import DEVICE, noise
from tests.marks import slow_but

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
"""Of tokens and results: the interpreter has no bf16."""


def _check(found: Tensor, x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    """Against float64, but for the rounding of sums and of the result."""
    expected = x.double() @ w.double().t()
    if bias is not None:
        expected += bias.double()
    assert found.dtype == x.dtype
    rtol, atol = (2**-8, 1e-3) if x.dtype == torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=atol * float(expected.abs().max()))


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    slow_but(
        [(1, 37, 384), (1, 5, 2560), (5, 37, 384), (16, 40, 1024), (64, 16, 640), (33, 50, 128), (17, 33, 2560)],
        (1, 37, 384),
        (16, 40, 1024),
        (33, 50, 128),
    ),
)
def test_products(name: WeightFormatName, m: int, n: int, k: int) -> None:
    from megafp8.kernels import packed_weights

    weight = quantize_weight(noise(n, k, scale=0.1), WEIGHT_FORMATS[name])
    x, bias = noise(m, k, dtype=DTYPE, seed=1), noise(n, dtype=DTYPE, seed=2) if n % 2 else None
    _check(packed_weights.multiply(x, weight.packed_data, bias), x, weight.dequantize(torch.float64), bias)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("m", [1, 3])
def test_rows_of_any_length(name: WeightFormatName, m: int) -> None:
    from megafp8.kernels import packed_weights

    weight = quantize_weight(noise(7, 131, scale=0.1), WEIGHT_FORMATS[name])
    x = noise(m, 131, dtype=DTYPE, seed=1)
    _check(packed_weights.multiply(x, weight.packed_data), x, weight.dequantize(torch.float64), None)


@pytest.mark.parametrize("m", [1, 4])
def test_weight_in_high_precision(m: int) -> None:
    from megafp8.kernels import packed_weights

    w, x = noise(20, 392, dtype=DTYPE), noise(m, 392, dtype=DTYPE, seed=1)
    _check(packed_weights.multiply(x, packed_weights.PackedData("bf16", w, 392)), x, w, None)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@pytest.mark.parametrize(("n", "k"), [(3, 128), (37, 640)])
def test_dequantizes_as_torch_does(name: WeightFormatName, n: int, k: int) -> None:
    from megafp8.kernels import packed_weights

    weight = quantize_weight(noise(n, k), WEIGHT_FORMATS[name])
    found = packed_weights.dequantize(weight.packed_data, DTYPE)
    torch.testing.assert_close(found, weight.dequantize(DTYPE), rtol=0, atol=0)


@pytest.mark.slow  # random ones are in all other tests
def test_every_value_is_unpacked() -> None:
    """All bytes of int8 but -128, all finite ones of E4M3, all pairs of int4, through both products."""
    from megafp8.kernels import packed_weights

    bytes_ = torch.arange(256, dtype=torch.int32, device=DEVICE).to(torch.uint8)
    one = torch.ones(1, 256, device=DEVICE)
    fp8 = bytes_.clone()
    fp8[[127, 255]] = 0
    values = {
        "int8": bytes_.view(torch.int8).clamp(min=-127),
        "fp8": fp8.view(torch.float8_e4m3fn),
    }
    for name, data in values.items():
        form = WEIGHT_FORMATS[name]  # type: ignore[index]
        weight = QuantizedWeight(form, data[:, None].expand(256, 64).contiguous(), one)
        for m in (1, 2):  # a token that picks one column
            x = torch.zeros(m, 64, dtype=DTYPE, device=DEVICE)
            x[:, 33] = 1
            found = packed_weights.multiply(x, weight.packed_data)
            torch.testing.assert_close(found, data.to(DTYPE).expand(m, -1), rtol=0, atol=0)
    zero = torch.randint(0, 16, (2, 256), device=DEVICE).to(torch.uint8)
    weight = QuantizedWeight(
        WEIGHT_FORMATS["int4-32"], bytes_[:, None].expand(256, 32).contiguous(),
        torch.full((2, 256), 0.5, dtype=torch.bfloat16, device=DEVICE), zero,
    )  # fmt: skip
    for m in (1, 2):
        for column, value in ((35, bytes_ & 15), (50, bytes_ >> 4)):
            x = torch.zeros(m, 64, dtype=DTYPE, device=DEVICE)
            x[:, column] = 2
            expected = (value.to(DTYPE) - zero[1].to(DTYPE)).expand(m, -1)
            torch.testing.assert_close(packed_weights.multiply(x, weight.packed_data), expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiles_for_hopper() -> None:
    """And needs no more shared memory than it has."""
    command = [sys.executable, "-m", "tests.kernels.compile_packed_weights"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 15
    assert all(int(line.split()[-1]) <= 227 * 1024 for line in lines), lines
