"""Span corruption: no token is lost, counts are those asked for, and a row depends on seed and sample only."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from megafp8.config.schema import SpanCorruptionConfig
from megafp8.objectives.span_corruption import SpanCorruption

END, PAD, SENTINELS = 1, 0, [199, 198, 197, 196, 195, 194, 193, 192]


def test_the_text_is_restored() -> None:
    config, s, d = SpanCorruptionConfig(), 64, 32
    length = config.text_length(s)
    noise, spans = config.lengths(length)
    of = SpanCorruption(s, d, seed=5, noise=noise, spans=spans, sentinels=SENTINELS, end_id=END, pad_id=PAD)
    starts, lengths = np.zeros(length), []
    for i in range(300):
        text = np.random.default_rng(i).integers(2, 190, length)
        row = of.row([text[:9], text[9:]], i)
        assert np.array_equal(row, of.row([text], i)), "depends on more than the sample"
        batch = of.batch(torch.from_numpy(row)[None])
        counts = batch.loss_mask[0] > 0
        labels, tokens = batch.labels[0][counts].tolist(), batch.tokens[0].tolist()
        assert len(tokens) == s
        assert batch.decoder_tokens[0, counts].tolist() == [PAD, *labels[:-1]]
        assert set(batch.decoder_tokens[0, ~counts].tolist()) == {PAD}
        assert labels[-1] == END
        tokens = tokens[: tokens.index(END)]
        restored, found = [], []
        for token in tokens:
            if token not in SENTINELS:
                restored.append(token)
                continue
            assert token == SENTINELS[len(found)], "sentinels in order, each once"
            first = labels.index(token) + 1
            end = next(k for k in range(first, len(labels)) if labels[k] in (*SENTINELS, END))
            starts[len(restored)] += 1
            found.append(end - first)
            restored += labels[first:end]
        assert restored == text.tolist()
        assert len(found) == spans
        assert sum(found) == noise
        assert min(found) > 0
        lengths += found
    assert len(set(lengths)) > 5, "all spans have one length"
    assert (starts[1:] > 0).sum() > 0.9 * (length - 10), "spans begin at some places only"


def seqio_lengths(inputs: int, noise_density: float, mean_span_length: float) -> tuple[int, int, int]:
    """Tokens of the text, and of the encoder's and the decoder's sequence: seqio's `random_spans_helper`."""

    def corrupted(tokens: int) -> tuple[int, int]:
        noise = round(tokens * noise_density)
        spans = round(noise / mean_span_length)
        return tokens - noise + spans + 1, noise + spans + 1

    tokens = inputs - 1
    while corrupted(tokens + 1)[0] <= inputs:
        tokens += 1
    return tokens, *corrupted(tokens)


def test_lengths_are_those_of_t5() -> None:
    """568 tokens become 512 and 114, as in the paper's code; other lengths as in seqio where it has a span at all."""
    assert SpanCorruptionConfig().text_length(512) == 568
    for mean, density in itertools.product((1.0, 1.5, 3.0, 10.0, 64.0), (0.15, 0.3, 0.45)):
        config = SpanCorruptionConfig(mean_span_length=mean, noise_density=density)
        for inputs in [*range(3, 130), 511, 512, 513, 1000, 1024, 2047, 2048]:
            text = config.text_length(inputs)
            noise, spans = config.lengths(text)
            expected = seqio_lengths(inputs, density, mean)
            if round(expected[0] * density) and round(round(expected[0] * density) / mean):
                assert (text, text - noise + spans + 1, noise + spans + 1) == expected, (mean, density, inputs)


def test_every_row_has_its_end() -> None:
    """Also for the shortest samples, the shortest spans and the least decoder length that is accepted."""
    cases = 0
    for mean, density in itertools.product((1.0, 1.2, 2.0, 3.0, 20.0, 500.0), (0.01, 0.15, 0.5, 0.9)):
        config = SpanCorruptionConfig(mean_span_length=mean, noise_density=density)
        for s in [*range(3, 70), *range(126, 131), 510, 511, 512, 513, 2048]:
            length = config.text_length(s)
            noise, spans = config.lengths(length)
            d = noise + spans + 1
            text = np.arange(length) + 100_000
            row = SpanCorruption(
                s, d, seed=s, noise=noise, spans=spans, sentinels=range(10, 10 + spans), end_id=END, pad_id=PAD
            ).row([text], s)
            tokens, decoder, labels, counts = np.split(row, [s, s + d, s + 2 * d])
            where = f"inputs {s}, mean {mean}, density {density}"
            assert tokens[length - noise + spans] == END, where
            assert not tokens[length - noise + spans + 1 :].any(), where
            assert decoder[0] == PAD, where
            assert labels[-1] == END, where
            assert decoder[1:].tolist() == labels[:-1].tolist(), where
            assert counts.all(), where
            kept_and_taken = np.concatenate([tokens[tokens >= 100_000], labels[labels >= 100_000]])
            assert sorted(kept_and_taken) == text.tolist(), where
            cases += 1
    assert cases > 1000


def test_no_row_is_written_that_does_not_fit() -> None:
    """A sequence must never run into the one after it in the row."""
    text = np.arange(20) + 100
    for s, d, message in ((19, 9, "20 tokens for an encoder of 19"), (20, 5, "6 tokens for a decoder of 5")):
        with pytest.raises(AssertionError, match=message):
            SpanCorruption(s, d, seed=0, noise=3, spans=2, sentinels=SENTINELS, end_id=END, pad_id=PAD).row([text], 0)
