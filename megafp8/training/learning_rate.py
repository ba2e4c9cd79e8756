"""Learning-rate schedule of a config, and the check that a resumed run keeps it.

The length of the schedule (`optimizer.decay_until`) and the end of the run (`training.steps`, `training.stop_after`)
are separate. By default decay_until is training.steps, so a change of the number of steps changes the schedule, and the
learning rate of a resumed run would jump. This is an error unless `optimizer.decay_until` is set explicitly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megafp8.config import Config, OptimizerConfig
from megafp8.optimizer.learning_rate import Schedule


def schedule_of(o: OptimizerConfig, steps: int) -> Schedule:
    """Return the learning-rate schedule of a run of `steps` steps."""
    begin = o.schedule_from, o.warmup_from
    if o.schedule == "constant":  # does not depend on the length
        return Schedule(o.schedule, o.learning_rate, o.learning_rate, o.warmup_steps, max(1, o.warmup_steps), 0, *begin)
    total = o.decay_until or steps
    length = total - o.schedule_from
    decay = min(o.decay_steps or max(1, length // 10), length - o.warmup_steps) if o.schedule == "wsd" else 0
    return Schedule(o.schedule, o.learning_rate, o.min_learning_rate, o.warmup_steps, total, decay, *begin)


def _schedules(then: Mapping[str, Any], now: Config) -> tuple[Schedule, Schedule, Schedule]:
    """Return three schedules: of the saved config, of this run, and of the saved config with this run's steps."""
    before, steps = OptimizerConfig.model_validate(then["optimizer"]), now.training.steps
    saved = schedule_of(before, then["training"]["steps"])
    return saved, schedule_of(now.optimizer, steps), schedule_of(before, steps)


def schedule_jump(then: Mapping[str, Any], now: Config, step: int) -> str | None:
    """Return the reason why a run with config `then` must not be resumed after `step` steps, or None if it may.

    It must not be resumed if only a change of `training.steps` changes the schedule and the learning rate jumps.
    """
    saved, ours, stretched = _schedules(then, now)
    implied = ours == stretched and now.optimizer.decay_until is None
    if saved == ours or not implied or step == 0 or saved.at(step - 1) == ours.at(step - 1):
        return None
    before, steps = saved.total_steps, now.training.steps
    keep = f"to keep the schedule, set optimizer.decay_until={before}"
    if steps < before:
        keep += f", or training.steps={before} and training.stop_after={steps}"
    return (
        f"was saved with training.steps = {before}, this run has {steps}, and without optimizer.decay_until "
        f"that changes the {ours.kind} schedule: the learning rate of the next step would be {ours.at(step):.3g} "
        f"instead of {saved.at(step):.3g}; {keep}; to change it, set optimizer.decay_until={steps}"
    )


def schedule_change(then: Mapping[str, Any], now: Config, step: int) -> str | None:
    """Return a log line about the difference from the schedule of config `then`, or None if there is no difference."""
    saved, ours, _ = _schedules(then, now)
    if saved == ours:
        return None
    rates = f"step {step + 1} has {ours.at(step):.3g} instead of {saved.at(step):.3g}"
    ends = "" if _decay(ours) == _decay(saved) else f", with {_decay(ours)} instead of {_decay(saved)}"
    return f"the learning-rate schedule has changed: {rates}{ends}"


def _decay(schedule: Schedule) -> str:
    return "no decay" if schedule.kind == "constant" else f"a decay until step {schedule.total_steps:,}"
