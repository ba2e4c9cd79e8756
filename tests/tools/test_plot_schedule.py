"""tools/plot_schedule.py: text, PNG, trace, and measured runs beside simulated ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafp8.parallel.pipeline.actions import loop_placement, v_placement
from megafp8.parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from megafp8.parallel.pipeline.schedules.zb_v import zb_v
from megafp8.parallel.pipeline.simulate import StageTimes, simulate
from megafp8.parallel.pipeline.trace import read_timeline, write_timeline
from tools import plot_schedule


def test_text_png_and_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png, trace = tmp_path / "s.png", tmp_path / "t.json"
    arguments = ["1f1b", "zb-v", "--pipeline", "2", "--micro-batches", "3", "--png", str(png), "--trace", str(trace)]
    assert plot_schedule.main(arguments) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1f1b: 12, bubble 25.0%, micro-batches held 2 (until their backward 2)",
        "zb-v: 9.5, bubble 5.3%, micro-batches held 2 (until their backward 2)",
    ]
    assert png.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    assert [(e["name"], e["ts"], e["dur"]) for e in spans if e["tid"] == 1] == [
        ("F0", 1e3, 1e3), ("B0", 2e3, 2e3), ("F1", 4e3, 1e3), ("B1", 5e3, 2e3), ("F2", 7e3, 1e3), ("B2", 8e3, 2e3),
    ]  # fmt: skip
    assert sum(e["ph"] == "X" and e["pid"] == 1 for e in events) == 2 * 2 * 3 * 3


def test_times_are_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_schedule.main(["zb-v", "--pipeline", "1", "--micro-batches", "2", "--times", "1,2,4"]) == 0
    assert capsys.readouterr().out.startswith("zb-v: 14, bubble 0.0%")
    assert plot_schedule.main(["1f1b", "--pipeline", "2", "--micro-batches", "1", "--p2p", "0.25"]) == 0
    assert capsys.readouterr().out.startswith("1f1b: 6.5,")


def test_a_measured_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    placement, path = v_placement(2), tmp_path / "pipeline_trace.json"
    timeline = simulate(zb_v(placement, 3), placement, StageTimes(0.5, 1.0, 0.25))
    write_timeline(timeline, placement, path)
    assert read_timeline(path) == (timeline, placement)
    assert plot_schedule.main(["zb-v", "--measured", str(path), "--png", str(tmp_path / "m.png")]) == 0
    measured, simulated = capsys.readouterr().out.splitlines()
    assert measured.removeprefix("measured: ") == simulated.removeprefix("zb-v: ")  # its own times, simulated
    assert measured.startswith(f"measured: {timeline.duration:.4g} s, bubble {timeline.bubble_fraction:.1%}")


def test_measured_stages_are_simulated_with_their_own_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    placement, path = loop_placement(2), tmp_path / "pipeline_trace.json"
    times = [StageTimes(1.0, 1.0, 1.0), StageTimes(2.0, 3.0, 1.0)]
    write_timeline(simulate(one_f_one_b(placement, 4), placement, times), placement, path)
    assert plot_schedule.main(["1f1b", "zb-v", "--measured", str(path)]) == 0
    measured, same, elsewhere = capsys.readouterr().out.splitlines()
    assert measured.removeprefix("measured: ") == same.removeprefix("1f1b: ")
    assert elsewhere.startswith("zb-v: ")  # which has another placement: the mean times of all stages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.csv"], "error: schedule mine.csv could not be read"),
        (["--measured", "absent.json"], "error: absent.json is not a pipeline timeline"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_schedule.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["1f1b", "--times", "1,1"], ["1f1b", "--times", "1,x,1"]])
def test_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        plot_schedule.main(arguments)
