"""The learning rate of each update, a pure function of its number, so that a resumed run needs no scheduler state.

Updates are numbered from 0. With W = `warmup_steps`, T = `total_steps`, D = `decay_steps`:

    step < W             peak · (step + 1) / W       the first update already learns; step W-1 is at the peak
    W <= step < T        minimum + (peak - minimum) · f(p)
        cosine           f = (1 + cos(π p)) / 2      p = (step - W) / (T - W)
        linear           f = 1 - p                   p as above
        wsd              f = 1 before step T - D, then 1 - sqrt(p) with p = (step - (T - D)) / D
        constant         f = 1, also after T
    step >= T            minimum (all but constant)

So the rate is the peak at the first step after warm-up (or of the decay), and the minimum at step T, one step after the
last update of a run of T updates. The warm-up starts from peak / W even where the minimum is higher.

WSD ("warm-up, stable, decay": Hu et al. 2024, MiniCPM, arXiv:2404.06395) decays with 1 - sqrt, which ended at a lower
loss than a linear decay of the same length in Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond
Fixed Training Durations", arXiv:2405.18392.
"""

from __future__ import annotations

import math
from typing import Literal

ScheduleKind = Literal["cosine", "linear", "wsd", "constant"]


def learning_rate(
    step: int,
    *,
    kind: ScheduleKind,
    peak: float,
    minimum: float,
    warmup_steps: int,
    total_steps: int,
    decay_steps: int = 0,
) -> float:
    """The learning rate of update `step` (from 0). `decay_steps` is for `wsd` only.

    Raises ValueError where the phases do not fit into `total_steps` or `minimum` is above `peak`.
    """
    assert step >= 0
    _check(kind, peak, minimum, warmup_steps, total_steps, decay_steps)
    if step < warmup_steps:
        return peak * ((step + 1) / warmup_steps)
    if kind == "constant":
        return peak
    if step >= total_steps:
        return minimum
    decay_start = total_steps - decay_steps if kind == "wsd" else warmup_steps
    progress = max(0, step - decay_start) / (total_steps - decay_start)
    return minimum + (peak - minimum) * _remaining(kind, progress)


def _remaining(kind: ScheduleKind, progress: float) -> float:
    """The fraction of peak - minimum that remains after `progress` of the decay, in [0, 1)."""
    if kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if kind == "linear":
        return 1.0 - progress
    return 1.0 - math.sqrt(progress)


def _check(kind: str, peak: float, minimum: float, warmup_steps: int, total_steps: int, decay_steps: int) -> None:
    if kind not in ("cosine", "linear", "wsd", "constant"):
        raise ValueError(f"learning rate schedule {kind!r} is unknown; choose cosine, linear, wsd or constant")
    if not 0.0 <= minimum <= peak:
        raise ValueError(f"minimum learning rate {minimum} must lie between 0 and the peak {peak}")
    if warmup_steps < 0 or total_steps < 1:
        raise ValueError(f"warmup_steps {warmup_steps} must be at least 0 and total_steps {total_steps} at least 1")
    if kind == "wsd" and decay_steps < 1:
        raise ValueError(f"decay_steps is {decay_steps}; a wsd schedule needs at least 1, a tenth of the run is usual")
    if kind != "wsd" and decay_steps:
        raise ValueError(f"decay_steps is {decay_steps}, but a {kind} schedule has no separate decay; leave it out")
    if kind != "constant" and warmup_steps + decay_steps > total_steps:
        raise ValueError(
            f"warmup_steps {warmup_steps} + decay_steps {decay_steps} exceed total_steps {total_steps}; "
            f"shorten the warm-up or the decay, or train longer"
        )
