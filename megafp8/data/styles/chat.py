"""Chats: lists of messages, whose answers are learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megafp8.data.chats import ChatTemplate, chat_encoder, read_chat_template
from megafp8.data.styles import Document, Key, Style, Tokens, fault_of_text
from megafp8.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Chats:
    """Chats, rendered by a template, which also says what ends them."""

    template: ChatTemplate
    has_loss_mask = True

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Document], Tokens | None]:
        encode = chat_encoder(tokenizer, self.template)
        return lambda document: encode(*document.record)


def _fault_of_messages(messages: Any, name: str) -> str | None:
    """Why `messages` are none: a chat is a list of objects with a role and a content, both strings."""
    if not isinstance(messages, list) or not messages:
        return f"{name} is not a list of messages"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            return f"message {number} of {name} is a {type(message).__name__}, not an object with role and content"
        for part in ("role", "content"):
            if fault := fault_of_text(message.get(part), f"{part!r} of message {number} of {name}"):
                return fault
    return None


STYLE = Style(
    "chat",
    (Key("--json-key", "list of messages", "messages"),),
    lambda flags: Chats(read_chat_template(flags.tokenizer_path, flags.chat_template)),
    frozenset({"--chat-template"}),  # the template says what ends a chat
    _fault_of_messages,
)
