"""Masked language modelling: what is chosen, by what it is replaced, and pairs of sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.batch import Batch
from megafp8.data.blend import Blend, Segment
from megafp8.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megafp8.data.sampler import batches
from megafp8.data.samples import PackedDataset
from megafp8.data.sentences import split_sentences
from megafp8.objectives.masked_lm import MaskedLM, SpecialIds

CLS, SEP, MASK, PAD, EOD, V = 100, 101, 102, 103, 0, 104
SPECIAL = SpecialIds(CLS, SEP, MASK, PAD)


def objective(s: int, **options: Any) -> MaskedLM:
    return MaskedLM(s, 7, SPECIAL, V, EOD, **options)


def sentences(tmp_path: Path, seed: int = 0) -> IndexedDataset:
    """Documents of sentences of 1 to 12 tokens, numbered from 1, the last one with the end of the document."""
    generator = np.random.default_rng(seed)
    writer = IndexedDatasetWriter(tmp_path / "x", np.uint16)
    for _ in range(40):
        lengths = generator.integers(1, 13, size=generator.integers(1, 9)).tolist()
        tokens = 1 + np.arange(sum(lengths)) % 99
        tokens[-1] = EOD
        writer.add_document(tokens, lengths)
    writer.close()
    return IndexedDataset(tmp_path / "x")


def test_the_share_of_tokens_and_what_becomes_of_them() -> None:
    text = np.arange(1, 100).repeat(20)
    rng, counted, masked, random, words = np.random.default_rng(1), 0, 0, 0, 0
    starts = np.arange(V) % 3 == 1  # 1, 4, 7, ... begin words of three tokens
    for i in range(40):
        own = rng.permutation(text)[:198]
        own[50] = EOD
        batch = objective(200).batch(torch.from_numpy(objective(200).row([own], i))[None])
        tokens, labels, chosen = batch.tokens[0].numpy(), batch.labels[0].numpy(), batch.loss_mask[0].numpy() > 0
        assert labels.tolist() == [CLS, *own, SEP]
        assert chosen.sum() == round(0.15 * 197)
        assert not chosen[[0, 51, 199]].any()
        assert (tokens == labels)[~chosen].all()
        counted += int(chosen.sum())
        masked += int((tokens[chosen] == MASK).sum())
        random += int(((tokens != labels) & (tokens != MASK))[chosen].sum())
        whole = objective(200, word_starts=starts).row([np.arange(198) % 99 + 1], i)[2, 1:199]
        words += int(whole.sum())
        assert (whole.reshape(66, 3) == whole[::3, None]).all(), "a part of a word"
    assert masked / counted == pytest.approx(0.8, abs=0.03)
    assert random / counted == pytest.approx(0.1, abs=0.02)
    assert words == 40 * 30


def test_pairs_keep_every_token_and_tell_their_order(tmp_path: Path) -> None:
    """Each token of the data set is in one sample of an epoch, and the labels put back in order are the text."""
    s = 24
    dataset = sentences(tmp_path)
    packed = PackedDataset(
        dataset, range(40), seq_length=s - 4, seed=3, cache_dir=tmp_path, vocab_size=V, packing="sentences"
    )
    found, swaps = [], 0
    for i in range(packed.samples_per_epoch):
        parts = packed.parts(i)
        text = np.concatenate(parts)
        found.append(tuple(text))
        batch = objective(s, pairs=True).batch(torch.from_numpy(objective(s, pairs=True).row(parts, i))[None])
        n, labels = int(batch.cu_seqlens[0, 1]), batch.labels[0].tolist()
        assert batch.cu_seqlens.tolist() == [[0, n, s]]
        assert labels[n:] == [PAD] * (s - n)
        one, other = (" ".join(map(str, labels[1:n])) + " ").split(f"{SEP} ")[:2]
        first, second = ([int(x) for x in part.split()] for part in (one, other))
        swapped = bool(batch.labels[1, 0])
        swaps += swapped
        assert (second + first if swapped else first + second) == [x for x in text if x != EOD]
        assert batch.token_types[0].tolist() == [0] * (len(first) + 2) + [1] * (len(second) + 1) + [0] * (s - n)
        if len([part for part in parts if part[0] != EOD]) > 1:
            cut = len(second if swapped else first)
            assert cut in np.cumsum([len(part) for part in parts]), "divided within a sentence"
        assert batch.loss_mask[1].tolist() == [batch.loss_mask[0].sum()] + [0] * (s - 1)
    documents = [tuple(dataset.document(i).tolist()) for i in range(40)]
    by_document = sorted(token for text in found for token in text)
    assert by_document == sorted(token for text in documents for token in text)
    assert 0.3 < swaps / packed.samples_per_epoch < 0.7


def test_a_batch_depends_on_seed_and_sample_only(tmp_path: Path) -> None:
    packed = PackedDataset(
        sentences(tmp_path), range(40), seq_length=20, seed=3, cache_dir=tmp_path, vocab_size=V, packing="sentences"
    )
    blend = Blend([packed], Segment.fresh([1.0], 3))

    def steps(consumed: int, rank: int, ranks: int, seed: int = 7) -> list[Batch]:
        of = MaskedLM(24, seed, SPECIAL, V, EOD, pairs=True)
        stream = batches(
            blend, consumed_samples=consumed, global_batch_size=4, micro_batch_size=1, data_parallel_rank=rank,
            data_parallel_size=ranks, num_workers=0, objective=of, pin_memory=False,
        )  # fmt: skip
        return [batch for _ in range(2) for batch in next(stream)]

    alone = steps(4, 0, 1)
    shared = [steps(4, rank, 2) for rank in range(2)]
    for i, batch in enumerate(alone):
        assert all(map(torch.equal, batch.tensors, shared[i % 2][i // 2].tensors))
    assert all(map(torch.equal, steps(8, 0, 1)[0].tensors, alone[4].tensors)), "a resumed run has other masks"
    assert any(not torch.equal(a.tokens, b.tokens) for a, b in zip(alone, steps(4, 0, 1, seed=8)))


def test_sentences() -> None:
    text = 'He left. "Why?" she asked, e.g. him. It is 3.5 km…\n\nNew (really!) Paragraph: x\n  end'
    assert split_sentences(text) == [
        "He left.", '"Why?" she asked, e.g. him.', "It is 3.5 km…", "New (really!)", "Paragraph: x\n  end",
    ]  # fmt: skip
    assert split_sentences("你好。再见！") == ["你好。", "再见！"]
    assert split_sentences(" \n\n ") == []
