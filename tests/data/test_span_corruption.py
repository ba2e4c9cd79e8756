"""Span corruption: no token is lost, counts are those asked for, and a row depends on seed and sample only."""

from __future__ import annotations

import numpy as np
import torch

from megafp8.config.schema import SpanCorruptionConfig
from megafp8.data.span_corruption import SpanCorruption

END, PAD, SENTINELS = 1, 0, [199, 198, 197, 196, 195, 194, 193, 192]


def test_the_text_is_restored() -> None:
    config, s, d = SpanCorruptionConfig(), 64, 32
    length = config.text_length(s)
    noise, spans = config.lengths(length)
    of = SpanCorruption(s, d, 5, noise, spans, SENTINELS, END, PAD)
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


def test_lengths_are_those_of_t5() -> None:
    """568 tokens become 512 and 114, as in the paper's code."""
    config = SpanCorruptionConfig()
    assert config.text_length(512) == 568
    noise, spans = config.lengths(568)
    assert (568 - noise + spans + 1, noise + spans + 1) == (512, 114)
