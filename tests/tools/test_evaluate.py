"""tools/evaluate.py: texts, data sets and tasks; a table and JSON."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafp8.config import model_spec
from megafp8.conversion.native import NativeSink
from megafp8.data.indexed_dataset import IndexedDatasetWriter
from megafp8.inference.kv_cache_scales import read_scales
from tests.conversion.checkpoints import convert
from tests.conversion.families import SMALL, RandomSource
from tests.inference.harness_tasks import write_tasks
from tests.inference.test_checkpoints import save_bytes_run
from tests.world import World
from tools.evaluate import main

TEXTS = ("abc " * 40, "été", "a\nb c")
CPU = ["--device", "cpu", "--threads", "1"]


@pytest.fixture(scope="module")
def run(rank_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a run with the tokenizer `bytes`, and no training; data/ in it has `TEXTS`."""
    folder = tmp_path_factory.mktemp("run")
    World(rank_processes, 1).run(save_bytes_run, str(folder))
    (folder / "data").mkdir()
    writer = IndexedDatasetWriter(folder / "data" / "set", np.uint16)
    for i, text in enumerate(TEXTS):
        (folder / "data" / f"{i}.txt").write_text(text)
        writer.add_document(np.array([*text.encode(), 256], np.uint16))
    writer.close()
    return str(folder)


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, *CPU, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_texts_and_data_sets(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = found(capsys, run, "--input", f"{run}/data/*.txt", "--data", f"{run}/data/set")
    assert (answer["max_length"], answer["stride"], answer["documents"], answer["start"]) == (64, 32, "separate", [256])
    files, data_set = answer["texts"]
    assert (files["name"], data_set["name"]) == (f"{run}/data/*.txt", f"{run}/data/set")
    assert {**files, "name": ""} == {**data_set, "name": ""}
    assert (files["documents"], files["tokens"], files["words"], files["bytes"]) == (3, 170, 44, 170)
    assert files["perplexity"] == pytest.approx(math.exp(files["nats"] / 170))
    assert files["bits_per_byte"] == pytest.approx(files["nats"] / 170 / math.log(2))
    more = ["--split", "1,2", "--max-documents", "1", "--concatenate", "--stride", "64", "--max-length", "64"]
    second = found(capsys, run, "--data", f"{run}/data/set", *more)
    assert (second["stride"], second["documents"], second["texts"][0]["bytes"]) == (64, "concatenated", 5)
    assert main([run, "--data", f"{run}/data/set", *CPU]) == 0
    heads, row, how = capsys.readouterr().out.splitlines()
    assert heads.split() == [
        "text", "documents", "tokens", "words", "bytes", "nats/token", "perplexity", "bits/byte",
    ]  # fmt: skip
    assert row.split()[:5] == [f"{run}/data/set", "3", "170", "44", "170"]
    assert float(row.split()[6]) == pytest.approx(files["perplexity"], abs=1e-4)
    assert how == "windows of 64 tokens, stride 32; documents separate, each after the tokens [256]"


def test_scales_of_caches(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On texts and data sets alike; without texts there are none."""
    scales = []
    for texts in (["--input", f"{run}/data/*.txt"], ["--data", f"{run}/data/set"]):
        found(capsys, run, *texts, "--kv-cache-scales", str(tmp_path / "scales"))
        scales.append(read_scales(tmp_path / "scales"))
    assert scales[0] == scales[1]
    assert sorted(scales[0]) == list(range(len(scales[0])))
    assert main([run, "--tasks", "hellaswag", "--kv-cache-scales", str(tmp_path / "none"), *CPU]) == 2
    assert "the model has read no text; give --input or --data" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_errors(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    convert(
        RandomSource(model_spec({**SMALL, "max_position_embeddings": 64}), tmp_path), NativeSink(tmp_path / "weights")
    )
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"words": "b"}\n')
    (tmp_path / "empty.txt").write_text("")
    data, text = ["--data", f"{run}/data/set"], ["--input", f"{run}/data/0.txt"]
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for arguments, message in (
        ([run], "error: there is nothing to evaluate on: give --input, --data or --tasks"),
        ([str(tmp_path / "none"), *data], "error: there is no "),
        ([run, "--data", str(tmp_path / "none")], "none.idx"),
        ([run, "--input", str(tmp_path / "bad.jsonl")], "bad.jsonl, line 2: has no key 'text'"),
        ([run, "--input", str(tmp_path / "empty.txt")], "there is no token to score in 1 documents"),
        ([run, *data, "--split", "1"], "--split 1: "),
        ([run, *data, "--max-length", "0"], "max_length = 0: must be at least 1"),
        ([run, *data, "--stride", "0"], "stride = 0: must be between 1 and max_length, which is 64"),
        ([run, *data, "--stride", "65"], "stride = 65: must be between 1 and max_length, which is 64"),
        ([run, *data, "--tensor", "2"], "need 2 ranks, but the job has 1; start it with torchrun --nproc-per-node 2"),
        ([str(tmp_path / "weights"), *text], "has no tokenizer to read texts with; give a data set with --data"),
        (
            [run, "--tasks", "hellaswag"],
            "--tasks needs the package lm_eval, which is not installed: pip install ",
        ),
    ):
        assert main([*arguments, *CPU]) == 2
        assert message in capsys.readouterr().err


def test_a_data_set_needs_no_tokenizer(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts, words and bytes are not known then; a document begins after its own first token."""
    convert(
        RandomSource(model_spec({**SMALL, "max_position_embeddings": 64}), tmp_path), NativeSink(tmp_path / "weights")
    )
    writer = IndexedDatasetWriter(tmp_path / "set", np.uint16)
    writer.add_document(np.arange(40, dtype=np.uint16))
    writer.close()
    answer = found(capsys, str(tmp_path / "weights"), "--data", str(tmp_path / "set"))
    assert answer["start"] == []
    (texts,) = answer["texts"]
    assert [texts[key] for key in ("tokens", "words", "bytes", "bits_per_byte")] == [39, None, None, None]


@pytest.mark.slow
def test_tasks(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tasks = ["--tasks", "pro?e", "last_word", "--include-path", str(write_tasks(tmp_path / "tasks"))]
    answer = found(capsys, run, *tasks, "--limit", "2")
    assert answer["tasks"].keys() == {"prose", "last_word"}
    assert answer["tasks"]["prose"]["byte_perplexity,none"] > 1
    assert answer["num_fewshot"]["last_word"] == 0
    assert main([run, *tasks, "--limit", "2", *CPU]) == 0
    assert "byte_perplexity" in capsys.readouterr().out
    assert main([run, "--tasks", "no_such_task", *CPU]) == 2
    assert "there is no task no_such_task in lm-evaluation-harness" in capsys.readouterr().err
