"""bench_any_model: a short run, and bad options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_any_model

TINY = ["--shape", "tiny", "--layers", "1", "--seq-length", "32", "--rounds", "1", "--steps", "2", "--device", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("variants", ["eager,eager:delayed", "compiled,compiled:current"])
def test_converted_layers_are_timed_and_compared(variants: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "bench.json"
    assert bench_any_model.main([*TINY, "--variants", variants, "--json", str(path)]) == 0
    plain, converted = json.loads(path.read_text())["rows"]
    assert plain["dw_difference"] < 0.05 < converted["dw_difference"]
    assert (plain["ratio"], converted["ratio"] is None) in ((1.0, False), (None, True))
    assert len(converted["samples_ms"]) == 2


def test_an_unknown_variant_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_any_model.main(["--variants", "compiled:fp8"]) == 2
    assert "error: --variants: 'compiled:fp8' is none of eager, compiled, eager:" in capsys.readouterr().err
