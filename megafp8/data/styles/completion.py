"""Prompts with completions. Only the completions are learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megafp8.data.styles import Document, RecordKey, Style, TokenizedRecord
from megafp8.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Completions:
    """Conversion of prompts with completions. With `append_eod`, completions end with the end-of-document token."""

    append_eod: bool = True
    has_loss_mask = True

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Document], TokenizedRecord | None]:
        """Return a function that tokenizes a prompt with its completion, and marks the completion."""
        encode = completion_encoder(tokenizer, self.append_eod)
        return lambda document: encode(*document.record)

    def warnings(self, tokenizer: Tokenizer, document: Document) -> list[str]:
        """Return no warnings."""
        return []


def completion_encoder(tokenizer: Tokenizer, append_eod: bool) -> Callable[[str, str], TokenizedRecord]:
    """Return a function that tokenizes a prompt and its completion. It raises ValueError if the completion is empty.

    The function tokenizes both together, after the tokenizer's `start_ids`. The completion begins at the first token
    that differs from the tokens of the prompt alone. With `append_eod`, the completion ends with the end-of-document
    token.
    """

    def encode(prompt: str, completion: str) -> TokenizedRecord:
        if not completion:
            raise ValueError("the completion is empty")
        ids, prompt_ids = tokenizer.encode(prompt + completion), tokenizer.encode(prompt)
        differing = [a != b for a, b in zip(ids, prompt_ids)]
        first = differing.index(True) if True in differing else min(len(prompt_ids), len(ids))
        ids = [*tokenizer.start_ids, *ids, *([tokenizer.eod_id] if append_eod else [])]
        first += len(tokenizer.start_ids)
        mask, characters = (np.arange(len(ids)) >= first).astype(np.uint8), len(prompt) + len(completion)
        return TokenizedRecord.masked(ids, mask, characters, "there is no token after the prompt")

    return encode


STYLE = Style(
    "completion",
    (RecordKey("--json-key", "prompt", "prompt"), RecordKey("--completion-key", "completion", "completion")),
    lambda flags: Completions(not flags.no_append_eod),
    frozenset({"--no-append-eod"}),
)
