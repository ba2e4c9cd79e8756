"""Gradients that travel in FP8 through a buffer of real ranks, against float64 sums within what casts may round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.data_parallel.fp8_reduce import BLOCK
from megafp8.data_parallel.grad_buffer import GradBuffer
from megafp8.distributed import collectives
from megafp8.fp8.formats import E4M3
from tests.data_parallel.test_fp8_reduce import bound
from tests.optimizer.tiny import make_param
from tests.world import World

SIZES = [100, 64, 3000, 5, 4097]  # none a multiple of ranks × 64 but one


def _buffer(bucket_elements: int) -> GradBuffer:
    return GradBuffer(
        [make_param(f"p{i}", np.zeros(n)) for i, n in enumerate(SIZES)],
        data_parallel_group=dist.group.WORLD,
        bucket_elements=bucket_elements,
        device=torch.device("cpu"),
        sharded=True,
        reduce_dtype=E4M3.dtype,
    )


def _gradients(rank: int, broken: float) -> list[Tensor]:
    """Of sizes from 1e-8 to 1, and some of them zero; rank 1 has one that is `broken` in the middle of the third."""
    generator = torch.Generator().manual_seed(rank)
    found = [torch.randn(n, generator=generator) * 10.0 ** torch.randint(-8, 1, (n,), generator=generator)
             for n in SIZES]  # fmt: skip
    found[4][1000:2000] = 0
    if rank == 1 and broken:
        found[2][1500] = broken
    return found


def _fill(buffer: GradBuffer, broken: float) -> None:
    for param, gradient in reversed(list(zip(buffer.params, _gradients(dist.get_rank(), broken), strict=True))):
        param.grad_sink(gradient)


def _case(bucket_elements: int, overlap: bool, broken: float = 0.0) -> tuple[list[Tensor], list[Tensor]]:
    """Of each bucket what this rank puts in, and the sums in its slice; two steps, so nothing stays from the first."""
    alone = _buffer(bucket_elements)
    _fill(alone, broken)
    put_in = [alone.flat[bucket.start : bucket.end] for bucket in alone.layout.buckets]
    buffer = _buffer(bucket_elements)
    for _ in range(2):
        buffer.zero()
        if overlap:
            buffer.start_overlap()
        _fill(buffer, broken)
        buffer.finish()
    return put_in, buffer.owned


@pytest.mark.parametrize("bucket_elements", [1, 200, 5000, 1_000_000])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_within_what_casts_may_round(world4: World, ranks: int, bucket_elements: int) -> None:
    answers = world4.run(_case, bucket_elements, False, ranks=ranks)
    assert len(answers[0][0]) == {1: 5, 200: 3, 5000: 2, 1_000_000: 1}[bucket_elements]
    rounded = 0
    for bucket, parts in enumerate(zip(*(put_in for put_in, _ in answers), strict=True)):
        x_rrn = torch.stack(parts).view(ranks, ranks, -1)
        assert x_rrn.shape[2] % BLOCK == 0
        found = torch.stack([owned[bucket] for _, owned in answers])
        error = (found.double() - x_rrn.double().sum(dim=0)).abs()
        assert (error <= bound(x_rrn)).all()
        rounded += int((error > 0).sum())
    assert rounded > 1000, "nothing was rounded"
    overlapped = world4.run(_case, bucket_elements, True, ranks=ranks)
    for (_, first), (_, second) in zip(answers, overlapped, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "the same sums at another time"


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_what_is_not_finite_reaches_its_owner(world4: World, broken: float) -> None:
    """Within its block of 64 and nowhere else."""
    answers = world4.run(_case, 1, False, broken, ranks=4)
    good = world4.run(_case, 1, False, ranks=4)
    spoilt = 0
    for (_, sums), (_, good_sums) in zip(answers, good, strict=True):
        for a, b in zip(sums, good_sums, strict=True):
            finite = a.isfinite()
            assert torch.equal(a[finite], b[finite])
            spoilt += int((~finite).sum())
    assert 1 <= spoilt <= BLOCK


class _Noted:
    """A collective that notes when it is started and when it is waited for."""

    def __init__(self, work: collectives.Work, log: list[str]) -> None:
        self.work, self.log = work, log
        log.append("start")

    def wait(self) -> None:
        self.log.append("wait")
        self.work.wait()


def _overlap_case() -> list[str]:
    log: list[str] = []
    start = collectives.all_to_all_async

    def noted(*arguments: object) -> tuple[Tensor, collectives.Work]:
        out, work = start(*arguments)  # type: ignore[arg-type]
        return out, _Noted(work, log)

    collectives.all_to_all_async = noted  # type: ignore[assignment]
    try:
        buffer = _buffer(1)
        buffer.start_overlap()
        for param in reversed(buffer.params):
            param.grad_sink(torch.ones_like(param))
            log.append("layer")
        buffer.finish()
    finally:
        collectives.all_to_all_async = start
    return log


def test_buckets_leave_while_backward_runs(world4: World) -> None:
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
