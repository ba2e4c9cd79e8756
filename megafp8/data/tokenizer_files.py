"""Special tokens in the files of a tokenizer's folder, in the formats that transformers writes and reads.

tokenizer_config.json     eos_token, bos_token, add_bos_token; special tokens of a tiktoken ranks file
special_tokens_map.json   eos_token, bos_token
generation_config.json    eos_token_id
tokenization_*.py         pattern of a tiktoken ranks file; the code is parsed but never run
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megafp8.host.strict_json import parse_json

CONFIG_FILE, TOKENS_FILE, TEMPLATE_FILE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
CODE_FILES = "tokenization_*.py"


class SpecialTokenFiles(NamedTuple):
    """Contents of the files that name special tokens. A missing file is an empty mapping."""

    config: Mapping[str, Any] = {}
    tokens: Mapping[str, Any] = {}
    generation: Mapping[str, Any] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> SpecialTokenFiles:
        """Read the files in a folder. Raises ValueError if one is damaged."""
        return cls(*(_read_json(folder / name) for name in (CONFIG_FILE, TOKENS_FILE, GENERATION_FILE)))

    def named(self, role: str) -> tuple[str, str] | None:
        """Return the token of a role such as "eos_token", and the name of its file, or None if no file has it."""
        files = [(CONFIG_FILE, self.config), (TOKENS_FILE, self.tokens)]
        for name, content in files if "added_tokens_decoder" in self.config else reversed(files):
            if (token := token_name(content.get(role))) is not None:
                return token, name
        return None

    def generation_ends(self) -> list[int]:
        """Return the ids that end a generated text. Raises ValueError if they are not token ids."""
        return token_ids(self.generation.get("eos_token_id"), f"{GENERATION_FILE}: eos_token_id")

    def numbered(self) -> dict[str, int]:
        """Return the ids that tokenizer_config.json gives to special tokens, by name. Raises ValueError."""
        entries = self.config.get("added_tokens_decoder") or {}
        try:
            numbers = {token_name(token): int(number) for number, token in entries.items()}
        except (AttributeError, ValueError) as error:
            raise ValueError(
                f"{CONFIG_FILE}: added_tokens_decoder is not a mapping of ids to tokens: {error}"
            ) from None
        return {name: number for name, number in numbers.items() if name is not None}


def token_ids(value: Any, name: str) -> list[int]:
    """Return `value`, which is one token id, a list of ids or None, as a list. `name` names it in the ValueError."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(each) is int for each in ids):
        raise ValueError(f"{name} = {value!r}; supported: a token, or a list of them")
    return ids


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens that transformers reads from a folder, by role such as "bos_token"."""
    files = SpecialTokenFiles.from_folder(folder)
    config = files.config if "added_tokens_decoder" in files.config else {**files.config, **files.tokens}
    special = {key: value for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    special |= extra if isinstance(extra, dict) else {}
    names = {key: token_name(value) for key, value in special.items()}
    return {key: name for key, name in names.items() if name is not None}


def token_name(token: Any) -> str | None:
    """Return the name of a token from its entry in a file: a string, or an object with its content. Else None."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def read_pattern(folder: Path) -> str | None:
    """Return the pattern that the tokenizer's code in a folder assigns to `pat_str`, or None.

    The value must be a string literal, or a join of string literals. The code is parsed but never run.
    """
    for file in sorted(folder.glob(CODE_FILES)):
        try:
            nodes = list(ast.walk(ast.parse(read_text(file))))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"{file} cannot be parsed: {error}") from None
        for node in nodes:
            names = [getattr(x, "id", "").lower() for x in node.targets] if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.Assign) and "pat_str" in names:
                return _text_of(node.value)
    return None


def _text_of(value: ast.expr) -> str | None:
    """Return the value of an expression that is a string literal or a join of string literals, or None."""
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"), args=[ast.List(parts)]):
            texts = [_text_of(part) for part in parts]
            return None if None in texts else between.join(text for text in texts if text is not None)
        case _:
            return None


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raises ValueError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, empty if there is no file. Raises ValueError if it is damaged."""
    return _read_json(folder / CONFIG_FILE)


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one if there is no file. Raises ValueError if the file is damaged."""
    if not path.exists():
        return {}
    try:
        content = parse_json(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds a {type(content).__name__}, not an object")
    return content
