"""The kernels of the FP8 reduce-scatter against their references, bit for bit. Shapes as there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.data_parallel.fp8_reduce import BLOCK, add_up_plain, message_bytes, pack_plain
from megafp8.kernels import fp8_reduce as kernels
from tests.data_parallel.test_fp8_reduce import SHAPES, gradients
from tests.kernels import DEVICE


def bucket(r: int, n: int) -> Tensor:
    """One rank's bucket with zeros, infinities, NaNs, and the ends of fp32 in it."""
    x_b64 = gradients(r, n)[0].reshape(-1, BLOCK)
    for i, special in enumerate([0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-38, 1e-44, 448.0, 448.00003]):
        x_b64[i % len(x_b64), 3 * i] = special
    x_b64[-1] *= 0
    return x_b64.view(r, n).to(DEVICE)


def canonical(packed_m: Tensor, n: int) -> Tensor:
    """Packed bytes without padding and with one NaN."""
    packed = packed_m[:, : n + n // BLOCK].clone()
    packed[:, :n][packed[:, :n] == 0xFF] = 0x7F
    return packed


@pytest.mark.parametrize(("r", "n"), SHAPES)
def test_pack(r: int, n: int) -> None:
    x = bucket(r, n)
    for own in {0, 1, r - 1}:
        found, expected = kernels.pack(x, own), pack_plain(x, own)
        assert found.shape == expected.shape == (r - 1, message_bytes(n))
        assert torch.equal(canonical(found, n), canonical(expected, n))


@pytest.mark.parametrize(("r", "n"), SHAPES)
def test_add_up_any_bytes(r: int, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    received = torch.randint(256, (r - 1, message_bytes(n)), dtype=torch.uint8, generator=generator).to(DEVICE)
    received[received % 128 == 127] -= 1  # NaN bytes occur with the exponent NaN only
    received[:, n : n + 1] = torch.tensor([[0], [1], [254], [255], [127], [128], [2]], dtype=torch.uint8)[: r - 1]
    for own in {0, 1, r - 1}:
        found = gradients(r, n)[own, own].to(DEVICE)
        expected = found.clone()
        kernels.add_up(found, received, own)
        add_up_plain(expected, received, own)
        assert torch.equal(found.nan_to_num(1.0), expected.nan_to_num(1.0))
        assert torch.equal(found.isnan(), expected.isnan())
