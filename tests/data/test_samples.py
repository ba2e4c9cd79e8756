"""Packed samples against a brute-force reference, the cache, and document boundaries token by token."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megafp8.batch import Batch
from megafp8.data import DataError
from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.data.packing import PACKINGS, PackingName
from megafp8.data.samples import PADDING, PackedDataset, next_token_batch, split_documents
from tests.data.datasets import write_dataset
from tests.world import World

S = 7
each_packing = pytest.mark.parametrize("packing", PACKINGS)


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    """Documents of 0 to 60 tokens, every token of the set different."""
    lengths = [*np.random.default_rng(0).integers(0, 12, 40).tolist(), 60, 0, 0, 1, 33]
    return write_dataset(tmp_path / "x", [range(end - n, end) for n, end in zip(lengths, np.cumsum(lengths).tolist())])


def packed(
    dataset: IndexedDataset, documents: range | None = None, seed: int = 3, packing: PackingName = "concatenate"
) -> PackedDataset:
    every = documents or range(dataset.num_documents)
    return PackedDataset(dataset, every, S, seed, Path(dataset.prefix).parent / "cache", packing=packing)


def test_an_epoch_is_a_cut_of_shuffled_documents(dataset: IndexedDataset) -> None:
    """Put an epoch's windows back in the order of their overlaps: the result is whole documents, each once."""
    samples = packed(dataset)
    epoch = [samples[i].tolist() for i in range(samples.samples_per_epoch)]
    assert all(len(window) == S + 1 for window in epoch)
    by_first = {window[0]: window for window in epoch}
    last_tokens = {window[-1] for window in epoch}
    (start,) = [window for window in epoch if window[0] not in last_tokens]
    stream = list(start)
    while stream[-1] in by_first:
        stream += by_first[stream[-1]][1:]
    assert len(stream) == samples.samples_per_epoch * S + 1
    assert len(set(stream)) == len(stream)
    documents = [dataset.document(i).tolist() for i in range(dataset.num_documents)]
    starts = {document[0]: document for document in documents if document}
    rebuilt: list[int] = []
    while len(rebuilt) < len(stream):
        rebuilt += starts.pop(stream[len(rebuilt)])
    assert rebuilt[: len(stream)] == stream
    assert stream != sorted(stream), "documents were not shuffled"
    assert [w[0] for w in epoch] != [stream[i * S] for i in range(len(epoch))], "samples were not shuffled"


def test_best_fit_predicts_every_token_of_every_document_once(dataset: IndexedDataset) -> None:
    """But the first of each. A document is whole in one sample, unless it is longer; padding is at the end."""
    samples = packed(dataset, packing="best_fit")
    epoch = [samples[i].tolist() for i in range(samples.samples_per_epoch)]
    assert all(len(sample) == S + 1 for sample in epoch)
    tokens = [[token for token in sample if token != PADDING] for sample in epoch]
    assert [sample + [PADDING] * (S + 1 - len(sample)) for sample in tokens] == epoch
    documents = [dataset.document(i).tolist() for i in range(dataset.num_documents)]
    firsts = {document[0] for document in documents if document}
    parts: list[list[int]] = []
    for sample in tokens:
        for token in sample:
            if token == sample[0] or token in firsts or token != parts[-1][-1] + 1:
                parts.append([])
            parts[-1].append(token)
    assert sorted(token for part in parts for token in part[1:]) == [
        token for document in documents for token in document[1:]
    ]
    assert all(document in parts for document in documents if 2 <= len(document) <= S + 1)


@each_packing
def test_no_state(dataset: IndexedDataset, packing: PackingName) -> None:
    a, b = packed(dataset, packing=packing), packed(dataset, packing=packing)
    count = 3 * a.samples_per_epoch
    forward = [a[i].tolist() for i in range(count)]
    assert [b[i].tolist() for i in reversed(range(count))] == forward[::-1]
    n = a.samples_per_epoch
    assert forward[:n] != forward[n : 2 * n] != forward[2 * n :], "epochs are alike"
    assert [packed(dataset, seed=4, packing=packing)[i].tolist() for i in range(n)] != forward[:n]


@each_packing
def test_a_range_of_documents(dataset: IndexedDataset, packing: PackingName) -> None:
    some = range(10, 30)
    allowed = {int(t) for i in some for t in dataset.document(i)} | {PADDING}
    samples = packed(dataset, some, packing=packing)
    assert all(set(samples[i].tolist()) <= allowed for i in range(3 * samples.samples_per_epoch))


