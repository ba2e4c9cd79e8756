"""One interface to the tokenizer libraries: sentencepiece, Hugging Face tokenizers, tiktoken, and plain bytes.

The fingerprint (SHA-256 of the kind, the model file and the settings that change token ids) is stored with data sets
and checkpoints, so that text tokenized with one vocabulary is never trained on with another.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megafp8.data.hub import TOKENIZER_FILES, NotOnThisMachine, is_hub_name, local_folder
from megafp8.data.packages import MissingPackage, import_package
from megafp8.suggestions import did_you_mean

TokenizerKind = Literal["sentencepiece", "huggingface", "tiktoken", "bytes"]
_EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back. `eod_id` ends a document. `model`: the library's object; of bytes None.

    `id_of`: the id of a token by its name, None if there is no such token. `word_starts`: by token id, whether it
    begins a word; None if tokens do not tell.
    """

    vocab_size: int
    eod_id: int
    fingerprint: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    model: Any = None
    id_of: Callable[[str], int | None] = lambda name: None
    word_starts: Callable[[], NDArray[np.bool_] | None] = lambda: None


class TokenizerSettings(NamedTuple):
    """Arguments of `build_tokenizer`, from the config section data.tokenizer or a tool's flags."""

    kind: TokenizerKind
    path: str | None = None
    end_token: str | None = None
    pattern: str | None = None


class TokenizerSettingError(ValueError):
    """A tokenizer setting that cannot be used.

    `setting` is a field of `TokenizerSettings`; the caller knows the config key or flag that the user gave. `rule` says
    what is wrong with `value`, `works` what would work.
    """

    def __init__(self, setting: str, value: object, rule: str, works: str) -> None:
        self.setting, self.value, self.rule, self.works = setting, value, rule, works
        super().__init__(f"tokenizer {setting} = {value!r}: {rule}; {works}")


class MissingTokenizer(TokenizerSettingError):
    """A tokenizer whose file, or library, is not on this machine."""


def build_tokenizer(
    kind: TokenizerKind, path: str | None = None, end_token: str | None = None, pattern: str | None = None
) -> Tokenizer:
    """The tokenizer `kind` read from `path` (for tiktoken an encoding's name or a ranks file; None for bytes).

    `end_token` ends a document in place of the tokenizer's own; `pattern` is the regular expression that splits text
    for a tiktoken ranks file. Raises TokenizerSettingError if a setting is missing or cannot be used, MissingTokenizer
    if its file or library is.
    """
    if pattern is not None and kind != "tiktoken":
        raise TokenizerSettingError("pattern", pattern, "only tiktoken ranks files are read with one", "leave it out")
    if kind == "bytes":
        for setting, value in (("path", path), ("end_token", end_token)):
            if value is not None:
                raise TokenizerSettingError(setting, value, "the bytes tokenizer has none", "leave it out")
        return _bytes_tokenizer()
    if path is None:
        raise TokenizerSettingError("path", None, f"a {kind} tokenizer is read from a file", "give its path")
    path = tokenizer_file(kind, path)
    try:
        if kind == "tiktoken":
            return _tiktoken(path, end_token, pattern)
        return _sentencepiece(path, end_token) if kind == "sentencepiece" else _huggingface(path, end_token)
    except MissingPackage as error:
        raise MissingTokenizer("kind", kind, error.rule, error.works) from None


_FILES: dict[str, tuple[str, ...]] = {
    "sentencepiece": ("tokenizer.model", "spiece.model", "*.model"),
    "huggingface": ("tokenizer.json", "vocab.json"),
    "tiktoken": ("*.tiktoken", "tiktoken.model"),
}
"""Patterns of the tokenizer's file in a folder, by kind; the first that matches is read."""


