"""Lines of JSON after a kill and on a full disk; and that neither ends a run."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megafp8.host.text_file import DiskErrorsLogged, JsonLines


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes, as on a disk that is full there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_torn_last_line_is_ended_first(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    lines = JsonLines(path)
    lines.append({"a": 3, "text": "ü\udc80"})
    lines.append({"a": 4}, {"a": 5})
    lines.close()
    first, torn, *rest = path.read_bytes().decode().splitlines()
    assert (first, torn) == ('{"a": 1}', '{"a": 2')
    assert [json.loads(line) for line in rest] == [{"a": 3, "text": "ü\udc80"}, {"a": 4}, {"a": 5}]


@pytest.mark.parametrize("room", range(12))
def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path, room: int) -> None:
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append({"a": 1})
    before = lines.path.read_bytes()
    fits = room >= len(before)
    with file_size_limit(len(before) + room):
        if fits:
            lines.append({"a": 2})
        else:
            with pytest.raises(OSError, match=r"File too large: .*a\.jsonl"):
                lines.append({"a": 2})
    assert lines.path.read_bytes() == before + b'{"a": 2}\n' * fits
    lines.append({"a": 3})
    lines.close()
    assert lines.path.read_bytes().endswith(b'\n{"a": 3}\n')


def test_errors_of_the_disk_are_logged_once_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    full, caplog_text = JsonLines(Path("/dev/full")), "metrics cannot be written: [Errno 28] No space left on device"
    logged = DiskErrorsLogged("metrics")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with logged:
                full.append({})
    assert [message.partition(": '/dev/full'")[0] for message in caplog.messages] == [caplog_text]
    with logged:
        pass
    with caplog.at_level(logging.WARNING), logged:
        full.append({})
    assert len(caplog.messages) == 2
    with pytest.raises(KeyError), logged:
        raise KeyError("of a program")
