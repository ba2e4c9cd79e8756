"""Write a run's tokenizer as files that `AutoTokenizer.from_pretrained` loads.

transformers recognizes a tokenizer by the names of files and classes. A run's tokenizer, however, is a file of any name
and one of four kinds, or no file at all. So it is written as tokenizer.json, the format of the library `tokenizers`,
which describes the whole pipeline and does not need a separate class:

    huggingface      the file itself; vocab.json and merges.txt are replaced by one file
    sentencepiece    BPE or unigram with the same pieces and normalization; the .model is added as tokenizer.model
    tiktoken, bytes  byte-level BPE with the same ranks, pattern and special tokens

tokenizer_config.json and special_tokens_map.json state the special tokens. eos ends the run's documents; bos, unk and
pad come from the tokenizer. If the tokenizer has no bos, eos is used as bos, because a run's document begins after the
eos of the previous one.

Each conversion is checked by encoding `SAMPLES` with both tokenizers. If they differ, or if the original cannot be
read, a warning is logged and only the original is written. The tokenizer of a Hugging Face folder is copied, and its
files are changed only if the run begins or ends its documents differently. A tiktoken folder is converted, because
transformers would need the tokenizer's code to load it.

Limits. transformers recognizes special tokens that are spelled out in a text, such as "</s>", and sentencepiece does
not. Unigram models are ambiguous: the libraries differ if several ways to split a text are equally likely, as in a long
run of one character, and for combining characters that normalization composes. A warning states this. For model_type
qwen2, transformers 5 always uses its Qwen2Tokenizer, which keeps the vocabulary of tokenizer.json but not its
pre-tokenizer. A warning explains how to load the folder's tokenizer in this case.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megafp8.checkpoint.files import parse_object, to_json
from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.target import TOKENIZER_NAMES
from megafp8.data.tokenizer_files import CONFIG_FILE, TOKENS_FILE, read_special_tokens, token_name
from megafp8.data.tokenizers import Tokenizer, TokenizerKind, build_tokenizer, tokens_before_text

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
_SENTENCEPIECE_FILE, _TIKTOKEN_FILE = "tokenizer.model", "tiktoken.model"
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|startoftext|>")
_PAD_NAMES = ("<pad>", "<|pad|>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>")
_UNK_NAMES = ("<unk>", "[UNK]")

SAMPLES = (
    "The 3 quick brown foxes' naïve été: Straße, 東京! They've said: \"don't\" (twice).",
    "def f(x_1):\n\treturn x_1 ** 2 != 0x1F  # ~3.14\n\n\n    if  a:\r\n        pass  \n",
    " leading, trailing and   several    spaces  ",
    "1234567890 12 123 1234 12,345.67 1e-5 ½ ² ٣",
    "Привет, мир! Γειά σου Κόσμε. مرحبا بالعالم हिन्दी ภาษาไทย 안녕하세요 日本語テキスト 中文字符",
    "😀👩‍👩‍👧‍👦🇩🇪 e\u0301 \ufb01 \u200b\u00a0\u3000 ｆｕｌｌ",
    "<html><body class='x'>&amp;</body></html> https://example.org/?q=a%20b&c=d#e {\"k\": [1, null]}",
    "aaaaaaaaaaaaaaaaaaaaaaa bbbbbb --------- ======= ......",
    "",
    "x",
    "\n",
)
"""Texts that a written tokenizer.json must encode in the same way as the run's tokenizer."""


class TokenizerExport(NamedTuple):
    """Files of a tokenizer by name, and the ids of the tokens that begin, end and pad a text (None if unknown)."""

    files: Mapping[str, bytes]
    bos_id: int | None = None
    eod_id: int | None = None
    pad_id: int | None = None


