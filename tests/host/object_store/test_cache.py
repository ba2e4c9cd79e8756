"""The cache of objects: contents, limit, several processes, damage, and objects that change."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from megafp8.host.object_store import ObjectPath, ObjectStoreError
from megafp8.host.object_store.cache import ObjectCache, ObjectChanged
from tests.object_server import ObjectServer

SIZE, BLOCK = 100_003, 1000
CONTENT = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()


def put(target: ObjectPath, content: bytes = CONTENT) -> ObjectPath:
    target.write_bytes(content)
    return target


def memory(name: str) -> ObjectPath:
    return put(ObjectPath(f"memory://cache/{name}"))


def stored(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / "blocks").iterdir())


def test_reads_are_those_of_the_object_and_hit_the_storage_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ObjectCache(tmp_path, 10**6, BLOCK)
    obj, fetched = cache.open(memory("reads")), []
    fetch = ObjectPath.read_range
    monkeypatch.setattr(ObjectPath, "read_range", lambda *range_: fetched.append(range_) or fetch(*range_))
    draw = random.Random(0)
    ranges = [sorted(draw.choices(range(SIZE + 1), k=2)) for _ in range(50)] + [[0, 0], [SIZE, SIZE], [0, SIZE]]
    for start, end in ranges:
        assert bytes(obj.read(start, end)) == CONTENT[start:end]
    assert len(fetched) == -(-SIZE // BLOCK)
    assert obj.download().read_bytes() == CONTENT
    assert bytes(ObjectCache(tmp_path, 10**6, BLOCK).open(obj.path).read(0, SIZE)) == CONTENT
    assert len(fetched) == -(-SIZE // BLOCK) + 1, "another reader found all in the folder"


def test_the_blocks_read_last_remain(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 10 * (BLOCK + 4), BLOCK)
    obj = cache.open(memory("limit"))
    for number in range(10):
        obj.read(number * BLOCK, number * BLOCK + 1)
        os.utime(cache._path(obj, number), (number + 100, number + 100))
    obj.read(0, 1)  # the oldest, now read again
    obj.read(50 * BLOCK, 50 * BLOCK + 1)
    kept = {int(file.name.rpartition(".")[2]) for file in (tmp_path / "blocks").iterdir()}
    assert {0, 50, 9, 8} <= kept
    assert 1 not in kept
    assert stored(tmp_path) <= cache.limit_bytes


def test_a_damaged_or_short_block_is_downloaded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    obj = ObjectCache(tmp_path, 10**6, BLOCK).open(memory("damage"))
    obj.read(0, SIZE)
    first, second = sorted((tmp_path / "blocks").iterdir())[:2]
    first.write_bytes(bytes(BLOCK + 4))
    os.truncate(second, 10)
    assert bytes(ObjectCache(tmp_path, 10**6, BLOCK).open(obj.path).read(0, SIZE)) == CONTENT
    assert [f.name in caplog.text for f in (first, second)] == [True, True]


def test_a_full_disk_or_a_small_limit_costs_no_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    obj = ObjectCache(tmp_path, BLOCK, BLOCK).open(memory("full"))
    assert bytes(obj.read(0, 3 * BLOCK)) == CONTENT[: 3 * BLOCK]
    assert "used without being stored" in caplog.text


def test_an_object_that_changes_is_noticed_and_never_mixed(tmp_path: Path, s3: ObjectServer) -> None:
    cache = ObjectCache(tmp_path, 10**6, BLOCK)
    obj = cache.open(put(s3.folder() / "x"))
    assert bytes(obj.read(0, 10)) == CONTENT[:10]
    other = CONTENT[::-1]
    put(obj.path, other)
    assert bytes(obj.read(0, 10)) == CONTENT[:10], "the version that was opened"
    with pytest.raises(ObjectChanged, match="has changed since it was opened"):
        obj.read(BLOCK, BLOCK + 1)
    assert bytes(cache.open(obj.path).read(0, SIZE)) == other
    with pytest.raises(ObjectChanged):
        obj.download()
    obj.path.unlink()
    with pytest.raises((ObjectChanged, FileNotFoundError)):
        obj.read(BLOCK, BLOCK + 1)


def test_reading_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    obj, fetch, running = ObjectCache(tmp_path, 10**6, BLOCK).open(memory("ahead")), ObjectPath.read_range, []

    def slow(*arguments: object) -> bytes:
        running.append(arguments)
        time.sleep(0.05)
        return fetch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ObjectPath, "read_range", slow)
    start = time.perf_counter()
    obj.fetch_ahead(0, 50 * BLOCK)
    assert bytes(obj.read(0, 50 * BLOCK)) == CONTENT[: 50 * BLOCK]
    assert time.perf_counter() - start < 50 * 0.05 / 2, "one after the other"
    assert len(running) == 50

    def fail(*_: object) -> bytes:
        raise ObjectStoreError("no network")

    monkeypatch.setattr(ObjectPath, "read_range", fail)
    obj.fetch_ahead(60 * BLOCK, 61 * BLOCK)
    with pytest.raises(ObjectStoreError, match="no network"):
        obj.read(60 * BLOCK, 60 * BLOCK + 1)


def _read_much(folder: Path, url: str, limit: int, seed: int, reads: int, results: mp.Queue[str]) -> None:
    obj = ObjectCache(folder, limit, BLOCK).open(ObjectPath(url))
    draw = random.Random(seed)
    for _ in range(reads):
        start = draw.randrange(SIZE - 10)
        if bytes(obj.read(start, start + 10)) != CONTENT[start : start + 10]:
            results.put("wrong bytes")
    results.put("done")


def test_two_processes_share_a_folder_and_its_limit(tmp_path: Path) -> None:
    """The content of the folder is watched while two processes read, and a third one is killed."""
    url, limit = str(put(ObjectPath(f"local://{tmp_path}/x"))), 20 * (BLOCK + 4)
    context = mp.get_context("spawn")
    results: mp.Queue[str] = context.Queue()
    readers = [context.Process(target=_read_much, args=(tmp_path, url, limit, i, 400, results)) for i in range(2)]
    killed = context.Process(target=_read_much, args=(tmp_path, url, limit, 2, 10**6, results))
    (tmp_path / "blocks").mkdir()
    for process in [*readers, killed]:
        process.start()
    largest, count = 0, 0
    while any(process.is_alive() for process in readers):
        sizes = []
        for entry in os.scandir(tmp_path / "blocks"):
            try:
                sizes.append(entry.stat().st_size)
            except FileNotFoundError:
                continue
        largest = max(largest, sum(sizes))
        count += largest > 0
        if count == 30 and killed.pid is not None and largest:
            os.kill(killed.pid, signal.SIGKILL)
        time.sleep(0.01)
    assert [results.get(timeout=10) for _ in range(2)] == ["done", "done"]
    killed.kill()
    killed.join()
    assert limit / 2 < largest <= limit
