"""Plain texts. All tokens are learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megafp8.data.sentences import split_sentences
from megafp8.data.styles import Document, RecordKey, Style, TokenizedRecord
from megafp8.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Texts:
    """Conversion of texts. A document begins with the tokenizer's `start_ids`.

    Args:
        append_eod: End each document with the tokenizer's end-of-document token.
        sentences: Split each text into sentences, and make each sentence a separate sequence.
    """

    append_eod: bool = True
    sentences: bool = False
    has_loss_mask = False

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Document], TokenizedRecord | None]:
        """Return a function that tokenizes a text."""

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
        """Return no warnings."""
        return []


STYLE = Style(
    "text",
    (RecordKey("--json-key", "text", "text"),),
    lambda flags: Texts(not flags.no_append_eod, flags.split_sentences),
    frozenset({"--split-sentences", "--no-append-eod"}),
)
