"""Tokenizers of exported models: AutoTokenizer loads them and gives the ids of the run's tokenizer."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping
from importlib.metadata import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from megafp8.conversion.huggingface.config import FAMILIES
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.conversion.huggingface.source import HfSource
from megafp8.conversion.huggingface.tokenizer import SAMPLES, byte_letters, export_tokenizer
from megafp8.conversion.native import NativeSource
from megafp8.data.tokenizers import TokenizerKind, build_tokenizer
from tests.conversion import checkpoints
from tests.conversion.checkpoints import convert
from tests.data.test_tokenizers import CL100K
from tools import train_tokenizer

TEXT = "\n".join(str(metadata(name)["Description"])[:15000] for name in ("torch", "numpy"))
TEXT += "\nПривет мир 東京 日本語 été Straße\n" * 20


def _tool(file: Path) -> None:
    """As tools/train_tokenizer.py makes them."""
    file.write_bytes(train_tokenizer.train([TEXT[i : i + 4000] for i in range(0, len(TEXT), 4000)], 900))


def _sentencepiece(file: Path, **options: Any) -> None:
    from sentencepiece import SentencePieceTrainer

    with file.open("wb") as writer:
        SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT.split("\n")), model_writer=writer, vocab_size=900, minloglevel=2, **options
        )


def _llama(file: Path) -> None:
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_digits": True}
    _sentencepiece(file, model_type="bpe", byte_fallback=True, pad_id=3, **options)


def _symbols(file: Path) -> None:
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    symbols = ["\n", "<html>", "def "]
    _sentencepiece(file, model_type="bpe", byte_fallback=True, user_defined_symbols=symbols, **options)


def _unigram(file: Path) -> None:
    _sentencepiece(file, model_type="unigram")


def _byte_level(file: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special, alphabet = ["<|endoftext|>", "<pad>", "<s>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT.split("\n"), trainer)
    tokenizer.save(str(file))
    return tokenizer


def _two_files(file: Path) -> None:
    _byte_level(file).model.save(str(file.parent), file.name.removesuffix("-vocab.json"))


def _tiktoken(file: Path) -> None:
    vocab = _byte_level(file).get_vocab()
    bytes_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    tokens = [token for token, i in sorted(vocab.items(), key=lambda item: item[1]) if i > 2]
    with file.open("wb") as stream:
        for rank, token in enumerate(tokens):
            stream.write(base64.b64encode(bytes(bytes_of[letter] for letter in token)) + f" {rank}\n".encode())


class Case(NamedTuple):
    kind: TokenizerKind
    file: str | None
    make: Any
    bos: str | None
    eos: str
    unk: str | None
    pad: str | None
    settings: Mapping[str, Any] = MappingProxyType({})


END = {"end_token": "<|endoftext|>"}
CASES = {
    "ours": Case("sentencepiece", "tokenizer.model", _tool, "<s>", "</s>", "<unk>", "<pad>"),
    "llama, any name": Case("sentencepiece", "vocabulary.v2.spm", _llama, "<s>", "</s>", "<unk>", "<pad>"),
    "symbols": Case("sentencepiece", "symbols.model", _symbols, "<s>", "</s>", "<unk>", None),
    "unigram": Case("sentencepiece", "m", _unigram, "<s>", "</s>", "<unk>", None),
    "tokenizers": Case("huggingface", "tokenizer.json", _byte_level, "<s>", "<|endoftext|>", None, "<pad>", END),
    "tokenizers, any name": Case(
        "huggingface", "mine-32k.json", _byte_level, "<s>", "<|endoftext|>", None, "<pad>", END
    ),
    "vocabulary and merges": Case(
        "huggingface", "my-vocab.json", _two_files, "<|endoftext|>", "<|endoftext|>", None, None
    ),
    "tiktoken": Case(
        "tiktoken", "ranks.tiktoken", _tiktoken, "<|endoftext|>", "<|endoftext|>", None, None, END | {"pattern": CL100K}
    ),
    "bytes": Case("bytes", None, None, "<|endoftext|>", "<|endoftext|>", None, None),
}


def texts(count: int) -> list[str]:
    """`SAMPLES`, pieces of the text, and characters of many scripts in any order."""
    rng = random.Random(0)
    found = list(SAMPLES)
    for _ in range(count):
        start = rng.randrange(len(TEXT))
        found.append(TEXT[start : start + rng.randrange(1, 300)])
        kinds = (lambda: rng.randrange(32, 127), lambda: rng.randrange(0x80, 0x2FFF), lambda: rng.choice([10, 32]))
        found.append("".join(chr(rng.choice(kinds)()) for _ in range(rng.randrange(1, 60))))
    return found


def make_run(folder: Path, case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str | None]:
    """A run whose config names a tokenizer, and the path of that."""
    path = None
    if case.file is not None:
        path = str(folder / case.file)
        case.make(Path(path))
    said = {**checkpoints.ABOUT["config"], "data": {"tokenizer": {"kind": case.kind, "path": path, **case.settings}}}
    monkeypatch.setitem(checkpoints.ABOUT, "config", said)
    return checkpoints.make(folder / "run"), path


@pytest.mark.parametrize("name", CASES)
def test_autotokenizer_gives_the_ids_of_the_runs_tokenizer(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    case, exported = CASES[name], tmp_path / "exported"
    run, path = make_run(tmp_path, case, monkeypatch)
    convert(NativeSource(run), HfSink(exported))
    assert [record.message for record in caplog.records if "is a unigram model" not in record.message] == []
    assert ("is a unigram model" in caplog.text) == (name == "unigram")
    ours = build_tokenizer(case.kind, path, **case.settings)
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    for text in texts(100):
        ids = ours.encode(text)
        assert theirs(text).input_ids == ids, text
        if ours.decode(ids) == text:
            assert theirs.decode(ids) == text
    assert (theirs.bos_token, theirs.eos_token, theirs.unk_token, theirs.pad_token) == case[3:7]
    assert theirs.eos_token_id == ours.eod_id
    generation = json.loads((exported / "generation_config.json").read_text())
    assert transformers.GenerationConfig.from_pretrained(exported).eos_token_id == ours.eod_id
    assert generation.get("pad_token_id") == theirs.pad_token_id
    described = json.loads((exported / "config.json").read_text())
    assert (described["bos_token_id"], described["eos_token_id"]) == (ours.eod_id, ours.eod_id)
    tokens = json.loads((exported / "special_tokens_map.json").read_text())
    assert tokens.get("pad_token") == case.pad
    if case.kind == "sentencepiece":  # engines that read it, and runs that start from the folder
        assert path is not None
        assert (exported / "tokenizer.model").read_bytes() == Path(path).read_bytes()
    convert(HfSource(exported), HfSink(tmp_path / "again"))
    for file in HfSource(exported).tokenizer_files:
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_tokenizers_in_every_family(
    tmp_path: Path, name: str, family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For qwen2, whose own class AutoTokenizer takes in any case, with the class that the warning names."""
    import transformers

    case, exported = CASES[name], tmp_path / "exported"
    run, path = make_run(tmp_path, case, monkeypatch)
    exported.mkdir()
    for file, content in export_tokenizer(NativeSource(run), family).files.items():
        (exported / file).write_bytes(content)
    (exported / "config.json").write_text(json.dumps({"model_type": family}))
    warned = "transformers.PreTrainedTokenizerFast.from_pretrained" in caplog.text
    assert warned == (family == "qwen2")
    loader = transformers.PreTrainedTokenizerFast if warned else transformers.AutoTokenizer
    theirs, ours = loader.from_pretrained(exported), build_tokenizer(case.kind, path, **case.settings)
    wrong = [text for text in texts(1000) if theirs(text).input_ids != ours.encode(text)]
    print(f"{name}, {family}: {len(wrong)} of {len(texts(1000))} texts differ")
    assert len(wrong) <= (10 if name == "unigram" else 0)


def test_what_cannot_be_converted_is_copied_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def newline_symbol(file: Path) -> None:
        """Its normalization makes a space of the newline that it has a symbol for."""
        _sentencepiece(file, model_type="unigram", user_defined_symbols=["\n"])

    case = CASES["unigram"]._replace(file="m.model", make=newline_symbol)
    run, path = make_run(tmp_path, case, monkeypatch)
    found = export_tokenizer(NativeSource(run), "llama")
    assert path is not None
    assert found.files == {"m.model": Path(path).read_bytes()}
    assert "m.model (sentencepiece) is not written as tokenizer.json" in caplog.text
    Path(path).unlink()
    assert export_tokenizer(NativeSource(run), "llama").files == {}
    assert "m.model no longer exists" in caplog.text


def test_a_tokenizer_of_theirs_comes_with_its_special_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = make_run(tmp_path, CASES["tokenizers"], monkeypatch)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "model_max_length": 77}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "generation_config.json").write_text("{}")  # of the model there, not of its tokenizer
    found = export_tokenizer(NativeSource(run), "llama")
    assert found.files == {
        name: (tmp_path / name).read_bytes()
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    }
    assert (found.bos_id, found.eod_id, found.pad_id, caplog.records) == (0, 0, 1, [])
