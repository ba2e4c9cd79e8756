"""What leaves the page cache: parts of files that were read or written, in order, once enough newer ones followed."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from megafp8.checkpoint import files
from megafp8.checkpoint.files import DropBehind, read_into, reading_once

MIB = 1 << 20


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Name, first byte and size of each call for a part of a file."""
    calls: list[tuple[str, int, int]] = []

    def fadvise(handle: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        calls.append((Path(os.readlink(f"/proc/self/fd/{handle}")).name, start, size))

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    return calls


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file"


def test_neighbours_become_one_part(dropped: list[Any], file: Path) -> None:
    behind = DropBehind(0, written=False)
    for start in range(0, 64, 2):
        behind.add(file, start * MIB, 2 * MIB)
    assert dropped == [("file", 0, 32 * MIB), ("file", 32 * MIB, 32 * MIB)]
    behind.add(file, 0, 100)
    behind.add(file, 64 * MIB, 100)  # small ones, which are not worth a call
    behind.add(file, 0, 100)
    assert len(dropped) == 2


def test_what_is_written_is_sent_at_once_and_removed_later(dropped: list[Any], file: Path) -> None:
    behind = DropBehind(64 * MIB, written=True)
    parts = [("file", start * MIB, 32 * MIB) for start in (0, 100, 200, 300)]
    for _, start, size in parts:
        behind.add(file, start, size)
    assert dropped == [*parts[:3], parts[0], parts[3], parts[1]]


def test_reads_are_dropped_within_a_context_alone(
    dropped: list[Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_READ_BYTES", 0)
    content = random.Random(0).randbytes(33 * MIB)
    file.write_bytes(content)
    view = memoryview(bytearray(33 * MIB))
    with file.open("rb", buffering=0) as stream:
        read_into(stream, 0, view)
        assert dropped == []
        with reading_once():
            read_into(stream, 0, view)
        assert dropped == [("file", 0, 33 * MIB)]
    assert view == content


def test_content_stays(file: Path) -> None:
    """With the operating system's own calls."""
    content = random.Random(0).randbytes(8 * MIB)
    file.write_bytes(content)
    behind = DropBehind(0, written=True)
    for start in (0, 4 * MIB, 0):
        behind.add(file, start, 4 * MIB)
    assert file.read_bytes() == content
