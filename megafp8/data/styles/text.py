"""Texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megafp8.data.sentences import split_sentences
from megafp8.data.styles import Document, RecordKey, Style, TokenizedRecord
from megafp8.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Texts:
    """Texts, which begin with the tokenizer's `start_ids`, and end with its end-of-document token if `append_eod`.

    `sentences`: each sentence is a sequence of its own.
    """

    append_eod: bool = True
    sentences: bool = False
    has_loss_mask = False

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Document], TokenizedRecord | None]:
        def encode(document: Document) -> TokenizedRecord | None:
            text = document.text or ""
            parts = [tokenizer.encode(part) for part in (split_sentences(text) if self.sentences else [text]) if part]
            parts = [part for part in parts if part]
            if not parts:
                return None
            parts[0] = [*tokenizer.start_ids, *parts[0]]
            if self.append_eod:
                parts[-1] = [*parts[-1], tokenizer.eod_id]
            return TokenizedRecord(
                np.concatenate(parts).astype(np.int32), [len(part) for part in parts], None, len(text)
            )

        return encode

    def warnings(self, tokenizer: Tokenizer, document: Document) -> list[str]:
        return []


STYLE = Style(
    "text",
    (RecordKey("--json-key", "text", "text"),),
    lambda flags: Texts(not flags.no_append_eod, flags.split_sentences),
    frozenset({"--split-sentences", "--no-append-eod"}),
)