@each_packing
def test_a_damaged_cache_is_made_again(
    dataset: IndexedDataset, packing: PackingName, caplog: pytest.LogCaptureFixture
) -> None:
    """Empty, truncated, with flipped bits, or the index of another seed: a warning, and the same file as before."""
    cache = Path(dataset.prefix).parent / "cache"
    other = packed(dataset, seed=4, packing=packing)
    other[0]
    (theirs,) = cache.iterdir()
    samples = packed(dataset, packing=packing)
    expected, checksum = [samples[i].tolist() for i in range(10)], samples.index_checksum(0)
    (path,) = set(cache.iterdir()) - {theirs}
    good = path.read_bytes()
    wrong = [b"", good[:-8], theirs.read_bytes()]
    for place in np.random.default_rng(0).integers(0, len(good), 30).tolist():
        wrong.append(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
    for content in wrong:
        path.write_bytes(content)
        caplog.clear()
        again = packed(dataset, packing=packing)
        assert [again[i].tolist() for i in range(10)] == expected
        assert f"sample index {path} is damaged" in caplog.text
        assert path.read_bytes() == good
        assert again.index_checksum(0) == checksum != other.index_checksum(0)
    cached = packed(dataset, packing=packing)
    assert ([cached[i].tolist() for i in range(10)], cached.index_checksum(0)) == (expected, checksum)
    for one in PACKINGS:
        assert (packed(dataset, packing=one).index_checksum(0) == checksum) == (one == packing)


def test_a_cache_that_cannot_be_written(dataset: IndexedDataset, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    samples = PackedDataset(dataset, range(dataset.num_documents), S, 3, tmp_path / "file" / "cache")
    with pytest.raises(DataError, match=r"cannot be written to .*file/cache .*; set data\.index_cache to a folder"):
        samples[0]


@each_packing
def test_a_sample_with_an_id_outside_the_vocabulary_is_refused(
    dataset: IndexedDataset, packing: PackingName, tmp_path: Path
) -> None:
    """Each sample that holds one, and no other, with the document and position of the first in it."""
    checked = PackedDataset(dataset, range(dataset.num_documents), S, 3, tmp_path, vocab_size=250, packing=packing)
    free = packed(dataset, packing=packing)
    where = {
        int(token): (document, position)
        for document in range(dataset.num_documents)
        for position, token in enumerate(dataset.document(document))
    }
    refused = 0
    for i in range(free.samples_per_epoch):
        sample = free[i].tolist()
        wrong = [token for token in sample if token >= 250]
        if not wrong:
            assert checked[i].tolist() == sample
            continue
        refused += 1
        document, position = where[wrong[0]]
        message = (
            rf"x\.bin: document {document}, position {position} holds token {wrong[0]}, but model.vocab_size is 250"
        )
        with pytest.raises(DataError, match=message):
            checked[i]
    assert 0 < refused < free.samples_per_epoch


def _samples(prefix: str) -> list[list[int]]:
    samples = packed(IndexedDataset(prefix))
    return [samples[i].tolist() for i in range(40)]


def test_processes_that_race_for_the_cache_agree(world2: World, dataset: IndexedDataset) -> None:
    results = world2.run(_samples, dataset.prefix)
    assert results[0] == results[1] == _samples(dataset.prefix)


def test_too_few_tokens(dataset: IndexedDataset) -> None:
    with pytest.raises(ValueError, match=r"hold 1 tokens, too few for one sample of training.seq_length \+ 1 = 8"):
        packed(dataset, range(43, 44))
    with pytest.raises(ValueError, match=r"hold 1 tokens, none in a document of two or more, and .*; add data"):
        packed(dataset, range(41, 44), packing="best_fit")


@pytest.mark.parametrize(
    ("n", "split", "ends"),
    [
        (1000, "969,30,1", (969, 999, 1000)),
        (10, "1,1", (5, 10, 10)),
        (7, "100,0,0", (7, 7, 7)),
        (3, "1,1,1", (1, 2, 3)),
    ],
)
def test_split_documents(n: int, split: str, ends: tuple[int, int, int]) -> None:
    parts = split_documents(n, split)
    assert tuple(part.stop for part in parts) == ends
    assert [d for part in parts for d in part] == list(range(n))


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0"])
def test_split_documents_refuses(split: str) -> None:
    with pytest.raises(ValueError, match=r"data\.split"):
        split_documents(10, split)


def by_ends(tokens: Tensor) -> Tensor:
    """Which document each token is of, where 0 ends documents and nothing else; padding is one more."""
    ends = tokens == 0
    return ends.cumsum(1) - ends.int() + 100 * (tokens == PADDING)


def test_document_boundaries_token_by_token() -> None:
    eod = 0
    tokens = torch.randint(0, 4, (5, 30), generator=torch.Generator().manual_seed(1))
    batch = next_token_batch(tokens, by_ends(tokens), reset_at_documents=True, mask_eod_loss=True)
    assert batch.cu_seqlens is not None
    assert batch.position_ids is not None
    assert batch.loss_mask is not None
    for row in range(5):
        document, position = 0, 0
        for i in range(29):
            token = tokens[row, i].item()
            assert batch.tokens[row, i] == token
            assert batch.labels[row, i] == tokens[row, i + 1]
            assert batch.position_ids[row, i] == position
            assert batch.cu_seqlens[row, document] + position == i
            assert batch.loss_mask[row, i] == (0.0 if token == eod else 1.0)
            position += 1
            if token == eod:
                document, position = document + 1, 0
        assert batch.cu_seqlens[row].diff().min() >= 0
        assert set(batch.cu_seqlens[row, document + (position > 0) :].tolist()) == {29}
    assert batch.cu_seqlens.shape == (5, 65)
    assert batch.cu_seqlens.dtype == torch.int32
    wider = batch.with_room(100)
    assert (batch.room, wider.room, wider.with_room(64).room) == (64, 100, 100)
    assert torch.equal(wider.cu_seqlens[:, :65], batch.cu_seqlens)
    assert (wider.cu_seqlens[:, 65:] == 29).all()
    plain = next_token_batch(tokens, by_ends(tokens), reset_at_documents=False, mask_eod_loss=False)
    assert (plain.loss_mask, plain.position_ids, plain.cu_seqlens) == (None, None, None)


def test_padding_is_one_document_without_loss() -> None:
    """After an end token, after a document that has none, and as a label alone."""
    tokens = torch.tensor([[5, 0, 6, -1, -1, -1], [5, 6, 0, -1, -1, -1], [5, 6, 7, 8, 0, -1], [5, 6, 7, 8, 9, -1]])
    batch = next_token_batch(tokens, by_ends(tokens), reset_at_documents=True, mask_eod_loss=True)
    assert batch.tokens.tolist() == [[5, 0, 6, 0, 0], [5, 6, 0, 0, 0], [5, 6, 7, 8, 0], [5, 6, 7, 8, 9]]
    assert batch.labels.tolist() == [[0, 6, 0, 0, 0], [6, 0, 0, 0, 0], [6, 7, 8, 0, 0], [6, 7, 8, 9, 0]]
    assert batch.loss_mask is not None
    assert batch.position_ids is not None
    assert batch.cu_seqlens is not None
    assert batch.loss_mask.tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 0, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert batch.cu_seqlens[:, :5].tolist() == [[0, 2, 3, 5, 5], [0, 3, 5, 5, 5], [0, 5, 5, 5, 5], [0, 5, 5, 5, 5]]
    assert batch.padding is not None
    assert batch.padding.sum(1).tolist() == [2, 2, 0, 0]
    assert batch.padding[:2, 3:].all()
    assert batch.label_padding is not None
    assert batch.label_padding.int().tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1]]
    later = batch.with_later_labels(2).padding
    assert later is not None
    assert later.int().tolist() == [  # at depth d tokens read the embeddings of d labels
        [0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1],
        [0, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1, 1],
    ]  # fmt: skip


