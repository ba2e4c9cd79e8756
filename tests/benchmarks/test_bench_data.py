"""bench_data measures every case and leaves no files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_data


@pytest.mark.slow
def test_it_measures_every_case_and_cleans_up(tmp_path: Path) -> None:
    sizes = ["--tokens", "2e5", "--seq-length", "64", "--steps", "5", "--workers", "0", "--step-ms", "1"]
    arguments = ["--folder", str(tmp_path / "disk"), *sizes, "--json", str(tmp_path / "rows.json")]
    assert bench_data.main(arguments) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    remote = ["object storage, cold, on demand", "object storage, cold", "object storage, warm"]
    cases = ["local", "local, blend of 3", "local, best_fit", *remote]
    assert [row["case"] for row in rows] == cases
    assert all(row["tokens_per_second"] > 0 and 0 <= row["waited"] < 1 for row in rows)
    assert not (tmp_path / "disk").exists()
    (tmp_path / "disk").mkdir()
    assert bench_data.main(arguments) == 2
