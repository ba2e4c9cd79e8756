"""The .bin/.idx format against bytes packed by hand, every kind of damage, and the writer's care for what is there."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megafp8.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, check_dataset

Damage = Callable[[bytes, bytes], tuple[bytes | None, bytes | None]]
DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12, 65535]]


def by_hand(prefix: Path) -> tuple[bytes, bytes]:
    """The two files of DOCUMENTS as Megatron-LM lays them out, packed with struct."""
    tokens = b"".join(struct.pack(f"<{len(d)}H", *d) for d in DOCUMENTS)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    index += struct.pack("<3i", 3, 1, 5) + struct.pack("<3q", 0, 6, 8) + struct.pack("<4q", 0, 1, 2, 3)
    prefix.with_suffix(".bin").write_bytes(tokens)
    prefix.with_suffix(".idx").write_bytes(index)
    return tokens, index


def write(prefix: Path, dtype: type = np.uint16) -> None:
    writer = IndexedDatasetWriter(prefix, dtype)
    for document in DOCUMENTS:
        writer.add_document(np.array(document))
    writer.close()


def test_reads_what_was_packed_by_hand(tmp_path: Path) -> None:
    by_hand(tmp_path / "x")
    dataset = IndexedDataset(tmp_path / "x")
    assert [dataset.document(i).tolist() for i in range(dataset.num_documents)] == DOCUMENTS
    assert dataset.document_lengths.tolist() == [3, 1, 5]
    assert (dataset.num_tokens, dataset.dtype, dataset.sidecar()) == (9, np.uint16, None)


def test_writes_the_same_bytes(tmp_path: Path) -> None:
    tokens, index = by_hand(tmp_path / "x")
    write(tmp_path / "y")
    assert (tmp_path / "y.bin").read_bytes() == tokens
    assert (tmp_path / "y.idx").read_bytes() == index
    assert len(list(tmp_path.iterdir())) == 4


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    """Megatron allows it: document 0 has sequences 0 and 1."""
    by_hand(tmp_path / "x")
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 3)
    index += struct.pack("<3i", 3, 1, 5) + struct.pack("<3q", 0, 6, 8) + struct.pack("<3q", 0, 2, 3)
    (tmp_path / "x.idx").write_bytes(index)
    dataset = IndexedDataset(tmp_path / "x")
    assert [dataset.document(i).tolist() for i in range(2)] == [[5, 6, 7, 8], DOCUMENTS[2]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b, i: (None, i), r"x\.bin is missing: its index promises 18 bytes"),
        (lambda b, i: (b, None), r"x\.idx cannot be opened: no such file"),
        (lambda b, i: (b, b""), r"x\.idx cannot be opened: it is empty"),
        (lambda b, i: (b[:-2], i), r"x\.bin has 16 bytes, but its index promises 18 \(9 tokens of 2 bytes\)"),
        (lambda b, i: (b + b"\0", i), r"x\.bin has 19 bytes"),
        (lambda b, i: (b, i[:-1]), r"x\.idx has 101 bytes, but its header .* needs 102: truncated or damaged"),
        (lambda b, i: (b, i[:20]), r"x\.idx is not an index"),
        (lambda b, i: (b, b"X" + i[1:]), r"x\.idx is not an index of a token file"),
        (lambda b, i: (b, i[:9] + struct.pack("<Q", 2) + i[17:]), "format version 2; only version 1"),
        (lambda b, i: (b, i[:17] + b"\x09" + i[18:]), "unknown dtype code 9"),
        (lambda b, i: (b, i[:-8] + struct.pack("<q", 2)), "document marks do not run from 0 to 3"),
        (lambda b, i: (b, i[:62] + struct.pack("<q", 10) + i[70:]), r"x\.idx is damaged: it points outside"),
        (lambda b, i: (b, i[:62] + struct.pack("<q", 7) + i[70:]), r"x\.idx is damaged: it points outside"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Damage, message: str) -> None:
    for suffix, content in zip((".bin", ".idx"), damage(*by_hand(tmp_path / "x"))):
        if content is None:
            (tmp_path / "x").with_suffix(suffix).unlink()
        else:
            (tmp_path / "x").with_suffix(suffix).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        IndexedDataset(tmp_path / "x")


def test_a_writer_overwrites_nothing(tmp_path: Path) -> None:
    write(tmp_path / "x")
    before = (tmp_path / "x.bin").read_bytes()
    with pytest.raises(ValueError, match=r"x\.bin is there already"):
        IndexedDatasetWriter(tmp_path / "x", np.uint16)
    writer = IndexedDatasetWriter(tmp_path / "x", np.uint16, overwrite=True)
    writer.add_document(np.array([1]))
    assert (tmp_path / "x.bin").read_bytes() == before, "visible before it was complete"
    writer.abort()
    assert (tmp_path / "x.bin").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_appending_another_data_set(tmp_path: Path) -> None:
    write(tmp_path / "a")
    writer = IndexedDatasetWriter(tmp_path / "b", np.uint16)
    writer.add_document(np.array([1, 2]))
    writer.append(IndexedDataset(tmp_path / "a"))
    writer.close()
    merged = IndexedDataset(tmp_path / "b")
    assert [merged.document(i).tolist() for i in range(4)] == [[1, 2], *DOCUMENTS]
    write(tmp_path / "c", np.int32)
    with pytest.raises(ValueError, match="cannot be merged"):
        IndexedDatasetWriter(tmp_path / "d", np.uint16).append(IndexedDataset(tmp_path / "c"))


def test_check_dataset(tmp_path: Path) -> None:
    write(tmp_path / "x")
    prefix = str(tmp_path / "x")

    def check(vocab_size: int, fingerprint: str | None) -> None:
        check_dataset(IndexedDataset(prefix), vocab_size, fingerprint)

    check(65536, "any")
    with pytest.raises(ValueError, match=r"holds token 65535, but model.vocab_size is 65535"):
        check(65535, None)
    about = {"tokenizer": "bytes", "tokenizer_fingerprint": "a" * 64, "max_token_id": 100}
    (tmp_path / "x.json").write_text(json.dumps(about))
    check(101, "a" * 64)
    with pytest.raises(ValueError, match="the vocabularies differ"):
        check(101, "b" * 64)
    with pytest.raises(ValueError, match=r"set model.vocab_size to at least 101"):
        check(100, None)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json is damaged"):
        check(101, None)


def test_an_empty_data_set(tmp_path: Path) -> None:
    IndexedDatasetWriter(tmp_path / "x", np.uint16).close()
    assert IndexedDataset(tmp_path / "x").num_documents == 0
    with pytest.raises(ValueError, match="holds no tokens"):
        check_dataset(IndexedDataset(tmp_path / "x"), 10, None)


def test_abort_leaves_nothing(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(tmp_path / "x", np.uint16)
    writer.add_document(np.array([1, 2]))
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_loader_process_is_sent_a_name_and_not_the_tokens(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(tmp_path / "x", np.uint16)
    writer.add_document(np.arange(50_000))
    writer.close()
    sent = pickle.dumps(IndexedDataset(tmp_path / "x"))
    assert len(sent) < 1000
    assert pickle.loads(sent).document(0).tolist() == list(range(50_000))
