"""What we tell torch.distributed.checkpoint (DCP), in one place.

DCP plans on rank 0 who writes and reads which rectangle of which tensor. Its planners are meant to be subclassed for
values that are not tensors; ours only add that a value is a `Rectangles`. Names are global and flat, so DCP's
flattening of nested dictionaries is off.

Saving does not go through `dcp.save`, which plans and writes in one go, but through the planner and the writer that it
calls: a save in the background plans first and copies to the host only what the rank will write (`SaveParts`), where
`dcp.async_save` copies all that the rank holds, so under data parallelism the whole state on every rank.

DCP's index file `.metadata` is a pickle. An ordinary pickle can run any code when it is read, and checkpoints are
passed around, so the index is read by an unpickler that knows the dozen classes of an index and nothing else. The data
files are read by `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megafp8.checkpoint import archives
from megafp8.checkpoint.checksums import Checksum, ChecksummedFiles
from megafp8.checkpoint.failures import DamagedCheckpoint, listing, rank_in, together
from megafp8.checkpoint.rectangles import Rectangles
from megafp8.distributed import collectives

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
    """What `getattr` is for in an index: some releases of Python write members of enumerations so."""
    if not (isinstance(cls, type) and issubclass(cls, Enum)):
        raise pickle.UnpicklingError(f"it takes {name} of {cls!r}, which is no enumeration")
    return cls[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of a checkpoint holds")


def parse_index(file: Path, content: bytes) -> Metadata:
    """DCP's index in `content`, the bytes of `file`. Raises DamagedCheckpoint, naming the file."""
    try:
        index = _IndexUnpickler(io.BytesIO(content)).load()
        sound = _is_index(index)
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DamagedCheckpoint(f"{file} is damaged: {type(error).__name__}: {error}") from error
    if not sound:
        raise DamagedCheckpoint(f"{file} is damaged: it holds no index of a checkpoint")
    return index


def _is_index(index: Any) -> bool:
    """Whether an unpickled object has the fields, and these the types, of an index; it may raise where it has not."""
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


def check_data_files(path: Path, index: Metadata) -> None:
    """Raise DamagedCheckpoint where a data file of the index is missing or shorter than the index says."""
    ends: dict[str, int] = {}
    for stored in index.storage_data.values():
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    problems = []
    for name, end in sorted(ends.items()):
        file = path / name
        if not file.is_file():
            problems.append(f"{file} is missing; it held {listing(tensors_in(index, name))}")
        elif os.path.getsize(file) < end:
            size = f"{os.path.getsize(file)} bytes of at least {end}"
            problems.append(f"{file} is truncated: {size}; it held {listing(tensors_in(index, name))}")
    if problems:
        more = f" (and {len(problems) - 5} more files)" if len(problems) > 5 else ""
        raise DamagedCheckpoint("; ".join(problems[:5]) + more)


def tensors_in(index: Metadata, name: str) -> list[str]:
    """The tensors of which parts lie in the data file `name`."""
    return sorted({where.fqn for where, stored in index.storage_data.items() if stored.relative_path == name})


def damaged_tensors(path: Path, index: Metadata, name: str) -> list[str]:
    """Which tensors a damaged data file, `name` in the folder `path`, has lost; all it holds where none stands out.

    Each rectangle is a zip archive, with a checksum of its own.
    """
    damaged = set()
    for where, stored in index.storage_data.items():
        if stored.relative_path == name and archives.find_damage(path / name, stored.offset, stored.length):
            damaged.add(where.fqn)
    return sorted(damaged) or tensors_in(index, name)


class _SavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)

    def transform_object(self, write_item: WriteItem, object: Tensor) -> Tensor:
        return object


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Without the base class's walk over the values, which replaces what is not a tensor by None."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class _Reader(FileSystemReader):
    """Reads with an index that was read, and checked, before, and names the file that turns out to be damaged."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._index.storage_meta is None:
            self._index.storage_meta = StorageMeta()
        self._index.storage_meta.load_id = self.load_id
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        done = super().read_data(replace(plan, items=[]), planner)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except (pickle.UnpicklingError, EOFError) as error:  # torch's text advises to allow the file to run code
                raise ValueError(f"{Path(self.path) / name} is damaged ({type(error).__name__})") from error
            except RuntimeError as error:
                raise ValueError(f"{Path(self.path) / name} cannot be read: {str(error).splitlines()[0]}") from error
        return done


@contextmanager
def _quiet() -> Iterator[None]:
    """Without DCP's warnings that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is .*", category=UserWarning)
        yield


def write_items(state: dict[str, Rectangles]) -> list[WriteItem]:
    """All rectangles of `state`, without their values."""
    return [item for name, rectangles in state.items() for item in rectangles.__create_write_items__(name, None)]


@dataclass(frozen=True)
class SaveParts:
    """Who writes what: `plan` is this rank's share, `index` all ranks', on the first rank and None elsewhere."""

    plan: SavePlan
    index: Metadata | None

    def contents(self) -> dict[str, int]:
        """How many tensors all ranks write, and how many bytes of values, on the first rank."""
        assert self.index is not None
        found = [x for x in self.index.state_dict_metadata.values() if isinstance(x, TensorStorageMetadata)]
        return {"tensors": len(found), "bytes": sum(math.prod(x.size) * x.properties.dtype.itemsize for x in found)}


def share_out(items: list[WriteItem], group: ProcessGroup | None) -> SaveParts:
    """Share out the rectangles that the ranks of `group` hold, so that each is written once. Collective."""
    held = collectives.gather_objects(SavePlan(items), group)

    def plan() -> tuple[list[SavePlan], Metadata]:
        assert held is not None
        plans, index = _SavePlanner().create_global_plan(held)
        return FileSystemWriter(".").prepare_global_plan(plans), index

    plans, index = together(lambda: plan() if rank_in(group) == 0 else (None, None), group)
    return SaveParts(collectives.scatter_objects(plans, group), index)


def write_data(
    path: Path, state: dict[str, Rectangles], parts: SaveParts
) -> tuple[list[WriteResult], dict[str, Checksum]]:
    """Write this rank's share of `state` into the folder `path`, flushed to disk: where it lies, and files' checksums.

    Of `state` no more is read than this rank's share.
    """
    on_gpu = any(part.view.is_cuda for rectangles in state.values() for part in rectangles.parts)
    files, planner = ChecksummedFiles(), _SavePlanner()
    planner.set_up_planner(state)
    writer = FileSystemWriter(path, sync_files=False, per_thread_copy_ahead=10_000_000 if on_gpu else 0)
    writer.fs = files
    results = writer.write_data(parts.plan, planner).wait()
    return results, files.sums


def write_index(path: Path, parts: SaveParts, results: list[list[WriteResult]]) -> dict[str, Checksum]:
    """Write the index of what all ranks wrote, flushed to disk; its checksum. On the first rank alone."""
    assert parts.index is not None
    files = ChecksummedFiles()
    writer = FileSystemWriter(path, sync_files=False)
    writer.fs = files
    writer.finish(replace(parts.index), results)
    return files.sums


def read(path: Path, index: Metadata, state: dict[str, Rectangles], group: ProcessGroup | None) -> None:
    """Copy the checkpoint's values into the views of `state`; all ranks of `group` (None: this process) take part."""
    with _quiet():
        dcp.load(
            state,
            storage_reader=_Reader(path, index),
            planner=_LoadPlanner(),
            process_group=group,
            no_dist=group is None,
        )
