"""The .bin/.idx format against bytes packed by hand, damage of every kind, and the writer."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megafp8.data import DataError
from megafp8.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, check_dataset, check_ids
from tests.data.datasets import all_documents, write_dataset

Damage = Callable[[bytes, bytes], tuple[bytes | None, bytes | None]]
DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12, 65535]]


def pack(
    prefix: Path,
    sequences: list[list[int]] = DOCUMENTS,
    places: list[int] | None = None,
    marks: list[int] | None = None,
    modes: bytes = b"",
) -> tuple[bytes, bytes]:
    """Both files, of uint16, as Megatron-LM writes them; `sequences` are in the .bin file in the order of `places`."""
    n = len(sequences)
    marks = marks or list(range(n + 1))
    pointers, tokens = [0] * n, b""
    for k in sorted(range(n), key=(places or list(range(n))).__getitem__):
        pointers[k] = len(tokens)
        tokens += struct.pack(f"<{len(sequences[k])}H", *sequences[k])
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, n, len(marks))
    index += struct.pack(f"<{n}i", *map(len, sequences)) + struct.pack(f"<{n}q", *pointers)
    index += struct.pack(f"<{len(marks)}q", *marks) + modes
    prefix.with_suffix(".bin").write_bytes(tokens)
    prefix.with_suffix(".idx").write_bytes(index)
    return tokens, index


def test_reads_and_writes_the_bytes_packed_by_hand(tmp_path: Path) -> None:
    tokens, index = pack(tmp_path / "x")
    assert index[9:34] == struct.pack("<QBQQ", 1, 8, 3, 4)
    assert index[34:] == struct.pack("<3i", 3, 1, 5) + struct.pack("<3q", 0, 6, 8) + struct.pack("<4q", 0, 1, 2, 3)
    dataset = IndexedDataset(tmp_path / "x")
    assert all_documents(tmp_path / "x") == DOCUMENTS
    assert dataset.document_lengths.tolist() == [3, 1, 5]
    assert (dataset.num_tokens, dataset.dtype, dataset.sidecar()) == (9, np.uint16, None)
    write_dataset(tmp_path / "y", DOCUMENTS)
    assert (tmp_path / "y.bin").read_bytes() == tokens
    assert (tmp_path / "y.idx").read_bytes() == index
    assert len(list(tmp_path.iterdir())) == 4


def test_sequences_in_any_order_and_documents_of_several(tmp_path: Path) -> None:
    """As Megatron-Core reads them: a document's sequences in the order of the index, wherever they are."""
    pack(tmp_path / "x", marks=[0, 2, 3])
    assert all_documents(tmp_path / "x") == [[5, 6, 7, 8], DOCUMENTS[2]]
    rng = np.random.default_rng(0)
    for _ in range(20):
        n = int(rng.integers(1, 12))
        sequences = [rng.integers(0, 2**16, int(rng.integers(0, 5))).tolist() for _ in range(n)]
        marks = [0, *sorted(rng.integers(0, n + 1, int(rng.integers(0, n))).tolist()), n]
        if len(marks) == n + 1:
            marks = list(range(n + 1))
        pack(tmp_path / "x", sequences, rng.permutation(n).tolist(), marks)
        expected = [[t for s in sequences[a:b] for t in s] for a, b in itertools.pairwise(marks)]
        assert all_documents(tmp_path / "x") == expected
        stream = [token for document in expected for token in document]
        dataset = IndexedDataset(tmp_path / "x")
        assert dataset.document_positions.tolist() == np.cumsum([0, *map(len, expected)])[:-1].tolist()
        for first, end in rng.integers(0, len(stream) + 1, (5, 2)).tolist():
            assert dataset.read(first, max(0, end - first)).tolist() == stream[first:end]


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    _, index = pack(tmp_path / "x", modes=b"\0\0\0")
    assert all_documents(tmp_path / "x") == DOCUMENTS
    (tmp_path / "x.idx").write_bytes(index[:-2] + b"\1\0")
    with pytest.raises(DataError, match="multimodal data set of Megatron-LM: sequence 1 has mode 1"):
        IndexedDataset(tmp_path / "x")
    for code, name in ((6, "float64"), (7, "float32")):
        (tmp_path / "x.idx").write_bytes(index[:17] + bytes([code]) + index[18:])
        with pytest.raises(DataError, match=rf"x\.idx says that its tokens are {name}, but token ids are integers"):
            IndexedDataset(tmp_path / "x")


