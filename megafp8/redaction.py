"""Removal of credentials from what a run writes: its command, its log and its config.

Covered are user:password in URLs, signatures and tokens in their queries, and values of options whose key names a
secret (`password`, `api_key`, `--hf-token`). `tokenizer`, `tokens` and `end_token` name no secret.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

REDACTED = "REDACTED"
_NAME = (
    r"(?:password|passwd|secret|credentials?|signature|sig|(?:api|access|secret|private|account)[_-]?key(?:[_-]?id)?"
    r"|(?<!end_)(?<!eod_)(?<!eos_)(?<!bos_)(?<!pad_)token)"
)
_KEY = rf"(?:[\w.-]*[._-])?{_NAME}"
_USER = re.compile(r"(?<=://)[^/?#\s'\"]+@")
_VALUE = re.compile(rf"(?<![\w.-])({_KEY}=)('[^']*'|\"[^\"]*\"|[^\s&#'\"]+)", re.IGNORECASE)
_OPTION = re.compile(rf"--?{_KEY}", re.IGNORECASE)


def redact(text: str) -> str:
    """`text` with credentials in URLs, in their queries and in `key=value` replaced."""
    return _VALUE.sub(rf"\1{REDACTED}", _USER.sub(f"{REDACTED}@", text))


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command; also of an option that is followed by its value, `--token VALUE`."""
    before = ["", *arguments[:-1]]
    return [REDACTED if _OPTION.fullmatch(a) else _redact_argument(b) for a, b in zip(before, arguments)]


def _redact_argument(argument: str) -> str:
    """One argument, whose value may have spaces."""
    key, equals, _ = argument.partition("=")
    return f"{key}={REDACTED}" if equals and re.fullmatch(rf"-*{_KEY}", key, re.IGNORECASE) else redact(argument)


def redact_tree(tree: Any) -> Any:
    """Dicts and lists of a config with all strings redacted."""
    if isinstance(tree, dict):
        return {key: redact_tree(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [redact_tree(value) for value in tree]
    return redact(tree) if isinstance(tree, str) else tree
