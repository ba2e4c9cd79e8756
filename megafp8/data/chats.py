"""Chats as token ids with a loss mask: which tokens are answers, and which are only their context.

A chat is rendered by the tokenizer's chat template, a Jinja program, in the sandbox and with the variables and
functions that transformers' `apply_chat_template` gives it, in a process of its own with limits of memory and time
(`template_process`), and tokenized as a whole. So token ids are those of transformers.

Which characters are answers is found in one of two ways:

    generation blocks   a template with `{% generation %}` marks them itself
    prefixes            of other templates the chat is rendered up to before each message of the assistant, with
                        `add_generation_prompt`, and up to after it: the answer is what the second adds to the first.
                        Both must be prefixes of the whole chat. Some templates render a message otherwise if others
                        follow it; then it is an error, since the answer's place in the whole chat is not known

An answer includes the token that ends it, and not white space that the template adds after a special token. A template
may end an answer only by the special token that begins the next message (GLM's `<|user|>`). The answer then includes
that token; after the last message, the token that would begin a message of the user is added to the text. So masks and
texts teach a model to stop. A token that has characters of an answer and of what precedes it counts as the answer's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megafp8.data.packages import import_package
from megafp8.data.styles import TokenizedRecord
from megafp8.data.template_process import BEGIN, END, render
from megafp8.data.tokenizer_files import (
    CONFIG_FILE,
    TEMPLATE_FILE,
    read_special_tokens,
    read_text,
    read_tokenizer_config,
)
from megafp8.data.tokenizers import Tokenizer, special_tokens_of, tokenizer_file

ANSWER_ROLE = "assistant"

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]
"""Start and end of each answer, in characters."""

_BLOCK = re.compile(r"\{%[-+]?\s*generation\b")


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the special tokens that it names, such as bos_token. Picklable.

    Rendering raises ValueError with the message of the template, or of Jinja.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of a chat."""
        return re.sub(f"[{BEGIN}{END}]", "", self._render(messages, add_generation_prompt))

    def answers(self, messages: Sequence[Message], special: Sequence[str] = ()) -> tuple[str, Spans]:
        """Return the text of a chat, and the places of its answers.

        Args:
            special: The special tokens, which may end an answer.

        Raises:
            ValueError: The place of an answer cannot be found.
        """
        if _BLOCK.search(self.source):
            if any(mark in message["content"] for message in messages for mark in (BEGIN, END)):
                raise ValueError("a message holds U+FDD0 or U+FDD1, which are no characters")
            return _spans_of_blocks(self._render(messages, False))
        text, spans = self.render(messages), []
        any_special = f"(?:{'|'.join(map(re.escape, special)) or '(?!)'})"
        ends, begins_next = re.compile(rf"{any_special}(\s*)$"), re.compile(rf"\s*{any_special}")
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
            if (end_token := ends.search(after, len(before))) is not None:
                spans.append((len(before), end_token.start(1)))
                continue
            is_last = i + 1 == len(messages)
            end_token = begins_next.match(self._header_after(messages, text) if is_last else text[len(after) :])
            added = "" if end_token is None else end_token[0]
            text += added if is_last else ""
            spans.append((len(before), len(after) + len(added)))
        return text, spans

    def _header_after(self, messages: Sequence[Message], text: str) -> str:
        """Return what the template puts between `text`, which ends with an answer, and a message of the user."""
        question = "?"
        try:
            longer = self.render([*messages, {"role": "user", "content": question}])
        except ValueError:
            return ""
        return longer[len(text) :].partition(question)[0] if longer.startswith(text) else ""

    def warnings(self, messages: Sequence[Message], special: Sequence[str]) -> list[str]:
        """Return what the answers of a chat teach that a user may not want: a header, or no end."""
        text, spans = self.answers(messages, special)
        faults = []
        if (header := self._learned_header(messages, text, spans)) is not None:
            faults.append(
                f"the chat template has no generation prompt, so the header of an answer, {header!r}, is learned as "
                "well; add it by {% if add_generation_prompt %}, or mark answers by {% generation %}"
            )
        if not all(text[:end].endswith(tuple(special)) for _, end in spans):
            faults.append(
                "no special token ends the answers, so a model does not learn where to stop; end them in the template, "
                "for example by {{ eos_token }}, inside of {% generation %} if the template has it"
            )
        return faults

    def _learned_header(self, messages: Sequence[Message], text: str, spans: Spans) -> str | None:
        """Return what precedes the content of the first answer in its span, unless a generation prompt is similar."""
        i = next(i for i, message in enumerate(messages) if message["role"] == ANSWER_ROLE)
        content, before = messages[i]["content"].strip(), messages[:i]
        if _BLOCK.search(self.source) or not content:
            return None
        header = text[slice(*spans[0])].partition(content)[0]
        prompted = self.render(before, add_generation_prompt=True) != self.render(before)
        return None if prompted or not header.strip() else header

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        variables = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
        return render(self.source, {"messages": plain, **variables, **self.special_tokens})


def _spans_of_blocks(marked: str) -> tuple[str, Spans]:
    """A text without its marks of generation blocks, and the spans that they enclose."""
    text, spans, begin = "", [], 0
    for part in re.split(f"([{BEGIN}{END}])", marked):
        if part == BEGIN:
            begin = len(text)
        elif part == END:
            spans.append((begin, len(text)))
        else:
            text += part
    return text, spans


def read_chat_template(tokenizer_path: str | None, given: str | None = None) -> ChatTemplate:
    """The chat template beside a `tokenizer.json`, or in the file `given`, with the tokenizer's special tokens.

    As transformers reads them: chat_template.jinja, or else chat_template of tokenizer_config.json, where several have
    names its "default". Raises ValueError if there is none, or if a file cannot be read.
    """
    folder = Path("." if tokenizer_path is None else tokenizer_file("huggingface", tokenizer_path)).parent
    special_tokens = read_special_tokens(folder)
    file = Path(given) if given is not None else folder / TEMPLATE_FILE
    source = read_tokenizer_config(folder).get("chat_template")
    if given is not None or file.exists():
        source = read_text(file)
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        where = "a tokenizer without a path" if tokenizer_path is None else folder
        raise ValueError(
            f"{where} has no chat template, neither {TEMPLATE_FILE} nor chat_template of {CONFIG_FILE}: give the file "
            "of one by --chat-template"
        )
    import_package("jinja2", "a chat template")
    render(source, None)
    return ChatTemplate(source, special_tokens)


def chat_encoder(tokenizer: Tokenizer, template: ChatTemplate) -> Callable[..., TokenizedRecord]:
    """Make the function that tokenizes a chat. Its second argument is the number of first answers not to learn.

    It raises ValueError for a chat that has no answer or cannot be rendered. Raises ValueError for tokenizers that
    `_check_special_tokens` refuses.
    """
    _check_special_tokens(tokenizer, template)
    model, special = tokenizer.model, special_tokens_of(tokenizer.model)

    def encode(messages: Sequence[Message], skip: int = 0) -> TokenizedRecord:
        text, spans = template.answers(messages, special)
        encoding = model.encode(text, add_special_tokens=False)
        mask = np.zeros(len(encoding.ids), np.uint8)
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        for begin, end in spans[skip:]:
            mask[(begins < end) & (np.maximum(ends, begins + 1) > begin)] = 1
        characters = sum(len(message["content"]) for message in messages)
        return TokenizedRecord.masked(
            encoding.ids, mask, characters, f"no message of the {ANSWER_ROLE}, or none with text"
        )

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
