"""Interface to torch.distributed.checkpoint (DCP), which defines the file format of our checkpoints.

DCP assigns each rectangle of each tensor to the rank that writes it. DCP's planner is meant to be subclassed for values
that are not tensors. Our subclass only handles values of type `Rectangles`. Names are global and flat, so DCP's
flattening of nested dictionaries is off.

A save calls DCP's planner and writer directly. `dcp.save` would plan and write in one call, but a background save plans
first and then copies to the host only the rectangles that this rank will write (`SavePlans`). `dcp.async_save` copies
everything the rank holds; under data parallelism this is the whole state on every rank.

DCP's index file `.metadata` is a pickle, and Python's unpickler may run arbitrary code. So `pickle_reader` reads the
file, and this module builds DCP's objects from the names, shapes, dtypes and file locations, after checking each of
them. Everything else in the file, such as planning data of another library, is ignored.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megafp8.checkpoint.errors import DamagedCheckpoint, on_all_ranks
from megafp8.checkpoint.files import Checksum, ChecksummedFiles
from megafp8.checkpoint.pickle_reader import PickledObject, read_pickle
from megafp8.checkpoint.rectangles import Rectangles
from megafp8.checkpoint.torch_file import DTYPE_NAMES, TorchFile, is_size, shape_of
from megafp8.host.messages import join_first, name_text
from megafp8.host.object_store import AnyPath, ObjectPath
from megafp8.parallel import collectives

INDEX_FILE = ".metadata"

_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"


def parse_index(file: AnyPath, content: bytes) -> Metadata:
    """Parse DCP's index from `content`, the bytes of `file`. Raises DamagedCheckpoint with the file's name."""
    try:
        with _without_collections():
            metadata = read_pickle(content, constants=DTYPE_NAMES, builders={("torch", "Size"): _size})
            return _Index(metadata).metadata()
    except ValueError as error:
        raise DamagedCheckpoint(f"{file} is damaged: {error}") from error


@contextmanager
def _without_collections() -> Iterator[None]:
    """Turn off the cyclic garbage collector while many long-lived objects are made: it would double the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _size(values: Any) -> torch.Size:
    return torch.Size(shape_of(values))


