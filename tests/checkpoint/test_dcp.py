"""DCP's index: read as DCP wrote it, without its classes; every value of a file is checked."""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megafp8.checkpoint.dcp import parse_index
from megafp8.checkpoint.errors import DamagedCheckpoint


class Attribute:
    """Pickled as `getattr(owner, name)`, as Python 3.11.2 does members of enumerations."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


def make() -> Metadata:
    """An index of one tensor [4, 3] in two rectangles, and an object."""
    halves = [ChunkStorageMetadata(torch.Size([low, 0]), torch.Size([2, 3])) for low in (0, 2)]
    places = {
        MetadataIndex("w", half.offsets): _StorageInfo("__0_0.distcp", 24 * i, 24) for i, half in enumerate(halves)
    }
    return Metadata(
        {
            "w": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4, 3]), halves),
            "o": BytesStorageMetadata(),
        },
        planner_data={"tree": Attribute(Path, "cwd")},
        storage_data=places | {MetadataIndex("o"): _StorageInfo("__0_0.distcp", 48, 9)},
        storage_meta=StorageMeta(Path("/where/it/was")),
    )


def tensor(index: Metadata) -> TensorStorageMetadata:
    entry = index.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_an_index_is_read(protocol: int) -> None:
    index = make()
    found = parse_index("f", pickle.dumps(index, protocol))
    assert found.state_dict_metadata == index.state_dict_metadata
    assert found.storage_data == index.storage_data
    assert found.planner_data is None  # of another library


def moved(path: Any = "__0_0.distcp", start: Any = 0, length: Any = 24) -> Callable[[Metadata], None]:
    def change(index: Metadata) -> None:
        index.storage_data[MetadataIndex("w", torch.Size([0, 0]))] = _StorageInfo(path, start, length)

    return change


def cut(offsets: list[int], sizes: list[int]) -> Callable[[Metadata], None]:
    def change(index: Metadata) -> None:
        tensor(index).chunks[0] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (moved("../other/file"), "'?../other/file'?, which is not a file name"),
        (moved("/etc/passwd"), "/etc/passwd, which is not a file name"),
        (moved(".."), "which is not a file name"),
        (moved(3), "which is not a file name"),
        (moved(start=-1), "the location of w has no valid offset and length"),
        (moved(length=2.5), "the location of w has no valid offset and length"),
        (moved(length=23), r"a rectangle \[2, 3\] of w has only 23 bytes"),
        (cut([0, 0], [2, 4]), r"w is \[4, 3\], but has a rectangle \[2, 4\] at \[0, 0\]"),
        (cut([0], [2]), r"w is \[4, 3\], but has a rectangle \[2\] at \[0\]"),
        (cut([0, 0], [1 << 50, 3]), r"has a rectangle \[1125899906842624, 3\]"),
        (lambda i: setattr(tensor(i), "size", torch.Size([4, -3])), "sizes that are not up to 64 numbers"),
        (lambda i: setattr(tensor(i), "size", torch.Size([1] * 65)), "sizes that are not up to 64 numbers"),
        (lambda i: setattr(tensor(i), "size", [4, 3]), "the entry of w has no valid size and rectangles"),
        (
            lambda i: tensor(i).chunks.extend(tensor(i).chunks),
            "more rectangles than it has locations|no valid size and",
        ),
        (lambda i: setattr(tensor(i).properties, "dtype", "float32"), "the entry of w has no dtype"),
        (lambda i: i.state_dict_metadata.update({"x": Path("/")}), "the entry of x is not a TensorStorageMetadata"),
        (lambda i: i.storage_data.update({"x": 1}), "a key of storage_data is not a MetadataIndex"),
        (lambda i: setattr(i, "storage_data", []), "it does not contain the index of a checkpoint"),
    ],
)
def test_values_are_checked(change: Callable[[Metadata], None], problem: str) -> None:
    index = make()
    change(index)
    with pytest.raises(DamagedCheckpoint, match=f"^folder/.metadata is damaged: .*({problem})"):
        parse_index("folder/.metadata", pickle.dumps(index))


@pytest.mark.parametrize(
    "name", ["pathlib\nPosixPath", "torch.distributed.checkpoint.metadata\nMetadata", "torch\nSize"]
)
def test_no_class_is_changed(name: str) -> None:
    """BUILD sets attributes of what is on the stack, which Python's unpickler allows for classes too."""
    before = {owner: dict(vars(owner)) for owner in (pathlib.PosixPath, Metadata, torch.Size)}
    content = b"\x80\x02c" + name.encode() + b"\nN}X\x07\x00\x00\x00patchedK\x01s\x86b."
    with pytest.raises(DamagedCheckpoint, match="is damaged: it sets the state of a Global"):
        parse_index("f", content)
    assert all(dict(vars(owner)) == known for owner, known in before.items())
