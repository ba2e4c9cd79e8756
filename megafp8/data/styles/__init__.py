"""What a record of a file of text holds, and how it becomes tokens, one file each.

To add a style, add a file here that defines `STYLE = Style("its-name", ...)`; the registry (`host/registry.py`) finds
it, and `megafp8 preprocess --style its-name` reads it. This package has what such a file imports.
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
    """A text and its origin (file, and line or row). `text` is None if it could not be read; `error` says why.

    `record`: of a file with keys the values of the style's; `text` is the first, if it is one.
    """

    origin: str
    text: str | None
    error: str | None = None
    record: tuple[Any, ...] = ()


class TokenizedRecord(NamedTuple):
    """A document: its token ids int32, the lengths of its sequences, the loss mask, and the characters of its text.

    `loss_mask` uint8: 1 for tokens that are answers; None if all are learned.
    """

    ids: NDArray[np.int32]
    sequences: list[int]
    loss_mask: NDArray[np.uint8] | None
    characters: int

    @classmethod
    def masked(cls, ids: Sequence[int], mask: NDArray[np.uint8], characters: int, fault: str) -> TokenizedRecord:
        """ValueError with `fault` if there is nothing to learn: a first token has nothing that predicts it."""
        if not mask[1:].any():
            raise ValueError(f"has nothing to learn: {fault}")
        return cls(np.asarray(ids, np.int32), [len(ids)], mask, characters)


class Method(Protocol):
    """How documents of one style become tokens. Picklable."""

    has_loss_mask: bool

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Document], TokenizedRecord | None]:
        """Make the function that tokenizes a document, which returns None for one without text.

        Raises ValueError if there is none with this tokenizer; the function may raise any exception.
        """
        ...

    def warnings(self, tokenizer: Tokenizer, document: Document) -> list[str]:
        """Return what is learned of a document that a user may not want."""
        ...


class RecordKey(NamedTuple):
    """A key of a record: the flag that names it, what is under it, its usual name, and others that stand for that."""

    flag: str
    meaning: str
    name: str
    others: tuple[str, ...] = ()


def position(error: UnicodeDecodeError) -> str:
    """Which byte is not UTF-8, and where."""
    return f"byte {error.object[error.start]:#04x} at position {error.start} ({error.reason})"


def text_of(value: Any, name: str) -> str:
    """The text that `value` is. Raises ValueError if it is none, as of lone surrogates, which JSON can hold."""
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
    """What a record holds.

    `keys`: what is read of it; the first is that of --json-key. `flags`: those of the tool that say something of it, by
    which `method` makes what tokenizes its documents. `read(value, name)`: what a document has of a key's value.
    Raises ValueError where that is none.
    """

    name: str
    keys: tuple[RecordKey, ...]
    method: Callable[[argparse.Namespace], Method]
    flags: frozenset[str] = field(default_factory=frozenset)
    read: Callable[[Any, str], Any] = text_of

    def document(self, origin: str, names: Sequence[str], values: Sequence[Any]) -> Document:
        """A document of the values of the keys that a file calls `names`, or of an error."""
        try:
            record = tuple(self.read(value, repr(name)) for name, value in zip(names, values))
        except ValueError as error:
            return Document(origin, None, str(error))
        return Document(origin, record[0] if isinstance(record[0], str) else None, None, record)

    def names(self, wanted: Sequence[str], present: Collection[str]) -> tuple[str, ...]:
        """What a record that has the keys `present` calls the keys `wanted`: usual names may be other ones there."""
        return tuple(
            next((other for other in key.others if other in present), name)
            if name == key.name and name not in present
            else name
            for key, name in zip(self.keys, wanted)
        )