class _Index:
    """Converter of the pickled records in an index file to DCP's `Metadata`.

    A wrong record raises a ValueError that names the tensor. A record that occurs several times is converted once, so
    the cost is proportional to the file's length.
    """

    def __init__(self, found: Any) -> None:
        self._index = _state(found, "Metadata", "the index")
        self._properties: dict[PickledObject, TensorProperties] = {}
        self._chunks: dict[PickledObject, ChunkStorageMetadata] = {}

    def metadata(self) -> Metadata:
        """Return the checked index: the size, dtype and rectangles of each tensor, and where each rectangle lies."""
        entries, stored = self._index.get("state_dict_metadata"), self._index.get("storage_data")
        if type(entries) is not dict or type(stored) is not dict:
            raise ValueError("it does not contain the index of a checkpoint")
        places: _Places = {}
        for key, value in stored.items():
            where, info = self._place(key, value)
            if where in places:
                raise ValueError(f"it locates {name_text(where[0])} twice")
            places[where] = info
        described = {name: self._entry(name, entry, len(stored)) for name, entry in entries.items()}
        if sum(len(x.chunks) for x in described.values() if isinstance(x, TensorStorageMetadata)) > len(stored):
            raise ValueError("it lists more rectangles than it has locations for")
        for name, entry in described.items():
            if isinstance(entry, TensorStorageMetadata):
                _check_places(name, entry, places)
        stored = {MetadataIndex(*where): info for where, info in places.items()}
        return Metadata(state_dict_metadata=described, storage_data=stored)

    def _place(self, key: Any, value: Any) -> tuple[tuple[str, torch.Size | None], _StorageInfo]:
        """Return the name and offset of a rectangle, or of an object that is not a tensor, and its location."""
        index = _state(key, "MetadataIndex", "a key of storage_data")
        name, offset = index.get("fqn"), index.get("offset")
        if type(name) is not str or not (offset is None or isinstance(offset, torch.Size)):
            raise ValueError("a key of storage_data is not a name with an offset")
        info = _state(value, "_StorageInfo", "the location of", name, module=_FILESYSTEM)
        file: Any = info.get("relative_path")
        start: Any = info.get("offset")
        length: Any = info.get("length")
        if type(file) is not str or file in ("", ".", "..") or "/" in file or "\0" in file or len(file) > 255:
            raise ValueError(f"the location of {name_text(name)} is {name_text(file)}, which is not a file name")
        if not is_size(start) or not is_size(length):
            raise ValueError(f"the location of {name_text(name)} has no valid offset and length")
        transformed = ("unknown",) if info.get("transform_descriptors") else None
        return (name, offset), _StorageInfo(file, start, length, transformed)

    def _entry(self, name: Any, entry: Any, limit: int) -> TensorStorageMetadata | BytesStorageMetadata:
        if type(name) is not str or not name.isprintable():
            raise ValueError(f"a key of state_dict_metadata is not a name: {name_text(name)}")
        what = f"the entry of {name_text(name)}"
        if isinstance(entry, PickledObject) and entry.of == (_METADATA, "BytesStorageMetadata"):
            return BytesStorageMetadata()
        about = _state(entry, "TensorStorageMetadata", "the entry of", name)
        size, chunks, properties = (about.get(field) for field in ("size", "chunks", "properties"))
        if not isinstance(size, torch.Size) or type(chunks) is not list or len(chunks) > limit:
            raise ValueError(f"{what} has no valid size and rectangles")
        if not isinstance(properties, PickledObject) or properties.of != (_METADATA, "TensorProperties"):
            raise ValueError(f"{what} has no TensorProperties")
        if properties not in self._properties:
            state = properties.state  # a tuple that begins with the dtype
            if type(state) is not tuple or not state or not isinstance(state[0], torch.dtype):
                raise ValueError(f"{what} has no dtype")
            self._properties[properties] = TensorProperties(dtype=state[0])
        return TensorStorageMetadata(self._properties[properties], size, [self._chunk(x, name) for x in chunks])

    def _chunk(self, chunk: Any, name: str) -> ChunkStorageMetadata:
        if isinstance(chunk, PickledObject) and chunk in self._chunks:
            return self._chunks[chunk]
        about = _state(chunk, "ChunkStorageMetadata", "a rectangle in the entry of", name)
        offsets, sizes = about.get("offsets"), about.get("sizes")
        if not isinstance(offsets, torch.Size) or not isinstance(sizes, torch.Size) or len(offsets) != len(sizes):
            raise ValueError(f"a rectangle in the entry of {name_text(name)} has no valid offsets and sizes")
        metadata = self._chunks[chunk] = ChunkStorageMetadata(offsets, sizes)
        return metadata


def _state(record: Any, class_name: str, what: str, name: Any = None, module: str = _METADATA) -> dict[str, Any]:
    """Return the fields of a record of class `module.class_name`; `what` and the tensor's `name` are for the error."""
    if not isinstance(record, PickledObject) or record.of != (module, class_name) or type(record.state) is not dict:
        raise ValueError(f"{what}{'' if name is None else f' {name_text(name)}'} is not a {class_name}")
    fields: dict[str, Any] = record.state
    return fields


_Places = dict[tuple[str, torch.Size | None], _StorageInfo]


def _check_places(name: str, entry: TensorStorageMetadata, places: _Places) -> None:
    """Raise ValueError if a rectangle exceeds its tensor's bounds, or is larger than the bytes that hold it."""
    itemsize = entry.properties.dtype.itemsize
    for chunk in entry.chunks:
        inside = len(chunk.sizes) == len(entry.size)
        for o, n, total in zip(chunk.offsets, chunk.sizes, entry.size):
            inside &= o + n <= total
        if not inside:
            raise ValueError(
                f"{name_text(name)} is {list(entry.size)}, but has a rectangle {list(chunk.sizes)} at "
                f"{list(chunk.offsets)}"
            )
        place = places.get((name, chunk.offsets))
        if place is not None and not place.transform_descriptors and math.prod(chunk.sizes) * itemsize > place.length:
            raise ValueError(f"a rectangle {list(chunk.sizes)} of {name_text(name)} has only {place.length} bytes")


