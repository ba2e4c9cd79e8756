"""Objectives with documents, label by label: what counts, whose document it is, and where a sample is padded."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from megafp8.data import DataError
from megafp8.data.blend import Blend, Segment
from megafp8.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megafp8.data.sampler import batches
from megafp8.data.samples import PackedDataset
from megafp8.objectives.answers import Answers
from megafp8.objectives.next_token import NextToken

S, EOD = 11, 0


@pytest.fixture
def dataset(tmp_path: Path) -> IndexedDataset:
    """Documents of 1 to 30 tokens: a third `EOD`, though not where a sample begins, and half of them answers."""
    rng = np.random.default_rng(0)
    writer = IndexedDatasetWriter(tmp_path / "x", np.uint16, loss_mask=True)
    for number, length in enumerate([*rng.integers(1, 9, 40).tolist(), 30, 12, 1]):
        tokens = 1 + number * 100 + np.arange(length)
        tokens[(rng.random(length) < 1 / 3) & (np.arange(length) % S != 0)] = EOD
        writer.add_document(tokens, loss_mask=rng.integers(0, 2, length).astype(np.uint8))
    writer.close({"max_token_id": 9999})
    return IndexedDataset(tmp_path / "x")


NEXT_TOKEN = NextToken(S, reset_at_documents=True, mask_eod_loss=True)


@pytest.mark.parametrize("objective", [Answers(S), Answers(S, all_tokens=True), NEXT_TOKEN])
def test_each_label_of_an_epoch(dataset: IndexedDataset, objective: Answers | NextToken) -> None:
    """Each token but a document's first is the label of exactly one place, whose token is the one before it; documents
    are those of the data set, though other tokens of theirs are `EOD` too."""
    mask, all_tokens = dataset.loss_mask(), objective != Answers(S)
    packed = PackedDataset(
        dataset, range(dataset.num_documents), S, 3, Path(dataset.prefix).parent, packing="best_fit",
        loss_mask=None if objective is NEXT_TOKEN else mask,
    )  # fmt: skip
    n = packed.samples_per_epoch
    stream = batches(
        Blend([packed], Segment.fresh([1.0], 3)), consumed_samples=0, global_batch_size=n, micro_batch_size=n,
        data_parallel_rank=0, data_parallel_size=1, num_workers=0, objective=objective, pin_memory=False,
    )  # fmt: skip
    (batch,) = next(stream)
    assert batch.loss_mask is not None
    assert batch.position_ids is not None
    assert batch.cu_seqlens is not None
    found: dict[int, tuple[list[list[int]], list[float]]] = {}
    for row in range(n):
        bounds = sorted(set(batch.cu_seqlens[row].tolist()))
        assert (bounds[0], bounds[-1]) == (0, S)
        for first, end in pairwise(bounds):
            assert batch.position_ids[row, first:end].tolist() == list(range(end - first))
            pairs = torch.stack([batch.tokens[row, first:end], batch.labels[row, first:end]]).T.tolist()
            counts = batch.loss_mask[row, first:end].tolist()
            assert pairs[0][0] not in found or pairs[0][0] == EOD
            found[pairs[0][0]] = pairs, counts
    total = 0.0
    for i in range(dataset.num_documents):
        tokens, learned = dataset.document(i).tolist(), mask.document(i).tolist()
        for first in range(0, len(tokens) - 1, S):  # a document that is longer than a sample is cut
            part, which = tokens[first : first + S + 1], learned[first + 1 : first + S + 1]
            pairs, counts = found[part[0]]
            assert pairs[: len(which)] == [list(pair) for pair in pairwise(part)]
            assert counts[: len(which)] == ([1.0] * len(which) if all_tokens else which)
            # The last token is an input too where another document follows; nothing is learned there.
            assert len(pairs) <= len(part)
            assert not any(counts[len(which) :])
            total += sum(counts)
    assert batch.loss_mask.sum() == total


def test_a_damaged_mask_is_named(dataset: IndexedDataset) -> None:
    path = Path(f"{dataset.prefix}.loss_mask.bin")
    content = bytearray(path.read_bytes())
    content[int(dataset.document_positions[40])] ^= 4
    path.write_bytes(bytes(content))
    Path(f"{dataset.prefix}.json").unlink()  # which knows the mask's fingerprint
    every, folder = range(dataset.num_documents), Path(dataset.prefix).parent
    mask = dataset.loss_mask()
    packed = PackedDataset(dataset, every, S, 3, folder, packing="best_fit", loss_mask=mask)
    error = r"x.loss_mask.bin: document 40, position 0 holds [45], but a loss mask has only 0 and 1"
    with pytest.raises(DataError, match=error):
        [packed.parts(i) for i in range(packed.samples_per_epoch)]


def test_padding_has_no_loss_and_is_a_document_of_its_own() -> None:
    part = np.array([[5, EOD, 7, 8], [0, 0, 1, 1]])
    objective = Answers(S)
    batch = objective.batch(
        torch.from_numpy(np.stack([objective.row([part], 0), objective.row([part * [[1], [0]]], 1)]))
    )
    assert batch.tokens[0].tolist() == [5, EOD, 7, 8] + [0] * 7
    assert batch.loss_mask is not None
    assert batch.loss_mask.tolist() == [[0, 1, 1] + [0] * 8, [0] * S]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens[0, :3].tolist() == [0, 4, S]
