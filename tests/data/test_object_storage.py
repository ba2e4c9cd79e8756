"""Data sets in object storage give the samples of local files, bit for bit, and their errors name what is wrong."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from megafp8.data import DataError
from megafp8.data.blend import Blend, Segment
from megafp8.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, check_dataset
from megafp8.data.sampler import READ_AHEAD, _with_ahead, batches
from megafp8.data.samples import PackedDataset
from megafp8.host.object_store import ObjectPath, ObjectStoreError, as_path
from megafp8.host.object_store.cache import ObjectCache
from megafp8.objectives.next_token import NextToken
from tests.data.test_indexed_dataset import pack
from tests.object_server import ObjectServer
from tests.world import World

VOCABULARY = 5000
STEPS = 10


def write(prefix: Path, documents: int, *, mask: bool = False) -> None:
    draw = np.random.default_rng(0)
    writer = IndexedDatasetWriter(prefix, np.uint16, loss_mask=mask)
    for _ in range(documents):
        tokens = draw.integers(0, VOCABULARY, draw.integers(1, 80))
        writer.add_document(tokens, loss_mask=(tokens % 2).astype(np.uint8) if mask else None)
    writer.close({"tokenizer": "x", "max_token_id": VOCABULARY - 1})


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    write(prefix, 300, mask=True)
    return prefix


def opened(url: str, cache: Path, limit: int = 10**6) -> IndexedDataset:
    return IndexedDataset(url, cache=ObjectCache(cache, limit, 500))


def stream(dataset: IndexedDataset, cache: Path, consumed: int, workers: int) -> list[torch.Tensor]:
    """Tokens and labels of some steps."""
    packed = PackedDataset(
        dataset, range(dataset.num_documents), seq_length=32, seed=1, cache_dir=cache, vocab_size=VOCABULARY
    )
    steps = batches(
        Blend([packed], Segment.fresh([1.0], 1)),
        consumed_samples=consumed,
        global_batch_size=4,
        micro_batch_size=2,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=workers,
        objective=NextToken(32, reset_at_documents=False, mask_eod_loss=False),
        pin_memory=False,
    )
    return [x for step in itertools.islice(steps, STEPS) for batch in step for x in (batch.tokens, batch.labels)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("protocol", "limit", "workers"),
    [("s3", 10**6, 0), ("local", 3000, 0), pytest.param("s3", 10**6, 2, marks=pytest.mark.slow)],
    ids=["all blocks fit", "few blocks fit", "loader processes"],
)
def test_samples_are_those_of_local_files(
    local: Path, s3: ObjectServer, tmp_path: Path, world2: World, protocol: str, limit: int, workers: int
) -> None:
    if workers:
        world2.run(int, ranks=1)  # loader processes come from the server of the ranks, which these tests configure
    remote = opened(s3.upload(local) if protocol == "s3" else f"local://{local}", tmp_path / "objects", limit)
    assert remote.is_remote
    for consumed in (0, 12):  # from the beginning, and resumed
        expected = stream(IndexedDataset(local), tmp_path / "index", consumed, 0)
        found = stream(remote, tmp_path / "index", consumed, workers)
        assert len(found) == len(expected) == 4 * STEPS
        assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_everything_else_is_as_in_local_files(local: Path, s3: ObjectServer, tmp_path: Path) -> None:
    here, there = IndexedDataset(local), opened(s3.upload(local), tmp_path)
    assert there.fingerprint == here.fingerprint
    assert there.loss_mask().fingerprint == here.loss_mask().fingerprint
    assert there.sidecar() == here.sidecar()
    assert np.array_equal(there.loss_mask().read(0, here.num_tokens), here.loss_mask().read(0, here.num_tokens))
    again = pickle.loads(pickle.dumps(there))
    assert np.array_equal(again.document(7), here.document(7))
    check_dataset(there, VOCABULARY, None)
    with pytest.raises(DataError, match=f"{there.prefix} holds token {VOCABULARY - 1}"):
        check_dataset(there, 10, None)
    packed = [PackedDataset(x, range(300), 32, 0, tmp_path, loss_mask=x.loss_mask()) for x in (here, there)]
    assert all(np.array_equal(x, y) for x, y in zip(packed[0].parts(3), packed[1].parts(3)))


def test_sequences_in_another_order_than_the_file(s3: ObjectServer, tmp_path: Path) -> None:
    pack(tmp_path / "x", places=[2, 0, 1])
    remote = opened(s3.upload(tmp_path / "x"), tmp_path / "objects")
    remote.fetch_ahead(1, 5)
    assert remote.read(1, 5).tolist() == [6, 7, 8, 9, 10]


def outage() -> None:
    raise ObjectStoreError("no network")


def test_faults(local: Path, s3: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"s3://bucket/none/x\.idx cannot be opened: no such file or object"):
        opened("s3://bucket/none/x", tmp_path)
    with pytest.raises(DataError, match="fsspec knows no protocol nosuch://"):
        opened("nosuch://x/y", tmp_path)
    url = s3.upload(local)
    remote = opened(url, tmp_path)
    tokens = ObjectPath(f"{url}.bin")
    tokens.write_bytes(tokens.read_bytes()[::-1])
    with pytest.raises(DataError, match=f"{url}.bin has changed since it was opened"):
        remote.read(0, 1000)
    with pytest.raises(DataError, match=f"{url}.bin has changed"):
        pickle.loads(pickle.dumps(remote)).read(0, 1000)
    tokens.write_bytes(b"12")
    with pytest.raises(DataError, match=f"{url}.bin has 2 bytes, but its index promises"):
        opened(url, tmp_path)
    url = s3.upload(local)
    remote = opened(url, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectPath, "read_range", lambda *_: outage())
        with pytest.raises(ObjectStoreError, match="no network"):  # no DataError: the job may be started again
            remote.read(0, 10)
    index = as_path(f"{url}.idx")
    index.write_bytes(b"damaged")
    with pytest.raises(DataError, match=f"{url}.idx is not an index of a token file"):
        opened(url, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data\.object_cache\.folder.*File exists|Not a directory"):
        opened(s3.upload(local), tmp_path / "file")
    with pytest.raises(ValueError, match="data sets are written to a local disk"):
        IndexedDatasetWriter(url, np.uint16)


@pytest.mark.parametrize("workers", [1, 3])
def test_each_worker_names_what_it_reads_next(workers: int) -> None:
    """Worker w of W makes the micro-batches w, w + W, ...; each is named once, at most READ_AHEAD of its own before."""
    wanted = list(itertools.islice(_with_ahead(([i] for i in itertools.count()), workers), 60))
    assert [x.rows for x in wanted] == [[i] for i in range(60)]
    for worker in range(workers):
        own = wanted[worker::workers]
        named = [index for x in own for index in x.ahead]
        assert named == list(range(worker, worker + len(named) * workers, workers))
        assert [max(x.ahead) - x.rows[0] for x in own] == [READ_AHEAD * workers] * len(own)