def tokenizer_file(kind: TokenizerKind, path: str) -> str:
    """The file that a tokenizer's `path` names: a file itself, or that in a folder or in a repository of the Hub.

    The name of a tiktoken encoding stays as it is. Raises TokenizerSettingError where there is none.
    """
    given = Path(path)
    if given.is_file() or kind == "bytes":
        return path
    if is_hub_name(path):
        try:
            given = local_folder(path, TOKENIZER_FILES)
        except NotOnThisMachine as error:
            rule, _, works = str(error).rpartition(": ")
            raise MissingTokenizer("path", path, rule, works) from None
    if given.is_dir():
        for pattern in _FILES[kind]:
            if files := sorted(given.glob(pattern)):
                return str(files[0])
        rule = f"{given} is a folder without a tokenizer of kind {kind}"
        raise TokenizerSettingError("path", path, f"{rule}; looked for {', '.join(_FILES[kind])}", "give its file")
    if kind == "tiktoken" and not given.exists():
        return path
    raise MissingTokenizer(
        "path", path, "no such file", did_you_mean(Path(path), "give the path of the tokenizer's file")
    )


def _fingerprint(kind: str, content: bytes, **changed: str | int | None) -> str:
    """`changed`: settings that give other ids than the file alone; None for those that do not."""
    settings = b"".join(f"\0{name}={value}".encode() for name, value in changed.items() if value is not None)
    return hashlib.sha256(kind.encode() + b"\0" + content + settings).hexdigest()


def _end_token_error(end_token: str | None, path: str, known: list[str]) -> TokenizerSettingError:
    """The error of a tokenizer without this end-of-document token; `known`: its special tokens."""
    if end_token is None:
        rule = f"{path} has no end-of-document token; looked for {', '.join(_EOD_NAMES)}"
    else:
        rule = f"{path} has no such token"
    shown = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
    works = f"name the token that ends a document; special tokens are {shown}" if known else "it has no special tokens"
    return TokenizerSettingError("end_token", end_token, rule, works)


def _bytes_tokenizer() -> Tokenizer:
    """Each UTF-8 byte is a token; 256 ends a document."""

    def decode(ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    return Tokenizer(257, 256, _fingerprint("bytes", b""), lambda text: list(text.encode("utf-8")), decode)


def _sentencepiece(path: str, end_token: str | None) -> Tokenizer:
    """A sentencepiece `.model`; its eos ends a document."""
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=path)
        pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]  # each must be UTF-8
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        rule = f"{path} is not a sentencepiece model: {error}"
        raise TokenizerSettingError("path", path, rule, "give a file that sentencepiece wrote") from None
    default: int = model.eos_id()
    eod_id = default if end_token is None else model.piece_to_id(end_token)
    unknown = eod_id < 0 if end_token is None else model.id_to_piece(eod_id) != end_token  # unknown ones get <unk>'s id
    if unknown:
        special = [piece for i, piece in enumerate(pieces) if model.is_control(i)]
        raise _end_token_error(end_token, path, special)
    fingerprint = _fingerprint("sentencepiece", Path(path).read_bytes(), eod_id=eod_id if eod_id != default else None)

    def id_of(name: str) -> int | None:
        token_id: int = model.piece_to_id(name)
        return token_id if model.id_to_piece(token_id) == name else None

    return Tokenizer(
        model.vocab_size(),
        eod_id,
        fingerprint,
        model.encode,
        model.decode,
        model,
        id_of,
        lambda: _word_starts(pieces),
    )


def _word_starts(pieces: Sequence[str]) -> NDArray[np.bool_] | None:
    """From the texts of all tokens: those without ## where any has it (WordPiece), else those with ▁ (sentencepiece),
    or Ġ or a space (byte-level BPE)."""
    if any(piece.startswith("##") and len(piece) > 2 for piece in pieces):
        return np.array([not piece.startswith("##") for piece in pieces])
    starts = np.array([piece.startswith(("▁", "Ġ", " ")) for piece in pieces])
    return starts if starts.any() else None


