"""bench_refit: a run on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_refit

TINY = [
    *("model.num_layers=1", "model.hidden_size=128", "model.num_attention_heads=4", "model.num_query_groups=2"),
    *("model.ffn_hidden_size=128", "model.vocab_size=128"),
]


@pytest.mark.parametrize("full", [False, True])
def test_it_copies_nothing_in_the_same_layout(tmp_path: Path, full: bool) -> None:
    file = tmp_path / "refit.json"
    flags = ["--device", "cpu", "--recipes", "delayed", "--rounds", "1", "--json", str(file)]
    assert bench_refit.main([*flags, *(["--full"] if full else []), "--set", *TINY]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["shared"], row["same_copies"], row["equal"]) == (1.0, 0, True)
    assert row["copied_copies"] > 0
