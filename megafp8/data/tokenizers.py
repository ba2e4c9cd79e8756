"""Common interface to tokenizers: sentencepiece, Hugging Face tokenizers, tiktoken, and plain bytes.

A tokenizer also defines the token that ends a document and the tokens that begin one. Both are settings.
`build_tokenizer` takes defaults from the tokenizer's files (`tokenizer_files`), and raises an error if neither the
settings nor the files name an end token. Preprocessing, training, generation and exports all use these tokens.

The fingerprint (SHA-256 of the kind, the model file and the pattern that splits text) is stored with data sets and
checkpoints, so that text tokenized with one vocabulary is never used to train with another.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megafp8.data.hub import TOKENIZER_FILES, NotOnThisMachine, is_hub_name, local_folder
from megafp8.data.packages import MissingPackage, import_package
from megafp8.data.tokenizer_files import SpecialTokenFiles, read_pattern
from megafp8.host.suggestions import did_you_mean

TokenizerKind = Literal["sentencepiece", "huggingface", "tiktoken", "bytes"]
_END_NAME = "<|endoftext|>"
"""End token of GPT-2's vocabularies, of tiktoken's encodings, and of ranks files without special tokens."""


class TokenizerSettings(NamedTuple):
    """Arguments of `build_tokenizer`, from the config section data.tokenizer or a tool's flags."""

    kind: TokenizerKind
    path: str | None = None
    end_token: str | None = None
    pattern: str | None = None
    add_bos_token: bool | None = None


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer: conversion of text to token ids and back, with the tokens around a document.

    Attributes:
        settings: Arguments of `build_tokenizer` with all defaults filled in.
        vocab_size: Number of token ids.
        eod_id: Token that ends a document.
        start_ids: Tokens that begin a document; empty if documents begin without one.
        bos_id: Beginning token that the tokenizer's files name, whether or not documents begin with it, or None.
        boundaries: The end and beginning tokens and the files that name them, in words.
        fingerprint: SHA-256 that identifies the vocabulary.
        encode: Function that returns the token ids of a text, without the tokens around a document.
        decode: Function that returns the text of token ids, including special tokens.
        model: Tokenizer object of the library; None for bytes.
        id_of: Function that returns the id of the token with a name, or None.
        word_starts: Function that returns whether each token begins a word, bool `[vocab_size]`, or None if this cannot
            be known from the tokens.
    """

    settings: TokenizerSettings
    vocab_size: int
    eod_id: int
    start_ids: tuple[int, ...]
    bos_id: int | None
    boundaries: str
    fingerprint: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    model: Any
    id_of: Callable[[str], int | None]
    word_starts: Callable[[], NDArray[np.bool_] | None]


class TokenizerSettingError(ValueError):
    """A tokenizer setting cannot be used.

    `setting` is a field of `TokenizerSettings`; the caller knows the config key or flag that the user gave. `rule` says
    what is wrong with `value`, and `works` says what would work.
    """

    def __init__(self, setting: str, value: object, rule: str, works: str) -> None:
        self.setting, self.value, self.rule, self.works = setting, value, rule, works
        super().__init__(f"tokenizer {setting} = {value!r}: {rule}; {works}")


class MissingTokenizer(TokenizerSettingError):
    """The file or the library of a tokenizer is not on this machine."""


class _Vocabulary(NamedTuple):
    """Tokenizer as read by its library, before the tokens around a document are chosen.

    Attributes:
        size: Number of token ids.
        content: Everything that determines the ids of a text.
        encode: Function that returns the token ids of a text.
        decode: Function that returns the text of token ids.
        special: Names of the special tokens.
        end: End token in the model file, and its source in words; None if the file names no end token.
        bos_id: Beginning token in the model file, or None.
        start_ids: Tokens that the model file puts before a text.
        pattern: Regular expression that splits text, for a tiktoken ranks file.
        model: Tokenizer object of the library; None for bytes.
        id_of: Function that returns the id of the token with a name, or None.
        name_of: Function that returns the name of a token, or None.
        word_starts: Function of `Tokenizer.word_starts`.
    """

    size: int
    content: bytes
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    special: Sequence[str] = ()
    end: tuple[int, str] | None = None
    bos_id: int | None = None
    start_ids: tuple[int, ...] = ()
    pattern: str | None = None
    model: Any = None
    id_of: Callable[[str], int | None] = lambda name: None
    name_of: Callable[[int], str | None] = lambda token: None
    word_starts: Callable[[], NDArray[np.bool_] | None] = lambda: None


def build_tokenizer(
    kind: TokenizerKind,
    path: str | None = None,
    end_token: str | None = None,
    pattern: str | None = None,
    add_bos_token: bool | None = None,
) -> Tokenizer:
    """Read a tokenizer and choose the tokens around a document.

    Args:
        kind: Library that reads the tokenizer.
        path: Model file, or a folder or Hub repository with one; for tiktoken also the name of an encoding; None for
            bytes.
        end_token: Token that ends a document. Default: the end token that the tokenizer's files name.
        pattern: Regular expression that splits text, for a tiktoken ranks file. Default: `pat_str` of the code in its
            folder.
        add_bos_token: Whether documents begin with the beginning token. Default: as the tokenizer's files say.

    Raises:
        TokenizerSettingError: A setting is missing or cannot be used.
        MissingTokenizer: The tokenizer's file or library is not on this machine.
    """
    settings = TokenizerSettings(kind, path, end_token, pattern, add_bos_token)
    if pattern is not None and kind != "tiktoken":
        raise TokenizerSettingError("pattern", pattern, "only tiktoken ranks files need a pattern", "leave it out")
    if kind == "bytes":
        for setting in ("path", "end_token", "add_bos_token"):
            if (value := getattr(settings, setting)) is not None:
                raise TokenizerSettingError(setting, value, "the bytes tokenizer has no such setting", "leave it out")
        return _choose_boundaries(settings, _bytes_vocabulary(), SpecialTokenFiles())
    if path is None:
        raise TokenizerSettingError("path", None, f"a {kind} tokenizer is read from a file", "give its path")
    file = tokenizer_file(kind, path)
    try:
        stated = SpecialTokenFiles.from_folder(Path(file).parent) if Path(file).is_file() else SpecialTokenFiles()
        if kind == "tiktoken":
            vocabulary = _tiktoken(file, settings, stated)
        else:
            vocabulary = _sentencepiece(file) if kind == "sentencepiece" else _huggingface(file, stated)
        return _choose_boundaries(settings, vocabulary, stated)
    except MissingPackage as error:
        raise MissingTokenizer("kind", kind, error.rule, error.works) from None
    except TokenizerSettingError:
        raise
    except ValueError as error:
        raise TokenizerSettingError("path", path, str(error), "restore the tokenizer's folder") from None


def _choose_boundaries(settings: TokenizerSettings, vocabulary: _Vocabulary, stated: SpecialTokenFiles) -> Tokenizer:
    """Make a tokenizer of a vocabulary, with the end and beginning tokens of the settings or, by default, its files."""
    eod_id, end_source = _end_token(settings, vocabulary, stated)
    bos = stated.named("bos_token")
    bos_id = vocabulary.bos_id if bos is None else vocabulary.id_of(bos[0])
    start_ids, start_source = _start_tokens(settings, vocabulary, stated, bos_id)
    end = vocabulary.name_of(eod_id)
    start = " ".join(f"{vocabulary.name_of(token)} ({token})" for token in start_ids)
    boundaries = f"end token {eod_id if end is None else f'{end} ({eod_id})'}, {end_source}; "
    boundaries += f"beginning token {start}, {start_source}" if start_ids else "no beginning token"
    complete = settings
    if settings.kind != "bytes":
        end_token = end if settings.end_token is None else settings.end_token
        complete = settings._replace(end_token=end_token, pattern=vocabulary.pattern, add_bos_token=bool(start_ids))
    return Tokenizer(
        complete,
        vocabulary.size,
        eod_id,
        start_ids,
        bos_id,
        boundaries,
        _fingerprint(settings.kind, vocabulary.content),
        vocabulary.encode,
        vocabulary.decode,
        vocabulary.model,
        vocabulary.id_of,
        vocabulary.word_starts,
    )


def _end_token(settings: TokenizerSettings, vocabulary: _Vocabulary, stated: SpecialTokenFiles) -> tuple[int, str]:
    """Return the id of the token that ends a document, and the source that names it.

    The sources, in order, are: the setting, eos_token in the files of the tokenizer's folder, eos_token_id of
    generation_config.json if it is a single id, and the model file. Except for the setting, they must name a special
    token. Raises TokenizerSettingError, with the candidates, if no source names a token.
    """
    end_token, candidates = settings.end_token, list(vocabulary.special)
    if end_token is not None:
        if (token := vocabulary.id_of(end_token)) is None:
            raise _end_token_error(end_token, f"{settings.path} has no such token", candidates)
        return token, "as set"
    if (named := stated.named("eos_token")) is not None:
        name, file = named
        if (token := vocabulary.id_of(name)) is None or name not in candidates:
            rule = f"{file} names {name!r} as eos_token, which is not a special token of {settings.path}"
            raise _end_token_error(None, rule, candidates)
        return token, f"eos_token of {file}"
    ends = [token for token in stated.generation_ends() if vocabulary.name_of(token) in candidates]
    if len(ends) == 1:
        return ends[0], "eos_token_id of generation_config.json"
    if vocabulary.end is not None:
        return vocabulary.end
    rule = f"the files of {settings.path} name no end-of-document token (eos_token in tokenizer_config.json)"
    raise _end_token_error(None, rule, [str(vocabulary.name_of(token)) for token in ends] or candidates)


def _end_token_error(end_token: str | None, rule: str, candidates: list[str]) -> TokenizerSettingError:
    """Return the error for a tokenizer without this end token. `candidates` are its special tokens."""
    shown = ", ".join(candidates[:20]) + (", ..." if len(candidates) > 20 else "")
    works = "name the token that ends a document, here or as eos_token of a tokenizer_config.json in its folder; "
    works += f"special tokens are {shown}" if candidates else "it has no special tokens"
    return TokenizerSettingError("end_token", end_token, rule, works)


def _start_tokens(
    settings: TokenizerSettings, vocabulary: _Vocabulary, stated: SpecialTokenFiles, bos_id: int | None
) -> tuple[tuple[int, ...], str]:
    """Return the tokens that begin a document, and the source that names them; both are empty if there are none.

    Without a setting, these are the tokens that the post-processor puts before a text, or the beginning token if
    tokenizer_config.json has add_bos_token.
    """
    start_ids = vocabulary.start_ids or (() if bos_id is None else (bos_id,))
    if settings.add_bos_token is not None:
        if settings.add_bos_token and not start_ids:
            rule = f"the files of {settings.path} name no beginning token (bos_token in tokenizer_config.json)"
            raise TokenizerSettingError("add_bos_token", True, rule, "set it to false, or leave it out")
        return start_ids if settings.add_bos_token else (), "as set"
    if vocabulary.start_ids:
        return start_ids, "from the post-processor"
    if stated.config.get("add_bos_token") is True:
        return start_ids, "add_bos_token of tokenizer_config.json"
    return (), ""


_FILES: dict[str, tuple[str, ...]] = {
    "sentencepiece": ("tokenizer.model", "spiece.model", "*.model"),
    "huggingface": ("tokenizer.json", "vocab.json"),
    "tiktoken": ("*.tiktoken", "tiktoken.model"),
}
"""Patterns of the tokenizer's file in a folder, by kind; the first that matches is read."""


