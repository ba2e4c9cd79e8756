"""End and beginning tokens of the tokenizers of model families, in the forms of their published files.

Every family is a row of `FAMILIES`: a small tokenizer with the family's special tokens, post-processor and settings.
Preprocessing, generation and exports are compared with the row, and with transformers' AutoTokenizer.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from megafp8.config import model_spec
from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.conversion.huggingface.tokenizer import export_tokenizer, find_tokenizer
from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.data.preprocess import check_boundaries
from megafp8.data.prompts import PromptSource
from megafp8.data.styles import Document
from megafp8.data.styles.completion import completion_encoder
from megafp8.data.styles.text import Texts
from megafp8.data.tokenizers import Tokenizer, TokenizerKind, build_tokenizer
from megafp8.inference.load import InferenceLayout, open_checkpoint
from tests.conversion.checkpoints import convert
from tests.conversion.families import SMALL, RandomSource
from tools import preprocess_data

TEXT = "It's 12345 words: été 世界 a世\n"
NONE: Mapping[str, Any] = MappingProxyType({})


class Family(NamedTuple):
    """Files of a family's tokenizer, and the tokens that they mean.

    `template`: the post-processor, in the notation of TemplateProcessing. `ordinary`: added tokens that are not
    special. `stops`: eos_token_id of generation_config.json, by name.
    """

    end: str | None
    start: tuple[str, ...]
    special: tuple[str, ...]
    config: Mapping[str, Any]
    stops: tuple[str, ...] = ()
    model_type: str = "llama"
    template: str | None = None
    ordinary: tuple[str, ...] = ()
    tokens: Mapping[str, Any] = NONE
    kind: TokenizerKind = "huggingface"
    write: Callable[[Path, Family], None] | None = None


def _byte_level(folder: Path, family: Family) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    _save(folder, family, library)


def _byte_fallback(folder: Path, family: Family) -> None:
    """Write a tokenizer.json that was converted from sentencepiece."""
    tokens = [*family.special, *(f"<0x{i:02X}>" for i in range(256)), "▁", *map(chr, range(33, 127))]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    library = Library(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    _save(folder, family, library)


def _word_piece(folder: Path, family: Family) -> None:
    vocab = {token: i for i, token in enumerate([*family.special, *map(chr, range(33, 127))])}
    library = Library(models.WordPiece(vocab, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    _save(folder, family, library)


def _unigram(folder: Path, family: Family) -> None:
    pieces = [(token, 0.0) for token in family.special] + [(chr(c), -3.0) for c in (0x2581, *range(33, 127))]
    library = Library(models.Unigram(pieces, family.special.index("<unk>")))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    _save(folder, family, library)


def _save(folder: Path, family: Family, library: Library) -> None:
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    library.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.ordinary])
    if family.template is not None:
        names = [token for token in family.template.split() if not token.startswith("$")]
        library.post_processor = processors.TemplateProcessing(
            family.template, special_tokens=[(name, library.token_to_id(name)) for name in dict.fromkeys(names)]
        )
    library.save(str(folder / "tokenizer.json"))


def _sentencepiece(folder: Path, family: Family) -> None:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT, "a b c d e f g"]), model_writer=model, vocab_size=300, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model.getvalue())


KIMI_PATTERNS = [
    r"""[\p{Han}]+""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""",
    r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
    r"""\s*[\r\n]+""",
    r"""\s+(?!\S)""",
    r"""\s+""",
]
KIMI_CODE = """
raise SystemExit("the code of a tokenizer is not run")

class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    pat_str = "|".join([%s])
"""


def _kimi(folder: Path, family: Family) -> None:
    """Write a ranks file, tokenizer_config.json with the numbers of its special tokens, and the tokenizer's code."""
    tokens = [*(bytes([i]) for i in range(256)), "世".encode()[:2], "世".encode(), "界".encode()[:2], "界".encode()]
    tokens += ["a世".encode(), "世界".encode()]
    ranks = "".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens))
    (folder / "tiktoken.model").write_text(ranks)
    (folder / "tokenization_kimi.py").write_text(KIMI_CODE % ", ".join(f'r"""{each}"""' for each in KIMI_PATTERNS))
    numbered = {str(len(tokens) + i): {"content": name, "special": True} for i, name in enumerate(family.special)}
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": numbered}))


