"""Span corruption: sentinels replace spans of a text, and the decoder restores the spans (T5).

    text      t0 t1 t2 t3 t4 t5 t6 t7 t8 t9
    encoder   t0 t1 <0> t4 t5 t6 <1> t8 t9 </s>
    decoder   [PAD] <0> t2 t3 <1> t7                     reads
    labels    <0> t2 t3 <1> t7 </s>                      predicts

The number of spans and the number of tokens in spans follow Raffel et al. (2019, arXiv:1910.10683). They depend only on
the length of the text, so all samples have the same lengths. The spans are drawn at random. The decoder's samples are
padded at the end, where no label counts. The decoder's attention is causal, so no token sees the padding.

Shapes: b micro-batch size, s and d tokens of the encoder and the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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


@dataclass(frozen=True, eq=False)
class SpanCorruption:
    """Objective that restores spans of a text.

    Args:
        seq_length: Number of tokens of the encoder, s.
        decoder_length: Number of tokens of the decoder, d.
        seed: Seed of the run.
        noise: Number of tokens in the spans of a text.
        spans: Number of spans of a text.
        sentinels: Ids of the marks of spans, at least `spans`.
        end_id: Id of the token that ends the encoder's tokens and the labels.
        pad_id: Id of the token that pads samples and begins the decoder's tokens.
    """

    seq_length: int
    decoder_length: int
    seed: int
    noise: int
    spans: int
    sentinels: Sequence[int]
    end_id: int
    pad_id: int

    def row(self, parts: Parts, index: int) -> NDArray[np.int64]:
        """Return the encoder's tokens, the decoder's tokens, its labels and its loss mask, concatenated, `[s + 3d]`."""
        text = np.concatenate(parts).astype(np.int64)
        generator, rest = generator_of(self.seed, index), len(text) - self.noise
        lengths = np.stack([_divided(n, self.spans, generator) for n in (rest, self.noise)], axis=1).flatten()
        pieces = np.split(text, np.cumsum(lengths)[:-1])  # kept, taken out, kept, ...
        encoder: list[NDArray[np.int64]] = []
        restored: list[NDArray[np.int64]] = []
        for sentinel, kept, taken in zip(self.sentinels, pieces[::2], pieces[1::2]):
            mark = np.array([sentinel])
            encoder += [kept, mark]
            restored += [mark, taken]
        inputs, labels = (np.concatenate([*pieces, [self.end_id]]) for pieces in (encoder, restored))
        lengths_of_row = (self.seq_length, *[self.decoder_length] * 3)
        assert len(inputs) <= self.seq_length, f"{len(inputs)} tokens for an encoder of {self.seq_length}"
        assert len(labels) <= self.decoder_length, f"{len(labels)} tokens for a decoder of {self.decoder_length}"
        row = np.full(sum(lengths_of_row), self.pad_id, np.int64)
        tokens_s, decoder_d, labels_d, counts_d = np.split(row, np.cumsum(lengths_of_row)[:-1])  # views
        tokens_s[: len(inputs)] = inputs
        decoder_d[1 : len(labels)] = labels[:-1]
        labels_d[: len(labels)] = labels
        counts_d[:] = np.arange(self.decoder_length) < len(labels)
        return row

    def batch(self, rows: Tensor) -> Batch:
        """Return the micro-batch of rows."""
        d = self.decoder_length
        tokens, decoder, labels, counts = (x.contiguous() for x in rows.split([self.seq_length, d, d, d], dim=1))
        return Batch(tokens, labels, counts.float(), decoder_tokens=decoder)


def _divided(total: int, parts: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Divide `total` into `parts` lengths, none of them zero, with all divisions equally likely."""
    cuts = np.sort(generator.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=total)


def _build(config: Config, tokenizer: Tokenizer | None, source: str) -> SpanCorruption:
    noise, spans = config.data.span_corruption.lengths(config.sample_tokens)
    length = config.decoder_length
    assert length is not None
    names = {"sep": ("[SEP]", "</s>"), "pad": ("[PAD]", "<pad>")}
    ids = special_ids(config, tokenizer, source, dict(config.data.special_tokens), names)
    sentinels = _sentinels(config, tokenizer, spans, source)
    return SpanCorruption(
        config.training.seq_length, length, config.seed, noise, spans, sentinels, ids["sep"], ids["pad"]
    )


def _sentinels(config: Config, tokenizer: Tokenizer | None, spans: int, source: str) -> list[int]:
    """Return the ids of the tokens that mark spans.

    Raises:
        ConfigError: There are fewer valid ids than spans.
    """
    size, count = config.spec.stem.vocab_size, config.data.special_tokens.sentinels
    assert size is not None
    if count is not None:
        sentinels = count
    else:
        sentinels = []
        while tokenizer is not None and (number := tokenizer.id_of(f"<extra_id_{len(sentinels)}>")) is not None:
            sentinels.append(number)
        sentinels = sentinels or [*range(size - 1, (0 if tokenizer is None else tokenizer.vocab_size) - 1, -1)][:spans]
    if len(sentinels) < spans or max(sentinels) >= size or len(set(sentinels)) < len(sentinels):
        rule = f"{len(sentinels)} different ids below model.vocab_size ({size}), and a sample has {spans} spans"
        needed = size + spans - len(sentinels)
        works = (
            f"try model.vocab_size={needed}, give {spans} ids, or try a larger data.span_corruption.mean_span_length"
        )
        raise ConfigError(source, [Problem("data.special_tokens.sentinels", count, rule, works)])
    return sentinels


OBJECTIVE = ObjectiveRecord(lambda config: config.spec.architecture == "t5", _build)
