"""Every tokenizer: exact round trips, the end of a document, fingerprints, and what is said of missing things."""

from __future__ import annotations

import base64
import sysconfig
from pathlib import Path

import pytest

from megafp8.data.tokenizers import Tokenizer, build_tokenizer
from tests.quickstart_data import QuickstartData

TEXTS = [
    "def f(x):\n\treturn x  # two  spaces\n\n\n    if 12345:\r\n        pass",
    "  leading and trailing  ",
    "Größe, 日本語, 🙂 emoji\x00\x07",
    "",
]


@pytest.fixture(scope="module")
def files(quickstart_data: QuickstartData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tokenizers")
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    library.train_from_iterator(TEXTS * 3, trainer)
    library.save(str(folder / "tokenizer.json"))
    ranks = [bytes([i]) for i in range(256)] + [b"re", b"tu", b"retu", b"rn"]
    lines = (base64.b64encode(token) + f" {rank}".encode() for rank, token in enumerate(ranks))
    (folder / "tiny.tiktoken").write_bytes(b"\n".join(lines))
    return {
        "sentencepiece": str(quickstart_data.folder / "tokenizer.model"),
        "huggingface": str(folder / "tokenizer.json"),
        "tiktoken": str(folder / "tiny.tiktoken"),
        "bytes": "",
    }


def build(files: dict[str, str], kind: str) -> Tokenizer:
    return build_tokenizer(kind, files[kind] or None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface", "tiktoken", "bytes"])
def test_round_trip(files: dict[str, str], kind: str) -> None:
    tokenizer = build(files, kind)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.eod_id not in ids
    assert 0 <= tokenizer.eod_id < tokenizer.vocab_size


def test_sentencepiece_gives_source_code_back_line_by_line(files: dict[str, str]) -> None:
    tokenizer = build(files, "sentencepiece")
    source = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
    ids = tokenizer.encode(source)
    assert tokenizer.decode(ids) == source
    assert len(ids) < len(source) / 1.5
    assert all(tokenizer.decode(tokenizer.encode(line)) == line for line in source.splitlines(keepends=True))


def test_fingerprints_differ(files: dict[str, str]) -> None:
    prints = [build(files, kind).fingerprint for kind in files]
    assert len(set(prints)) == len(prints)
    assert prints == [build(files, kind).fingerprint for kind in files]


@pytest.mark.parametrize(
    ("kind", "path", "message"),
    [
        ("sentencepiece", None, "a sentencepiece tokenizer needs data.tokenizer.path"),
        ("sentencepiece", "absent.model", "absent.model: no such file"),
        ("sentencepiece", __file__, "is not a sentencepiece model"),
        ("huggingface", __file__, "is not a tokenizer.json"),
        ("tiktoken", "gpt9", "neither a file nor a tiktoken encoding"),
    ],
)
def test_what_is_missing_is_said(kind: str, path: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(kind, path)  # type: ignore[arg-type]


def test_no_end_of_document_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    Library(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "t.json"))
    with pytest.raises(ValueError, match=r"has no end-of-document token; looked for <\|endoftext\|>"):
        build_tokenizer("huggingface", str(tmp_path / "t.json"))


def test_tiktoken_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")

    def unreachable(name: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(ValueError, match="gpt2: tiktoken has no copy of this encoding"):
        build_tokenizer("tiktoken", "gpt2")