def tokenizer_file(kind: TokenizerKind, path: str) -> str:
    """Return the tokenizer file that `path` names: the path itself, or a file in a folder or Hub repository.

    The name of a tiktoken encoding is returned unchanged. Raises TokenizerSettingError if there is no file.
    """
    file = Path(path)
    if file.is_file() or kind == "bytes":
        return path
    if is_hub_name(path):
        try:
            file = local_folder(path, TOKENIZER_FILES)
        except NotOnThisMachine as error:
            rule, _, works = str(error).rpartition(": ")
            raise MissingTokenizer("path", path, rule, works) from None
    if file.is_dir():
        for pattern in _FILES[kind]:
            if files := sorted(file.glob(pattern)):
                return str(files[0])
        rule = f"{file} is a folder without a tokenizer of kind {kind}"
        raise TokenizerSettingError("path", path, f"{rule}; looked for {', '.join(_FILES[kind])}", "give its file")
    if kind == "tiktoken" and not file.exists():
        return path
    raise MissingTokenizer(
        "path", path, "no such file", did_you_mean(Path(path), "give the path of the tokenizer's file")
    )


def _fingerprint(kind: str, content: bytes) -> str:
    return hashlib.sha256(kind.encode() + b"\0" + content).hexdigest()


def _bytes_vocabulary() -> _Vocabulary:
    """Return the vocabulary of the 256 byte values, for UTF-8 text. Token 256 ends a document."""

    def decode(ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    return _Vocabulary(257, b"", lambda text: list(text.encode("utf-8")), decode, end=(256, "after the bytes"))


def _sentencepiece(path: str) -> _Vocabulary:
    """Read a sentencepiece `.model`."""
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=path)
        pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]  # fails if one is not UTF-8
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        rule = f"{path} is not a sentencepiece model: {error}"
        raise TokenizerSettingError("path", path, rule, "give a file that sentencepiece wrote") from None

    def id_of(name: str) -> int | None:
        token_id: int = model.piece_to_id(name)
        return token_id if model.id_to_piece(token_id) == name else None  # an unknown name gets the id of <unk>

    return _Vocabulary(
        model.vocab_size(),
        Path(path).read_bytes(),
        model.encode,
        model.decode,
        special=[piece for i, piece in enumerate(pieces) if model.is_control(i)],
        end=None if model.eos_id() < 0 else (model.eos_id(), f"eos of {Path(path).name}"),
        bos_id=None if model.bos_id() < 0 else model.bos_id(),
        model=model,
        id_of=id_of,
        name_of=lambda token: pieces[token] if 0 <= token < len(pieces) else None,
        word_starts=lambda: _word_starts(pieces),
    )


