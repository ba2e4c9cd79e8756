"""tools/train_tokenizer.py: a uniform, reproducible sample of all input; a complete model or none."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest

from megafp8.data.tokenizers import build_tokenizer
from tools import train_tokenizer
from tools.train_tokenizer import sample


def test_the_sample_is_uniform(tmp_path: Path) -> None:
    """Over 1,000 seeds, each of 60 texts of different sizes is drawn equally often, wherever it is."""
    texts = [f"{i:03d}" + "x" * (10 * (i % 7)) for i in range(60)]
    size = sum(map(len, texts))
    counts = np.zeros(60)
    for seed in range(1000):
        drawn, total = sample(iter(texts), size // 3, seed)
        assert total == size
        assert size // 3 - 200 < sum(map(len, drawn)) <= size // 3
        assert drawn == sorted(drawn)
        counts[[int(text[:3]) for text in drawn]] += 1
    # A longer text is a little less likely to fit, so texts of one size are compared.
    for kind in range(7):
        same = counts[kind::7]
        spread = np.sqrt(1000 * (1 / 3) * (2 / 3))
        assert np.abs(same - same.mean()).max() < 4.5 * spread, (kind, same)
    assert counts[:30].sum() == pytest.approx(counts[30:].sum(), rel=0.05)


def test_a_sample_that_holds_all_is_the_input() -> None:
    texts = [random.Random(i).choice("aäß日") * i for i in range(50)]
    size = sum(len(text.encode()) for text in texts)
    assert sample(texts, size, 0) == (texts, size)
    assert sample(texts, size - 1, 0)[0] != texts
    assert sample(texts, size // 2, 7) == sample(texts, size // 2, 7) != sample(texts, size // 2, 8)


def corpus(folder: Path) -> list[str]:
    """Two files; the second, of other words, lies behind what is drawn."""
    draw = random.Random(0)

    def words(letters: str, count: int) -> str:
        return " ".join("".join(draw.choices(letters, k=5)) for _ in range(count))

    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": words("abcde", 500)}) + "\n" for _ in range(40)))
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": words("vwxyz", 500)}) + "\n" for _ in range(40)))
    return ["--input", str(folder), "--vocab-size", "400", "--sample-bytes", "60000"]


def test_all_input_is_learned_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = corpus(tmp_path / "in")
    model = tmp_path / "out" / "t.model"
    assert train_tokenizer.main([*arguments, "--output", str(model)]) == 0
    shown = capsys.readouterr()
    assert "training 400 tokens on 0.1 of 0.2 MB of text" in shown.out
    assert re.search(r"reading: 100%.*24\dk", shown.err)
    tokenizer = build_tokenizer("sentencepiece", str(model))
    pieces = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    for letters in ("abcde", "vwxyz"):
        assert len([piece for piece in pieces if len(piece) > 1 and set(piece) <= set(letters)]) > 20
    assert train_tokenizer.main([*arguments, "--output", str(tmp_path / "2")]) == 0
    assert (tmp_path / "2").read_bytes() == model.read_bytes()
    assert train_tokenizer.main([*arguments, "--output", str(tmp_path / "3"), "--seed", "5"]) == 0
    assert (tmp_path / "3").read_bytes() != model.read_bytes()


def test_failures_leave_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = corpus(tmp_path / "in")
    folder = tmp_path / "out"
    folder.mkdir()
    output = ["--output", str(folder / "t.model")]

    def refused(code: int, *more: str) -> str:
        assert train_tokenizer.main([*arguments, *output, *more]) == code
        assert list(folder.iterdir()) == []
        return capsys.readouterr().err

    assert "sentencepiece could not train 300000 tokens" in refused(2, "--vocab-size", "300000")
    assert "no text in the inputs" in refused(2, "--sample-bytes", "10")
    (tmp_path / "in" / "bad.jsonl").write_bytes(b'{"text": "ok"}\n\xff\n')
    said = refused(2)
    assert "bad.jsonl, line 2: not UTF-8 text: byte 0xff at position 0 (invalid start byte); --skip-errors" in said
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupt)
        assert refused(130, "--skip-errors").endswith("interrupted\n")
    assert train_tokenizer.main([*arguments, *output, "--skip-errors"]) == 0
    said = capsys.readouterr().err
    assert "bad.jsonl, line 2: not UTF-8" in said
    assert "1 unreadable documents skipped" in said
    before = (folder / "t.model").read_bytes()
    source = tmp_path / "in" / "bad.jsonl"
    assert train_tokenizer.main([*arguments, "--output", str(source), "--overwrite", "--skip-errors"]) == 2
    assert "bad.jsonl is an input, and --output would replace it" in capsys.readouterr().err
    assert source.read_bytes() == b'{"text": "ok"}\n\xff\n'
    assert train_tokenizer.main([*arguments, *output]) == 2
    assert "exists; --overwrite replaces it" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert train_tokenizer.main([*arguments, "--output", str(tmp_path / "file" / "t.model")]) == 2
    assert "t.model: cannot be written: " in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupt)
        assert train_tokenizer.main([*arguments, *output, "--skip-errors", "--overwrite"]) == 130
    assert [path.name for path in folder.iterdir()] == ["t.model"]
    assert (folder / "t.model").read_bytes() == before


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt
