"""bench_streams measures every tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_streams


def test_every_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": "words " * 40}) + "\n" for _ in range(80)))
    text = ["--text", str(tmp_path / "x.jsonl"), "--seconds", "0.05", "--workers", "0", "--seq-length", "64"]
    assert bench_streams.main([*text, "--json", str(tmp_path / "report.json")]) == 0
    (row,) = json.loads((tmp_path / "report.json").read_text())
    assert row["tokenizer"] == "bytes"
    assert row["tokens_per_second"] > 0
    assert row["tokenizer"] in capsys.readouterr().out
    assert bench_streams.main([*text, "--tokenizers", "morse"]) == 2
    assert "error: --tokenizers morse: kinds are sentencepiece" in capsys.readouterr().err
