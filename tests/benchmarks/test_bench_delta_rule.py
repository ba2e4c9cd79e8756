"""bench_delta_rule on the CPU, where both kinds are computed by PyTorch's operations."""

from __future__ import annotations

import pytest

from benchmarks.bench_delta_rule import main


def test_a_row_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--seq-length", "40", "--heads", "2", "--width", "8", "--rounds", "1", "--device", "cpu"]
    assert main(small) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["gated_delta_net:", "megafp8"], ["kimi_delta_attention:", "megafp8"]]
    assert all(float(error) < 1e-5 for row in rows for error in row[-2:])


def test_an_odd_number_of_heads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--heads", "3", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "error: --heads: 3 is odd, and two heads share a key in gated_delta_net\n"
