"""Slow ranks: comparison of the time that ranks spend in the sections of their steps, without waiting for others.

In synchronous training all ranks are as slow as the slowest rank, so their steps are equally long. A slow rank shows
only in the work that it does itself: the time of a section minus the time spent waiting in collectives, which
`parallel.activity` sums up. At an interval all ranks gather these sums. Each rank is compared with the other ranks of
its pipeline stage, which do the same work. This finds slow disks and busy or throttled CPUs.

Times of a few steps vary, especially on a busy host. A warning is therefore logged only if the same rank is slow in two
comparisons in a row and, unless its GPU is slow, loses at least 10 ms per step. The metrics have all comparisons.

On CUDA the host only queues work, so host times say nothing about the device. At the interval each rank therefore also
times some matrix products, which are equal on all ranks. A GPU with a throttled clock is slow at these.
"""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megafp8.parallel import activity
from megafp8.parallel.collectives import gather_objects
from megafp8.parallel.parallel_state import ParallelState
from megafp8.training.observer import Observer

logger = logging.getLogger(__name__)

SECTIONS = frozenset({"data", "forward and backward", "update"})
WARN_RATIO = 1.2
WARN_SECONDS = 0.01
"""Minimum time that a slow rank loses per step. Smaller differences are mostly due to the Python interpreter."""
GPU_TEST = "matrix products"
_SIZE, _PRODUCTS = 4096, 8


@dataclass(frozen=True)
class SectionTimes:
    """Seconds that a rank spent in each section since the last comparison."""

    rank: int
    host: str
    stage: int
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Slowest:
    """Rank with the largest ratio of its time to the median of its stage's ranks.

    Attributes:
        rank: Global rank.
        host: Name of its host.
        ratio: Its time divided by the median.
        section: Section in which it loses most.
        lost_seconds: Time that it loses in this section, compared with the median.
    """

    rank: int
    host: str
    ratio: float
    section: str
    lost_seconds: float

    def is_slow(self, steps: int) -> bool:
        """Return whether the rank counts as slow in a comparison over `steps` steps."""
        return self.ratio >= WARN_RATIO and (self.section == GPU_TEST or self.lost_seconds >= WARN_SECONDS * steps)


def slowest(times: Sequence[SectionTimes]) -> Slowest | None:
    """Return the slowest rank, or None if no stage has several ranks."""
    slowest_of_stages = [
        one for stage in {t.stage for t in times} if (one := _slowest([t for t in times if t.stage == stage]))
    ]
    return max(slowest_of_stages, key=lambda one: one.ratio, default=None)


def _slowest(peers: Sequence[SectionTimes]) -> Slowest | None:
    if len(peers) < 2:
        return None
    sections = sorted({section for peer in peers for section in peer.seconds})
    medians = {s: statistics.median_low([peer.seconds.get(s, 0.0) for peer in peers]) for s in sections}
    gpus = [peer.seconds.get(GPU_TEST, 0.0) for peer in peers]
    total = statistics.median_low([_total(peer) for peer in peers])

    def ratio(times: SectionTimes, gpu: float) -> float:
        device_ratio = gpu / medians[GPU_TEST] if medians.get(GPU_TEST) else 0.0
        return max(device_ratio, _total(times) / total if total else 0.0)

    ratios = [ratio(peer, gpu) for peer, gpu in zip(peers, gpus)]
    worst = peers[ratios.index(max(ratios))]
    lost = {section: worst.seconds.get(section, 0.0) - median for section, median in medians.items()}
    section = max(lost, key=lambda name: lost[name])
    return Slowest(worst.rank, worst.host, max(ratios), section, lost[section])


def _total(times: SectionTimes) -> float:
    return sum(seconds for section, seconds in times.seconds.items() if section != GPU_TEST)


class Stragglers(Observer):
    """Observer that compares the ranks every `interval` steps. Rank 0 adds the result to its metrics and may warn.

    Attributes:
        slowest: Slowest rank of the latest comparison, on rank 0; else None.
    """

    def __init__(self, interval: int, parallel: ParallelState) -> None:
        self._interval, self._parallel = interval, parallel
        self.slowest: Slowest | None = None

    def after_step(self, step: int, loss: float, skipped: bool) -> Mapping[str, Any]:
        """Return the slowest rank on rank 0 if a comparison is due, and warn if it was slow twice. Collective."""
        if step % self._interval or activity.record is None:
            return {}
        parallel, steps, before = self._parallel, self._interval, self.slowest
        seconds = {name: spent for name, spent in activity.record.take_own_seconds().items() if name in SECTIONS}
        if parallel.device.type == "cuda":
            seconds[GPU_TEST] = _time_products(parallel.device)
        times = SectionTimes(parallel.rank, socket.gethostname(), parallel.pipeline.rank, seconds)
        slow = self.slowest = slowest(gather_objects(times, parallel.world.group) or [])
        if slow is None:
            return {}
        again = before is not None and before.rank == slow.rank and before.is_slow(steps)
        if again and slow.is_slow(steps):
            logger.warning(
                f"slow rank: rank {slow.rank} on {slow.host} took {slow.ratio:.2f} times as long as the median of "
                f"its stage in the {steps} steps to {step}, most of it in {slow.section}: {slow.lost_seconds:.2f} s "
                "more"
            )
        return {"slowest_rank": slow.rank, "slowest_ratio": slow.ratio}


def _time_products(device: torch.device) -> float:
    """Return the seconds that some matrix products take on `device`, after a warm-up."""
    x = torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16, device=device)
    x @ x
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(_PRODUCTS):
        x @ x
    torch.cuda.synchronize(device)
    return time.perf_counter() - start
