"""The interface to torch.distributed.checkpoint (DCP), whose files we write.

DCP assigns each rectangle of each tensor to the rank that writes it. Its planner is meant to be subclassed for values
that are not tensors; ours only says that a value is a `Rectangles`. Names are global and flat, so DCP's flattening of
nested dictionaries is off.

A save calls DCP's planner and writer directly instead of `dcp.save`, which plans and writes in one call: a background
save plans first and copies to the host only what this rank will write (`SavePlans`), while `dcp.async_save` copies
everything the rank holds, which under data parallelism is the whole state on every rank.

DCP's index file `.metadata` is a pickle, which may run any code when it is read. So it is read by an unpickler that
knows the dozen classes of an index and nothing else.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megafp8.checkpoint.errors import DamagedCheckpoint, join_first, on_all_ranks
from megafp8.checkpoint.files import Checksum, ChecksummedFiles
from megafp8.checkpoint.rectangles import Rectangles
from megafp8.checkpoint.torch_file import TorchFile, Unknown, unknown_class
from megafp8.distributed import collectives
from megafp8.object_store import AnyPath, ObjectPath

INDEX_FILE = ".metadata"

_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}


def _enum_member(cls: Any, name: str) -> Any:
    """Replaces `getattr`, with which some releases of Python pickle members of enumerations."""
    if not (isinstance(cls, type) and issubclass(cls, Enum)):
        if isinstance(cls, type) and issubclass(cls, Unknown):
            return cls(name)
        raise pickle.UnpicklingError(f"it takes {name} of {cls!r}, which is no enumeration")
    return cls[name]


class _IndexUnpickler(pickle.Unpickler):
    """Reads an index. `foreign`: every other class becomes an empty one, as in a `TorchFile`."""

    def __init__(self, stream: io.BytesIO, *, foreign: bool = False) -> None:
        super().__init__(stream)
        self.foreign = foreign

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if self.foreign:
            return unknown_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of a checkpoint holds")


def parse_index(file: AnyPath, content: bytes, *, foreign: bool = False) -> Metadata:
    """DCP's index in `content`, the bytes of `file`.

    `foreign`: another library wrote it, whose own planning data may be in it; it is ignored. Raises DamagedCheckpoint
    naming the file.
    """
    try:
        index = _IndexUnpickler(io.BytesIO(content), foreign=foreign).load()
        valid = _is_index(index)
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DamagedCheckpoint(f"{file} is damaged: {type(error).__name__}: {error}") from error
    if not valid:
        raise DamagedCheckpoint(f"{file} is damaged: it holds no index of a checkpoint")
    return index


def _is_index(index: Any) -> bool:
    """Whether an unpickled object has the fields of an index, of the right types; may raise where it has not."""
    stored = all(
        isinstance(where, MetadataIndex)
        and isinstance(where.fqn, str)
        and isinstance(info.relative_path, str)
        and type(info.offset) is type(info.length) is int
        for where, info in index.storage_data.items()
    )
    described = all(
        isinstance(name, str)
        and isinstance(entry.size, torch.Size)
        and isinstance(entry.properties.dtype, torch.dtype)
        and all(isinstance(chunk.offsets, torch.Size) and isinstance(chunk.sizes, torch.Size) for chunk in entry.chunks)
        for name, entry in index.state_dict_metadata.items()
        if not isinstance(entry, BytesStorageMetadata)
    )
    return isinstance(index, Metadata) and stored and described


def check_data_files(path: AnyPath, index: Metadata) -> None:
    """Raise DamagedCheckpoint where a data file of the index is missing or shorter than the index says."""
    ends: dict[str, int] = {}
    for stored in index.storage_data.values():
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    problems = []
    sizes = _sizes(path, ends)
    for name, end in sorted(ends.items()):
        file, tensors = path / name, join_first(tensors_in(index, name))
        if (size := sizes.get(name)) is None:
            problems.append(f"{file} is missing; it held {tensors}")
        elif size < end:
            problems.append(f"{file} is truncated: {size} bytes of at least {end}; it held {tensors}")
    if problems:
        raise DamagedCheckpoint(join_first(problems, "; "))


def _sizes(path: AnyPath, names: Iterable[str]) -> dict[str, int]:
    """Bytes of those files of a checkpoint that there are; one request for all where it is in object storage."""
    if isinstance(path, ObjectPath):
        return path.sizes()
    return {name: (path / name).stat().st_size for name in names if (path / name).is_file()}


def tensors_in(index: Metadata, name: str) -> list[str]:
    """The tensors with a rectangle in the data file `name`."""
    return sorted({where.fqn for where, stored in index.storage_data.items() if stored.relative_path == name})


def damaged_tensors(path: AnyPath, index: Metadata, name: str) -> list[str]:
    """The tensors whose rectangles in the data file `name` are damaged; all in the file where none stands out.

    Each rectangle is an archive of `torch.save` with checksums of its own.
    """

    def is_damaged(start: int, length: int) -> bool:
        try:
            return TorchFile(path / name, start, length).is_damaged()
        except ValueError:
            return True

    here = ((where.fqn, stored) for where, stored in index.storage_data.items() if stored.relative_path == name)
    damaged = {tensor for tensor, stored in here if is_damaged(stored.offset, stored.length)}
    return sorted(damaged) or tensors_in(index, name)


class _SavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)

    def transform_object(self, write_item: WriteItem, object: Tensor) -> Tensor:
        return object


def write_items(state: dict[str, Rectangles]) -> list[WriteItem]:
    """DCP's descriptions of all rectangles of `state`, without values."""
    return [item for name, rectangles in state.items() for item in rectangles.__create_write_items__(name, None)]


