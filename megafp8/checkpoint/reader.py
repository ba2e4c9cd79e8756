"""Reading a checkpoint in one process, whatever layout wrote it, without a process group.

Resuming, conversion and tools all open a checkpoint here: metadata.json and index are read once, compared with
checksums.json, and only then parsed. Data files are checked for presence and size; `loading` verifies their content.

`read` and `read_into` copy the rectangles of one tensor, or of a part of it, from the files straight to their place in
the result. For a rectangle that is cut along its columns, or a result that is not on the CPU, they need a block of 32
MiB more.

Checkpoints from before checksums have no checksums.json, and no `has_checksums` in metadata.json. A checkpoint with
`has_checksums` but no checksums.json is damaged.
"""

from __future__ import annotations

import difflib
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megafp8.checkpoint import dcp, store
from megafp8.checkpoint.errors import DamagedCheckpoint
from megafp8.checkpoint.files import CHECKSUMS_FILE, Checksum, read_verified
from megafp8.checkpoint.rectangles import Rectangles, TensorInfo
from megafp8.checkpoint.torch_file import StoredTensor, TorchFile
from megafp8.host.messages import MAX_LISTED, join_first
from megafp8.host.object_store import AnyPath, as_path
from megafp8.parallel.sharding import Shape


class StoredRectangle(NamedTuple):
    """A rectangle of a global tensor, and the bytes of a file that hold it as an archive of `torch.save`."""

    offset: Shape
    shape: Shape
    file: AnyPath
    start: int
    length: int


class TensorReader:
    """The tensors of a folder of torch.distributed.checkpoint, whose index is `index`."""

    def __init__(self, path: AnyPath, index: Metadata) -> None:
        self.path, self.index = path, index

    @cached_property
    def rectangles(self) -> dict[str, list[StoredRectangle]]:
        """The rectangles of each tensor."""
        rectangles: dict[str, list[StoredRectangle]] = {}
        for name, entry in self.index.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            rectangles[name] = []
            for chunk in entry.chunks:
                stored = self.index.storage_data.get(MetadataIndex(name, chunk.offsets))
                if stored is None or stored.transform_descriptors:
                    how = "without saying where" if stored is None else "compressed, which is not read"
                    raise ValueError(f"{self.path / dcp.INDEX_FILE} lists a rectangle of {name} {how}")
                where = self.path / stored.relative_path, stored.offset, stored.length
                rectangles[name].append(StoredRectangle(tuple(chunk.offsets), tuple(chunk.sizes), *where))
        return rectangles

    def overlapping(self, name: str, low: Shape, shape: Shape) -> list[StoredRectangle]:
        """The rectangles with values of the rectangle of `shape` from index `low` of tensor `name` on."""
        return [
            rectangle
            for rectangle in self.rectangles[name]
            if all(max(o, r) < min(o + n, r + m) for o, n, r, m in zip(low, shape, rectangle.offset, rectangle.shape))
        ]

    def read_into(self, name: str, low: Shape, target: Tensor, *, verify: bool = False) -> None:
        """Fill `target`, of any strides and on any device, with the rectangle of tensor `name` from index `low` on."""
        filled = 0
        for rectangle in self.overlapping(name, low, tuple(target.shape)):
            ends = [min(o + n, r + m) for o, n, r, m in zip(low, target.shape, rectangle.offset, rectangle.shape)]
            begins = [max(o, r) for o, r in zip(low, rectangle.offset)]
            part = target[tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, low))]
            _copy(name, rectangle, tuple(b - r for b, r in zip(begins, rectangle.offset)), part, verify)
            filled += part.numel()
        if filled < target.numel():
            raise ValueError(f"{self.path} holds only {filled} of {target.numel()} values of {name}")


