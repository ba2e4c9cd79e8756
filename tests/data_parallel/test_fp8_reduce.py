"""FP8 reduce-scatter: sums against float64 within what quantization may round, emulated and on real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.data_parallel.fp8_reduce import (
    BLOCK,
    packed_bytes,
    quantize_and_pack_reference,
    unpack_and_sum_reference,
)
from megafp8.data_parallel.grad_buffer import GradBuffer
from megafp8.distributed import collectives
from megafp8.fp8.formats import E4M3
from tests.tiny_model import make_buffer, make_param
from tests.world import World

SHAPES = [(2, 64), (2, 4096), (3, 192), (4, 4160), (8, 64)]


def gradients(r: int, n: int) -> Tensor:
    """Each of r ranks' bucket of r slices: fp32 `[r, r, n]`, of different magnitudes in each block."""
    generator = torch.Generator().manual_seed(r * n)
    sizes = 10.0 ** torch.randint(-12, 4, (r, r, n // BLOCK, 1), generator=generator)
    return (torch.randn(r, r, n // BLOCK, BLOCK, generator=generator) * sizes).view(r, r, n)


def reduced(x_rrn: Tensor) -> Tensor:
    """The sums `[r, n]` of all slices, each by its owner, without real ranks."""
    ranks = x_rrn.shape[0]
    sent = [quantize_and_pack_reference(x_rn, rank) for rank, x_rn in enumerate(x_rrn)]
    sums = []
    for own in range(ranks):
        others = [rank for rank in range(ranks) if rank != own]
        received = torch.stack([sent[rank][own - (own > rank)] for rank in others])
        own_n = x_rrn[own, own].clone()
        unpack_and_sum_reference(own_n, received, own)
        sums.append(own_n)
    return torch.stack(sums)


def error_and_bound(sums_rn: Tensor, x_rrn: Tensor) -> tuple[Tensor, Tensor]:
    """How far sums are from exact ones, and may be.

    scale_inv s is the smallest power of two not below amax / 448. Of the other ranks, |x| / s in the normal range of
    E4M3 is off by half a unit of a 3-bit mantissa, |x| / 16 at most; below 2^-6, by half of 2^-9. fp32 sums of r terms
    are off by r - 1 roundings of at most the sum of magnitudes.
    """
    r, _, n = x_rrn.shape
    x = x_rrn.double().view(r, r, -1, BLOCK)
    scale_inv = 2.0 ** torch.ceil(torch.log2(x.abs().amax(dim=-1, keepdim=True) / 448))
    cast = torch.maximum(x.abs() / 16, scale_inv / 1024)
    cast[range(r), range(r)] = 0  # a rank's own is not rounded
    arrived = (x.abs() + cast).sum(dim=0)
    bound = (cast.sum(dim=0) + (r - 1) * 2.0**-24 * arrived).view(r, n)
    return (sums_rn.double() - x_rrn.double().sum(dim=0)).abs(), bound


@pytest.mark.parametrize(("r", "n"), SHAPES)
def test_sums_are_within_the_bound(r: int, n: int) -> None:
    x = gradients(r, n)
    error, bound = error_and_bound(reduced(x), x)
    assert (error <= bound).all()
    assert error.max() > 0
    assert (error / bound).max() > 0.8  # the bound is no looser than it must be


def test_packed_format() -> None:
    assert [packed_bytes(size) for size in (64, 4096, 4160)] == [128, 4160, 4288]
    x = torch.zeros(2, 128)
    x[1, 0], x[1, 1], x[1, 64] = 448.0, -1.0, 900.0
    packed = quantize_and_pack_reference(x, 0)
    assert packed.shape == (1, 192)
    assert packed[0, [0, 1, 64]].tolist() == [0x7E, 0xB8, 0x76]  # 448, -1, and 900 / 4 = 225, of which 224 is nearest
    assert packed[0, 128:].tolist() == [127, 129, *[0] * 62]


def test_the_own_slice_is_exact_and_sums_are_in_the_order_of_ranks() -> None:
    """256 + 2^-16 has no FP8; 2^25 + 1 - 2^25 is 0 in one order of fp32 and 1 in another."""
    x = torch.zeros(3, 3, 64)
    x[1, 1, 0] = 256 + 2.0**-15
    x[:, 2, 0] = torch.tensor([2.0**25, 1, -(2.0**25)])
    x[:, 0, 0] = torch.tensor([1, 2.0**25, -(2.0**25)])
    x[:, 1, 1] = torch.tensor([2.0**25, -(2.0**25), 1])
    sums = reduced(x)
    assert sums[1, 0] == 256 + 2.0**-15
    assert [sums[2, 0], sums[0, 0], sums[1, 1]] == [0, 0, 1]


def test_zeros_stay_zeros() -> None:
    x = gradients(2, 192)
    x[..., 64:128] = 0
    sums = reduced(x)
    assert (sums[:, 64:128] == 0).all()
    assert (sums[:, :64] != 0).any()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_non_finite_gradient_of_any_rank_spoils_its_block_only(rank: int, bad: float) -> None:
    x = gradients(3, 256)
    good = reduced(x)
    x[rank, 1, 70] = bad
    sums = reduced(x)
    assert not sums[1, 70].isfinite()
    sums[1, 64:128] = good[1, 64:128]
    assert torch.equal(sums, good)


@pytest.mark.parametrize("size", [3.1e38, 1e30, 1e-36, 1e-38, 1e-44])
def test_the_ends_of_fp32(size: float) -> None:
    """Off by no more than any other, or half of 2^-136. (Above 3.19e38 a cast may round up to 2^128, infinity.)"""
    x = torch.zeros(2, 2, 64)
    x[1, 0, :3] = torch.tensor([1.0, -0.7, 0.01]) * size
    error = (reduced(x).double() - x.double().sum(dim=0)).abs()
    assert (error <= (x[1, 0].double().abs() / 16).clamp(min=2.0**-137)).all()


# --- a buffer on real ranks -------------------------------------------------------------------------------------------

SIZES = [100, 64, 3000, 5, 4097]  # none a multiple of ranks × 64 but one


def _buffer(bucket_elements: int) -> GradBuffer:
    params = [make_param(f"p{i}", n) for i, n in enumerate(SIZES)]
    return make_buffer(params, bucket_elements, dist.group.WORLD, sharded=True, reduce_dtype=E4M3.dtype)


def _fill(buffer: GradBuffer) -> None:
    """Gradients from 1e-8 to 1, and some zero."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for n in SIZES:
        x = torch.randn(n, generator=generator)
        found.append(x * 10.0 ** torch.randint(-8, 1, (n,), generator=generator))
    found[4][1000:2000] = 0
    for param, gradient in reversed(list(zip(buffer.params, found, strict=True))):
        param.grad_sink(gradient)


def _case(bucket_elements: int, overlap: bool) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's buckets before the reduction, and its sums; two steps, so that nothing is left of the first."""
    unreduced = _buffer(bucket_elements)
    _fill(unreduced)
    before = [unreduced.flat[bucket.start : bucket.end] for bucket in unreduced.layout.buckets]
    buffer = _buffer(bucket_elements)
    for _ in range(2):
        buffer.zero()
        if overlap:
            buffer.start_overlap()
        _fill(buffer)
        buffer.finish()
    return before, buffer.owned


@pytest.mark.parametrize("bucket_elements", [1, 200, 5000, 1_000_000])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_of_a_buffer_are_within_the_bound(world4: World, ranks: int, bucket_elements: int) -> None:
    answers = world4.run(_case, bucket_elements, False, ranks=ranks)
    assert len(answers[0][0]) == {1: 5, 200: 3, 5000: 2, 1_000_000: 1}[bucket_elements]
    rounded = 0
    for bucket, slices in enumerate(zip(*(before for before, _ in answers), strict=True)):
        x_rrn = torch.stack(slices).view(ranks, ranks, -1)
        assert x_rrn.shape[2] % BLOCK == 0
        error, bound = error_and_bound(torch.stack([owned[bucket] for _, owned in answers]), x_rrn)
        assert (error <= bound).all()
        rounded += int((error > 0).sum())
    assert rounded > 1000, "nothing was rounded"
    overlapped = world4.run(_case, bucket_elements, True, ranks=ranks)
    for (_, first), (_, second) in zip(answers, overlapped, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "overlap changes sums"


def _overlap_case() -> list[str]:
    log: list[str] = []
    start = collectives.all_to_all_async

    def logged(*arguments: object) -> tuple[Tensor, collectives.Work]:
        out, work = start(*arguments)  # type: ignore[arg-type]
        log.append("start")

        def wait() -> None:
            log.append("wait")
            work.wait()

        return out, collectives.WaitFunction(wait)

    collectives.all_to_all_async = logged  # type: ignore[assignment]
    try:
        buffer = _buffer(1)
        buffer.start_overlap()
        for param in reversed(buffer.params):
            param.grad_sink(torch.ones_like(param))  # type: ignore[operator]
            log.append("layer")
        buffer.finish()
    finally:
        collectives.all_to_all_async = start
    return log


def test_buckets_are_sent_while_backward_runs(world4: World) -> None:
    for log in world4.run(_overlap_case, ranks=2):
        assert log == ["start", "layer"] * len(SIZES) + ["wait"] * len(SIZES)


def _all_to_all_case() -> list[list[int]]:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    others = [other for other in range(group.size()) if other != rank]
    sent = torch.tensor([[10 * rank + other] * 3 for other in others], dtype=torch.uint8)
    received, work = collectives.all_to_all_async(sent, group)
    work.wait()
    return received.tolist()


def test_all_to_all(world4: World) -> None:
    assert world4.run(_all_to_all_case, ranks=3) == [
        [[10] * 3, [20] * 3],
        [[1] * 3, [21] * 3],
        [[2] * 3, [12] * 3],
    ]
    nothing = torch.empty(0, 5)
    assert collectives.all_to_all_async(nothing, None) == (nothing, collectives.DONE)
