"""Messages that may quote text from others: tensor names, and keys and values of files.

`printable` is applied where messages leave the process, so that no file can control or flood the terminal. The other
functions keep a message short where it is created.

This module must not import torch, because `megafp8.training.errors` works without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

MAX_LISTED = 5
_LONGEST_NAME, _LONGEST_VALUE, _LONGEST_MESSAGE = 120, 300, 20_000
"""Maximum number of characters of each in a message."""


def printable(text: str) -> str:
    """Escape control and formatting characters except line breaks and tabs, and cut out the middle of long text."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return _shortened(text, _LONGEST_MESSAGE)


def name_text(name: object) -> str:
    """Return the name of a tensor or key for use in a message."""
    text = name if isinstance(name, str) and name.isprintable() else ascii(name)
    return _shortened(text, _LONGEST_NAME)


def value_text(value: object) -> str:
    """Return a value of a config or file for use in a message."""
    return _shortened(repr(value), _LONGEST_VALUE)


def join_first(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first `MAX_LISTED` of `names`, and the number of the remaining ones."""
    remainder = f"{separator}and {len(names) - MAX_LISTED:,} more" if len(names) > MAX_LISTED else ""
    return separator.join(names[:MAX_LISTED]) + remainder


def join_names(names: Iterable[object], separator: str = ", ") -> str:
    """Return the first of `names`, which may be arbitrary text, and the number of the remaining ones."""
    return join_first([name_text(name) for name in names], separator)


def print_error(error: object) -> None:
    """Print `error: ` and the text of `error` on stderr."""
    print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 20]} … {text[-17:]}"