def test_the_loss_of_best_fit_is_of_each_prediction_within_a_document_once(tmp_path: Path) -> None:
    """Document d is of tokens d and its end, so a label is one of its own input's document or is not counted."""
    lengths = np.random.default_rng(0).integers(1, 20, 80).tolist()
    samples = packed(
        write_dataset(tmp_path / "x", [[d + 1] * (n - 1) + [0] for d, n in enumerate(lengths)]), packing="best_fit"
    )
    epoch = torch.from_numpy(np.stack([samples[i] for i in range(samples.samples_per_epoch)]))
    batch = next_token_batch(epoch, by_ends(epoch), reset_at_documents=True, mask_eod_loss=True)
    assert batch.loss_mask is not None
    counted = batch.loss_mask.bool()
    found = Counter(zip(batch.tokens[counted].tolist(), batch.labels[counted].tolist()))
    assert found == Counter({(d + 1, d + 1): n - 2 for d, n in enumerate(lengths) if n > 2}) + Counter(
        {(d + 1, 0): 1 for d, n in enumerate(lengths) if n > 1}
    )


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_each_document_option_adds_its_own_part_alone(reset: bool, mask: bool) -> None:
    tokens = torch.tensor([[5, 0, 6, 7, 0, 0, 8]])
    batch = next_token_batch(tokens, by_ends(tokens), reset_at_documents=reset, mask_eod_loss=mask)
    assert batch.tokens.tolist() == [[5, 0, 6, 7, 0, 0]]
    assert batch.labels.tolist() == [[0, 6, 7, 0, 0, 8]]
    found = [None if x is None else x.tolist() for x in (batch.loss_mask, batch.position_ids, batch.cu_seqlens)]
    expected = [[[1, 0, 1, 1, 0, 0]], [[0, 1, 0, 1, 2, 0]], [[0, 2, 5] + [6] * 62]]
    assert found == [part if asked else None for part, asked in zip(expected, (mask, reset, reset))]