def _added(name: str) -> dict[str, Any]:
    """Return a token as older files of transformers write it."""
    return {"__type": "AddedToken", "content": name, "lstrip": False, "normalized": False, "rstrip": False}


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_CONFIG = {"add_bos_token": False, "bos_token": None, "pad_token": "<|endoftext|>"}
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
SPM = ("<unk>", "<s>", "</s>")

FAMILIES = {
    "gpt2": Family("<|endoftext|>", (), ("<|endoftext|>",), {"model_max_length": 1024}, ("<|endoftext|>",), "gpt2"),
    "gpt-neox": Family(
        "<|endoftext|>", (), ("<|endoftext|>", "<|padding|>"),
        {"tokenizer_class": "GPTNeoXTokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
        ("<|endoftext|>",), "gpt_neox", tokens={"eos_token": "<|endoftext|>"},
    ),
    "llama2-sentencepiece": Family(
        "</s>", ("<s>",), SPM,
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False,
         "bos_token": _added("<s>"), "eos_token": _added("</s>")},
        ("</s>",), kind="sentencepiece", write=_sentencepiece,
    ),
    "llama3-base": Family(
        "<|end_of_text|>", ("<|begin_of_text|>",), LLAMA3,
        FAST | {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        ("<|end_of_text|>",), template="<|begin_of_text|> $A",
    ),
    "llama3-instruct": Family(
        "<|eot_id|>", ("<|begin_of_text|>",), LLAMA3,
        FAST | {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        ("<|end_of_text|>", "<|eot_id|>"), template="<|begin_of_text|> $A",
    ),
    "mistral": Family(
        "</s>", ("<s>",), SPM,
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "bos_token": "<s>",
         "eos_token": "</s>", "unk_token": "<unk>"},
        ("</s>",), template="<s> $A", write=_byte_fallback,
    ),
    "gemma": Family(
        "<eos>", ("<bos>",), ("<pad>", "<eos>", "<bos>", "<unk>"),
        {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False, "bos_token": "<bos>",
         "eos_token": "<eos>", "unk_token": "<unk>"},
        ("<eos>",), "gemma2", template="<bos> $A", ordinary=("<s>", "</s>", "<b>", "</b>"), write=_byte_fallback,
    ),
    "qwen-base": Family(
        "<|endoftext|>", (), QWEN, FAST | QWEN_CONFIG | {"eos_token": "<|endoftext|>"}, ("<|endoftext|>",), "qwen3"
    ),
    "qwen-instruct": Family(
        "<|im_end|>", (), QWEN, FAST | QWEN_CONFIG | {"eos_token": "<|im_end|>"},
        ("<|im_end|>", "<|endoftext|>"), "qwen3",
    ),
    "phi3": Family(
        "<|endoftext|>", (), (*SPM[:2], "<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"),
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": False, "bos_token": "<s>",
         "eos_token": "<|endoftext|>", "unk_token": "<unk>"},
        ("<|endoftext|>", "<|assistant|>", "<|end|>"), "phi3", template="$A", ordinary=("</s>",), write=_byte_fallback,
    ),
    "phi4": Family(
        "<|im_end|>", (), ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        FAST | {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        ("<|endoftext|>", "<|im_end|>"), "phi3",
    ),
    "glm4": Family(
        "<|endoftext|>", ("[gMASK]", "<sop>"),
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"),
        FAST | {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        ("<|endoftext|>", "<|user|>", "<|observation|>"), "glm4", template="[gMASK] <sop> $A",
    ),
    "deepseek-v3": Family(
        DEEPSEEK[1], DEEPSEEK[:1], DEEPSEEK,
        {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False,
         "bos_token": _added(DEEPSEEK[0]), "eos_token": _added(DEEPSEEK[1]), "pad_token": _added(DEEPSEEK[1])},
        DEEPSEEK[1:2], "deepseek_v3", template=f"{DEEPSEEK[0]} $A",
    ),
    "kimi-tiktoken": Family(
        "[EOS]", (), ("[BOS]", "[EOS]", "<|im_end|>"),
        {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
         "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}},
        ("<|im_end|>",), kind="tiktoken", write=_kimi,
    ),
    "gpt-oss": Family(
        "<|return|>", (), ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|call|>"),
        FAST | {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        ("<|return|>", "<|endoftext|>", "<|call|>"), "gpt_oss",
    ),
    "falcon": Family(
        "<|endoftext|>", (), (">>TITLE<<", "<|endoftext|>"), FAST | {"eos_token": "<|endoftext|>"},
        ("<|endoftext|>",), "falcon",
    ),
    "olmo2": Family(
        "<|endoftext|>", (), ("<|endoftext|>", "<|pad|>"),
        FAST | {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"},
        ("<|endoftext|>",), "olmo2",
    ),
    "t5": Family(
        "</s>", (), ("<pad>", "</s>", "<unk>"),
        FAST | {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}, ("</s>",), "t5",
        template="$A </s>", write=_unigram,
    ),
    "bert": Family(
        None, (), ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        FAST | {"cls_token": "[CLS]", "sep_token": "[SEP]"}, (), "bert", template="[CLS] $A [SEP]", write=_word_piece,
    ),
}  # fmt: skip


def write_family(folder: Path, family: Family) -> Path:
    """Write the files of a family's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(family.config)))
    (family.write or _byte_level)(folder, family)
    if family.tokens:
        (folder / "special_tokens_map.json").write_text(json.dumps(dict(family.tokens)))
    if family.stops and family.end is not None:
        tokenizer = build_tokenizer(family.kind, str(folder), family.end)
        stops = [tokenizer.id_of(stop) for stop in family.stops]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops if stops[1:] else stops[0]}))
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder without a tokenizer."""
    folder = tmp_path_factory.mktemp("weights") / "model"
    convert(RandomSource(model_spec(SMALL | {"max_position_embeddings": 64})), HfSink(folder))
    return folder


def _run_of(folder: Path, family: Family, **settings: Any) -> CheckpointSource:
    """Return a checkpoint of a run with the tokenizer in `folder`."""
    source = RandomSource(model_spec(SMALL | {"max_position_embeddings": 64}))
    source.tokenizer_files = [file for file in folder.iterdir() if file.name != "generation_config.json"]
    source.about["config"] = {"data": {"tokenizer": {"kind": family.kind, "path": str(folder), **settings}}}
    return source


def _exported(folder: Path, source: CheckpointSource) -> Any:
    """Return what AutoTokenizer loads of the tokenizer that is exported from `source`."""
    from transformers import AutoTokenizer

    folder.mkdir()
    for name, content in export_tokenizer(source, "llama").files.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return AutoTokenizer.from_pretrained(folder)


def _names(tokenizer: Tokenizer, ids: Any) -> tuple[str, ...]:
    numbers = {number: name for name in SPECIAL if (number := tokenizer.id_of(name)) is not None}
    return tuple(numbers[token] for token in ids)


SPECIAL = sorted({name for family in FAMILIES.values() for name in family.special})
SERVED = [name for name, family in FAMILIES.items() if family.end is not None]


@pytest.mark.parametrize("name", SERVED)
def test_tokens_around_a_document(name: str, tmp_path: Path, weights: Path) -> None:
    """Check the end and beginning of documents, the stops of generation, and eos of an export, against the row."""
    family = FAMILIES[name]
    folder = write_family(tmp_path / "theirs", family)
    tokenizer = build_tokenizer(family.kind, str(folder))
    document = Texts().encoder(tokenizer)(Document("", TEXT))
    assert document is not None
    ids, text = document.ids.tolist(), tokenizer.encode(TEXT)
    assert _names(tokenizer, ids[-1:]) == (family.end,)
    assert (_names(tokenizer, ids[: -len(text) - 1]), ids[-len(text) - 1 : -1]) == (family.start, text)
    assert f"end token {family.end} ({tokenizer.eod_id}), " in tokenizer.boundaries
    assert ("no beginning token" in tokenizer.boundaries) == (not family.start)

    model = shutil.copytree(weights, tmp_path / "model")
    shutil.copytree(folder, model, dirs_exist_ok=True)
    opened = open_checkpoint(model, InferenceLayout(), device="cpu")
    assert set(_names(tokenizer, opened.end_tokens)) == {family.end, *family.stops}
    assert _names(tokenizer, opened.start_tokens) == family.start

    source = _run_of(folder, family, **tokenizer.settings._replace(kind=family.kind, path=str(folder))._asdict())
    theirs = _exported(tmp_path / "exported", source)
    assert (theirs.eos_token, theirs.eos_token_id) == (family.end, tokenizer.eod_id)
    assert export_tokenizer(source, "llama").eod_id == tokenizer.eod_id


@pytest.mark.parametrize("name", [name for name in SERVED if name != "kimi-tiktoken"])
def test_autotokenizer_agrees(name: str, tmp_path: Path) -> None:
    """Compare the end and beginning tokens with those of transformers, which needs Kimi's own code for its folder."""
    from transformers import AutoTokenizer

    family = FAMILIES[name]
    folder = write_family(tmp_path, family)
    (folder / "config.json").write_text(json.dumps({"model_type": family.model_type}))
    ours, theirs = build_tokenizer(family.kind, str(folder)), AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token_id == ours.eod_id
    plain, whole = (theirs("a", add_special_tokens=add).input_ids for add in (False, True))
    assert whole[: whole.index(plain[0])] == list(ours.start_ids)


def test_a_tokenizer_that_states_no_end_is_refused_with_the_candidates(tmp_path: Path) -> None:
    bert = write_family(tmp_path / "bert", FAMILIES["bert"])
    with pytest.raises(ValueError, match=r"name no end-of-document token .* special tokens are \[PAD\], \[UNK\], "):
        build_tokenizer("huggingface", str(bert))
    assert build_tokenizer("huggingface", str(bert), "[SEP]").start_ids == ()  # [CLS] begins samples, not documents
    gpt = write_family(tmp_path / "gpt", FAMILIES["qwen-instruct"])
    config = gpt / "tokenizer_config.json"
    config.write_text("{}")
    with pytest.raises(
        ValueError, match=r"special tokens are <\|im_end\|>, <\|endoftext\|>$"
    ):  # generation_config.json
        build_tokenizer("huggingface", str(gpt))
    gemma = write_family(tmp_path / "gemma", FAMILIES["gemma"])
    config = gemma / "tokenizer_config.json"
    config.write_text('{"eos_token": "</s>"}')
    with pytest.raises(ValueError, match="names '</s>' as eos_token, which is not a special token"):
        build_tokenizer("huggingface", str(gemma))
    assert build_tokenizer("huggingface", str(gemma), "</s>").decode([260])
    config.write_text("[")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is damaged"):
        build_tokenizer("huggingface", str(gemma))


def test_beginning_tokens_can_be_chosen(tmp_path: Path) -> None:
    """Check the setting, and add_bos_token where the post-processor does not say."""
    llama = write_family(tmp_path / "llama", FAMILIES["llama3-base"])
    assert build_tokenizer("huggingface", str(llama), add_bos_token=False).start_ids == ()
    qwen = write_family(tmp_path / "qwen", FAMILIES["qwen-base"])
    with pytest.raises(ValueError, match=r"add_bos_token = True: the files of .* name no beginning token"):
        build_tokenizer("huggingface", str(qwen), add_bos_token=True)
    gemma = write_family(tmp_path / "gemma", FAMILIES["gemma"]._replace(template=None))
    ours = build_tokenizer("huggingface", str(gemma))
    assert _names(ours, ours.start_ids) == ("<bos>",)
    kimi = write_family(tmp_path / "kimi", FAMILIES["kimi-tiktoken"])
    ours = build_tokenizer("tiktoken", str(kimi), add_bos_token=True)
    assert _names(ours, ours.start_ids) == ("[BOS]",)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen-instruct", {"end_token": "<|endoftext|>"}),
        ("llama3-base", {"add_bos_token": False}),
        ("llama2-sentencepiece", {"add_bos_token": False}),
        ("kimi-tiktoken", {"add_bos_token": True, "end_token": "<|im_end|>"}),
        ("gpt2", {"end_token": "<|endoftext|>"}),
    ],
)
def test_an_export_states_what_the_run_chose(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    family = FAMILIES[name]
    folder = write_family(tmp_path / "theirs", family)
    ours = build_tokenizer(family.kind, str(folder), **settings)
    theirs = _exported(tmp_path / "exported", _run_of(folder, family, **settings))
    assert theirs.eos_token_id == ours.eod_id
    assert theirs(TEXT).input_ids == [*ours.start_ids, *ours.encode(TEXT)]


def _preprocess(folder: Path, kind: str, prefix: Path, *flags: str) -> IndexedDataset:
    (text := prefix.with_suffix(".txt")).write_text(TEXT)
    settings = ["--tokenizer", kind, "--tokenizer-path", str(folder), "--output-prefix", str(prefix)]
    assert preprocess_data.main(["--input", str(text), *settings, *flags]) == 0
    return IndexedDataset(str(prefix))


def test_data_with_other_tokens_around_its_documents_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data set says which tokens it was written with; the error names the key that reads it as it is."""
    folder = write_family(tmp_path / "gemma", FAMILIES["gemma"])
    ours = build_tokenizer("huggingface", str(folder))
    data = _preprocess(folder, "huggingface", tmp_path / "as_it_is")
    said = capsys.readouterr().out
    assert "tokenizer: end token <eos> (1), eos_token of tokenizer_config.json; beginning token <bos> (2), from" in said
    assert data.document(0).tolist() == [2, *ours.encode(TEXT), 1]
    check_boundaries(data, ours)
    data = _preprocess(folder, "huggingface", tmp_path / "no_start", "--no-tokenizer-add-bos-token")
    assert data.document(0).tolist() == [*ours.encode(TEXT), 1]
    check_boundaries(data, build_tokenizer("huggingface", str(folder), add_bos_token=False))
    with pytest.raises(ValueError, match=r"with no beginning token, .* set data.tokenizer.add_bos_token=false, or"):
        check_boundaries(data, ours)
    data = _preprocess(folder, "huggingface", tmp_path / "tag", "--tokenizer-end-token", "</s>")
    with pytest.raises(ValueError, match=r"with the end token \d+, but data.tokenizer has end token <eos> \(1\), "):
        check_boundaries(data, ours)
    earlier = tmp_path / "as_it_is.json"  # written before data sets recorded how documents begin
    about = json.loads(earlier.read_text())
    earlier.write_text(json.dumps({key: value for key, value in about.items() if key != "start_ids"}))
    with pytest.raises(ValueError, match="with no beginning token"):
        check_boundaries(IndexedDataset(str(tmp_path / "as_it_is")), ours)
    earlier.unlink()
    check_boundaries(IndexedDataset(str(tmp_path / "as_it_is")), ours)  # as Megatron-LM writes them


def test_completions_and_prompts_begin_as_documents_do(tmp_path: Path) -> None:
    ours = build_tokenizer("huggingface", str(write_family(tmp_path, FAMILIES["gemma"])))
    tokens = completion_encoder(ours, append_eod=True)("ab", "cd")
    assert tokens.loss_mask is not None
    assert (tokens.ids.tolist(), tokens.loss_mask.tolist()) == ([2, *ours.encode("abcd"), 1], [0, 0, 0, 1, 1, 1])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ab"}\n')
    source = PromptSource(
        str(prompts), ours, str(tmp_path), key="prompt", longest=9, group_size=1, seed=1, seq_length=16
    )
    assert source.prompts[0].tokens == [2, *ours.encode("ab")]


def test_a_ranks_file_takes_tokens_and_pattern_from_its_folder(tmp_path: Path) -> None:
    """Compare with tiktoken, and check that the folder's code is not run and a model with it is recognized."""
    import tiktoken

    folder = write_family(tmp_path / "kimi", FAMILIES["kimi-tiktoken"])
    ours = build_tokenizer("tiktoken", str(folder / "tiktoken.model"))
    assert (ours.vocab_size, ours.eod_id, ours.id_of("[BOS]")) == (265, 263, 262)
    ranks = {token: i for i, token in enumerate(ours.model.token_byte_values()[:262])}
    reference = tiktoken.Encoding(
        "kimi", pat_str="|".join(KIMI_PATTERNS), mergeable_ranks=ours.model._mergeable_ranks, special_tokens={}
    )
    assert len(ranks) == 262
    assert ours.encode(TEXT) == reference.encode_ordinary(TEXT)
    assert ours.encode("a世界") == [97, 261], "the pattern keeps Han apart"
    source = _run_of(folder, FAMILIES["kimi-tiktoken"])
    assert find_tokenizer(source) == {"kind": "tiktoken", "path": str(folder / "tiktoken.model")}
    source.about.clear()  # a folder that was not made by a run
    assert find_tokenizer(source) == {"kind": "tiktoken", "path": str(folder / "tiktoken.model")}
    (folder / "tokenization_kimi.py").unlink()
    with pytest.raises(ValueError, match="does not contain the regular expression that splits text"):
        build_tokenizer("tiktoken", str(folder))
    again = build_tokenizer(*ours.settings)  # as a checkpoint records it
    assert (again.eod_id, again.fingerprint) == (ours.eod_id, ours.fingerprint)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"]["5"] = {"content": "[FIVE]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"gives '\[FIVE\]' the id 5, which another token"):
        build_tokenizer("tiktoken", str(folder), pattern="|".join(KIMI_PATTERNS))
