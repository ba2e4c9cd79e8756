"""Schedules by name, from files and from functions; what is refused names the first wrong action."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from megafp8.parallel.pipeline.actions import Action, Kind, Schedule, StagePlacement, loop_placement
from megafp8.parallel.pipeline.registry import (
    SCHEDULES,
    place_stages,
    read_csv,
    training_schedule,
    unsplit_schedule,
)
from tests.parallel.pipeline.notation import csv_of

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT


def test_a_csv_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("F0,F0.1, ,B0.1\n F0 , ,F0.1,B0.1,B0,W0\n")
    assert read_csv(path) == [
        [Action(F, 0), Action(F, 0, 1), Action(B, 0, 1)],
        [Action(F, 0), Action(F, 0, 1), Action(B, 0, 1), Action(B, 0), Action(W, 0)],
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_built_in_schedule_survives_a_csv(tmp_path: Path, name: str) -> None:
    placement = place_stages(name, 3, SCHEDULES[name].least_chunks)
    schedule = training_schedule(name, placement, 7)
    (tmp_path / "copy.csv").write_text(csv_of(schedule))
    assert training_schedule(str(tmp_path / "copy.csv"), placement, 7) == schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_records_say_what_schedules_do(name: str) -> None:
    record = SCHEDULES[name]
    placement = place_stages(name, 3, record.least_chunks)
    assert record.allows(placement.num_chunks)
    assert not record.allows(placement.num_chunks - 1)
    assert record.allows(placement.num_chunks + 1) == (record.chunks is None)
    kinds = {action.kind for actions in record.build(placement, 6) for action in actions}
    assert (W in kinds) == record.splits_wgrad


def test_the_table_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "parallelism.md").read_text(encoding="utf-8")
    section = page.partition("## Pipeline schedules")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", section, re.MULTILINE))
    assert len(rows) >= 5
    for name, stages in rows.items():
        assert str(SCHEDULES[name].chunks or "v ≥ 2") in stages
        assert ("V" in stages) == (SCHEDULES[name].placement == "v")


@pytest.mark.parametrize(("source", "advice"), [("1f2b", "did you mean 1f1b"), ("mine", "choose .*, a .csv file")])
def test_a_misspelt_schedule_is_answered(source: str, advice: str) -> None:
    with pytest.raises(ValueError, match=f"schedule {source}: no schedule has this name; {advice}"):
        training_schedule(source, loop_placement(2), 4)


def test_a_schedule_that_splits_no_backward() -> None:
    assert (unsplit_schedule(1), unsplit_schedule(2), unsplit_schedule(7)) == ("1f1b", "interleaved", "interleaved")


@pytest.mark.parametrize("source", [*SCHEDULES, "mine.csv"])
def test_no_microbatches_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match="num_microbatches is 0"):
        training_schedule(source, loop_placement(2), 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0,B0\nF0,X0,B0\n", "row 2, cell 2: 'X0' is not an action; write F3, B3 or W3"),
        ("F0,B0\n", "the schedule is for 1 ranks, but the pipeline has 2"),
        ("F0,B0\nF0,B0,B0\n", "rank 1, position 2, BACKWARD(0): every micro-batch has exactly one"),
        ("B0,F0\nF0,B0\n", "rank 0, position 0, BACKWARD(0): a backward comes after its forward"),
        ("F0,B0\nF0.1,B0\n", "rank 1, position 0, FORWARD(0, chunk 1): a rank of this pipeline holds 1 chunks"),
        ("F0,B0,F1,B1\nF0,B0,F1,B1\n", "rank 0, position 2, FORWARD(1): there are 1 micro-batches"),
    ],
)
def test_a_wrong_csv(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"schedule {re.escape(str(path))}.*{re.escape(message)}"):
        training_schedule(str(path), loop_placement(2), 1)


def test_a_missing_csv(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.csv could not be read: .*No such file"):
        training_schedule(str(tmp_path / "absent.csv"), loop_placement(2), 1)


def all_forwards_first(placement: StagePlacement, num_microbatches: int) -> Schedule:
    """GPipe."""
    return [[Action(kind, i) for kind in (F, B) for i in range(num_microbatches)] for _ in placement.stages]


def nonsense(placement: StagePlacement, num_microbatches: int) -> list[str]:
    return ["F0"]


def test_a_function_of_the_users() -> None:
    schedule = training_schedule(f"{__name__}:all_forwards_first", loop_placement(2), 2)
    assert schedule == [[Action(F, 0), Action(F, 1), Action(B, 0), Action(B, 1)]] * 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (f"{__name__}:nonsense", "the function must return a list of Actions for each rank"),
        (f"{__name__}:absent", "has no attribute 'absent'; write a function as module:function"),
        ("no_such_module:f", "No module named 'no_such_module'; write a function as module:function"),
    ],
)
def test_a_wrong_function(source: str, message: str) -> None:
    assert __name__ in sys.modules
    with pytest.raises(ValueError, match=re.escape(message)):
        training_schedule(source, loop_placement(2), 1)
