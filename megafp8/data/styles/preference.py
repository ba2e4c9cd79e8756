"""Pairs of a preferred and a rejected answer: texts or chats."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megafp8.data.chats import ANSWER_ROLE, ChatTemplate, chat_encoder, read_chat_template
from megafp8.data.styles import Document, RecordKey, Style, TokenizedRecord, text_of
from megafp8.data.styles.chat import messages_of
from megafp8.data.styles.completion import completion_encoder
from megafp8.data.tokenizers import Tokenizer, special_tokens_of


@dataclass(frozen=True)
class PreferencePairs:
    """Conversion of a prompt with a chosen and a rejected answer to two sequences: the prompt with each answer.

    Texts are tokenized like completions, and lists of messages with `template`, if there is one. If there is no prompt,
    or the prompt is a text, then both lists begin with the prompt: the answers start at the first message that differs.
    """

    template: ChatTemplate | None
    append_eod: bool = True
    has_loss_mask = True

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Document], TokenizedRecord | None]:
        """Return a function that tokenizes a pair of answers and marks them."""
        text_encoder = completion_encoder(tokenizer, self.append_eod)
        chats_encoder = None if self.template is None else chat_encoder(tokenizer, self.template)

        def encode(document: Document) -> TokenizedRecord:
            prompt, chosen, rejected = document.record
            if isinstance(chosen, str) != isinstance(rejected, str):
                raise ValueError("one answer is a text and the other one a list of messages")
            if isinstance(chosen, str):
                if not isinstance(prompt, str) or prompt == chosen:
                    raise ValueError("answers that are texts need a prompt that is a text")
                return _pair(text_encoder(prompt, chosen), text_encoder(prompt, rejected))
            if chats_encoder is None:
                raise ValueError("a list of messages needs a chat template: give one with --chat-template")
            if isinstance(prompt, str) or prompt == chosen:
                shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), None)
                if shared is None:
                    raise ValueError("one answer equals the other, or is the beginning of it")
                prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
            before = sum(message["role"] == ANSWER_ROLE for message in prompt)
            return _pair(chats_encoder([*prompt, *chosen], before), chats_encoder([*prompt, *rejected], before))

        return encode

    def warnings(self, tokenizer: Tokenizer, document: Document) -> list[str]:
        """Return the template's warnings about the chosen answer; none for texts."""
        prompt, chosen, _ = document.record
        if self.template is None or isinstance(chosen, str):
            return []
        messages = chosen if isinstance(prompt, str) or prompt == chosen else [*prompt, *chosen]
        return self.template.warnings(messages, special_tokens_of(tokenizer.model))


def _pair(chosen: TokenizedRecord, rejected: TokenizedRecord) -> TokenizedRecord:
    """Join both answers to a document of two sequences."""
    assert chosen.loss_mask is not None
    assert rejected.loss_mask is not None
    ids, mask = np.concatenate([chosen.ids, rejected.ids]), np.concatenate([chosen.loss_mask, rejected.loss_mask])
    return TokenizedRecord(ids, [len(chosen.ids), len(rejected.ids)], mask, chosen.characters + rejected.characters)


def _read(value: Any, name: str) -> Any:
    return messages_of(value, name) if isinstance(value, list) else text_of(value, name)


def _method(flags: argparse.Namespace) -> PreferencePairs:
    try:
        template = read_chat_template(flags.tokenizer_path, flags.chat_template)
    except ValueError:
        if flags.chat_template is not None:
            raise
        template = None
    return PreferencePairs(template, not flags.no_append_eod)


STYLE = Style(
    "preference",
    (
        RecordKey("--json-key", "prompt", "prompt", ("chosen",)),
        RecordKey("--chosen-key", "preferred answer", "chosen"),
        RecordKey("--rejected-key", "other answer", "rejected"),
    ),
    _method,
    frozenset({"--chat-template", "--no-append-eod"}),
    _read,
)