def check_data_files(path: AnyPath, index: Metadata) -> None:
    """Raise DamagedCheckpoint if a data file that the index lists is missing or too short."""
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
    """Return the sizes in bytes of the existing files among `names`. Object storage gets one request for all files."""
    if isinstance(path, ObjectPath):
        return path.sizes()
    return {name: (path / name).stat().st_size for name in names if (path / name).is_file()}


def tensors_in(index: Metadata, name: str) -> list[str]:
    """Return the names of the tensors that have a rectangle in the data file `name`."""
    return sorted({where.fqn for where, stored in index.storage_data.items() if stored.relative_path == name})


def damaged_tensors(path: AnyPath, index: Metadata, name: str) -> list[str]:
    """Return the names of the tensors with damaged rectangles in the data file `name`.

    Each rectangle is a `torch.save` archive with its own checksums. If all of these match although the file is damaged,
    return all tensors in the file.
    """

    def is_damaged(start: int, length: int) -> bool:
        try:
            return TorchFile(path / name, start, length).is_damaged()
        except ValueError:
            return True

    stored_here = ((where.fqn, stored) for where, stored in index.storage_data.items() if stored.relative_path == name)
    damaged = {tensor for tensor, stored in stored_here if is_damaged(stored.offset, stored.length)}
    return sorted(damaged) or tensors_in(index, name)


class _SavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)

    def transform_object(self, write_item: WriteItem, object: Tensor) -> Tensor:
        return object


def write_items(state: dict[str, Rectangles]) -> list[WriteItem]:
    """Return DCP's descriptions of all rectangles of `state`, without values."""
    return [item for name, rectangles in state.items() for item in rectangles.__create_write_items__(name, None)]


@dataclass(frozen=True)
class SavePlans:
    """Rectangles that this rank writes (`plan`), and the index of all ranks (`index`; None except on rank 0)."""

    plan: SavePlan
    index: Metadata | None

    def contents(self) -> dict[str, int]:
        """Return the number of tensors, and the bytes of their values, that all ranks write. Rank 0 only."""
        assert self.index is not None
        entries = [x for x in self.index.state_dict_metadata.values() if isinstance(x, TensorStorageMetadata)]
        return {"tensors": len(entries), "bytes": sum(math.prod(x.size) * x.properties.dtype.itemsize for x in entries)}


def plan_save(items: list[WriteItem], group: ProcessGroup | None) -> SavePlans:
    """Assign each rectangle held by ranks of `group` to one rank that writes it. Collective."""
    plans_of_ranks = collectives.gather_objects(SavePlan(items), group)

    def plan() -> tuple[list[SavePlan], Metadata]:
        assert plans_of_ranks is not None
        plans, index = _SavePlanner().create_global_plan(plans_of_ranks)
        return FileSystemWriter(".").prepare_global_plan(plans), index

    plans, index = on_all_ranks(lambda: plan() if collectives.rank(group) == 0 else (None, None), group)
    return SavePlans(collectives.scatter_objects(plans, group), index)


def write_data(
    path: AnyPath, state: dict[str, Rectangles], plan: SavePlan
) -> tuple[list[WriteResult], dict[str, Checksum]]:
    """Write the rectangles of `plan` into the folder `path` and flush them to disk.

    Returns where each rectangle lies, and the checksums of the files by name.
    """
    on_gpu = any(part.view.is_cuda for rectangles in state.values() for part in rectangles.parts)
    planner = _SavePlanner()
    planner.set_up_planner(state)
    writer, files = _writer(path, per_thread_copy_ahead=10_000_000 if on_gpu else 0)
    return writer.write_data(plan, planner).wait(), files.sums


def write_index(path: AnyPath, index: Metadata, results: list[list[WriteResult]]) -> dict[str, Checksum]:
    """Write the index of all ranks' rectangles, flush it to disk, and return its checksum by name. On one rank."""
    writer, files = _writer(path)
    writer.finish(replace(index), results)
    return files.sums


def _writer(path: AnyPath, **options: Any) -> tuple[FileSystemWriter, ChecksummedFiles]:
    files = ChecksummedFiles()
    writer = FileSystemWriter(".", sync_files=False, **options)  # ChecksummedFiles syncs them
    writer.fs, writer.path = files, path if isinstance(path, Path) else str(path)  # the index stores the path
    return writer, files