def _word_starts(pieces: Sequence[str]) -> NDArray[np.bool_] | None:
    """Return whether each token begins a word, judging by the texts of all tokens, or None if they do not tell.

    If any token begins with ## (WordPiece), the tokens without ## begin words. Otherwise, these are the tokens that
    begin with ▁ (sentencepiece), or with Ġ or a space (byte-level BPE).
    """
    if any(piece.startswith("##") and len(piece) > 2 for piece in pieces):
        return np.array([not piece.startswith("##") for piece in pieces])
    starts = np.array([piece.startswith(("▁", "Ġ", " ")) for piece in pieces])
    return starts if starts.any() else None


def _huggingface(path: str, stated: SpecialTokenFiles) -> _Vocabulary:
    """Read a `tokenizer.json` of the Hugging Face `tokenizers` library, or GPT-2's `vocab.json` and `merges.txt`.

    In the second form, the special tokens are <|endoftext|>, and the end and beginning tokens that files in the folder
    name.
    """
    library = import_package("tokenizers", "a huggingface tokenizer")
    merges = _merges_beside(path)
    try:
        model = library.Tokenizer.from_file(path) if merges is None else _byte_level_bpe(library, path, merges)
        if merges is not None:
            names = [_END_NAME, *(named[0] for role in ("eos_token", "bos_token") if (named := stated.named(role)))]
            model.add_special_tokens([name for name in names if model.token_to_id(name) is not None])
    except Exception as error:  # the library raises bare Exception
        rule = f"{path} is not a {'tokenizer.json' if merges is None else 'vocabulary of ' + str(merges)}: {error}"
        raise TokenizerSettingError("path", path, rule, "give a file of the tokenizers library") from None
    # The file may have settings that truncate or pad texts to the context of some model.
    model.no_truncation()
    model.no_padding()
    special = special_tokens_of(model)
    vocab_size = max(model.get_vocab(with_added_tokens=True).values()) + 1
    return _Vocabulary(
        vocab_size,
        Path(path).read_bytes() + (b"" if merges is None else b"\0" + merges.read_bytes()),
        encode=lambda text: model.encode(text, add_special_tokens=False).ids,
        decode=lambda ids: model.decode(ids, skip_special_tokens=False),
        special=special,
        end=None if merges is None or _END_NAME not in special else (model.token_to_id(_END_NAME), "as in GPT-2"),
        start_ids=tokens_before_text(model),
        model=model,
        id_of=model.token_to_id,
        name_of=model.id_to_token,
        word_starts=lambda: _word_starts([model.id_to_token(i) or "" for i in range(vocab_size)]),
    )


