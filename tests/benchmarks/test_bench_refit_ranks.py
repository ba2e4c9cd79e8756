"""bench_refit_ranks: a run on CPU ranks, and what it calls exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_refit_ranks
from benchmarks.bench_refit_ranks import Measured, Sizes, Sums, summary
from megafp8.distributed.sharding import Shape
from megafp8.inference.refit import Copies

TINY = ["model.num_layers=1", "model.hidden_size=64", "model.ffn_hidden_size=64", "model.vocab_size=128"]


def test_refits_of_ranks_are_exact(tmp_path: Path) -> None:
    file = tmp_path / "refits.json"
    flags = ["--device", "cpu", "--rounds", "1", "--json", str(file), "--set", *TINY]
    cases = ["--ranks", "2", "--shapes", "small", "--one-job", "tp2:tp1", "--two-jobs", "tp1:tp1"]
    assert bench_refit_ranks.main([*flags, *cases]) == 0
    one_job, two_jobs = json.loads(file.read_text())["rows"]
    assert (one_job["exact"], two_jobs["exact"]) == (1, 1)
    assert one_job["GB"] > 0
    assert two_jobs["apply"] > 0


def test_what_is_exact() -> None:
    def found(second: dict[str, int], replica: dict[str, int]) -> int:
        ranks: list[Sums] = [
            {(name, (0,), (2,)): x for name, x in sums.items()} for sums in ({"a": 1, "b": 2}, second, replica)
        ]
        none, copies = dict[tuple[str, Shape, Shape], int](), Copies(0, 0, 0)
        measured = [Measured(1, [1.0], None, copies, ranks[0], none)]
        measured += [Measured(1, [1.0], None, copies, none, x) for x in ranks[1:]]
        exact: int = summary(measured)["exact"]
        return exact

    assert found({"a": 1}, {"a": 1}) == 1
    assert found({"a": 1}, {"b": 2}) == 1
    assert found({"a": 1}, {"a": 2}) == 0
    assert found({"a": 1, "c": 0}, {}) == 0
    assert found({}, {}) == 0
    with pytest.raises(ValueError, match="'ep2' is no axis"):
        Sizes.of("tp2+ep2")
