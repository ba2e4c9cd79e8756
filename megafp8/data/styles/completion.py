"""Prompts with completions, of which these are learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megafp8.data.styles import Document, RecordKey, Style, TokenizedRecord
from megafp8.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Completions:
    """Prompts with completions, which end with the end-of-document token if `append_eod`."""

    append_eod: bool = True
    has_loss_mask = True

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Document], TokenizedRecord | None]:
        encode = completion_encoder(tokenizer, self.append_eod)
        return lambda document: encode(*document.record)

    def warnings(self, tokenizer: Tokenizer, document: Document) -> list[str]:
        return []


def completion_encoder(tokenizer: Tokenizer, append_eod: bool) -> Callable[[str, str], TokenizedRecord]:
    """Return the function that tokenizes a prompt and its completion. It raises ValueError if the completion is empty.

    They are tokenized together, after the tokenizer's `start_ids`. The completion begins with the first token that the
    prompt alone does not have there. `append_eod`: it ends with the end-of-document token.
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
        return TokenizedRecord.masked(ids, mask, characters, "no token after the prompt")

    return encode


STYLE = Style(
    "completion",
    (RecordKey("--json-key", "prompt", "prompt"), RecordKey("--completion-key", "completion", "completion")),
    lambda flags: Completions(not flags.no_append_eod),
    frozenset({"--no-append-eod"}),
)
