"""Chats: lists of messages in which the answers are learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megafp8.data.chats import ChatTemplate, chat_encoder, read_chat_template
from megafp8.data.styles import Document, RecordKey, Style, TokenizedRecord, text_of
from megafp8.data.tokenizers import Tokenizer, special_tokens_of


@dataclass(frozen=True)
class Chats:
    """Conversion of chats by a chat template, which also determines the end token."""

    template: ChatTemplate
    has_loss_mask = True

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Document], TokenizedRecord | None]:
        """Return a function that tokenizes a chat and marks its answers."""
        encode = chat_encoder(tokenizer, self.template)
        return lambda document: encode(*document.record)

    def warnings(self, tokenizer: Tokenizer, document: Document) -> list[str]:
        """Return the template's warnings about the answers of a chat."""
        return self.template.warnings(document.record[0], special_tokens_of(tokenizer.model))


_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of ShareGPT that have other names in chat templates."""


def messages_of(value: Any, name: str) -> list[dict[str, Any]]:
    """Return the messages of a chat, each with a role and a content, both strings.

    ShareGPT's `from` and `value` are renamed, and a content that is a list of text parts is joined. Raises ValueError
    if `value` is not a chat.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} is not a list of messages")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            what = f"message {number} of {name} is a {type(message).__name__}"
            raise ValueError(f"{what}, not an object with role and content")
        role, content = ("from", "value") if "from" in message and "role" not in message else ("role", "content")
        texts = [
            text_of(_joined(message.get(key), f"message {number} of {name}"), f"{key!r} of message {number} of {name}")
            for key in (role, content)
        ]
        others = {key: part for key, part in message.items() if key not in (role, content)}
        messages.append(others | {"role": _ROLES.get(texts[0], texts[0]) if role == "from" else texts[0]})
        messages[-1]["content"] = texts[1]
    return messages


def _joined(content: Any, name: str) -> Any:
    """Join a list of parts {"type": "text", "text": ...} to one text; return other contents unchanged."""
    if not isinstance(content, list):
        return content
    for number, part in enumerate(content, 1):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ValueError(f"part {number} of {name} has type {kind}, but parts of a content must be texts")
    return "".join(part["text"] for part in content)


STYLE = Style(
    "chat",
    (RecordKey("--json-key", "list of messages", "messages", ("conversations",)),),
    lambda flags: Chats(read_chat_template(flags.tokenizer_path, flags.chat_template)),
    frozenset({"--chat-template"}),  # not --no-append-eod: the template determines the end token
    messages_of,
)
