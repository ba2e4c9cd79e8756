"""Styles of text records: the keys that a record has, and how it becomes tokens. Each style is one file here.

To add a style, add a file here that defines `STYLE = Style("its-name", ...)`. The registry (`host/registry.py`) finds
it, and `megafp8 preprocess --style its-name` uses it. This module has the classes and functions that such a file
imports.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megafp8.data.tokenizers import Tokenizer


class Document(NamedTuple):
    """A document and its origin: the file, and the line or row.

    `text` is None if the document could not be read; `error` says why. For a file with keys, `record` has the values of
    the style's keys, and `text` is the first value if it is a string.
    """

    origin: str
    text: str | None
    error: str | None = None
    record: tuple[Any, ...] = ()


class TokenizedRecord(NamedTuple):
    """A tokenized document.

    Attributes:
        ids: Token ids, int32 `[n]`.
        sequences: Lengths of the sequences that the document consists of; they add up to n.
        loss_mask: 1 for tokens of answers and 0 for others, uint8 `[n]`; None if all tokens are learned.
        characters: Number of characters of the text.
    """

    ids: NDArray[np.int32]
    sequences: list[int]
    loss_mask: NDArray[np.uint8] | None
    characters: int

    @classmethod
    def masked(cls, ids: Sequence[int], mask: NDArray[np.uint8], characters: int, fault: str) -> TokenizedRecord:
        """Return a document of one sequence with a loss mask.

        Raises ValueError with `fault` if there is nothing to learn. The first token is not learned, because no token
        predicts it.
        """
        if not mask[1:].any():
            raise ValueError(f"has nothing to learn: {fault}")
        return cls(np.asarray(ids, np.int32), [len(ids)], mask, characters)


class Method(Protocol):
    """Conversion of documents of one style to tokens. Picklable."""

    has_loss_mask: bool

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Document], TokenizedRecord | None]:
        """Return a function that tokenizes a document, or returns None if the document has no text.

        Raises ValueError if the tokenizer does not suit the method. The returned function may raise any exception.
        """
        ...

    def warnings(self, tokenizer: Tokenizer, document: Document) -> list[str]:
        """Return warnings about text that the model would learn from a document by mistake."""
        ...


class RecordKey(NamedTuple):
    """A key of a record: the flag that renames it, the meaning of its value, its usual name, and alternative names."""

    flag: str
    meaning: str
    name: str
    others: tuple[str, ...] = ()


def position(error: UnicodeDecodeError) -> str:
    """Describe the byte that is not UTF-8, and its position."""
    return f"byte {error.object[error.start]:#04x} at position {error.start} ({error.reason})"


def text_of(value: Any, name: str) -> str:
    """Return `value` if it is a text, and raise ValueError otherwise.

    A string with lone surrogates, which JSON allows, is not a text. `value` may also be the error of decoding it.
    """
    if isinstance(value, UnicodeDecodeError):
        raise ValueError(f"not UTF-8 text: {position(value)}")
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode: {error}") from None
    return value


@dataclass(frozen=True)
class Style:
    """Description of a kind of record.

    Attributes:
        name: Name of the style for --style.
        keys: Keys that are read from a record. The first one belongs to --json-key.
        method: Function that builds the `Method` from the flags of the tool.
        flags: Flags of the tool that apply to this style.
        read: Function `read(value, name)` that converts the value of a key. It raises ValueError for invalid values.
    """

    name: str
    keys: tuple[RecordKey, ...]
    method: Callable[[argparse.Namespace], Method]
    flags: frozenset[str] = field(default_factory=frozenset)
    read: Callable[[Any, str], Any] = text_of

    def document(self, origin: str, names: Sequence[str], values: Sequence[Any]) -> Document:
        """Return the document of a record with these values under the keys `names`, or a document with an error."""
        try:
            record = tuple(self.read(value, repr(name)) for name, value in zip(names, values))
        except ValueError as error:
            return Document(origin, None, str(error))
        return Document(origin, record[0] if isinstance(record[0], str) else None, None, record)

    def names(self, wanted: Sequence[str], present: Collection[str]) -> tuple[str, ...]:
        """Return the names of the keys `wanted` in a record with the keys `present`.

        If a key has its usual name and the record does not have it, an alternative name in the record is used.
        """
        return tuple(
            next((other for other in key.others if other in present), name)
            if name == key.name and name not in present
            else name
            for key, name in zip(self.keys, wanted)
        )
