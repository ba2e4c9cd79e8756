"""bench_casts: figures derived from the times of kernels, which need a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import bench_casts


def test_rates_are_relative_to_a_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = bench_casts.Case("plain -> tensor", "plain", ("one factor",), lambda: None, bytes=4 * 10**9)
    monkeypatch.setattr(bench_casts, "cases", lambda: [case])
    monkeypatch.setattr(bench_casts, "milliseconds", lambda run: 2.0)
    monkeypatch.setattr(bench_casts, "copy_bandwidth", lambda: 4.0)
    monkeypatch.setattr(bench_casts, "machine", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bench_casts.main(["--json", str(tmp_path / "casts.json")]) == 0
    (record,) = json.loads((tmp_path / "casts.json").read_text())
    expected = {"kernel": case.name, "tile": "", "bytes": case.bytes, "ms": 2.0, "tb_per_s": 2.0, "of_copy": 0.5}
    assert record == expected


def test_a_gpu_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_casts.main([]) == 2