def export_tokenizer(source: CheckpointSource, model_type: str) -> TokenizerExport:
    """Return the tokenizer of `source` for a folder of `model_type`. It has no files if `source` has no tokenizer.

    Logs a warning if AutoTokenizer cannot load the tokenizer, or returns other ids.
    """
    files = {file.name: file.read_bytes() for file in source.tokenizer_files}
    tokenizer_path = find_tokenizer(source)
    if tokenizer_path is None:
        if path := _run_tokenizer(source).get("path"):
            logger.warning("the run's tokenizer %s no longer exists; no tokenizer is written", path)
        return TokenizerExport(files)
    kind, path = tokenizer_path["kind"], tokenizer_path["path"]
    is_folder = CONFIG_FILE in files and kind != "tiktoken" and Path(path).name in TOKENIZER_NAMES
    try:
        tokenizer = build_tokenizer(**tokenizer_path)
        library, roles = _CONVERTERS[kind](tokenizer, path)
        for text in () if is_folder else SAMPLES:
            if library.encode(text, add_special_tokens=False).ids != tokenizer.encode(text):
                raise ValueError(f"as tokenizer.json it would encode {text!r} differently")
    except (ValueError, ImportError) as error:
        if not is_folder:
            what = f"the tokenizer {path or ''} ({kind}) is not written as {TOKENIZER_FILE}"
            logger.warning("%s, so AutoTokenizer may not load it, or may return other tokens: %s", what, error)
        return TokenizerExport(files)
    end = library.id_to_token(tokenizer.eod_id)
    roles = {"bos_token": end, **roles, **(_stated_roles(library, path) if path else {}), "eos_token": end}
    begins_otherwise = tokens_before_text(library) != tokenizer.start_ids
    if begins_otherwise:
        library.post_processor = _starts_with(library, tokenizer.start_ids)
    if is_folder and _run_tokenizer(source):
        files |= _with_boundaries(files, tokenizer, end)
        if begins_otherwise and Path(path).name == TOKENIZER_FILE:
            files[TOKENIZER_FILE] = library.to_str().encode()
    elif not is_folder:
        if model_type == "qwen2":
            logger.warning(
                "AutoTokenizer of transformers 5 splits text like Qwen2 for models of type qwen2, so it may return "
                "other tokens than the run's tokenizer; transformers.PreTrainedTokenizerFast.from_pretrained does not"
            )
        original = files.pop(Path(path).name, None) if path and not path.endswith("vocab.json") else None
        unchanged = original if kind == "huggingface" and not begins_otherwise else None
        files[TOKENIZER_FILE] = unchanged or library.to_str().encode()
        if kind == "sentencepiece" and original:
            files[_SENTENCEPIECE_FILE] = original
        about = {key: value for key, value in _parsed(files, CONFIG_FILE).items() if key != "auto_map"}
        about |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        files |= {
            CONFIG_FILE: to_json(about | roles, ensure_ascii=False),
            TOKENS_FILE: to_json(roles, ensure_ascii=False),
        }
    bos_id, pad_id = (*tokenizer.start_ids, tokenizer.eod_id)[0], library.token_to_id(roles.get("pad_token", ""))
    return TokenizerExport(files, bos_id, tokenizer.eod_id, pad_id)


def _stated_roles(library: Any, path: str) -> dict[str, str]:
    """Return the special tokens that the files in the tokenizer's folder state, by role, if `library` has them."""
    stated = read_special_tokens(Path(path).parent)
    roles = ("bos_token", "unk_token", "pad_token")
    return {role: stated[role] for role in roles if library.token_to_id(stated.get(role, "")) is not None}


def _starts_with(library: Any, start_ids: Sequence[int]) -> Any:
    """Return a post-processor that puts `start_ids` before a text."""
    from tokenizers.processors import TemplateProcessing

    special = [(library.id_to_token(token), token) for token in start_ids]
    single = " ".join([*(name for name, _ in special), "$A"])
    return TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=special)


def _with_boundaries(files: Mapping[str, bytes], tokenizer: Tokenizer, end: str) -> dict[str, bytes]:
    """Return corrected versions of the files that state another end or beginning of documents than the run uses."""
    adds_bos, changed = bool(tokenizer.start_ids), {}
    for name in (CONFIG_FILE, TOKENS_FILE):
        content = _parsed(files, name)
        stated = {"eos_token": token_name(content.get("eos_token")), "add_bos_token": content.get("add_bos_token")}
        right = {"eos_token": end} | ({"add_bos_token": adds_bos} if "add_bos_token" in content else {})
        if name in files and any(stated[key] != value for key, value in right.items()):
            changed[name] = to_json(content | right, ensure_ascii=False)
    return changed