def tokens_before_text(model: Any) -> tuple[int, ...]:
    """Return the tokens that the post-processor of a tokenizer.json puts before a text.

    If the post-processor also puts a token after the text, it makes samples for an encoder, such as [CLS] text [SEP],
    and not documents. The result is then empty.
    """
    encoded = model.encode("a", add_special_tokens=True)
    added: list[int] = encoded.special_tokens_mask
    if 0 not in added or added[-1]:
        return ()
    return tuple(encoded.ids[: added.index(0)])


def _merges_beside(path: str) -> Path | None:
    """Return the path of the merges of a vocabulary: `x-merges.txt` for `x-vocab.json`. None for other names."""
    if not path.endswith("vocab.json"):
        return None
    merges = Path(path.removesuffix("vocab.json") + "merges.txt")
    if not merges.is_file():
        rule = f"there is no {merges}, the merges of this vocabulary"
        raise TokenizerSettingError("path", path, rule, "put it there, or give a tokenizer.json")
    return merges


def _byte_level_bpe(library: Any, vocabulary: str, merges: Path) -> Any:
    """Build GPT-2's byte-level tokenizer from its two files, without adding a space before a text."""
    model = library.Tokenizer(library.models.BPE.from_file(vocabulary, str(merges)))
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = library.decoders.ByteLevel()
    return model


