"""bench_linear: measured and predicted speedups, missing ones, heat maps and arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import bench_linear
from benchmarks.bench_linear import PUBLISHED, Point
from megafp8.fp8 import CurrentScaling
from megafp8.fp8.speed_model import LinearSeconds, LinearSize, predict
from megafp8.host.gpus import CEILINGS


def bench(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a short run."""
    path = tmp_path / "bench.json"
    code = bench_linear.main(["--device", "cpu", "--rounds", "2", "--json", str(path), *options])
    return code, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--m", "1k"], "--m: '1k' is not a list of positive whole numbers"),
        (["--predicted-only"], "the speeds of 'cpu' are not known; known are NVIDIA H200"),
    ],
)
def test_bad_arguments(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_linear.main(["--device", "cpu", *options]) == 2
    assert f"error: {message}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "speed.png"
    options = ["--grid-only", "--m", "16", "--k", "16,32", "--n", "16,48", "--png", str(png)]
    code, report = bench(tmp_path, *options, "--recipe", "delayed", "--micro-batches", "3")
    assert code == 0
    assert "left out, prediction: the speeds of 'cpu' are not known" in capsys.readouterr().out
    points = report["points"]
    assert [(p["m"], p["k"], p["n"]) for p in points] == [(16, 16, 16), (16, 16, 48), (16, 32, 16), (16, 32, 48)]
    for point in points:
        measured = point["measured"]
        assert measured["speedup"] == pytest.approx(measured["bf16_ms"] / measured["fp8_ms"])
        assert point["predicted"] is None
    assert png.read_bytes().startswith(b"\x89PNG")


def test_predictions_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "speed.png"
    options = ["--m", "1024,4096", "--k", "2048,8192", "--n", "1024,16384", "--png", str(png)]
    code, report = bench(tmp_path, "--predicted-only", "--ceilings", "NVIDIA H200", *options)
    assert code == 0
    points = report["points"]
    assert len(points) == 8 + 8, "the grid, and Llama's layers"
    found = {LinearSize(p["m"], p["k"], p["n"]): p for p in points if p["published_speedup"]}
    assert {size: p["published_speedup"] for size, p in found.items()} == PUBLISHED
    for size, point in found.items():
        expected = predict(size, CurrentScaling(), CEILINGS["NVIDIA H200"])
        assert point["predicted"]["speedup"] == expected.speedup
        assert point["predicted"]["fp8_ms"] == pytest.approx(expected.fp8 * 1e3)
        assert point["measured"] is None
    row = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:3] == ["4096", "8192", "16384"])
    assert row.split()[-1] == "1.39"
    assert png.stat().st_size > 0


def test_what_does_not_fit_into_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(size: LinearSize, *_: Any, **__: Any) -> LinearSeconds:
        if size.k == 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return LinearSeconds(2.0, 1.0)

    monkeypatch.setattr(bench_linear, "measure", measure)
    sizes = [LinearSize(16, 16, 16), LinearSize(16, 32, 16)]
    points = bench_linear.sweep(sizes, CurrentScaling(), torch.device("cpu"), None, micro_batches=1, rounds=1)
    assert points == [Point(sizes[0], None, LinearSeconds(2.0, 1.0)), Point(sizes[1], None, None)]


def test_the_map_shows_each_speedup_where_it_belongs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of a panel are outputs n, columns are inputs k; a value that is not known stays empty."""
    import matplotlib.axes

    drawn: list[Tensor] = []
    original = matplotlib.axes.Axes.imshow

    def imshow(self: Any, values: Any, **options: Any) -> Any:
        drawn.append(torch.tensor(values))
        return original(self, values, **options)

    monkeypatch.setattr(matplotlib.axes.Axes, "imshow", imshow)
    seconds = {(16, 32): 1.5, (64, 32): 0.5, (64, 48): 1.25}
    points = [Point(LinearSize(8, k, n), None, LinearSeconds(value, 1.0)) for (k, n), value in seconds.items()]
    bench_linear.plot(points, tmp_path / "map.png", "title")
    (panel,) = drawn
    assert torch.equal(panel.nan_to_num(-1.0), torch.tensor([[1.5, 0.5], [-1.0, 1.25]]))
