"""The journal lists only what is safe on disk, and belongs to one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.target import JOURNAL_FILE, Journal, Sink

KEY = {"source": "a → b"}


def test_flushed_lines_are_read_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path, KEY, seconds=1000)
    journal.add("x")
    journal.add("y")
    assert journal.done == set()
    journal.flush()
    journal.add("z")  # and the process dies: the lock goes, the name too
    journal._stream.close()
    assert Journal(tmp_path, KEY).done == {"x", "y"}


def test_with_zero_seconds_each_line_is_flushed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, KEY, seconds=0)
    journal.add("x")
    assert journal.done == {"x"}


def test_data_is_flushed_before_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, KEY, seconds=1000)
    (tmp_path / "sub").mkdir()
    for name in ("one", "sub/two"):
        (tmp_path / name).write_text("data")
    order: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1])
    journal.add("x")
    journal.flush()
    assert order[-1] == str(tmp_path / JOURNAL_FILE)
    assert {str(tmp_path / "one"), str(tmp_path / "sub/two")} <= set(order[:-1])


@pytest.mark.parametrize("damage", [b"", b"half a na"])
def test_a_torn_line_does_not_count(tmp_path: Path, damage: bytes) -> None:
    journal = Journal(tmp_path, KEY)
    journal.add("x")
    journal.flush()
    journal._stream.close()
    with (tmp_path / JOURNAL_FILE).open("ab") as stream:
        stream.write(damage)
    again = Journal(tmp_path, KEY, seconds=0)
    assert again.done == {"x"}
    again.add("y")
    again._stream.close()
    assert Journal(tmp_path, KEY).done == {"x", "y"}


def test_another_key_is_refused_once_something_is_safe(tmp_path: Path) -> None:
    Journal(tmp_path, {"source": "b"})._stream.close()
    journal = Journal(tmp_path, KEY, seconds=0)
    journal.add("x")
    journal._stream.close()
    with pytest.raises(ValueError, match="another unfinished conversion: source was a → b and is c"):
        Journal(tmp_path, {"source": "c"})
    assert Journal(tmp_path, KEY).done == {"x"}


def test_remove_deletes_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path, KEY)
    journal.add("x")
    journal.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_second_process_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    program = f"""
import sys
from megafp8.conversion.target import Journal
journal = Journal({str(tmp_path)!r}, {KEY!r}, seconds=0)
journal.add("x")
print("ready", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    with pytest.raises(ValueError, match="written by another process"):
        Journal(tmp_path, KEY)
    process.kill()
    process.communicate()
    assert Journal(tmp_path, KEY).done == {"x"}


class _Sink(Sink):
    def begin(self, source: CheckpointSource, options: object) -> list[str]:
        assert self._open_journal(source, [], {})
        return []

    def write(self, name: str, tensor: object) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError


def _hidden_link(hidden: Path, elsewhere: Path) -> None:
    hidden.symlink_to(elsewhere)


def _hidden_link_to_nothing(hidden: Path, elsewhere: Path) -> None:
    hidden.symlink_to(elsewhere / "missing")


def _link_to_a_file(hidden: Path, elsewhere: Path) -> None:
    hidden.mkdir()
    (hidden / JOURNAL_FILE).symlink_to(elsewhere / "precious")


def _link_to_a_folder(hidden: Path, elsewhere: Path) -> None:
    hidden.mkdir()
    (hidden / "tokenizer").symlink_to(elsewhere)


@pytest.mark.parametrize("link", [_hidden_link, _hidden_link_to_nothing, _link_to_a_file, _link_to_a_folder])
def test_nothing_is_deleted_or_overwritten_through_a_symlink(
    tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("kept\n")
    sink = _Sink(tmp_path / "target")
    link(sink.hidden, elsewhere)
    with pytest.raises(ValueError, match=r"\.target\.converting.* is a symbolic link"):
        sink.begin(cast(CheckpointSource, SimpleNamespace(tensors={}, path=tmp_path)), {})
    assert [(file.name, file.read_text()) for file in elsewhere.iterdir()] == [("precious", "kept\n")]