FLIPPED = ["one sequence each", "with modes", "not in order", "several sequences", "several, with a sidecar"]


@pytest.mark.parametrize(
    ("cases", "n", "every"), [(FLIPPED, 3, 5), *(pytest.param([x], 60, 1, marks=pytest.mark.slow) for x in FLIPPED)]
)
def test_no_flipped_bit_of_an_index_gives_wrong_tokens(tmp_path: Path, cases: list[str], n: int, every: int) -> None:
    """Every bit, or every fifth, of an index of `n` sequences, one of them empty: an error, or the right data."""
    rng = np.random.default_rng(1)
    sequences = [[], *(rng.integers(0, 2**16, int(rng.integers(0, 9))).tolist() for _ in range(n - 1))]
    for case in cases:
        places = rng.permutation(n).tolist() if case == "not in order" else None
        marks = [*range(0, n, 2), n] if case.startswith("several") else list(range(n + 1))
        _, index = pack(tmp_path / "x", sequences, places, marks, bytes(n) if case == "with modes" else b"")
        if case == "several, with a sidecar":
            about = {"max_token_id": 2**16 - 1, "index_sha256": hashlib.sha256(index).hexdigest()}
            (tmp_path / "x.json").write_text(json.dumps(about))
        expected = [[t for s in sequences[a:b] for t in s] for a, b in itertools.pairwise(marks)]
        errors, wrong = 0, []
        for bit in range(0, 8 * len(index), every):
            damaged = bytearray(index)
            damaged[bit // 8] ^= 1 << bit % 8
            (tmp_path / "x.idx").write_bytes(damaged)
            try:
                if all_documents(tmp_path / "x") != expected:
                    wrong.append(bit)
            except DataError:
                errors += 1
        print(f"{case}: {errors} errors, {len(wrong)} wrong")
        assert errors > 100 / every
        # With documents of several sequences only the sidecar's checksum shows which of them a document ends with.
        first_mark = 8 * (len(index) - 8 * len(marks)) if case == "several sequences" else 0
        assert all(first_mark and bit >= first_mark for bit in wrong), "more than a moved mark went undetected"


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
        (lambda b, i: (b, i[:62] + struct.pack("<q", 6) + i[70:]), r"overlap in the \.bin file.*\(sequence 2 is the"),
        (lambda b, i: (b, i[:-16] + struct.pack("<q", 1) + i[-8:]), "its document 1 does not hold exactly one"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Damage, message: str) -> None:
    for suffix, content in zip((".bin", ".idx"), damage(*pack(tmp_path / "x"))):
        path = (tmp_path / "x").with_suffix(suffix)
        path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("given", ["a.bin", "a.idx"])
def test_a_file_for_a_prefix_is_answered_with_its_prefix(tmp_path: Path, given: str) -> None:
    for name in ("a", "b"):
        pack(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{given}\.idx cannot be opened: .*did you mean \S+/a\?"):
        IndexedDataset(tmp_path / given)


def test_a_writer_overwrites_nothing(tmp_path: Path) -> None:
    write_dataset(tmp_path / "x", DOCUMENTS)
    before = (tmp_path / "x.bin").read_bytes()
    with pytest.raises(ValueError, match=r"x\.bin exists"):
        IndexedDatasetWriter(tmp_path / "x", np.uint16)
    writer = IndexedDatasetWriter(tmp_path / "x", np.uint16, overwrite=True)
    writer.add_document(np.array([1]))
    assert (tmp_path / "x.bin").read_bytes() == before, "visible before it was complete"
    writer.abort()
    assert (tmp_path / "x.bin").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "corpus.json").write_text('{"text": "a corpus of one document"}')
    for overwrite, message in ((False, r"corpus\.json exists"), (True, "it has no max_token_id")):
        with pytest.raises(ValueError, match=message):
            IndexedDatasetWriter(tmp_path / "corpus", np.uint16, overwrite=overwrite)


def test_a_sidecar_is_that_of_its_data_set(tmp_path: Path) -> None:
    for about in ({"max_token_id": 3}, {"max_token_id": 4}, None):
        writer = IndexedDatasetWriter(tmp_path / "x", np.uint16, overwrite=True)
        writer.add_document(np.array([1, 2, 3]))
        writer.close(about)
        digest = hashlib.sha256((tmp_path / "x.idx").read_bytes()).hexdigest()
        assert IndexedDataset(tmp_path / "x").sidecar() == (
            about and {"format_version": 1, **about, "index_sha256": digest}
        )


def test_check_dataset(tmp_path: Path) -> None:
    write_dataset(tmp_path / "x", DOCUMENTS)
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["a"]', "it holds a list, not a mapping"),
        ('{"text": "a"}\n{"text": "b"}\n', "Extra data.*restore it, or move it away"),
        ("{}", "max_token_id is None, not a token id"),
        ('{"max_token_id": "100"}', "max_token_id is '100', not a token id"),
        ('{"max_token_id": true}', "max_token_id is True"),
        ('{"max_token_id": -1}', "max_token_id is -1"),
        ('{"max_token_id": 1, "tokenizer_fingerprint": 7}', "tokenizer_fingerprint is 7, not a hash"),
        (
            '{"max_token_id": 1, "index_sha256": "0"}',
            r"x\.idx is damaged, or belongs to another data set than .*x\.json",
        ),
    ],
)
def test_damaged_sidecars(tmp_path: Path, text: str, message: str) -> None:
    write_dataset(tmp_path / "x", DOCUMENTS)
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DataError, match=message):
        check_dataset(IndexedDataset(tmp_path / "x"), 101, "a" * 64)


