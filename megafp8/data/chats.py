"""Chats and completions as token ids with a loss mask: which tokens are answers, and which are only their context.

A chat is rendered by the tokenizer's chat template, a Jinja program, in the sandbox and with the variables and
functions that transformers' `apply_chat_template` gives it, and tokenized as a whole. So token ids are those of
transformers.

Which characters are answers is found in one of two ways:

    generation blocks   a template with `{% generation %}` marks them itself
    prefixes            of other templates the chat is rendered up to before each message of the assistant, with
                        `add_generation_prompt`, and up to after it: the answer is what the second adds to the first.
                        Both must be prefixes of the whole chat. Some templates render a message otherwise if others
                        follow it; then it is an error, since the answer's place in the whole chat is not known

An answer includes the token that ends it, and not white space that the template adds after a special token. A token
that has characters of an answer and of what precedes it counts as the answer's.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megafp8.data.packages import import_package
from megafp8.data.tokenizers import Tokenizer
from megafp8.strict_json import parse_json

CONFIG_FILE, TOKENS_FILE, TEMPLATE_FILE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
ANSWER_ROLE = "assistant"

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]
"""Start and end of each answer, in characters."""

RENDER_SECONDS, RENDERED_CHARACTERS = 5.0, 1 << 24
"""Limits of rendering, as templates come with models from others."""
_LARGEST_EXPONENT = 1024
_BEGIN, _END = "\ufdd0", "\ufdd1"  # noncharacters, which no text has
_BLOCK = re.compile(r"\{%[-+]?\s*generation\b")


class Encoded(NamedTuple):
    """Token ids `[n]`, and 1 for those that are answers, uint8 `[n]`."""

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the special tokens that it names, such as bos_token. Picklable.

    Rendering raises ValueError with the message of the template, or of Jinja.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of a chat."""
        return re.sub(f"[{_BEGIN}{_END}]", "", self._render(messages, add_generation_prompt))

    def answers(self, messages: Sequence[Message], special: Sequence[str] = ()) -> tuple[str, Spans]:
        """The text of a chat, and the places of its answers.

        `special`: the tokens after which white space is not a part of the answer. Raises ValueError if an answer's
        place cannot be found.
        """
        if _BLOCK.search(self.source):
            if any(mark in message["content"] for message in messages for mark in (_BEGIN, _END)):
                raise ValueError("a message holds U+FDD0 or U+FDD1, which are no characters")
            return _spans_of_blocks(self._render(messages, False))
        text, spans = self.render(messages), []
        ends = re.compile(f"(?:{'|'.join(map(re.escape, special)) or '(?!)'})(\\s+)$")
        for i, message in enumerate(messages):
            if message["role"] != ANSWER_ROLE:
                continue
            before = self.render(messages[:i], add_generation_prompt=True)
            after = self.render(messages[: i + 1]) if i + 1 < len(messages) else text
            if not (after.startswith(before) and text.startswith(after)):
                raise ValueError(
                    f"the chat template renders what precedes the end of message {i + 1} otherwise in the whole chat, "
                    "so the place of this answer is not known; mark answers in the template by {% generation %} ... "
                    "{% endgeneration %} and give it by --chat-template"
                )
            trailing = ends.search(after, len(before))
            spans.append((len(before), trailing.start(1) if trailing else len(after)))
        return text, spans

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        jinja2 = import_package("jinja2", "a chat template")
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        variables = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            with _time_limit(RENDER_SECONDS):
                pieces, length = [], 0
                for piece in self._compiled.generate(messages=plain, **variables, **self.special_tokens):
                    length += len(piece)
                    if length > RENDERED_CHARACTERS:
                        raise ValueError(f"its text has more than {RENDERED_CHARACTERS:,} characters")
                    pieces.append(piece)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses it: {error}") from None
        except Exception as error:  # a template can raise anything: a division by zero, a recursion
            raise ValueError(f"the chat template fails: {type(error).__name__}: {error}") from None
        return "".join(pieces)

    @cached_property
    def _compiled(self) -> Any:
        return _compile(self.source)

    def __getstate__(self) -> dict[str, Any]:  # a compiled template cannot be pickled
        return {"source": self.source, "special_tokens": self.special_tokens}


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Context in which Python code of this thread raises TimeoutError when `seconds` are over.

    Each line that runs is compared with the clock. So it ends loops, and nothing that is done within one call of native
    code.
    """
    end, before = time.monotonic() + seconds, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"it takes more than {seconds:g} s")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _compile(source: str) -> Any:
    """A Jinja template in the environment of transformers' chat templates. Raises ValueError if it is none."""
    jinja2 = import_package("jinja2", "a chat template")
    extensions, sandbox = import_package("jinja2.ext", "a chat template"), import_package("jinja2.sandbox", "")
    nodes = jinja2.nodes

    class Generation(extensions.Extension):  # type: ignore[name-defined]
        """`{% generation %}`: the text of an answer, which is put between `_BEGIN` and `_END`."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_BEGIN, _END))
            return [node.set_lineno(line) for node in (begin, nodes.Scope(body), end)]

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own escapes characters of HTML

    class Environment(sandbox.ImmutableSandboxedEnvironment):  # type: ignore[name-defined]
        """With limits to what operators may make."""

        intercepted_binops = frozenset(("*", "**", "+"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(x) if isinstance(x, (str, list, tuple)) else x for x in (left, right)]
            numbers = all(isinstance(x, int) for x in sizes)
            of_text = sizes != [left, right]
            if numbers and of_text and (sizes[0] * sizes[1] if operator == "*" else sum(sizes)) > RENDERED_CHARACTERS:
                raise ValueError(f"{operator} would make more than {RENDERED_CHARACTERS:,} characters")
            if numbers and operator == "**" and abs(sizes[0]) > 1 and sizes[1] > _LARGEST_EXPONENT:
                raise ValueError(f"an exponent of more than {_LARGEST_EXPONENT}")
            return super().call_binop(context, operator, left, right)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extensions.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template cannot be compiled: line {error.lineno}: {error}") from None
    except (RecursionError, MemoryError, SyntaxError) as error:
        raise ValueError(f"the chat template cannot be compiled: {type(error).__name__}: {error}") from None


def _spans_of_blocks(marked: str) -> tuple[str, Spans]:
    """Of a text with marks of generation blocks: the text without them, and what they enclose."""
    text, spans, begin = "", [], 0
    for part in re.split(f"([{_BEGIN}{_END}])", marked):
        if part == _BEGIN:
            begin = len(text)
        elif part == _END:
            spans.append((begin, len(text)))
        else:
            text += part
    return text, spans


def read_chat_template(tokenizer_path: str | None, given: str | None = None) -> ChatTemplate:
    """The chat template beside a `tokenizer.json`, or in the file `given`, with the tokenizer's special tokens.

    As transformers reads them: chat_template.jinja, or else chat_template of tokenizer_config.json, where several have
    names its "default". Raises ValueError if there is none, or if a file cannot be read.
    """
    folder = Path(tokenizer_path or "").parent
    config = _tokenizer_config(folder)
    file = Path(given) if given is not None else folder / TEMPLATE_FILE
    source = config.get("chat_template")
    if given is not None or file.exists():
        source = _read(file)
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise ValueError(
            f"{folder} has no chat template, neither {TEMPLATE_FILE} nor chat_template of {CONFIG_FILE}: give the file "
            "of one by --chat-template"
        )
    _compile(source)
    return ChatTemplate(source, _special_tokens(config))


def read_special_tokens(folder: Path) -> dict[str, str]:
    """By role, such as bos_token, the special tokens that the files of transformers in a folder name."""
    return _special_tokens(_tokenizer_config(folder))


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    config, tokens = (_read_json(folder / name) for name in (CONFIG_FILE, TOKENS_FILE))
    return config if "added_tokens_decoder" in config else config | tokens


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    special = {key: value for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    special |= extra if isinstance(extra, dict) else {}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in special.items()}
    return {key: value for key, value in contents.items() if isinstance(value, str)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        content = parse_json(_read(path))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds a {type(content).__name__}, not an object")
    return content


def chat_encoder(tokenizer: Tokenizer, template: ChatTemplate) -> Callable[[Sequence[Message]], Encoded]:
    """The function that tokenizes a chat. It raises ValueError for a chat that has no answer or cannot be rendered.

    Raises ValueError for tokenizers that `_check_special_tokens` refuses.
    """
    _check_special_tokens(tokenizer, template)
    model = tokenizer.model
    special = [token.content for token in model.get_added_tokens_decoder().values() if token.special]

    def encode(messages: Sequence[Message]) -> Encoded:
        text, spans = template.answers(messages, special)
        encoding = model.encode(text, add_special_tokens=False)
        mask = np.zeros(len(encoding.ids), np.uint8)
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        for begin, end in spans:
            mask[(begins < end) & (np.maximum(ends, begins + 1) > begin)] = 1
        return _checked(encoding.ids, mask, f"no message of the {ANSWER_ROLE}, or none with text")

    return encode


def chat_prompt_encoder(tokenizer: Tokenizer, template: ChatTemplate) -> Callable[[Sequence[Message]], list[int]]:
    """The function that tokenizes a chat up to where the assistant is to answer.

    It raises ValueError for a chat that cannot be rendered. Raises ValueError for tokenizers that
    `_check_special_tokens` refuses.
    """
    _check_special_tokens(tokenizer, template)
    return lambda messages: tokenizer.encode(template.render(messages, add_generation_prompt=True))


def _check_special_tokens(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    """ValueError unless the tokenizer is a tokenizer.json that has the template's special tokens: only these tokenizers
    find special tokens in a text."""
    if not hasattr(tokenizer.model, "get_added_tokens_decoder"):
        raise ValueError("chats need a tokenizer that finds special tokens in a text: --tokenizer huggingface")
    missing = {value for value in template.special_tokens.values() if tokenizer.id_of(value) is None}
    if missing:
        raise ValueError(
            f"tokenizer.json does not have the special tokens {', '.join(sorted(missing))} of {CONFIG_FILE} beside it; "
            "save the tokenizer again by transformers"
        )


def completion_encoder(tokenizer: Tokenizer, append_eod: bool) -> Callable[[str, str], Encoded]:
    """The function that tokenizes a prompt and its completion. It raises ValueError if the completion is empty.

    They are tokenized together. The completion begins with the first token that the prompt alone does not have there.
    `append_eod`: it ends with the end-of-document token.
    """

    def encode(prompt: str, completion: str) -> Encoded:
        if not completion:
            raise ValueError("the completion is empty")
        ids, own = tokenizer.encode(prompt + completion), tokenizer.encode(prompt)
        differing = [a != b for a, b in zip(ids, own)]
        first = differing.index(True) if True in differing else min(len(own), len(ids))
        ids = [*ids, tokenizer.eod_id] if append_eod else ids
        return _checked(ids, (np.arange(len(ids)) >= first).astype(np.uint8), "no token after the prompt")

    return encode


def _checked(ids: Sequence[int], mask: NDArray[np.uint8], fault: str) -> Encoded:
    """ValueError with `fault` if there is nothing to learn: a first token has nothing that predicts it."""
    if not mask[1:].any():
        raise ValueError(f"has nothing to learn: {fault}")
    return Encoded(np.asarray(ids, np.int32), mask)