class CheckpointReader(TensorReader):
    """A complete checkpoint folder whose metadata.json and index are verified, to be read tensor by tensor.

    `check_sizes`: check presence and sizes of the data files too. Raises DamagedCheckpoint naming the file where one is
    missing, truncated or altered; ValueError where there is no such folder, a file cannot be read, or the checkpoint is
    of a newer format.
    """

    metadata: dict[str, Any]
    """Content of metadata.json."""
    sums: dict[str, Checksum] | None
    """Checksums of all files by name; None where the checkpoint is from before checksums."""
    identity: int
    """CRC-32 of metadata.json and index; equal where ranks see the same checkpoint."""

    def __init__(self, path: AnyPath | str, *, check_sizes: bool = True) -> None:
        folder = as_path(path)
        self.metadata, self.sums, description = store.read_description(folder)
        content = read_verified(folder, dcp.INDEX_FILE, self.sums)
        super().__init__(folder, dcp.parse_index(folder / dcp.INDEX_FILE, content))
        self.identity = zlib.crc32(content, zlib.crc32(description))
        if self.sums is not None:
            unlisted = {stored.relative_path for stored in self.index.storage_data.values()} - self.sums.keys()
            if unlisted:
                file = self.path / CHECKSUMS_FILE
                raise DamagedCheckpoint(f"{file} has no checksum of {join_first(sorted(unlisted))}")
        if check_sizes:
            dcp.check_data_files(self.path, self.index)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Global shape and dtype by global name; layers in the order of their numbers."""
        entries = sorted(self.index.state_dict_metadata.items(), key=lambda item: _by_number(item[0]))
        if other := [name for name, entry in entries if not isinstance(entry, TensorStorageMetadata)]:
            raise ValueError(f"{self.path} is no checkpoint of megafp8: its {other[0]} is no tensor")
        return {name: TensorInfo(tuple(entry.size), entry.properties.dtype) for name, entry in entries}  # type: ignore[union-attr]

    def prepare(self, state: Mapping[str, Rectangles]) -> None:
        """Make readable what `read_into` will fill `state` with. Collective; `load` calls it."""

    def read(
        self, name: str, offset: Shape | None = None, shape: Shape | None = None, *, verify: bool = False
    ) -> Tensor:
        """The tensor `name`, or its rectangle of `shape` at `offset`: contiguous, on the CPU, in its stored dtype.

        Default: from the beginning, and to the end. `verify`: compare the CRC-32 of every rectangle that is read, for
        which it is read in full. Raises ValueError for a name that is not there, a rectangle that leaves the tensor, a
        tensor that is only partly in the checkpoint, and a file that is damaged.
        """
        if name not in self.tensors:
            near = difflib.get_close_matches(name, self.tensors, n=3)
            raise ValueError(f"{self.path} holds no tensor {name}" + (f"; there is {', '.join(near)}" if near else ""))
        total, dtype = self.tensors[name]
        low = (0,) * len(total) if offset is None else tuple(offset)
        size = tuple(n - o for n, o in zip(total, low)) if shape is None else tuple(shape)
        inside = len(low) == len(size) == len(total) and all(0 <= o <= o + n <= t for o, n, t in zip(low, size, total))
        if not inside:
            raise ValueError(f"{name} is {list(total)}: there is no rectangle {list(size)} at {list(low)} of it")
        stored = sum(math.prod(rectangle.shape) for rectangle in self.overlapping(name, low, size))
        if stored < math.prod(size):  # before memory of that size is used
            raise ValueError(f"{self.path} holds only {stored} of {math.prod(size)} values of {name}")
        result = torch.empty(size, dtype=dtype)
        self.read_into(name, low, result, verify=verify)
        return result


def newest_readable(folder: AnyPath | str) -> CheckpointReader | None:
    """The newest checkpoint under `folder` that can be opened, or None where there is none. Changes nothing.

    It is the one that `newest_good` chooses, unless the content of a data file is damaged. Raises DamagedCheckpoint
    where all are damaged.
    """
    return first_intact([path for _, path in reversed(store.complete_checkpoints(folder))], CheckpointReader)[0]


def first_intact(
    paths: Sequence[AnyPath], open_checkpoint: Callable[[AnyPath], CheckpointReader]
) -> tuple[CheckpointReader | None, list[tuple[AnyPath, str]]]:
    """The first of `paths` that opens without DamagedCheckpoint, and the paths before it with their damage.

    None where there are no paths. Raises DamagedCheckpoint where all are damaged.
    """
    damaged: list[tuple[AnyPath, str]] = []
    for path in paths:
        try:
            return open_checkpoint(path), damaged
        except DamagedCheckpoint as error:
            damaged.append((path, str(error)))
    if damaged:
        raise DamagedCheckpoint(
            f"all {len(damaged)} checkpoints in {paths[0].parent} are damaged, so the run cannot continue, and nothing "
            f"was changed: {'; '.join(problem for _, problem in damaged[:MAX_LISTED])}. Restore one, or move them away "
            "to start the run anew"
        )
    return None, []


def _copy(name: str, rectangle: StoredRectangle, low: Shape, part: Tensor, verify: bool) -> None:
    """Fill `part` with the values of `rectangle` from its index `low` on."""
    try:
        file = TorchFile(rectangle.file, rectangle.start, rectangle.length)
        stored = file.content
        if not isinstance(stored, StoredTensor) or (stored.shape, stored.dtype) != (rectangle.shape, part.dtype):
            raise ValueError(f"it is {stored}")
        file.read(stored, name, low, part, verify=verify)
    except ValueError as error:
        where = f"{rectangle.file} is damaged at {name} (from byte {rectangle.start} on)"
        raise ValueError(f"{where}: {error}") from error


def _by_number(name: str) -> list[tuple[int, str]]:
    """A sort key with layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