@dataclass(frozen=True)
class SavePlans:
    """The rectangles this rank writes (`plan`), and the index of all ranks (None but on rank 0)."""

    plan: SavePlan
    index: Metadata | None

    def contents(self) -> dict[str, int]:
        """How many tensors all ranks write, and how many bytes of values. On rank 0."""
        assert self.index is not None
        found = [x for x in self.index.state_dict_metadata.values() if isinstance(x, TensorStorageMetadata)]
        return {"tensors": len(found), "bytes": sum(math.prod(x.size) * x.properties.dtype.itemsize for x in found)}


def plan_save(items: list[WriteItem], group: ProcessGroup | None) -> SavePlans:
    """Assign each rectangle that ranks of `group` hold to one rank that writes it. Collective."""
    held = collectives.gather_objects(SavePlan(items), group)

    def plan() -> tuple[list[SavePlan], Metadata]:
        assert held is not None
        plans, index = _SavePlanner().create_global_plan(held)
        return FileSystemWriter(".").prepare_global_plan(plans), index

    plans, index = on_all_ranks(lambda: plan() if collectives.rank(group) == 0 else (None, None), group)
    return SavePlans(collectives.scatter_objects(plans, group), index)


def write_data(
    path: AnyPath, state: dict[str, Rectangles], plan: SavePlan
) -> tuple[list[WriteResult], dict[str, Checksum]]:
    """Write the rectangles of `plan` into the folder `path`, flushed to disk: where each lies, and files' checksums."""
    on_gpu = any(part.view.is_cuda for rectangles in state.values() for part in rectangles.parts)
    planner = _SavePlanner()
    planner.set_up_planner(state)
    writer, files = _writer(path, per_thread_copy_ahead=10_000_000 if on_gpu else 0)
    return writer.write_data(plan, planner).wait(), files.sums


def write_index(path: AnyPath, index: Metadata, results: list[list[WriteResult]]) -> dict[str, Checksum]:
    """Write the index of what all ranks wrote, flushed to disk, and return its checksum. On one rank."""
    writer, files = _writer(path)
    writer.finish(replace(index), results)
    return files.sums


def _writer(path: AnyPath, **options: Any) -> tuple[FileSystemWriter, ChecksummedFiles]:
    files = ChecksummedFiles()
    writer = FileSystemWriter(".", sync_files=False, **options)  # ChecksummedFiles syncs them
    writer.fs, writer.path = files, path if isinstance(path, Path) else str(path)  # the index has it
    return writer, files
