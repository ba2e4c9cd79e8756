"""Prompts for a model to continue, from files of JSON lines, with the other keys of their records.

The order is a function of (seed, epoch), so a resumed run only needs the number of prompts that were read. All prompts
are read and tokenized when a run starts, so an unusable prompt is an error at the start.
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
    """A prompt, its token ids, and the whole record that it comes from.

    `text` is a string or a list of messages, as in the record.
    """

    text: Any
    tokens: list[int]
    record: dict[str, Any]


class PromptSource:
    """Endless stream of prompts. Each prompt is used for `group_size` consecutive samples of a run.

    Args:
        path: File, folder, glob or URL of JSON lines.
        tokenizer: Tokenizer of the model.
        tokenizer_path: Path of the tokenizer, where its chat template is found.
        key: Key of a record that holds its prompt.
        longest: Largest number of tokens of a prompt.
        group_size: Number of samples that continue one prompt.
        seed: Seed of the order of prompts.
        seq_length: Number of labels of a sample.

    Raises:
        DataError: A record cannot be used. The message names the file and line.
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
                raise DataError(f"{file.path} is not uncompressed JSON lines; prompts can be read only from such files")
            for line, record in _records(file.path):
                try:
                    prompt = _prompt(record, key, encode)
                    if len(prompt.tokens) > longest:
                        raise ValueError(
                            f"the prompt has {len(prompt.tokens)} tokens, but training.seq_length minus "
                            f"data.grpo.max_tokens leaves room for {longest}; shorten the prompt, or increase "
                            "training.seq_length"
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
        """Return the number of prompts before sample `index`, and the prompt of that sample."""
        number = index // self.group_size
        epoch, place = divmod(number, len(self.prompts))
        return number, self.prompts[self._order(epoch)[place]]

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        key = np.array([self.seed & (2**64 - 1), epoch], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).permutation(len(self.prompts))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(prompt.tokens) for prompt in self.prompts)

    def epochs(self, samples: int) -> float:
        """Return the number of epochs read after `samples` samples."""
        return samples / self.group_size / len(self.prompts)

    def index_checksum(self, index: int) -> str:
        """Return the SHA-256 of the order of prompts in the epoch of sample `index`."""
        epoch = index // self.group_size // len(self.prompts)
        return hashlib.sha256(self._order(epoch).tobytes()).hexdigest()


def _records(path: AnyPath) -> Iterator[tuple[int, Any]]:
    """Yield the line number and JSON value of each non-empty line of a file. Raises DataError."""
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
        raise ValueError(f"has no key {key!r} ({present}); data.grpo.prompt_key names the key of the prompt")
    if "completion" in record or "completions" in record or (key != "prompt" and "prompt" in record):
        raise ValueError(
            "has the key completion, completions or prompt, which is reserved for the arguments of rewards; rename it"
        )
    text = messages_of(record[key], repr(key)) if isinstance(record[key], list) else text_of(record[key], repr(key))
    tokens = encode(text)
    if not tokens:
        raise ValueError("the prompt is empty, and the tokenizer adds no beginning token that the model could continue")
    return Prompt(text, tokens, record)


class _Encoder:
    """Tokenizer of prompts. Texts begin like documents, and messages are rendered by the chat template.

    The template is read when the first list of messages is tokenized.
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
