"""CheckpointWriter: every reader reads the result, also of a writer that was interrupted and continued."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megafp8.checkpoint import CheckpointReader, Rectangle, Rectangles, load
from megafp8.checkpoint import writer as writer_module
from megafp8.checkpoint.files import Checksum, find_damage, write_checksums, write_file
from megafp8.checkpoint.store import METADATA_FILE, metadata_json
from megafp8.checkpoint.writer import CheckpointWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"a": (37, 8), "b": (5,), "c": (), "d": (4, 3, 2), "e": (1, 100)}
    state = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    state["f"] = torch.randn(20, 6, generator=generator).to(torch.bfloat16)[3:9]  # a part of larger memory
    return state


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rectangles and files."""
    monkeypatch.setattr(writer_module, "RECTANGLE_BYTES", 64)
    monkeypatch.setattr(writer_module, "FILE_BYTES", 2000)


def describe(folder: Path, sums: dict[str, Checksum]) -> Path:
    sums[METADATA_FILE] = write_file(folder / METADATA_FILE, metadata_json(folder, 5, {}))
    assert sums.keys() == {file.name for file in folder.iterdir()}
    assert all(find_damage(folder / name, checksum) is None for name, checksum in sums.items())
    write_checksums(folder, sums)
    return folder


def check(folder: Path) -> None:
    """By torch's own code, by ours into a whole and into halves, and by the reader."""
    expected = tensors()
    plain = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(plain, checkpoint_id=folder, no_dist=True)
    ours = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    half = ours["a"][:, 4:]
    state = {**ours, "a": Rectangles((37, 8), torch.float32, [Rectangle((0, 0), ours["a"][:, :4])])}
    state["a"].add((0, 4), half)
    assert load(folder, state)["step"] == 5
    reader = CheckpointReader(folder)
    assert reader.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        for found in (plain[name], ours[name], reader.read(name)):
            assert torch.equal(found, tensor), name


@pytest.mark.usefixtures("small")
def test_all_readers_read_it(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    for name, tensor in tensors().items():
        writer.add(name, tensor)
    check(describe(tmp_path, writer.finish()))
    data = list(tmp_path.glob("*.distcp"))
    assert len(data) > 3
    assert all(file.stat().st_size < 2000 + 2000 for file in data)
    assert len(CheckpointReader(tmp_path).rectangles["a"]) == 19  # 2 rows of 32 bytes each


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("safe", range(7))
def test_an_interrupted_writer_is_continued(tmp_path: Path, safe: int) -> None:
    first, state = CheckpointWriter(tmp_path), tensors()
    records = [first.add(name, tensor) for name, tensor in state.items()]
    first._stream.write(b"torn")
    first._stream.close()
    second = CheckpointWriter(tmp_path, records[:safe])
    assert second.names == set(list(state)[:safe])
    for name in list(state)[safe:]:
        second.add(name, state[name])
    check(describe(tmp_path, second.finish()))
    sizes = sum(rectangle.length for all_ in CheckpointReader(tmp_path).rectangles.values() for rectangle in all_)
    assert sizes == sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))


def test_a_full_disk_names_the_file_and_the_writer_can_be_continued(tmp_path: Path) -> None:
    records, state, limits = [], tensors(), resource.getrlimit(resource.RLIMIT_FSIZE)
    first = CheckpointWriter(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"__0_0\.distcp"):
            records.extend(first.add(name, tensor) for name, tensor in state.items())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 0 < len(records) < len(state)
    second = CheckpointWriter(tmp_path, records)
    for name in list(state)[len(records) :]:
        second.add(name, state[name])
    check(describe(tmp_path, second.finish()))