def _huggingface(path: str, end_token: str | None) -> Tokenizer:
    """A `tokenizer.json` of the Hugging Face `tokenizers` library, or GPT-2's `vocab.json` beside `merges.txt`."""
    library = import_package("tokenizers", "a huggingface tokenizer")
    merges = _merges_beside(path)
    try:
        model = library.Tokenizer.from_file(path) if merges is None else _byte_level_bpe(library, path, merges)
    except Exception as error:  # the library raises bare Exception
        rule = f"{path} is not a {'tokenizer.json' if merges is None else 'vocabulary of ' + str(merges)}: {error}"
        raise TokenizerSettingError("path", path, rule, "give a file of the tokenizers library") from None
    content = Path(path).read_bytes() + (b"" if merges is None else b"\0" + merges.read_bytes())
    # The file may have settings to truncate or pad to some model's context.
    model.no_truncation()
    model.no_padding()
    default = next((i for i in map(model.token_to_id, _EOD_NAMES) if i is not None), None)
    eod_id: int | None = default if end_token is None else model.token_to_id(end_token)
    if eod_id is None:
        known = [token.content for _, token in sorted(model.get_added_tokens_decoder().items())]
        raise _end_token_error(end_token, path, known)
    vocab_size = max(model.get_vocab(with_added_tokens=True).values()) + 1
    return Tokenizer(
        vocab_size=vocab_size,
        eod_id=eod_id,
        fingerprint=_fingerprint("huggingface", content, eod_id=eod_id if eod_id != default else None),
        encode=lambda text: model.encode(text, add_special_tokens=False).ids,
        decode=lambda ids: model.decode(ids, skip_special_tokens=False),
        model=model,
        id_of=model.token_to_id,
        word_starts=lambda: _word_starts([model.id_to_token(i) or "" for i in range(vocab_size)]),
    )


def _merges_beside(path: str) -> Path | None:
    """The merges of the vocabulary `path`, `x-merges.txt` of `x-vocab.json`; None where `path` has another name."""
    if not path.endswith("vocab.json"):
        return None
    merges = Path(path.removesuffix("vocab.json") + "merges.txt")
    if not merges.is_file():
        rule = f"there is no {merges}, the merges of this vocabulary"
        raise TokenizerSettingError("path", path, rule, "put it there, or give a tokenizer.json")
    return merges


def _byte_level_bpe(library: Any, vocabulary: str, merges: Path) -> Any:
    """GPT-2's tokenizer of two files: bytes as printable characters, its pattern that splits text, no added space."""
    model = library.Tokenizer(library.models.BPE.from_file(vocabulary, str(merges)))
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = library.decoders.ByteLevel()
    model.add_special_tokens([name for name in _EOD_NAMES if model.token_to_id(name) is not None])
    return model


_GPT4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _tiktoken(path: str, end_token: str | None, pattern: str | None) -> Tokenizer:
    """A tiktoken encoding by name, or a `.tiktoken` ranks file.

    A ranks file has neither the pattern that splits text nor special tokens: `pattern` (default: GPT-4's) is used, and
    <|endoftext|> is added after the last token unless `end_token` names a token of the file.
    """
    tiktoken = import_package("tiktoken", "a tiktoken tokenizer")
    if Path(path).is_file():
        content = Path(path).read_bytes()
        ranks = _read_ranks(path, content)
        if pattern is not None:
            _check_pattern(tiktoken, pattern)
        end_is_ordinary = end_token is not None and end_token.encode() in ranks
        model = tiktoken.Encoding(
            Path(path).stem,
            pat_str=_GPT4_PATTERN if pattern is None else pattern,
            mergeable_ranks=ranks,
            special_tokens={} if end_is_ordinary else {_EOD_NAMES[0]: max(ranks.values()) + 1},
        )
    else:
        if pattern is not None:
            rule = f"{path} is a tiktoken encoding, which has its own"
            raise TokenizerSettingError("pattern", pattern, rule, "leave it out, or give a ranks file")
        model, content = _get_encoding(tiktoken, path), path.encode()
    special: set[str] = model.special_tokens_set
    default: int | None = model.eot_token if _EOD_NAMES[0] in special else None
    try:
        eod_id: int | None = default if end_token is None else model.encode_single_token(end_token)
    except KeyError:
        eod_id = None
    if eod_id is None:
        raise _end_token_error(end_token, path, sorted(special))
    fingerprint = _fingerprint(
        "tiktoken",
        content,
        pattern=None if pattern == _GPT4_PATTERN else pattern,
        eod_id=None if eod_id == default else eod_id,
    )

    def id_of(name: str) -> int | None:
        try:
            token_id: int = model.encode_single_token(name)
        except KeyError:
            return None
        return token_id

    def word_starts() -> NDArray[np.bool_] | None:
        texts = [token.decode("utf-8", errors="replace") for token in model.token_byte_values()]
        return _word_starts(texts + [""] * (model.n_vocab - len(texts)))

    return Tokenizer(model.n_vocab, eod_id, fingerprint, model.encode_ordinary, model.decode, model, id_of, word_starts)


