"""tools/compare_runs.py: runs of the same name are distinguished, and runs without steps are errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import compare_runs


def make_run(folder: Path, losses: list[float | None]) -> str:
    folder.mkdir(parents=True)
    steps = [{"step": i + 1, "loss": loss, "grad_norm": 1.0} for i, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return str(folder)


def test_every_run_has_its_own_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        make_run(tmp_path / "a" / "quickstart", [4.0, 2.0]),
        make_run(tmp_path / "b" / "quickstart", [4.0, 2.5]),
        make_run(tmp_path / "b" / "other", [None, 2.0, 1.0, None]),
    ]
    assert compare_runs.main([*runs, "--png", str(tmp_path / "curves.png")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert rows == [
        ["a/quickstart", "2", "4.00000", "2.00000", "0.0e+00", "0.0e+00"],
        ["b/quickstart", "2", "4.00000", "2.50000", "2.5e-01", "0.0e+00"],
        ["other", "4", "nan", "nan", "0.0e+00", "0.0e+00"],
    ]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "metrics.jsonl has no step"), ('{"step": 1, "lo', "metrics.jsonl has no step"), (None, "not a run folder")],
)
def test_a_run_without_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    run = make_run(tmp_path / "run", [1.0])
    (tmp_path / "empty").mkdir()
    if content is not None:
        (tmp_path / "empty" / "metrics.jsonl").write_text(content)
    assert compare_runs.main([run, str(tmp_path / "empty")]) == 2
    assert message in capsys.readouterr().err
    assert compare_runs.main([run, f"{run}/"]) == 2
    assert "is given twice" in capsys.readouterr().err
