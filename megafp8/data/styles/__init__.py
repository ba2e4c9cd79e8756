"""What a record of a file of text holds, and how it becomes tokens, one file each.

To add a style, add a file here that defines `STYLE = Style("its-name", ...)`; the registry (`registry.py`) finds it,
and `megafp8 preprocess --style its-name` reads it. This package has what such a file imports.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
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


class Tokens(NamedTuple):
    """A document: its token ids int32, the lengths of its sequences, the loss mask, and the characters of its text.

    `loss_mask` uint8: 1 for tokens that are answers; None if all are learned.
    """

    ids: NDArray[np.int32]
    sequences: list[int]
    loss_mask: NDArray[np.uint8] | None
    characters: int

    @classmethod
    def masked(cls, ids: Sequence[int], mask: NDArray[np.uint8], characters: int, fault: str) -> Tokens:
        """ValueError with `fault` if there is nothing to learn: a first token has nothing that predicts it."""
        if not mask[1:].any():
            raise ValueError(f"has nothing to learn: {fault}")
        return cls(np.asarray(ids, np.int32), [len(ids)], mask, characters)


class Method(Protocol):
    """How documents of one style become tokens. Picklable."""

    has_loss_mask: bool

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Document], Tokens | None]:
        """The function that tokenizes a document; None for one without text. Raises ValueError if there is none with
        this tokenizer; the function may raise any exception."""
        ...


class Key(NamedTuple):
    """A key of a record: the flag that names it, what is under it, and its usual name."""

    flag: str
    meaning: str
    name: str


def position(error: UnicodeDecodeError) -> str:
    """Which byte is not UTF-8, and where."""
    return f"byte {error.object[error.start]:#04x} at position {error.start} ({error.reason})"


def fault_of_text(text: Any, name: str) -> str | None:
    """Why `text` is none. JSON can hold lone surrogates, which tokenizers do not take."""
    if isinstance(text, UnicodeDecodeError):
        return f"not UTF-8 text: {position(text)}"
    if not isinstance(text, str):
        return f"{name} is not a string"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"{name} is not valid Unicode: {error}"
    return None


@dataclass(frozen=True)
class Style:
    """What a record holds.

    `keys`: what is read of it; the first is that of --json-key. `flags`: those of the tool that say something of it, by
    which `method` makes what tokenizes its documents. `fault(value, name)`: why a value is none; None where it is one.
    """

    name: str
    keys: tuple[Key, ...]
    method: Callable[[argparse.Namespace], Method]
    flags: frozenset[str] = field(default_factory=frozenset)
    fault: Callable[[Any, str], str | None] = fault_of_text

    def document(self, origin: str, names: Sequence[str], values: Sequence[Any]) -> Document:
        """A document of the values of the keys that a file calls `names`, or of an error."""
        for name, value in zip(names, values):
            if fault := self.fault(value, repr(name)):
                return Document(origin, None, fault)
        text = values[0] if isinstance(values[0], str) else None
        return Document(origin, text, None, tuple(values))
