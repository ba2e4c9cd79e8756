"""Removal of credentials from the files of a run: its command, its log and its config.

It covers user:password in URLs; the values of keys that name a secret (`password`, `api_key`, `AWSAccessKeyId`) in
queries, overrides, JSON, YAML and headers; values that follow such an option (`--hf-token VALUE`); and tokens with a
known prefix (`hf_`, `sk-`, `AKIA`). `tokenizer`, `tokens` and `eos_token` do not name a secret.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

REDACTED = "REDACTED"
_NO_SECRET = "".join(rf"(?<!{kind}_)" for kind in ["end", "eod", "eos", "bos", "pad", "unk", "sep", "cls", "mask"])
_NAME = (
    r"(?:password|passwd|secret|credentials?|signature|sig|(?:aws)?(?:api|access|secret|private|account)[_-]?key"
    r"(?:[_-]?id)?|googleaccessid|client[_-]?secret|(?:access|auth|bearer|id|refresh|session)token"
    rf"|{_NO_SECRET}token)"
)
_KEY = rf"(?:[\w.-]*[._-])?{_NAME}"
_USER = re.compile(r"(?<=://)[^/?#\s'\"]+@")
_VALUE = re.compile(
    rf"""(?<![\w.-])({_KEY}(?:=|["']?[ ]*:[ ]*)|(?<=[?&])key=)('[^']*'|"[^"]*"|[^\s&#'",}}]+)""", re.IGNORECASE
)
_HEADER = re.compile(
    r"""((?:proxy-)?authorization["']?\s*[:=]\s*["']?|\bbearer\s+(?=[\w.~+/=-]{16}))[^\r\n"']+""", re.I
)
_OPTION = re.compile(rf"--?{_KEY}", re.IGNORECASE)
_OPTION_IN_TEXT = re.compile(rf"(?<!\S)(--{_KEY}\s+)('[^']*'|\"[^\"]*\"|(?!-)\S+)", re.IGNORECASE)
_TOKEN = re.compile(
    r"\b(?:hf_\w{20,}|sk-[\w-]{20,}|gh[oprsu]_\w{20,}|github_pat_\w{20,}|xox[abp]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}"
    r"|AIza[\w-]{35})"
)


def redact(text: str) -> str:
    """Return `text` with its credentials replaced."""
    text = _HEADER.sub(rf"\1{REDACTED}", _USER.sub(f"{REDACTED}@", text))
    for pattern in (_VALUE, _OPTION_IN_TEXT):
        text = pattern.sub(rf"\1{REDACTED}", text)
    return _TOKEN.sub(REDACTED, text)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command with credentials replaced, including the value in `--token VALUE`."""
    before = ["", *arguments[:-1]]
    return [REDACTED if _OPTION.fullmatch(a) else _redact_argument(b) for a, b in zip(before, arguments)]


def _redact_argument(argument: str) -> str:
    """Return an argument with credentials replaced. Its value may contain spaces."""
    key, equals, _ = argument.partition("=")
    return f"{key}={REDACTED}" if equals and re.fullmatch(rf"-*{_KEY}", key, re.IGNORECASE) else redact(argument)


def redact_tree(tree: Any) -> Any:
    """Return the dicts and lists of a config with credentials in all strings replaced."""
    if isinstance(tree, dict):
        return {key: redact_tree(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [redact_tree(value) for value in tree]
    return redact(tree) if isinstance(tree, str) else tree
