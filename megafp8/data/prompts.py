"""Prompts that a model is to continue, from files of JSON lines, with what else their records have.

The order is a function of (seed, epoch), so the number of prompts that were given is all that resuming needs. All
prompts are read and tokenized when a run starts, so that one which cannot be used is an error then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megafp8.data import DataError
from megafp8.data.chats import chat_prompt_encoder, read_chat_template
from megafp8.data.documents import find_files, is_too_long, open_to_read, read_lines, too_long
from megafp8.data.styles import position, text_of
from megafp8.data.styles.chat import messages_of
from megafp8.data.tokenizers import Tokenizer
from megafp8.host.object_store import AnyPath
from megafp8.host.strict_json import parse_json


class Prompt(NamedTuple):
    """`text`: a text or messages, as the record has them; `record`: all of it."""

    text: Any
    tokens: list[int]
    record: dict[str, Any]


class PromptSource:
    """Endless prompts of the files that `path` names, each of them `group_size` times: the samples of a run.

    `key`: of a record, for its prompt. `tokenizer_path`: of the tokenizer, for its chat template. `longest`: the most
    tokens of a prompt. Raises DataError, with file and line, for a record that cannot be used.
    """

    def __init__(
        self, path: str, tokenizer: Tokenizer, tokenizer_path: str | None, *, key: str, longest: int, group_size: int,
        seed: int, seq_length: int,
    ) -> None:  # fmt: skip
        self.prefix, self.group_size, self.seed, self.seq_length = path, group_size, seed, seq_length
        files, _ = find_files([path], json_keys=[key], flag="data.train,")
        encode = _Encoder(tokenizer, tokenizer_path)
        self.prompts: list[Prompt] = []
        for file in files:
            if file.content != "json_lines" or file.compression:
                raise DataError(f"{file.path} is not JSON lines as they are; prompts are read from these")
            for line, record in _records(file.path):
                try:
                    prompt = _prompt(record, key, encode)
                    if len(prompt.tokens) > longest:
                        raise ValueError(
                            f"the prompt has {len(prompt.tokens)} tokens, and training.seq_length less "
                            f"data.grpo.max_tokens leaves room for {longest}; shorten it, or make samples longer"
                        )
                except ValueError as error:
                    raise DataError(f"{file.path}, line {line}: {error}") from None
                self.prompts.append(prompt)
        if not self.prompts:
            raise DataError(f"{path} has no prompts")
        contents = hashlib.sha256()
        for prompt in self.prompts:
            contents.update(repr((prompt.tokens, sorted(prompt.record.items()))).encode())
        self.fingerprint = contents.hexdigest()
        self._order = lru_cache(maxsize=2)(self._make_order)

    def prompt_at(self, index: int) -> tuple[int, Prompt]:
        """The prompt of sample `index`, and how many were given before it."""
        number = index // self.group_size
        epoch, place = divmod(number, len(self.prompts))
        return number, self.prompts[self._order(epoch)[place]]

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        key = np.array([self.seed & (2**64 - 1), epoch], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).permutation(len(self.prompts))

    @property
    def num_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)

    def epochs(self, samples: int) -> float:
        """Epochs read after `samples`."""
        return samples / self.group_size / len(self.prompts)

    def index_checksum(self, index: int) -> str:
        """SHA-256 of the order of the epoch of sample `index`."""
        epoch = index // self.group_size // len(self.prompts)
        return hashlib.sha256(self._order(epoch).tobytes()).hexdigest()


def _records(path: AnyPath) -> Iterator[tuple[int, Any]]:
    """Yield the JSON values of a file, by number of the line. Raises DataError."""
    number = 0
    try:
        with open_to_read(path) as file:
            for number, line in enumerate(read_lines(file), 1):
                if is_too_long(line):
                    raise DataError(f"{path}, line {number}: {too_long('a line')}")
                if line.strip():
                    yield number, parse_json(line.removeprefix(b"\xef\xbb\xbf"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 text: {position(error)}") from None
    except ValueError as error:
        raise DataError(f"{path}, line {number}: not JSON: {error} (each line must be one JSON object)") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _prompt(record: Any, key: str, encode: Callable[[Any], list[int]]) -> Prompt:
    if not isinstance(record, dict) or key not in record:
        present = ", ".join(list(record)[:10]) if isinstance(record, dict) else f"it is a {type(record).__name__}"
        raise ValueError(f"has no key {key!r} ({present}); data.grpo.prompt_key names that of prompts")
    if "completion" in record or "completions" in record or (key != "prompt" and "prompt" in record):
        raise ValueError("has a key that a reward gets of each text: completion, completions or prompt; rename it")
    text = messages_of(record[key], repr(key)) if isinstance(record[key], list) else text_of(record[key], repr(key))
    tokens = encode(text)
    if not tokens:
        raise ValueError("the prompt is empty, and nothing is before it that the model could continue")
    return Prompt(text, tokens, record)


class _Encoder:
    """Function that tokenizes texts, which begin as documents do, and messages, by the chat template.

    The template is read when the first messages come.
    """

    def __init__(self, tokenizer: Tokenizer, path: str | None) -> None:
        self._tokenizer, self._path = tokenizer, path
        self._of_chats: Callable[[Any], list[int]] | None = None

    def __call__(self, text: Any) -> list[int]:
        if isinstance(text, str):
            return [*self._tokenizer.start_ids, *self._tokenizer.encode(text)]
        if self._of_chats is None:
            try:
                template = read_chat_template(self._path)
            except ValueError as error:
                raise ValueError(str(error).partition(": give the file")[0]) from None
            self._of_chats = chat_prompt_encoder(self._tokenizer, template)
        return self._of_chats(text)