def _parsed(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return parse_object(name, files[name]) if name in files else {}


def find_tokenizer(source: CheckpointSource) -> dict[str, Any] | None:
    """Return the arguments of `build_tokenizer` for the source's tokenizer, or None if the source has none.

    The arguments come from the config of the source's run, with the path of the file in the source. If that is not
    possible, they are inferred from the names of the files.
    """
    files = {file.name: str(file) for file in source.tokenizer_files}
    described = {key: value for key, value in _run_tokenizer(source).items() if value is not None}
    if described.get("kind") == "bytes":
        return described | {"path": None}
    if "kind" in described and (name := Path(described.get("path", "")).name):
        if name in files:
            return described | {"path": files[name]}
        if described["kind"] == "tiktoken" and described["path"] == name and "." not in name:
            return described  # the name of an encoding
    by_suffix: dict[str, TokenizerKind] = {".json": "huggingface", ".model": "sentencepiece", ".tiktoken": "tiktoken"}
    for name in (TOKENIZER_FILE, _SENTENCEPIECE_FILE, *sorted(files)):
        suffix = ".tiktoken" if name == _TIKTOKEN_FILE else Path(name).suffix
        if name in files and suffix in by_suffix and (suffix != ".json" or name == TOKENIZER_FILE):
            same_kind = described if described.get("kind") == by_suffix[suffix] else {}  # a folder or a Hub name
            return same_kind | {"kind": by_suffix[suffix], "path": files[name]}
    return None


def _run_tokenizer(source: CheckpointSource) -> Mapping[str, Any]:
    """Return the config section data.tokenizer of the run that saved the source."""
    return (source.about.get("config", {}).get("data") or {}).get("tokenizer") or {}


def _from_huggingface(tokenizer: Tokenizer, path: str | None) -> tuple[Any, dict[str, str]]:
    """Return the library's tokenizer for a tokenizer.json, or for a vocabulary and its merges, and its special tokens.

    Special tokens by role come from the model's unknown token, from the padding, and from usual names.
    """
    from tokenizers import Tokenizer as Library

    assert path is not None
    library = tokenizer.model if path.endswith("vocab.json") else Library.from_file(path)
    special = [token.content for token in library.get_added_tokens_decoder().values() if token.special]
    roles = {}
    for role, names in (("bos_token", _BOS_NAMES), ("unk_token", _UNK_NAMES), ("pad_token", _PAD_NAMES)):
        if present := [name for name in names if name in special]:
            roles[role] = present[0]
    if unknown := getattr(library.model, "unk_token", None):
        roles["unk_token"] = unknown
    if library.padding:
        roles["pad_token"] = library.padding["pad_token"]
    library.no_truncation()  # transformers does not truncate or pad, either, unless a call requests it
    library.no_padding()
    return library, roles


def _from_tiktoken(tokenizer: Tokenizer, path: str | None) -> tuple[Any, dict[str, str]]:
    encoding = tokenizer.model
    return _byte_level(encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens), {}


def _from_bytes(tokenizer: Tokenizer, path: str | None) -> tuple[Any, dict[str, str]]:
    return _byte_level({bytes([i]): i for i in range(256)}, None, {"<|endoftext|>": tokenizer.eod_id}), {}


def _byte_level(ranks: Mapping[bytes, int], pattern: str | None, special: Mapping[str, int]) -> Any:
    """Return a byte-level BPE tokenizer.

    `pattern` is the regular expression of the words into which text is split first. None does not split it.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    letters = byte_letters()
    vocab = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = _merges(vocab, sorted(vocab, key=lambda token: vocab[token]), vocab)
    library = Library(models.BPE({**vocab, **special}, merges, ignore_merges=True))
    steps = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return library


def byte_letters() -> list[str]:
    """Return the printable character that stands for each byte in byte-level vocabularies (as in GPT-2)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _merges(ids: Mapping[str, int], order: Iterable[str], parts: Collection[str]) -> list[tuple[str, str]]:
    """Return all pairs of `parts` that concatenate to a token in `order`, which is sorted by priority."""
    merges = []
    for token in order:
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        possible = [(left, right) for left, right in cuts if left in parts and right in parts]
        merges += sorted(possible, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _from_sentencepiece(tokenizer: Tokenizer, path: str | None) -> tuple[Any, dict[str, str]]:
    """Return the library's tokenizer for a BPE or unigram model, and its special tokens by role.

    Raises ValueError for features that have no equivalent in the library `tokenizers`.
    """
    from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec  # type: ignore[attr-defined]
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Library

    model = tokenizer.model
    proto = ModelProto.FromString(model.serialized_model_proto())
    trainer, normalizer, piece = proto.trainer_spec, proto.normalizer_spec, ModelProto.SentencePiece
    ids = {one.piece: i for i, one in enumerate(proto.pieces)}
    normal = {one.piece: one.score for one in proto.pieces if one.type == piece.NORMAL}
    inserted = sorted((one.piece for one in proto.pieces if one.type == piece.USER_DEFINED), key=len, reverse=True)
    if trainer.treat_whitespace_as_suffix:
        raise ValueError("spaces at the end of words are not supported")
    if trainer.model_type == TrainerSpec.BPE:
        merges = _merges(ids, sorted(normal, key=lambda one: -normal[one]), normal.keys())
        unknown, fallback = model.id_to_piece(model.unk_id()), trainer.byte_fallback
        whole = any(len(one) > 1 for one in inserted)  # merges cannot produce user-defined symbols
        library = Library(
            models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=fallback, ignore_merges=whole)
        )
    elif trainer.model_type == TrainerSpec.UNIGRAM:
        logger.warning(
            "%s is a unigram model: transformers may split rare texts differently, such as long runs of one character; "
            "tokenizer.model, which is written in addition to tokenizer.json, does not", path,
        )  # fmt: skip
        scores = [(one.piece, one.score) for one in proto.pieces]
        library = Library(models.Unigram(scores, model.unk_id(), trainer.byte_fallback))
    else:
        raise ValueError("it is neither BPE nor unigram")

    steps: list[Any] = []
    if normalizer.precompiled_charsmap:
        steps.append(normalizers.Precompiled(normalizer.precompiled_charsmap))
    if normalizer.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if normalizer.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends = [decoders.Strip(" ", 1, 0)] if normalizer.add_dummy_prefix else []
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    if inserted:
        library.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, inserted))), "isolated")
    control = [one.piece for one in proto.pieces if one.type in (piece.CONTROL, piece.UNKNOWN)]
    library.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in control])
    special_ids = {"bos_token": model.bos_id(), "unk_token": model.unk_id(), "pad_token": model.pad_id()}
    return library, {role: model.id_to_piece(i) for role, i in special_ids.items() if i >= 0}


_CONVERTERS: Mapping[TokenizerKind, Any] = {
    "huggingface": _from_huggingface,
    "sentencepiece": _from_sentencepiece,
    "tiktoken": _from_tiktoken,
    "bytes": _from_bytes,
}
