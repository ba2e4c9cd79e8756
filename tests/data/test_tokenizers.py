"""Every tokenizer: exact round trips, end-of-document tokens, fingerprints, and errors."""

from __future__ import annotations

import base64
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megafp8.config import ConfigError, TokenizerConfig, load_config
from megafp8.data.tokenizers import Tokenizer, build_tokenizer
from megafp8.training.inputs import open_tokenizer
from tests.quickstart_data import CONFIG, QuickstartData
from tools import preprocess_data

TEXTS = [
    "def f(x):\n\treturn x  # two  spaces\n\n\n    if 12345:\r\n        pass",
    "  leading and trailing  ",
    "Größe, 日本語, 🙂 emoji\x00\x07",
    "",
]


def write_ranks(path: Path, merges: Sequence[bytes] = ()) -> dict[bytes, int]:
    """A tiktoken ranks file of all bytes and `merges`."""
    ranks = {token: rank for rank, token in enumerate([*(bytes([i]) for i in range(256)), *merges])}
    path.write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()))
    return ranks


def word_level(vocab: dict[str, int]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))


@pytest.fixture(scope="module")
def files(quickstart_data: QuickstartData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tokenizers")
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    library.train_from_iterator(TEXTS * 3, trainer)
    library.save(str(folder / "tokenizer.json"))
    write_ranks(folder / "tiny.tiktoken", [b"re", b"tu", b"retu", b"rn"])
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return {
        "sentencepiece": str(quickstart_data.folder / "tokenizer.model"),
        "huggingface": str(folder / "tokenizer.json"),
        "tiktoken": str(folder / "tiny.tiktoken"),
        "bytes": "",
    }


def build(files: dict[str, str], kind: str, end_token: str | None = None) -> Tokenizer:
    pattern = CL100K if kind == "tiktoken" else None
    return build_tokenizer(kind, files[kind] or None, end_token, pattern)  # type: ignore[arg-type]


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


CL100K = "|".join(
    [
        r"'(?i:[sdmt]|ll|ve|re)",
        r"[^\r\n\p{L}\p{N}]?+\p{L}++",
        r"\p{N}{1,3}+",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*+",
        r"\s++$",
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        r"\s",
    ]
)


def test_errors_name_the_key_or_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same error names the key of a config, and the flag of a tool."""
    (tmp_path / "a.txt").write_text("a")
    ranks = tmp_path / "r.tiktoken"
    write_ranks(ranks)
    cases: list[tuple[dict[str, str], str, str]] = [
        ({"kind": "sentencepiece"}, "path", "a sentencepiece tokenizer is read from a file"),
        ({"kind": "sentencepiece", "path": "absent.model"}, "path", "no such file"),
        ({"kind": "huggingface", "path": str(tmp_path)}, "path", "is a folder without a tokenizer of kind huggingface"),
        ({"kind": "sentencepiece", "path": __file__}, "path", "is not a sentencepiece model"),
        ({"kind": "huggingface", "path": __file__}, "path", "is not a tokenizer.json"),
        ({"kind": "tiktoken", "path": __file__}, "path", "not a tiktoken ranks file: line 1: "),
        ({"kind": "tiktoken", "path": "gpt9"}, "path", "neither a file nor a tiktoken encoding"),
        (
            {"kind": "tiktoken", "path": str(ranks)},
            "pattern",
            "does not contain the regular expression that splits text",
        ),
        (
            {"kind": "tiktoken", "path": str(ranks), "pattern": r"[\s\S]"},
            "end_token",
            "special tokens are <|endoftext|>",
        ),
        (
            {"kind": "tiktoken", "path": str(ranks), "pattern": r"[\s\S]", "end_token": "<|im_end|>"},
            "end_token",
            "has no such token",
        ),
        ({"kind": "tiktoken", "path": str(ranks), "pattern": "("}, "pattern", "not a regular expression"),
        ({"kind": "tiktoken", "path": str(ranks), "pattern": r"\S+|\n"}, "pattern", "would leave out '\\t'"),
        ({"kind": "tiktoken", "path": str(ranks), "pattern": "a*"}, "pattern", "matches the empty text"),
        ({"kind": "sentencepiece", "path": "x", "pattern": "x"}, "pattern", "only tiktoken ranks files"),
        ({"kind": "bytes", "path": "x"}, "path", "the bytes tokenizer has no such setting"),
        ({"kind": "bytes", "end_token": "x"}, "end_token", "the bytes tokenizer has no such setting"),
    ]
    config = load_config(CONFIG)
    for settings, setting, rule in cases:
        data = config.data.model_copy(update={"tokenizer": TokenizerConfig.model_validate(settings)})
        with pytest.raises(ConfigError) as raised:
            open_tokenizer(config.model_copy(update={"data": data}), "a.yaml")
        assert str(raised.value).startswith(f"a.yaml: 1 problem\n  data.tokenizer.{setting} = "), raised.value
        assert rule in str(raised.value)
        flags = [f"--tokenizer-{key.replace('_', '-')}={value}" for key, value in settings.items() if key != "kind"]
        outputs = ["--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "out")]
        assert preprocess_data.main([*outputs, "--tokenizer", settings["kind"], *flags]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: --tokenizer-{setting.replace('_', '-')}"), said
        assert rule in said
        assert "data.tokenizer" not in said


def test_end_tokens(files: dict[str, str], tmp_path: Path) -> None:
    """A setting may be any token of the vocabulary; it does not change the vocabulary's fingerprint."""
    for kind, token in (("sentencepiece", "<s>"), ("huggingface", "!"), ("tiktoken", "retu")):
        usual, other = build(files, kind), build(files, kind, token)
        assert other.decode([other.eod_id]) in (token, "")  # sentencepiece shows no control tokens
        assert other.eod_id != usual.eod_id
        assert (other.fingerprint == usual.fingerprint) == (kind != "tiktoken")  # there <|endoftext|> is not added
        assert other.encode(TEXTS[0]) == usual.encode(TEXTS[0])
    for kind, token in (("sentencepiece", "</s>"), ("huggingface", "<|endoftext|>"), ("tiktoken", "<|endoftext|>")):
        same, usual = build(files, kind, token), build(files, kind)
        assert (same.eod_id, same.fingerprint) == (usual.eod_id, usual.fingerprint)
        assert same.settings == usual.settings._replace(path=same.settings.path)
        again = build_tokenizer(*usual.settings)
        assert (again.eod_id, again.start_ids, again.fingerprint) == (same.eod_id, same.start_ids, same.fingerprint)

    path = str(tmp_path / "t.json")
    library = word_level({"a": 0, "b": 1})
    library.save(path)
    with pytest.raises(ValueError, match=r"name no end-of-document token .*; it has no special tokens"):
        build_tokenizer("huggingface", path)
    library.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    library.save(path)
    known = r"; special tokens are <\|im_start\|>, <\|im_end\|>"
    with pytest.raises(ValueError, match=f"name no end-of-document token .*{known}"):
        build_tokenizer("huggingface", path)
    with pytest.raises(ValueError, match=f"'</s>': .* has no such token; .*{known}"):
        build_tokenizer("huggingface", path, "</s>")
    assert build_tokenizer("huggingface", path, "<|im_end|>").eod_id == 3


ODD_TEXTS = [
    "",
    " ",
    "  two  spaces\n\n\tand a tab ",
    "It's what they'll've said: 12345,678.90!?...",
    "GRÖSSE größe \u0301e\u0301 日本語 العربية 🙂👩‍👩‍👧",
    "\r\n\u00a0\u2028\ufeff\x00\x7f a\u200bb",
    "a<|endoftext|>b <|endoftext|> <|endof",
    "def f(x):\n    return x ** 2\n" * 3,
]


@pytest.mark.parametrize("prefix", ["", "gpt2-"])
def test_a_vocabulary_and_merges_are_gpt2s_tokenizer(prefix: str, files: dict[str, str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = tokenizers.Tokenizer.from_file(files["huggingface"]).model
    model.save(str(tmp_path))
    vocabulary, merges = tmp_path / f"{prefix}vocab.json", tmp_path / f"{prefix}merges.txt"
    (tmp_path / "vocab.json").rename(vocabulary)
    (tmp_path / "merges.txt").rename(merges)
    ours = build_tokenizer("huggingface", str(vocabulary))
    theirs = transformers.GPT2Tokenizer(str(vocabulary), str(merges))
    for text in ODD_TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False) == text
    assert len(ours.encode(TEXTS[0])) < len(TEXTS[0].encode())
    assert (ours.vocab_size, ours.eod_id) == (len(theirs), theirs.eos_token_id)
    lines = merges.read_text().splitlines()
    merges.write_text("\n".join(lines[:-1]))
    assert build_tokenizer("huggingface", str(vocabulary)).fingerprint != ours.fingerprint
    merges.unlink()
    with pytest.raises(ValueError, match=f"there is no .*{prefix}merges.txt, the merges of this vocabulary"):
        build_tokenizer("huggingface", str(vocabulary))


def test_texts_are_neither_cut_nor_padded(tmp_path: Path) -> None:
    """A tokenizer.json may ask for both, to fit some model's context."""
    library = word_level({"a": 0, "b": 1, "</s>": 2})
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.enable_truncation(2)
    library.save(str(tmp_path / "cut.json"))
    library.no_truncation()
    library.enable_padding(length=9)
    library.save(str(tmp_path / "padded.json"))
    for name in ("cut.json", "padded.json"):
        assert build_tokenizer("huggingface", str(tmp_path / name), "</s>").encode("a b a b") == [0, 1, 0, 1]


def test_tiktoken_ranks_files(files: dict[str, str], tmp_path: Path) -> None:
    """Patterns against the library; and a file that has changed is read again."""
    tiktoken = pytest.importorskip("tiktoken")
    path = tmp_path / "r.tiktoken"
    text = "a 12345 word's  end\n"
    ranks = write_ranks(path, [b"34", b"d'", b" e"])
    prints = set()
    for pattern in (CL100K, r"\s+|\S+", r"[\s\S]"):
        tokenizer = build_tokenizer("tiktoken", str(path), "<|endoftext|>", pattern)
        default = build_tokenizer("tiktoken", str(path), "<|endoftext|>", CL100K)
        reference = tiktoken.Encoding("r", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        assert tokenizer.encode(text) == reference.encode_ordinary(text)
        assert (tokenizer.encode(text) == default.encode(text)) == (pattern == CL100K), pattern
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.eod_id == 259
        prints.add(tokenizer.fingerprint)
    assert len(prints) == 3
    write_ranks(path, [b"12", b"or", b"rd"])
    changed = build_tokenizer("tiktoken", str(path), "<|endoftext|>", CL100K)
    assert changed.encode("12") == [256], "an earlier content of the file was used"
    for damaged, message in (
        (b"IQ== 0\n", "no token for the single byte 0x00"),
        (b"IQ==\n", "line 1: not enough values"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            build_tokenizer("tiktoken", str(path))


def test_tiktoken_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")

    def unreachable(name: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(ValueError, match="gpt2: tiktoken has no copy of this encoding"):
        build_tokenizer("tiktoken", "gpt2")
