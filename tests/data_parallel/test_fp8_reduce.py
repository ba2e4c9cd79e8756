"""Gradients in messages: what arrives, held against float64 within what a cast by blocks may round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.data_parallel.fp8_reduce import BLOCK, add_up_plain, message_bytes, pack_plain

SHAPES = [(2, 64), (2, 4096), (3, 192), (4, 4160), (8, 64)]


def gradients(r: int, n: int) -> Tensor:
    """What each of r ranks has of a bucket of r slices: fp32 `[r, r, n]`, of other sizes from block to block."""
    generator = torch.Generator().manual_seed(r * n)
    sizes = 10.0 ** torch.randint(-12, 4, (r, r, n // BLOCK, 1), generator=generator)
    return (torch.randn(r, r, n // BLOCK, BLOCK, generator=generator) * sizes).view(r, r, n)


def exchanged(x_rrn: Tensor) -> Tensor:
    """The sums `[r, n]` of all slices, each by its owner, as if messages had travelled."""
    ranks = x_rrn.shape[0]
    sent = [pack_plain(x_rn, rank) for rank, x_rn in enumerate(x_rrn)]
    sums = []
    for own in range(ranks):
        others = [rank for rank in range(ranks) if rank != own]
        received = torch.stack([sent[rank][own - (own > rank)] for rank in others])
        own_n = x_rrn[own, own].clone()
        add_up_plain(own_n, received, own)
        sums.append(own_n)
    return torch.stack(sums)


def bound(x_rrn: Tensor) -> Tensor:
    """How far `exchanged` may be from exact sums.

    A factor f is the smallest power of two not below amax / 448. Of the other ranks, |x| / f in the normal range of
    E4M3 is off by half a unit of 3 bits behind the leading one, |x| / 16 at most; below 2^-6, by half of 2^-9. fp32
    sums of r terms are off by r - 1 roundings of at most the sum of magnitudes.
    """
    r, _, n = x_rrn.shape
    x = x_rrn.double().view(r, r, -1, BLOCK)
    factor = 2.0 ** torch.ceil(torch.log2(x.abs().amax(dim=-1, keepdim=True) / 448))
    cast = torch.maximum(x.abs() / 16, factor / 1024)
    cast[range(r), range(r)] = 0  # a rank's own is not rounded
    arrived = (x.abs() + cast).sum(dim=0)
    return (cast.sum(dim=0) + (r - 1) * 2.0**-24 * arrived).view(r, n)


@pytest.mark.parametrize(("r", "n"), SHAPES)
def test_sums_are_within_what_a_cast_may_round(r: int, n: int) -> None:
    x = gradients(r, n)
    error = (exchanged(x).double() - x.double().sum(dim=0)).abs()
    allowed = bound(x)
    assert (error <= allowed).all()
    assert error.max() > 0
    assert (error / allowed).max() > 0.8  # the bound is no looser than it must be


def test_a_message_is_codes_and_exponents() -> None:
    assert [message_bytes(size) for size in (64, 4096, 4160)] == [128, 4160, 4288]
    x = torch.zeros(2, 128)
    x[1, 0], x[1, 1], x[1, 64] = 448.0, -1.0, 900.0
    message = pack_plain(x, 0)
    assert message.shape == (1, 192)
    assert message[0, [0, 1, 64]].tolist() == [0x7E, 0xB8, 0x76]  # 448, -1, and 900 / 4 = 225, of which 224 is nearest
    assert message[0, 128:].tolist() == [127, 129, *[0] * 62]


def test_the_own_share_is_exact_and_the_order_is_that_of_ranks() -> None:
    """256 + 2^-16 has no FP8; 2^25 + 1 - 2^25 is 0 in one order of fp32 and 1 in another."""
    x = torch.zeros(3, 3, 64)
    x[1, 1, 0] = 256 + 2.0**-15
    x[:, 2, 0] = torch.tensor([2.0**25, 1, -(2.0**25)])
    x[:, 0, 0] = torch.tensor([1, 2.0**25, -(2.0**25)])
    x[:, 1, 1] = torch.tensor([2.0**25, -(2.0**25), 1])
    sums = exchanged(x)
    assert sums[1, 0] == 256 + 2.0**-15
    assert [sums[2, 0], sums[0, 0], sums[1, 1]] == [0, 0, 1]


def test_zeros_stay_zeros() -> None:
    x = gradients(2, 192)
    x[..., 64:128] = 0
    sums = exchanged(x)
    assert (sums[:, 64:128] == 0).all()
    assert (sums[:, :64] != 0).any()


@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_is_not_finite_shows_in_the_sum(rank: int, broken: float) -> None:
    """Whoever had it: in its block and nowhere else."""
    x = gradients(3, 256)
    good = exchanged(x)
    x[rank, 1, 70] = broken
    sums = exchanged(x)
    assert not sums[1, 70].isfinite()
    sums[1, 64:128] = good[1, 64:128]
    assert torch.equal(sums, good)


@pytest.mark.parametrize("size", [3.1e38, 1e30, 1e-36, 1e-38, 1e-44])
def test_the_ends_of_fp32(size: float) -> None:
    """Off by no more than any other, or half of 2^-136. (Above 3.19e38 a cast may round up to 2^128, infinity.)"""
    x = torch.zeros(2, 2, 64)
    x[1, 0, :3] = torch.tensor([1.0, -0.7, 0.01]) * size
    error = (exchanged(x).double() - x.double().sum(dim=0)).abs()
    assert (error <= (x[1, 0].double().abs() / 16).clamp(min=2.0**-137)).all()
