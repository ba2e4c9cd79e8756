"""Prefix language modelling: what is seen is not predicted, all else is, and a prefix depends on its sample only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megafp8.objectives.next_token import NextToken
from megafp8.objectives.prefix_lm import PrefixLM

S, END = 12, 0


def test_every_token_after_the_prefix_is_predicted_once_and_none_that_is_seen() -> None:
    of = PrefixLM(NextToken(S), 5, 1, S)
    for i in range(100):
        text = np.random.default_rng(i).permutation(100)[: S + 1] + 1
        row = of.row([text[:4], text[4:]], i)
        assert np.array_equal(row, of.row([text], i)), "depends on more than the sample"
        batch = of.batch(torch.from_numpy(row)[None])
        prefix = int(batch.prefix[0])
        assert batch.tokens[0].tolist() == text[:-1].tolist()
        predicted = []
        for place in range(S):
            if batch.loss_mask[0, place]:
                seen = text[: max(place + 1, prefix)].tolist()
                assert batch.labels[0, place] not in seen
                predicted.append(int(batch.labels[0, place]))
        assert predicted == text[prefix:].tolist()


@pytest.mark.parametrize(("shortest", "longest"), [(1, S), (3, 7), (4, 4)])
def test_lengths_are_drawn_uniformly_from_their_range(shortest: int, longest: int) -> None:
    text = np.arange(S + 1)
    of = PrefixLM(NextToken(S), 5, shortest, longest)
    rows = torch.stack([torch.from_numpy(of.row([text], i)) for i in range(600)])
    counts = torch.bincount(of.batch(rows).prefix, minlength=S + 1)
    lengths = range(shortest, longest + 1)
    assert counts[[*lengths]].min() > 0.6 * 600 / len(lengths)
    assert counts.sum() == counts[[*lengths]].sum()


def test_lengths_depend_on_the_seed() -> None:
    text = np.arange(S + 1)
    found = [[PrefixLM(NextToken(S), seed, 1, S).row([text], i)[-1] for i in range(9)] for seed in (5, 6)]
    assert found[0] != found[1]


def test_what_follows_the_end_of_a_document_does_not_count_either() -> None:
    texts = np.array([3, 4, END]), np.array([5, 6, 7, END]), np.array([8, 9])
    of = PrefixLM(NextToken(8, mask_eod_loss=True), 1, 5, 5)
    batch = of.batch(torch.from_numpy(of.row(texts, 0))[None])
    assert batch.loss_mask[0].tolist() == [0, 0, 0, 0, 1, 1, 0, 1]
