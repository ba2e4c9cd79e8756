"""Masked language modeling: some tokens of a sample are replaced, and the model predicts them (BERT, RoBERTa).

    text of documents        [CLS] t t t t t t t t t [SEP]
    pairs of sentences       [CLS] A A A A [SEP] B B B [SEP] [PAD] [PAD]
                               0   0 0 0 0   0   1 1 1   1     0     0       token types

All tokens except special tokens and ends of documents may be masked. A share of them is chosen at random (Devlin et al.
2018, arXiv:1810.04805): 80% of the chosen tokens become [MASK], 10% become a random token, and 10% stay. With
`word_starts`, whole words are chosen, as long as their tokens do not exceed the share.

A pair is a run of sentences of one document, divided after one of the sentences. In half of the samples the two parts
are swapped, and the binary head predicts whether they are (sentence-order prediction, as in Megatron-LM's binary head).

Padding is a separate segment (`Batch.cu_seqlens`), so no other token attends to it.

Shapes: b micro-batch size, s sequence length, n tokens without padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megafp8.batch import Batch
from megafp8.objectives import (
    Config,
    ConfigError,
    ObjectiveRecord,
    Parts,
    Problem,
    Tokenizer,
    generator_of,
    special_ids,
)

MASKED, RANDOM = 0.8, 0.1
"""Shares of the chosen tokens that become [MASK] and that become a random token."""


class SpecialIds(NamedTuple):
    """Ids of special tokens."""

    cls: int
    sep: int
    mask: int
    pad: int


@dataclass(frozen=True, eq=False)
class MaskedLM:
    """Objective of a masked language model.

    Args:
        seq_length: Number of tokens of a sample, s.
        seed: Seed of the run.
        special: Ids of special tokens.
        vocab_size: Upper limit of the ids of random tokens.
        eod_id: Id of the token that ends documents, which is never masked; None if there is none.
        probability: Share of the tokens to predict.
        word_starts: Whether each token id begins a word; None to choose single tokens instead of words.
        pairs: Whether samples are pairs of sentences.
    """

    seq_length: int
    seed: int
    special: SpecialIds
    vocab_size: int
    eod_id: int | None = None
    probability: float = 0.15
    word_starts: NDArray[np.bool_] | None = None
    pairs: bool = False

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        """Return tokens, labels, loss mask and token types, `[4, s + 1]`.

        The last column holds n, whether the pair is swapped, and two zeros.
        """
        generator = generator_of(self.seed, index)
        cls, sep, _, pad = self.special
        texts, swapped = [np.concatenate(parts).astype(np.int64)], False
        if self.pairs:
            texts, swapped = self._pair(parts, generator)
        pieces, types = [np.array([cls])], [0]
        for kind, text in enumerate(texts):
            pieces += [text, np.array([sep])]
            types += [kind] * (len(text) + 1)
        labels = np.concatenate(pieces)
        chosen = self._chosen(labels, generator)
        row = np.zeros((4, self.seq_length + 1), np.int64)
        n = len(labels)
        assert n <= self.seq_length, f"{n} tokens for a sample of {self.seq_length}"
        row[:2, :-1] = pad
        row[0, :n] = self._replaced(labels, chosen, generator)
        row[1, :n], row[2, chosen], row[3, :n] = labels, 1, types
        row[:2, -1] = n, swapped
        return row

    def _pair(self, parts: Parts, generator: np.random.Generator) -> tuple[list[NDArray[np.int64]], bool]:
        """Return the two parts of a pair, and whether they are swapped. Divide a single sentence in the middle."""
        sentences = [part.astype(np.int64) for part in parts]
        if sentences[-1][-1] == self.eod_id:
            sentences[-1] = sentences[-1][:-1]
        sentences = [sentence for sentence in sentences if len(sentence)]
        if len(sentences) > 1:
            first = int(generator.integers(1, len(sentences)))
            pair = [np.concatenate(sentences[:first]), np.concatenate(sentences[first:])]
        else:
            text = np.concatenate([*sentences, np.empty(0, np.int64)])
            pair = [text[: (len(text) + 1) // 2], text[(len(text) + 1) // 2 :]]
        swapped = bool(generator.integers(2))
        return pair[::-1] if swapped else pair, swapped

    def _chosen(self, labels: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.int64]:
        """Return the indices of the tokens to predict."""
        special = [*self.special, -1 if self.eod_id is None else self.eod_id]
        candidates = np.flatnonzero(~np.isin(labels, special))
        count = min(len(candidates), max(1, round(self.probability * len(candidates))))
        if self.word_starts is None:
            return generator.permutation(candidates)[:count]
        begins = self.word_starts[labels[candidates]]
        begins |= np.diff(candidates, prepend=-1) > 1  # after a special token
        words = np.split(candidates, np.flatnonzero(begins)[1:])
        chosen_words: list[NDArray[np.int64]] = []
        for i in generator.permutation(len(words)):
            if len(words[i]) <= count:
                chosen_words.append(words[i])
                count -= len(words[i])
        return np.concatenate(chosen_words) if chosen_words else candidates[:0]

    def _replaced(
        self, labels: NDArray[np.int64], chosen: NDArray[np.int64], generator: np.random.Generator
    ) -> NDArray[np.int64]:
        tokens, draw = labels.copy(), generator.random(len(chosen))
        random = generator.integers(self.vocab_size, size=len(chosen))
        becomes_random = (draw >= MASKED) & (draw < MASKED + RANDOM)
        tokens[chosen[draw < MASKED]] = self.special.mask
        tokens[chosen[becomes_random]] = random[becomes_random]
        return tokens

    def batch(self, rows: Tensor) -> Batch:
        """Return the micro-batch of rows.

        With pairs, labels and mask are `[2b, s]`. The first column of their second half belongs to the binary head. The
        mask there is the number of the sample's tokens to predict.
        """
        tokens, labels, counts, types = (rows[:, i, :-1].contiguous() for i in range(4))
        mask = counts.float()
        if not self.pairs:
            return Batch(tokens, labels, mask)
        n, swapped = rows[:, 0, -1:], rows[:, 1, -1:]
        head_labels, head_mask = torch.zeros_like(labels), torch.zeros_like(mask)
        head_labels[:, :1], head_mask[:, :1] = swapped, mask.sum(1, keepdim=True)
        s = torch.full_like(n, self.seq_length)
        cu_seqlens = torch.cat([torch.zeros_like(n), n, s], dim=1).int()
        return Batch(
            tokens,
            torch.cat([labels, head_labels]),
            torch.cat([mask, head_mask]),
            cu_seqlens=cu_seqlens,
            token_types=types,
        )


_NAMES = {"cls": ("[CLS]", "<s>"), "sep": ("[SEP]", "</s>"), "mask": ("[MASK]", "<mask>"), "pad": ("[PAD]", "<pad>")}
"""Names of special tokens in the tokenizers of BERT and RoBERTa."""


def _build(config: Config, tokenizer: Tokenizer | None, source: str) -> MaskedLM:
    vocab_size, masked = config.spec.stem.vocab_size, config.data.masked_lm
    assert vocab_size is not None
    starts = None
    if masked.whole_words:
        starts = None if tokenizer is None else tokenizer.word_starts()
        if starts is None:
            rule = "the tokens of data.tokenizer do not tell where words begin"
            raise ConfigError(source, [Problem("data.masked_lm.whole_words", True, rule, "try false")])
        starts = np.append(starts, np.ones(max(0, vocab_size - len(starts)), np.bool_))
    return MaskedLM(
        config.training.seq_length,
        config.seed,
        SpecialIds(**special_ids(config, tokenizer, source, dict(config.data.special_tokens), _NAMES)),
        vocab_size,
        eod_id=None if tokenizer is None else tokenizer.eod_id,
        probability=masked.probability,
        word_starts=starts,
        pairs=config.spec.head.binary,
    )


OBJECTIVE = ObjectiveRecord(lambda config: config.spec.architecture == "bert", _build)
