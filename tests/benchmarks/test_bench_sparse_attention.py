"""The comparison of kernels with the reference that the benchmark of sparse attention begins with."""

from __future__ import annotations

import pytest

from benchmarks import bench_sparse_attention


@pytest.mark.slow
def test_kernels_are_compared_with_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--check-length", "64", "--top-k", "24", "--heads", "4", "--index-heads", "4"]
    assert bench_sparse_attention.main(["--check", *options]) == 0
    said = capsys.readouterr().out
    assert said.count(" equal\n") == 2
    assert "indexer's dk" in said
