"""One small interface over the libraries people train vocabularies with; none of our own.

The fingerprint (sha256 of the kind and the model file) is kept with data sets and checkpoints, so that text written
with one vocabulary is never trained on as if it were another.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal, Protocol

TokenizerKind = Literal["sentencepiece", "huggingface", "tiktoken", "bytes"]
_EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>")


class Tokenizer(Protocol):
    """Text to token ids and back. `eod_id` ends a document."""

    vocab_size: int
    eod_id: int
    fingerprint: str

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


def build_tokenizer(kind: TokenizerKind, path: str | None) -> Tokenizer:
    """The tokenizer `kind` read from `path` (an encoding name or a ranks file for tiktoken, None for bytes).

    ValueError where the file or the library is missing, or no end-of-document token is found.
    """
    if kind == "bytes":
        return BytesTokenizer()
    if path is None:
        raise ValueError(f"a {kind} tokenizer needs data.tokenizer.path")
    if kind == "tiktoken" and not Path(path).exists():
        return TiktokenTokenizer(path)
    if not Path(path).is_file():
        raise ValueError(f"data.tokenizer.path = {path}: no such file")
    classes: dict[str, Any] = {
        "sentencepiece": SentencePieceTokenizer,
        "huggingface": HuggingFaceTokenizer,
        "tiktoken": TiktokenTokenizer,
    }
    tokenizer: Tokenizer = classes[kind](path)
    return tokenizer


def _fingerprint(kind: str, content: bytes) -> str:
    return hashlib.sha256(kind.encode() + b"\0" + content).hexdigest()


def _needs(package: str, extra: str) -> ValueError:
    return ValueError(f"this tokenizer needs the package {package}: pip install 'megafp8[{extra}]'")


class BytesTokenizer:
    """Each UTF-8 byte is a token; 256 ends a document."""

    vocab_size = 257
    eod_id = 256
    fingerprint = _fingerprint("bytes", b"")

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class SentencePieceTokenizer:
    """A sentencepiece `.model`; its eos ends a document."""

    def __init__(self, path: str) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._model = SentencePieceProcessor(model_file=path)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{path} is not a sentencepiece model: {error}") from None
        self.vocab_size: int = self._model.vocab_size()
        self.eod_id: int = self._model.eos_id()
        if self.eod_id < 0:
            raise ValueError(f"{path} has no end-of-sentence token; train it with one (tools/train_tokenizer.py does)")
        self.fingerprint = _fingerprint("sentencepiece", Path(path).read_bytes())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._model.decode(ids)
        return text


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the Hugging Face `tokenizers` library."""

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise _needs("tokenizers", "hf") from None
        try:
            self._model = Library.from_file(path)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
        self.vocab_size: int = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        ids = [self._model.token_to_id(name) for name in _EOD_NAMES]
        found = [i for i in ids if i is not None]
        if not found:
            raise ValueError(f"{path} has no end-of-document token; looked for {', '.join(_EOD_NAMES)}")
        self.eod_id: int = found[0]
        self.fingerprint = _fingerprint("huggingface", Path(path).read_bytes())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._model.decode(ids, skip_special_tokens=False)
        return text


class TiktokenTokenizer:
    """A tiktoken encoding by name, or a `.tiktoken` ranks file with GPT-4's pattern and <|endoftext|> as last token."""

    _PATTERN = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )

    def __init__(self, path: str) -> None:
        try:
            import tiktoken
            from tiktoken.load import load_tiktoken_bpe
        except ImportError:
            raise _needs("tiktoken", "data") from None
        if Path(path).is_file():
            ranks = load_tiktoken_bpe(path)
            self._model = tiktoken.Encoding(
                Path(path).stem,
                pat_str=self._PATTERN,
                mergeable_ranks=ranks,
                special_tokens={_EOD_NAMES[0]: len(ranks)},
            )
            content = Path(path).read_bytes()
        else:
            if path not in tiktoken.list_encoding_names():
                names = ", ".join(tiktoken.list_encoding_names())
                raise ValueError(f"data.tokenizer.path = {path}: neither a file nor a tiktoken encoding ({names})")
            try:
                self._model = tiktoken.get_encoding(path)  # from its cache, or else from the network
            except OSError as error:
                raise ValueError(
                    f"data.tokenizer.path = {path}: tiktoken has no copy of this encoding and cannot fetch it "
                    f"({type(error).__name__}); run once where there is a network and copy the folder "
                    "TIKTOKEN_CACHE_DIR, or give the path of a ranks file"
                ) from None
            content = path.encode()
        self.vocab_size: int = self._model.n_vocab
        self.eod_id: int = self._model.eot_token
        self.fingerprint = _fingerprint("tiktoken", content)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode_ordinary(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._model.decode(ids)
        return text
