"""The kernels of the FP8 reduce-scatter against their references, bit for bit.

Shapes as there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.data_parallel.fp8_reduce import (
    BLOCK,
    packed_bytes,
    quantize_and_pack_reference,
    unpack_and_sum_reference,
)
from megafp8.kernels import fp8_reduce
from tests.data_parallel.test_fp8_reduce import SHAPES, gradients
from tests.kernels import DEVICE


def bucket(r: int, n: int) -> Tensor:
    """One rank's bucket with zeros, what is not finite, and the ends of fp32 in it."""
    x_b64 = gradients(r, n)[0].reshape(-1, BLOCK)
    for i, special in enumerate([0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-38, 1e-44, 448.0, 448.00003]):
        x_b64[i % len(x_b64), 3 * i] = special
    x_b64[-1] *= 0
    return x_b64.view(r, n).to(DEVICE)


def without_padding(packed_m: Tensor, n: int) -> Tensor:
    """The packed bytes without padding, all NaNs alike."""
    packed = packed_m[:, : n + n // BLOCK].clone()
    packed[:, :n][packed[:, :n] == 0xFF] = 0x7F
    return packed


@pytest.mark.parametrize(("r", "n"), SHAPES)
def test_data_and_exponents(r: int, n: int) -> None:
    x = bucket(r, n)
    for own in {0, 1, r - 1}:
        expected = quantize_and_pack_reference(x, own)
        assert expected.shape == (r - 1, packed_bytes(n))
        found = fp8_reduce.quantize_and_pack(x, own, block=BLOCK, nbytes=packed_bytes(n))
        assert found.shape == expected.shape
        assert torch.equal(without_padding(found, n), without_padding(expected, n))


@pytest.mark.parametrize(("r", "n"), SHAPES)
def test_sums_of_any_bytes(r: int, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    received = torch.randint(256, (r - 1, packed_bytes(n)), dtype=torch.uint8, generator=generator).to(DEVICE)
    received[received % 128 == 127] -= 1  # NaN data occur in blocks with a NaN scale_inv only
    received[:, n : n + 1] = torch.tensor([[0], [1], [254], [255], [127], [128], [2]], dtype=torch.uint8)[: r - 1]
    for own in {0, 1, r - 1}:
        found = gradients(r, n)[own, own].to(DEVICE)
        expected = found.clone()
        fp8_reduce.unpack_and_sum(found, received, own, block=BLOCK)
        unpack_and_sum_reference(expected, received, own)
        assert torch.equal(found.nan_to_num(1.0), expected.nan_to_num(1.0))
        assert torch.equal(found.isnan(), expected.isnan())
