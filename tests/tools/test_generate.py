"""tools/generate.py: prompts from arguments, files, standard input and a conversation; texts and JSON."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megafp8.config import model_spec
from megafp8.conversion.native import NativeSink
from tests.conversion.checkpoints import convert
from tests.conversion.families import SMALL, RandomSource
from tests.inference.test_checkpoints import save_bytes_run
from tests.world import World
from tools.generate import main

SAMPLED = ["--temperature", "1", "--seed", "3", "--max-tokens", "6", "--device", "cpu", "--threads", "1"]


@pytest.fixture(scope="module")
def run(rank_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a run with the tokenizer `bytes`, and no training."""
    folder = str(tmp_path_factory.mktemp("run"))
    World(rank_processes, 1).run(save_bytes_run, folder)
    return folder


def test_where_prompts_come_from(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([run, "a\nb", *SAMPLED]) == 0
    text = capsys.readouterr().out.removesuffix("\n")
    assert text
    file = tmp_path / "prompts"
    file.write_text("a\\nb\n\nc\n")
    assert main([run, "--file", str(file), "--json", "--samples", "2", "--logprobs", "1", *SAMPLED]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(x["prompt"], x["sample"], x["seed"]) for x in found] == [(p, i, 3) for p in ("a\nb", "c") for i in (0, 1)]
    assert found[0]["text"] == text
    assert [len(found[0][key]) for key in ("tokens", "logprobs", "top_logprobs")] == [6, 6, 6]
    assert main([run, "a", "--ignore-end", "--json", "--device", "cpu"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 62, "what fits after the prompt"
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb"))
    assert main([run, *SAMPLED]) == 0
    assert capsys.readouterr().out == f"{text}\n"


def test_prompts_one_after_the_other(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error does not end the conversation."""
    answers = iter(["x" * 90, "a", ""])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert main([run, *SAMPLED]) == 0
    wrong, *texts = capsys.readouterr().out.split("\n", 1)
    assert "error: prompt 0 has 91 tokens, but max_length is 64" in wrong
    assert main([run, *SAMPLED, "a"]) == 0  # the prompt after options
    assert capsys.readouterr().out == texts[0]


def test_errors(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(
        RandomSource(model_spec({**SMALL, "max_position_embeddings": 64}), tmp_path), NativeSink(tmp_path / "weights")
    )
    (tmp_path / "empty").write_text("\n")
    for arguments, message in (
        ([str(tmp_path / "none"), "a"], "error: there is no "),
        ([str(tmp_path / "weights"), "a", "--device", "cpu"], "has no tokenizer; use megafp8.inference.Generator"),
        ([run, "a", "--threads", "999", "--device", "cpu"], "error: threads = 999: must be between 1 and"),
        ([run, "a", "--top-p", "2"], "error: top_p = 2.0: must be above 0"),
        ([run, "--file", str(tmp_path / "empty")], "has no prompts"),
        ([run, "a", "--tensor", "2"], "need 2 ranks, but the job has 1; start it with torchrun --nproc-per-node 2"),
        ([run, "a", "--max-tokens", "99", "--device", "cpu"], "shorten it, or try max_tokens = 62"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_quantized_weights(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([run, "a", "--weights", "int8", *SAMPLED]) == 0
    assert capsys.readouterr().out.strip()
    assert main([run, "a", "--weights", "int4", *SAMPLED]) == 2
    assert "weights = int4: layers.0.attention.qkv has" in capsys.readouterr().err
