"""Learning rate of each update. It is a pure function of the update's number, so resuming needs no scheduler state.

Updates are numbered from 0. With W = `warmup_steps`, T = `total_steps` and D = `decay_steps`, a schedule that begins at
step 0 is:

    step < W             low + (peak - low) · (step + 1) / W       low = `warmup_from`; step W-1 is at the peak
    W <= step < T        minimum + (peak - minimum) · f(p)
        cosine           f = (1 + cos(π p)) / 2      p = (step - W) / (T - W)
        linear           f = 1 - p                   same p
        wsd              f = 1 before step T - D, then 1 - sqrt(p) with p = (step - (T - D)) / D
        constant         f = 1, also after T
    step >= T            minimum (all but constant)

So the rate is the peak at the first step after warm-up (or at the first step of the decay), and the minimum at step T,
one step after the last update of a run of T updates. The warm-up starts from low + (peak - low) / W even if the minimum
is higher.

With `first_step` F, the schedule begins at F: W is counted from F, but T is not, and updates before F have the rate of
update F.

WSD ("warm-up, stable, decay": Hu et al. 2024, MiniCPM, arXiv:2404.06395) decays with 1 - sqrt. In Hägele et al. 2024,
"Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", arXiv:2405.18392, this decay reached a
lower loss than a linear decay of the same length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["cosine", "linear", "wsd", "constant"]


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule, as described at the top of this file. Only `wsd` uses `decay_steps`."""

    kind: ScheduleKind
    peak: float
    minimum: float
    warmup_steps: int
    total_steps: int
    decay_steps: int = 0
    first_step: int = 0
    warmup_from: float = 0.0

    def __post_init__(self) -> None:
        assert 0.0 <= self.minimum <= self.peak
        assert (self.decay_steps > 0) == (self.kind == "wsd")
        assert 0.0 <= self.warmup_from <= self.peak
        assert self.kind == "constant" or self.first_step + self.warmup_steps + self.decay_steps <= self.total_steps

    def at(self, step: int) -> float:
        """Return the learning rate of update `step`, counted from 0."""
        assert step >= 0
        step = max(step, self.first_step)
        warm = self.first_step + self.warmup_steps
        if step < warm:
            risen = (step - self.first_step + 1) / self.warmup_steps
            return self.warmup_from + (self.peak - self.warmup_from) * risen
        if self.kind == "constant":
            return self.peak
        if step >= self.total_steps:
            return self.minimum
        decay_start = self.total_steps - self.decay_steps if self.kind == "wsd" else warm
        progress = max(0, step - decay_start) / (self.total_steps - decay_start)
        return self.minimum + (self.peak - self.minimum) * self._remaining(progress)

    def _remaining(self, progress: float) -> float:
        """Return the fraction of peak - minimum that remains after `progress` of the decay, in [0, 1)."""
        if self.kind == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        if self.kind == "linear":
            return 1.0 - progress
        return 1.0 - math.sqrt(progress)