def _tiktoken(path: str, settings: TokenizerSettings, stated: SpecialTokenFiles) -> _Vocabulary:
    """Read a tiktoken encoding by name, or a ranks file.

    A ranks file has neither special tokens nor the pattern that splits text. Special tokens come from
    tokenizer_config.json in its folder. If there are none, <|endoftext|> is added after the last token, unless
    `end_token` is a token of the file. Raises TokenizerSettingError if the pattern is unknown.
    """
    tiktoken = import_package("tiktoken", "a tiktoken tokenizer")
    pattern = settings.pattern
    if Path(path).is_file():
        content = Path(path).read_bytes()
        ranks = _read_ranks(path, content)
        if pattern is None and (pattern := read_pattern(Path(path).parent)) is None:
            rule = f"{path} is a ranks file, which does not contain the regular expression that splits text"
            works = "set the pattern from the tokenizer's code, such as pat_str; " + _PATTERNS
            raise TokenizerSettingError("pattern", None, rule, works)
        _check_pattern(tiktoken, pattern)
        special = _special_ids(path, ranks, stated.numbered())
        if not special and (settings.end_token is None or settings.end_token.encode() not in ranks):
            special = {_END_NAME: max(ranks.values()) + 1}
        content += b"".join(f"\0{value}".encode() for value in (pattern, sorted(special.items())))
        model = tiktoken.Encoding(Path(path).stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        end = None
    else:
        if pattern is not None:
            rule = f"{path} is a tiktoken encoding, which already has a pattern"
            raise TokenizerSettingError("pattern", pattern, rule, "leave it out, or give a ranks file")
        model, content = _get_encoding(tiktoken, path), path.encode()
        end = (model.eot_token, "as in tiktoken") if _END_NAME in model.special_tokens_set else None

    def id_of(name: str) -> int | None:
        try:
            token_id: int = model.encode_single_token(name)
        except KeyError:
            return None
        return token_id

    def name_of(token: int) -> str | None:
        try:
            return str(model.decode([token]))
        except KeyError:
            return None

    def word_starts() -> NDArray[np.bool_] | None:
        texts = [token.decode("utf-8", errors="replace") for token in model.token_byte_values()]
        return _word_starts(texts + [""] * (model.n_vocab - len(texts)))

    return _Vocabulary(
        model.n_vocab,
        content,
        model.encode_ordinary,
        model.decode,
        special=sorted(model.special_tokens_set),
        end=end,
        pattern=pattern,
        model=model,
        id_of=id_of,
        name_of=name_of,
        word_starts=word_starts,
    )


def special_tokens_of(model: Any) -> list[str]:
    """Return the special tokens of a tokenizer.json, in the order of their ids. `model` is a `Tokenizer.model`."""
    return [token.content for _, token in sorted(model.get_added_tokens_decoder().items()) if token.special]


def _special_ids(path: str, ranks: Mapping[bytes, int], numbered: dict[str, int]) -> dict[str, int]:
    """Return `numbered`, the special tokens of a ranks file. Raises ValueError if an id is negative or already used."""
    taken = set(ranks.values())
    for name, number in numbered.items():
        if number in taken or number < 0:
            raise ValueError(f"added_tokens_decoder gives {name!r} the id {number}, which another token of {path} has")
        taken.add(number)
    return numbered


def _read_ranks(path: str, content: bytes) -> dict[bytes, int]:
    """Return the tokens of a ranks file and their ids.

    The library's reader is not used: it caches by path, and may return outdated content.
    """
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


_PATTERNS = "patterns of tiktoken's encodings are in tiktoken_ext/openai_public.py"


def _check_pattern(tiktoken: Any, pattern: str) -> None:
    """Raise TokenizerSettingError unless `pattern` is a regular expression that matches all text.

    tiktoken silently drops text that the pattern does not match, and an empty match aborts the process.
    """
    regex = import_package("regex", "a tiktoken tokenizer")  # tiktoken depends on it
    probe = "".join(map(chr, range(128))) + " It's 12345 words,\n\n  Größe: 日本語 \u0301 🙂\t\u00a0\u2028 x\r\n"
    works = _PATTERNS
    try:
        tiktoken.Encoding("probe", pat_str=pattern, mergeable_ranks={b"a": 0}, special_tokens={})
        spans = [match.span() for match in regex.finditer(pattern, probe, regex.V1)]
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
        return tiktoken.get_encoding(name)  # from tiktoken's cache, or else from the network
    except OSError as error:
        raise MissingTokenizer(
            "path",
            name,
            f"{name}: tiktoken has no copy of this encoding and cannot download it ({type(error).__name__})",
            "run once on a machine with a network and copy the folder TIKTOKEN_CACHE_DIR, or give the path of a ranks "
            "file",
        ) from None