def _read_ranks(path: str, content: bytes) -> dict[bytes, int]:
    """Tokens of a ranks file and their ids. The library's reader caches by path and may return an earlier content."""
    ranks: dict[bytes, int] = {}
    works = "give a file with a token in base64 and its rank on each line"
    for number, line in enumerate(content.splitlines(), 1):
        try:
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise TokenizerSettingError(
                "path", path, f"not a tiktoken ranks file: line {number}: {error}", works
            ) from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerSettingError("path", path, f"has no token for the single byte {missing[0]:#04x}", works)
    if len(set(ranks.values())) < len(ranks) or min(ranks.values()) < 0:
        raise TokenizerSettingError("path", path, "has a negative rank, or one rank for several tokens", works)
    return ranks


def _check_pattern(tiktoken: Any, pattern: str) -> None:
    """TokenizerSettingError unless `pattern` is a regular expression whose matches cover all text.

    tiktoken silently drops text that the pattern does not match, and an empty match aborts the process.
    """
    regex = import_package("regex", "a tiktoken tokenizer")  # tiktoken depends on it
    probe = "".join(map(chr, range(128))) + " It's 12345 words,\n\n  Größe: 日本語 \u0301 🙂\t\u00a0\u2028 x\r\n"
    works = "tiktoken's own are in tiktoken_ext/openai_public.py"
    try:
        tiktoken.Encoding("probe", pat_str=pattern, mergeable_ranks={b"a": 0}, special_tokens={})
        spans = [match.span() for match in regex.finditer(pattern, probe)]
    except (ValueError, regex.error) as error:
        rule = f"not a regular expression that tiktoken can use: {error}"
        raise TokenizerSettingError("pattern", pattern, rule, works) from None
    covered = 0
    for start, end in [*spans, (len(probe), len(probe) + 1)]:
        if start > covered:
            rule = f"does not match all text: tiktoken would leave out {probe[covered:start]!r}"
            raise TokenizerSettingError("pattern", pattern, rule, works)
        if start == end:
            raise TokenizerSettingError("pattern", pattern, "matches the empty text", works)
        covered = end


def _get_encoding(tiktoken: Any, name: str) -> Any:
    if name not in tiktoken.list_encoding_names():
        names = ", ".join(tiktoken.list_encoding_names())
        kind = MissingTokenizer if "/" in name else TokenizerSettingError
        raise kind("path", name, "neither a file nor a tiktoken encoding", f"encodings are {names}")
    try:
        return tiktoken.get_encoding(name)  # from its cache, or else from the network
    except OSError as error:
        raise MissingTokenizer(
            "path",
            name,
            f"{name}: tiktoken has no copy of this encoding and cannot fetch it ({type(error).__name__})",
            "run once where there is a network and copy the folder TIKTOKEN_CACHE_DIR, or give a ranks file's path",
        ) from None