def test_labels_of_later_tokens_end_with_the_document_and_the_sample() -> None:
    """Not counted: the end of the sample and, where attention restarts at documents, of these; and what has no loss."""
    tokens = torch.tensor([[5, 6, 7, 0, 8, 9, 1, 2, 3], [4, 0, 5, 6, 7, 8, 9, 0, 4]])
    of_masks = {
        (False, False): [[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0]],
        (False, True): [[1, 0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]],
        (True, False): [[1, 1, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0]],
        (True, True): [[1, 0, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0, 0, 0]],
    }
    for (reset, mask), expected in of_masks.items():
        plain = next_token_batch(tokens, by_ends(tokens), reset_at_documents=reset, mask_eod_loss=mask)
        batch = plain.with_later_labels(2)
        labels, counted = batch.labels.view(3, 2, 8), batch.loss_mask.view(3, 2, 8)
        assert torch.equal(labels[0], plain.labels)
        assert torch.equal(counted[0], torch.ones(2, 8) if plain.loss_mask is None else plain.loss_mask)
        assert counted[2].tolist() == expected
        for row, i in counted[2].nonzero().tolist():
            assert labels[2, row, i] == tokens[row, i + 3]
        assert counted[1, :, :7].all() == (not reset and not mask)
        assert not counted[1, :, 7].any()
        halves = [batch.shard(rank, 2) for rank in range(2)]
        assert all(torch.equal(half.labels[:2], plain.shard(rank, 2).labels) for rank, half in enumerate(halves))
        assert sum(half.loss_mask[4:].sum() for half in halves) == sum(map(sum, expected))
    assert plain.with_later_labels(0) is plain


def test_windows_longer_than_every_document(tmp_path: Path) -> None:
    """Documents of one token, and a window that spans many: an epoch holds every token but the tail's, once."""
    samples = packed(write_dataset(tmp_path / "x", [[token] for token in range(20)]))
    assert samples.samples_per_epoch == 2
    inputs = [token for i in range(2) for token in samples[i][:-1].tolist()]
    assert len(set(inputs)) == 2 * S


@each_packing
def test_a_pickled_data_set_reads_the_same(dataset: IndexedDataset, packing: PackingName) -> None:
    samples = packed(dataset, packing=packing)
    expected = [samples[i].tolist() for i in range(5)]
    again = pickle.loads(pickle.dumps(samples))
    assert [again[i].tolist() for i in range(5)] == expected


def test_a_batch_is_sharded_with_its_positions() -> None:
    tokens = torch.arange(16).view(2, 8)
    batch = Batch(tokens, tokens + 1, loss_mask=tokens % 2)
    shard = batch.shard(1, 2)
    assert shard.tokens.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert torch.equal(shard.labels, shard.tokens + 1)
    assert torch.equal(shard.loss_mask, shard.tokens % 2)
    assert shard.position_ids.tolist() == [[2, 3, 4, 5]]
    ends = torch.tensor([[0, 4, 8], [0, 8, 8]], dtype=torch.int32)
    given = Batch(tokens, tokens, position_ids=tokens % 5, cu_seqlens=ends, samples=tokens[:, 0]).shard(0, 2)
    assert given.samples.tolist() == [0, 8]
    assert given.tokens.tolist() == [[0, 4, 3, 7], [8, 9, 14, 15]]
    assert given.position_ids.tolist() == [[0, 4, 3, 2], [3, 4, 4, 0]]
    assert given.cu_seqlens is ends
    assert batch.shard(0, 1) is batch
