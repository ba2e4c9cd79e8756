"""Schedules of the user's own, and the timeline of a step. Built-in schedules are compared in test_layouts.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.config import Config
from megafp8.parallel.pipeline.actions import COMPUTE, Action, Kind, Schedule, StagePlacement, loop_placement
from megafp8.parallel.pipeline.registry import SCHEDULES
from tests.parallel.pipeline.notation import csv_of
from tests.training.presets import LAYERS_4, LAYERS_8, NO_CLIP, PP2, ZB_V, config_of
from tests.training.runs import Runs, start, steps_of
from tests.world import World


def all_forwards_first(placement: StagePlacement, num_microbatches: int) -> Schedule:
    """GPipe over chunks."""
    order = [(Kind.FORWARD, range(placement.num_chunks)), (Kind.BACKWARD, reversed(range(placement.num_chunks)))]
    actions = [Action(kind, i, c) for kind, chunks in order for c in chunks for i in range(num_microbatches)]
    return [list(actions) for _ in placement.stages]


@pytest.mark.slow
def test_schedules_of_the_users(runs: Runs, tmp_path: Path) -> None:
    preset = LAYERS_8 | NO_CLIP | PP2
    expected = runs.one_rank(preset)
    path = tmp_path / "mine.csv"
    path.write_text(csv_of(SCHEDULES["zb-h1"].build(loop_placement(2), 2)))
    for schedule in ({"schedule": f"{__name__}:all_forwards_first", "virtual_pipeline": 3}, {"schedule": str(path)}):
        found = runs.of(preset, parallel=schedule)
        assert [loss for loss, _ in found.curve] == [loss for loss, _ in expected.curve]
        assert found.state == expected.state


def _traced(config: Config) -> tuple[bool, list[list[Action]], list[list[Action]]]:
    trainer, parallel = start(config)
    steps_of(trainer, parallel, [0])
    before = trainer.timeline is None
    steps_of(trainer, parallel, [1])
    assert trainer.timeline is not None
    compute = [[a for a in actions if a.kind in COMPUTE] for actions in trainer.plan.train]
    return before, [[span.action for span in spans] for spans in trainer.timeline.spans], compute


def test_a_step_is_traced_where_asked_for(world2: World) -> None:
    config = config_of(LAYERS_4 | PP2 | ZB_V, logging={"pipeline_trace_step": 2})
    for before, traced, compute in world2.run(_traced, config):
        assert before
        assert traced == compute