@pytest.mark.parametrize(
    ("dtype", "token"), [(np.int32, -1), (np.int64, 2**40), (np.int16, -300), (np.uint16, 50_000), (np.int32, 100)]
)
def test_ids_outside_the_vocabulary_are_placed(tmp_path: Path, dtype: type, token: int) -> None:
    dataset = write_dataset(tmp_path / "x", [[1, 2, 3], [], [99, 4, token, 5]], dtype)
    message = rf"x\.bin: document 2, position 2 holds token {token}"
    with pytest.raises(DataError, match=message):
        check_dataset(dataset, 100, None)
    with pytest.raises(DataError, match=message):
        check_ids(dataset, dataset.read(1, 6), 100, position=1)
    check_ids(dataset, dataset.read(0, 5), 100, position=0)


def test_an_empty_data_set(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "x", [])
    assert dataset.num_documents == 0
    with pytest.raises(ValueError, match="holds no tokens"):
        check_dataset(dataset, 10, None)


def test_a_writer_refuses_tokens_that_do_not_fit(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(tmp_path / "x", np.uint16)
    writer.add_document(np.array([1, 2]))
    for tokens in ([1, 65536], [-1]):
        with pytest.raises(ValueError, match="do not fit uint16"):
            writer.add_document(np.array(tokens))
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_becomes_shorter_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    """And no SIGBUS, as of a memory map, after which the process says nothing."""
    dataset = write_dataset(tmp_path / "x", [range(5), range(5, 50_000)])
    os.truncate(tmp_path / "x.bin", 20_000)
    assert dataset.document(0).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(
        DataError, match=r"x.bin has become shorter since it was opened: it had 100,000 bytes and now has"
    ):
        dataset.document(1)
    os.truncate(tmp_path / "x.idx", 50)
    with pytest.raises(
        DataError, match=r"x.idx has become shorter since it was opened: it had \d+ bytes and now has 50"
    ):
        dataset.locate(3)


def test_files_of_a_writer_that_was_killed_are_removed_by_the_next(tmp_path: Path) -> None:
    """And not those of one that still writes."""
    code = (
        "import sys\nimport numpy as np\nfrom megafp8.data.indexed_dataset import IndexedDatasetWriter\n"
        f"writer = IndexedDatasetWriter({str(tmp_path / 'x')!r}, np.uint16, loss_mask=True)\nprint(1, flush=True)\n"
        "sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 2
    write_dataset(tmp_path / "x", [range(5)])
    assert left < {path.name for path in tmp_path.iterdir()}
    process.kill()
    process.communicate()
    IndexedDatasetWriter(tmp_path / "x", np.uint16, overwrite=True).abort()
    assert {path.name for path in tmp_path.iterdir()} == {"x.bin", "x.idx"}


def test_a_loader_process_gets_a_name_and_not_the_tokens(tmp_path: Path) -> None:
    sent = pickle.dumps(write_dataset(tmp_path / "x", [range(50_000)]))
    assert len(sent) < 1000
    assert pickle.loads(sent).document(0).tolist() == list(range(50_000))
