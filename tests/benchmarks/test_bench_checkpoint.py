"""bench_checkpoint measures every method and leaves no files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_checkpoint


@pytest.mark.slow
def test_it_measures_every_way_and_cleans_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--folder", str(tmp_path / "disk"), "--parameters", "1", "--step-seconds", "0.01", "--rounds", "2"]
    assert bench_checkpoint.main([*arguments, "--json", str(tmp_path / "rows.json")]) == 0
    rows, again = json.loads((tmp_path / "rows.json").read_text())
    assert [row["method"] for row in rows] == [
        "disk",
        "torch.save",
        "synchronous",
        "load",
        "load, verified",
        "background, first",
        "background, later",
    ]
    assert [row["method"] for row in again] == [row["method"] for row in rows]
    assert all(0 < row["stalled"] <= row["total"] for row in rows)
    assert {row["bytes"] for row in rows} == {2 * (2048 * (2 * 2048 + 2 * 512 + 3 * 5632) + 2048)}
    assert "background, later" in capsys.readouterr().out
    assert list((tmp_path / "disk").iterdir()) == []
    (tmp_path / "disk" / "mine").write_text("x")
    assert bench_checkpoint.main(arguments) == 2
