"""Bit sums of tensors, by the kernel and by PyTorch, against Python's own integers."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from megafp8.training.consistency import bit_sums, words_of
from megafp8.training.consistency import bit_sums_reference as reference
from tests.kernels import DEVICE

kernels = pytest.importorskip("megafp8.kernels.bit_sums")

WORDS = 2048 * 256 + 100  # more than one block for the first programs


def by_hand(x: Tensor) -> list[int]:
    """Bit sums by Python integers of any length."""
    content = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    content += bytes(-len(content) % 4)
    words = struct.unpack(f"<{len(content) // 4}i", content)
    totals = sum(words), sum((i + 1) * w for i, w in enumerate(words))
    return [(total + 2**63) % 2**64 - 2**63 for total in totals]


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    extreme = torch.full((70_000,), -(2**31), dtype=torch.int32)  # the weighted sum is beyond 2^64
    special = torch.tensor([torch.nan, -torch.nan, torch.inf, -0.0, 1e-40])
    memory = torch.randint(256, (4099,), generator=generator, dtype=torch.uint8)
    found = [
        torch.randint(-(2**31), 2**31, (WORDS,), generator=generator).int(), extreme, special, special.bfloat16(),
        special.double(), torch.arange(7, dtype=torch.int64), memory[1:4098], memory[:5].view(torch.float8_e4m3fn),
        torch.zeros(0), torch.randn(6, 5, generator=generator).T, torch.randn(3, generator=generator)[1],
    ]  # fmt: skip
    return [x.to(DEVICE) for x in found]


@pytest.mark.slow
def test_kernel_and_reference_are_the_sums_of_the_words() -> None:
    found = tensors()
    expected = [by_hand(x) for x in found]
    words = [words_of(x) for x in found]
    assert reference([w.cpu() for w in words]).tolist() == expected
    assert kernels.bit_sums(words).tolist() == expected
    assert bit_sums(found, torch.device(DEVICE)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_every_flipped_bit_and_every_swap_is_seen(dtype: torch.dtype) -> None:
    x = torch.randn(23, generator=torch.Generator().manual_seed(2)).to(dtype)
    changed = []
    for byte in range(x.nbytes):
        for bit in range(8):
            other = x.clone()
            other.view(torch.uint8)[byte] ^= 1 << bit
            changed.append(other)
    for i in range(len(x)):
        for j in range(i):
            other, a, b = x.clone().view(torch.uint8).view(len(x), -1), *x.view(torch.uint8).view(len(x), -1)[[i, j]]
            if not torch.equal(a, b):
                other[[i, j]] = torch.stack([b, a])
                changed.append(other.view(-1).view(dtype))
    sums = reference([words_of(other) for other in [x, *changed]])
    assert (sums[1:] != sums[0]).any(dim=1).all()
    assert len(changed) > 8 * x.nbytes + 200
