"""bench_attention: shares of pairs against a count, and a run on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import bench_attention
from benchmarks.bench_attention import bounded, document_offsets, visible_pairs


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_pairs_against_a_count(window: int | None) -> None:
    ends = document_offsets(200, 20, seed=3)
    assert ends[0] == 0
    assert ends[-1] == 200
    document = [sum(end <= token for end in ends) for token in range(200)]
    count = sum(
        document[key] == document[query] and (window is None or query - key < window)
        for query in range(200)
        for key in range(query + 1)
    )
    assert visible_pairs(ends, window) == count
    assert bounded(ends, torch.device("cpu")).shape == (1, 65)


@pytest.mark.slow
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--seq-length 64 --document-length 20 --window 8 --heads 2 --groups 1 --head-dim 8 --context 2 --rounds 1"
    assert bench_attention.main(["--device", "cpu", *sizes.split(), "--json", str(tmp_path / "out.json")]) == 0
    names = [record["name"] for record in json.loads((tmp_path / "out.json").read_text())]
    ranks = [f"{what}, rank {rank} of 2" for what in ("documents", "window 8") for rank in range(2)]
    assert names == ["causal", "documents", "window 8", "documents, window 8", *ranks]
    assert all(name in capsys.readouterr().out for name in names[:1])
    assert bench_attention.main(["--device", "cpu", "--scores", "--divisor", "256", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("against the reference: o 0.0e+00" in line for line in lines) == 6, "the reference itself on a CPU"
    assert sum(": ours" in line for line in lines) == 6
    assert bench_attention.main(["--device", "cpu", "--seq-length", "65"]) == 2
    assert "--seq-length: 65 is not a multiple of 2" in capsys.readouterr().err
