"""Chats as token ids with a loss mask that tells answers from their context.

The tokenizer's chat template, a Jinja program, renders a chat to text. It runs in a sandbox with the variables and
functions of transformers' `apply_chat_template`, in a separate process with memory and time limits
(`template_process`). The text is then tokenized as a whole, so the token ids are the same as in transformers.

The characters of the answers are found in one of two ways:

    generation blocks   a template with `{% generation %}` marks the answers itself
    prefixes            for other templates, the chat is rendered up to the start of each assistant message, with
                        `add_generation_prompt`, and up to its end. The answer is the text that the second rendering
                        adds to the first. Both renderings must be prefixes of the whole chat. Some templates render a
                        message differently when other messages follow. This is an error, because the position of the
                        answer in the whole chat is then unknown

An answer includes the token that ends it, but not the white space that the template adds after a special token. Some
templates end an answer only with the special token that begins the next message (GLM's `<|user|>`). The answer then
includes that token; after the last message, the token that would begin a user message is added to the text. So the
model learns to stop. A token with characters of both an answer and the text before it counts as part of the answer.
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
"""Start and end of each answer, as character positions."""

_BLOCK = re.compile(r"\{%[-+]?\s*generation\b")


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and the special tokens that it can use by name, such as bos_token. Picklable.

    Rendering raises ValueError with the message of the template or of Jinja.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the text of a chat."""
        return re.sub(f"[{BEGIN}{END}]", "", self._render(messages, add_generation_prompt))

    def answers(self, messages: Sequence[Message], special: Sequence[str] = ()) -> tuple[str, Spans]:
        """Return the text of a chat, and the start and end of each of its answers.

        Args:
            messages: The chat.
            special: Special tokens of the tokenizer, which may end an answer.

        Raises:
            ValueError: The position of an answer cannot be found.
        """
        if _BLOCK.search(self.source):
            if any(mark in message["content"] for message in messages for mark in (BEGIN, END)):
                raise ValueError("a message contains U+FDD0 or U+FDD1, which are not characters")
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
                    f"the chat template renders the text up to the end of message {i + 1} differently in the whole "
                    "chat, so the position of this answer is unknown; mark answers in the template with "
                    "{% generation %} ... {% endgeneration %} and pass the template with --chat-template"
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
        """Return the text that the template puts between `text`, which ends with an answer, and a user message."""
        question = "?"
        try:
            longer = self.render([*messages, {"role": "user", "content": question}])
        except ValueError:
            return ""
        return longer[len(text) :].partition(question)[0] if longer.startswith(text) else ""

    def warnings(self, messages: Sequence[Message], special: Sequence[str]) -> list[str]:
        """Return warnings about text that the model would learn from a chat by mistake: a header, or no end token."""
        text, spans = self.answers(messages, special)
        faults = []
        if (header := self._learned_header(messages, text, spans)) is not None:
            faults.append(
                f"the chat template has no generation prompt, so the model also learns the header of an answer, "
                f"{header!r}; add the prompt with {{% if add_generation_prompt %}}, or mark answers with "
                "{% generation %}"
            )
        if not all(text[:end].endswith(tuple(special)) for _, end in spans):
            faults.append(
                "no special token ends the answers, so the model does not learn where to stop; end answers in the "
                "template, for example with {{ eos_token }} (inside {% generation %} if the template uses it)"
            )
        return faults

    def _learned_header(self, messages: Sequence[Message], text: str, spans: Spans) -> str | None:
        """Return the header in the span of the first answer, or None if there is none or a generation prompt has it."""
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
    """Return a text without the marks of its generation blocks, and the spans that the marks enclose."""
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
    """Return the chat template of a tokenizer, or the one in the file `given`, with the tokenizer's special tokens.

    The template is read as in transformers: from chat_template.jinja in the tokenizer's folder, or else from
    chat_template in tokenizer_config.json. If that key has several named templates, the one named "default" is used.
    Raises ValueError if there is no template or a file cannot be read.
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
            f"{where} has no chat template, neither {TEMPLATE_FILE} nor chat_template in {CONFIG_FILE}: give the file "
            "of a template with --chat-template"
        )
    import_package("jinja2", "a chat template")
    render(source, None)
    return ChatTemplate(source, special_tokens)


def chat_encoder(tokenizer: Tokenizer, template: ChatTemplate) -> Callable[..., TokenizedRecord]:
    """Return a function that tokenizes a chat and marks its answers in the loss mask.

    The optional second argument of that function is the number of answers at the start of the chat that are not
    learned. The function raises ValueError for a chat that has no answer or cannot be rendered. `chat_encoder` itself
    raises ValueError for a tokenizer that `_check_special_tokens` rejects.
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
        return TokenizedRecord.masked(encoding.ids, mask, characters, f"no message of the {ANSWER_ROLE} has text")

    return encode


def chat_prompt_encoder(tokenizer: Tokenizer, template: ChatTemplate) -> Callable[[Sequence[Message]], list[int]]:
    """Return a function that tokenizes a chat up to the point where the assistant answers.

    The function raises ValueError for a chat that cannot be rendered. `chat_prompt_encoder` itself raises ValueError
    for a tokenizer that `_check_special_tokens` rejects.
    """
    _check_special_tokens(tokenizer, template)
    return lambda messages: tokenizer.encode(template.render(messages, add_generation_prompt=True))


def _check_special_tokens(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    """Raise ValueError unless the tokenizer is a tokenizer.json that has the template's special tokens.

    Only these tokenizers find special tokens in a text.
    """
    if not hasattr(tokenizer.model, "get_added_tokens_decoder"):
        raise ValueError("chats need a tokenizer that finds special tokens in a text: --tokenizer huggingface")
    missing = {value for value in template.special_tokens.values() if tokenizer.id_of(value) is None}
    if missing:
        raise ValueError(
            f"tokenizer.json does not have the special tokens {', '.join(sorted(missing))} that {CONFIG_FILE} in its "
            "folder names; save the tokenizer again with transformers"
        )
