"""The learning-rate schedule of a resumed run: kept, changed explicitly, or refused; its length and the run's."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megafp8.config import Config
from megafp8.training.learning_rate import schedule_change, schedule_jump, schedule_of
from tests.training.presets import config

PEAK, LEAST = 1e-3, 1e-4


def run(steps: int, schedule: str = "cosine", **optimizer: Any) -> Config:
    """A run of `steps` steps with 10 of warm-up."""
    rates = {"learning_rate": PEAK, "min_learning_rate": LEAST, "warmup_steps": 10}
    return config(training={"steps": steps}, optimizer={**rates, "schedule": schedule, **optimizer})


def saved(config: Config) -> dict[str, Any]:
    """The config in a checkpoint of a version that knew neither `decay_until` nor `stop_after`."""
    tree = config.model_dump(mode="json")
    for section, key in (("optimizer", "decay_until"), ("training", "stop_after")):
        del tree[section][key]
    return tree


def cosine(step: int, total: int) -> float:
    return LEAST + (PEAK - LEAST) * (1 + math.cos(math.pi * (step - 10) / (total - 10))) / 2


def test_the_schedule_is_as_long_as_decay_until_says() -> None:
    longer = schedule_of(run(200, decay_until=100).optimizer, 200)
    assert longer == schedule_of(run(100).optimizer, 100)
    assert [longer.at(i) for i in (9, 40, 99, 100, 199)] == pytest.approx(
        [PEAK, *(cosine(i, 100) for i in (40, 99)), LEAST, LEAST]
    )
    shorter = schedule_of(run(50, decay_until=100).optimizer, 50)
    assert shorter.at(49) == pytest.approx(cosine(49, 100))
    assert schedule_of(run(100, "wsd").optimizer, 100).decay_steps == 10
    assert schedule_of(run(50, "wsd", decay_until=200).optimizer, 50).decay_steps == 20


REFUSED = [  # steps before, kind, steps done, steps now, next rate now, next rate before
    (100, "cosine", 100, 200, cosine(100, 200), LEAST),
    (100, "cosine", 50, 200, cosine(50, 200), cosine(50, 100)),
    (100, "cosine", 50, 80, cosine(50, 80), cosine(50, 100)),
    (100, "linear", 12, 200, PEAK - 2 * (PEAK - LEAST) / 190, PEAK - 2 * (PEAK - LEAST) / 90),
    (100, "wsd", 100, 200, PEAK, LEAST),
]


@pytest.mark.parametrize(("before", "kind", "done", "now", "next_now", "next_before"), REFUSED)
def test_another_number_of_steps_does_not_change_the_schedule_silently(
    before: int, kind: str, done: int, now: int, next_now: float, next_before: float
) -> None:
    then = saved(run(before, kind))
    refusal = schedule_jump(then, run(now, kind), done)
    assert refusal is not None
    assert f"training.steps = {before}, this run has {now}" in refusal
    assert f"would be {next_now:.3g} instead of {next_before:.3g}; to keep the schedule, set" in refusal
    assert f"optimizer.decay_until={before}" in refusal
    assert f"to change it, set optimizer.decay_until={now}" in refusal
    assert ("training.stop_after=80" in refusal) == (now == 80)

    keeps = run(now, kind, decay_until=before)
    assert schedule_jump(then, keeps, done) is None
    assert schedule_change(then, keeps, done) is None
    changes = run(now, kind, decay_until=now)
    assert schedule_jump(then, changes, done) is None
    assert schedule_change(then, changes, done) == (
        f"the learning-rate schedule has changed: step {done + 1} has {next_now:.3g} instead of {next_before:.3g}, "
        f"with a decay until step {now} instead of a decay until step {before}"
    )


@pytest.mark.parametrize(
    ("kind", "done", "said"),
    [("constant", 50, False), ("wsd", 50, True), ("wsd", 90, True), ("cosine", 0, True), ("cosine", 10, True)],
)
def test_changes_that_keep_past_rates_are_allowed(kind: str, done: int, said: bool) -> None:
    """A constant rate; wsd before its decay; a run that has not left the warm-up."""
    then = saved(run(100, kind))
    assert schedule_jump(then, run(200, kind), done) is None
    assert (schedule_change(then, run(200, kind), done) is not None) == said


def test_other_optimizer_keys_may_change() -> None:
    then = saved(run(100))
    warmer = run(200, learning_rate=2 * PEAK)
    assert schedule_jump(then, warmer, 50) is None
    change = schedule_change(then, warmer, 50)
    assert change is not None
    assert change.endswith("a decay until step 200 instead of a decay until step 100")
    same_length = schedule_change(then, run(100, learning_rate=2 * PEAK), 50)
    assert same_length is not None
    assert "decay" not in same_length
    constant = schedule_change(then, run(100, "constant"), 50)
    assert constant is not None
    assert constant.endswith("no decay instead of a decay until step 100")
