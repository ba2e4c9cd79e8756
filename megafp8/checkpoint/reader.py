"""Read a checkpoint of any layout in one process, without a process group.

Resuming, conversion and tools all open checkpoints with this module. It reads metadata.json and the index once,
compares them with checksums.json, and only then parses them. It checks the presence and size of data files; `loading`
verifies their content.

`read` and `read_into` copy the rectangles of a tensor, or of a part of it, from the files directly to their place in
the result. They need an additional block of 32 MiB if a rectangle is cut along its columns, or if the result is not on
the CPU.

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
    """Rectangle of a global tensor, and the byte range of a file that holds it as a `torch.save` archive."""

    offset: Shape
    shape: Shape
    file: AnyPath
    start: int
    length: int


class TensorReader:
    """Reader of the tensors in a torch.distributed.checkpoint folder, given its index."""

    def __init__(self, path: AnyPath, index: Metadata) -> None:
        self.path, self.index = path, index

    @cached_property
    def rectangles(self) -> dict[str, list[StoredRectangle]]:
        """Rectangles of each tensor, by name."""
        rectangles: dict[str, list[StoredRectangle]] = {}
        for name, entry in self.index.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            rectangles[name] = []
            for chunk in entry.chunks:
                stored = self.index.storage_data.get(MetadataIndex(name, chunk.offsets))
                if stored is None or stored.transform_descriptors:
                    how = "without its location" if stored is None else "that is compressed, which is not supported"
                    raise ValueError(f"{self.path / dcp.INDEX_FILE} lists a rectangle of {name} {how}")
                where = self.path / stored.relative_path, stored.offset, stored.length
                rectangles[name].append(StoredRectangle(tuple(chunk.offsets), tuple(chunk.sizes), *where))
        return rectangles

    def overlapping(self, name: str, low: Shape, shape: Shape) -> list[StoredRectangle]:
        """Return the stored rectangles of tensor `name` that overlap the rectangle of `shape` at index `low`."""
        return [
            rectangle
            for rectangle in self.rectangles[name]
            if all(max(o, r) < min(o + n, r + m) for o, n, r, m in zip(low, shape, rectangle.offset, rectangle.shape))
        ]

    def read_into(self, name: str, low: Shape, target: Tensor, *, verify: bool = False) -> None:
        """Fill `target` with the rectangle of tensor `name` that begins at index `low` and has the shape of `target`.

        `target` may have any strides and be on any device. If `verify` is True, compare the CRC-32 of each rectangle.
        """
        filled = 0
        for rectangle in self.overlapping(name, low, tuple(target.shape)):
            ends = [min(o + n, r + m) for o, n, r, m in zip(low, target.shape, rectangle.offset, rectangle.shape)]
            begins = [max(o, r) for o, r in zip(low, rectangle.offset)]
            part = target[tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, low))]
            _copy(name, rectangle, tuple(b - r for b, r in zip(begins, rectangle.offset)), part, verify)
            filled += part.numel()
        if filled < target.numel():
            raise ValueError(f"{self.path} has only {filled} of {target.numel()} values of {name}")


class CheckpointReader(TensorReader):
    """Reader of a complete checkpoint folder, tensor by tensor. Its metadata.json and index have been verified.

    Args:
        path: Folder of the checkpoint.
        check_sizes: Whether to check the presence and sizes of the data files, too.

    Raises:
        DamagedCheckpoint: A file is missing, truncated or altered. The message names it.
        ValueError: The folder does not exist, a file cannot be read, or the checkpoint has a newer format.
    """

    metadata: dict[str, Any]
    """Content of metadata.json."""
    sums: dict[str, Checksum] | None
    """Checksums of all files by name; None if the checkpoint is from before checksums."""
    identity: int
    """CRC-32 of metadata.json and the index. It is equal on all ranks that see the same checkpoint."""

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
                raise DamagedCheckpoint(f"{file} has no checksum for {join_first(sorted(unlisted))}")
        if check_sizes:
            dcp.check_data_files(self.path, self.index)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Global shape and dtype of each tensor, by global name. Layers are in the order of their numbers."""
        entries = sorted(self.index.state_dict_metadata.items(), key=lambda item: _by_number(item[0]))
        if other := [name for name, entry in entries if not isinstance(entry, TensorStorageMetadata)]:
            raise ValueError(f"{self.path} is not a checkpoint of megafp8: its {other[0]} is not a tensor")
        return {name: TensorInfo(tuple(entry.size), entry.properties.dtype) for name, entry in entries}  # type: ignore[union-attr]

    def prepare(self, state: Mapping[str, Rectangles]) -> None:
        """Make the data for `state` available to `read_into`. Collective; `load` calls it before it reads."""

    def read(
        self, name: str, offset: Shape | None = None, shape: Shape | None = None, *, verify: bool = False
    ) -> Tensor:
        """Return the tensor `name`, or its rectangle of `shape` at `offset`, as stored.

        Args:
            name: Global name of the tensor.
            offset: First index of the rectangle; by default the beginning of the tensor.
            shape: Shape of the rectangle; by default it extends to the end of the tensor.
            verify: Whether to compare the CRC-32 of every stored rectangle that is read. It is then read completely.

        Returns:
            A contiguous tensor on the CPU, in its stored dtype.

        Raises:
            ValueError: The checkpoint does not have this tensor or only a part of it, the rectangle exceeds the
                tensor's bounds, or a file is damaged.
        """
        if name not in self.tensors:
            near = difflib.get_close_matches(name, self.tensors, n=3)
            raise ValueError(f"{self.path} has no tensor {name}" + (f"; it has {', '.join(near)}" if near else ""))
        total, dtype = self.tensors[name]
        low = (0,) * len(total) if offset is None else tuple(offset)
        size = tuple(n - o for n, o in zip(total, low)) if shape is None else tuple(shape)
        inside = len(low) == len(size) == len(total) and all(0 <= o <= o + n <= t for o, n, t in zip(low, size, total))
        if not inside:
            raise ValueError(f"{name} is {list(total)}; a rectangle {list(size)} at {list(low)} is outside its bounds")
        stored = sum(math.prod(rectangle.shape) for rectangle in self.overlapping(name, low, size))
        if stored < math.prod(size):  # check before memory of this size is used
            raise ValueError(f"{self.path} has only {stored} of {math.prod(size)} values of {name}")
        result = torch.empty(size, dtype=dtype)
        self.read_into(name, low, result, verify=verify)
        return result


def newest_readable(folder: AnyPath | str) -> CheckpointReader | None:
    """Return the newest checkpoint under `folder` that can be opened, or None if the folder has no checkpoints.

    This changes nothing on disk. `newest_good` chooses the same checkpoint, unless the content of a data file is
    damaged. Raises DamagedCheckpoint if all checkpoints are damaged.
    """
    return first_intact([path for _, path in reversed(store.complete_checkpoints(folder))], CheckpointReader)[0]


def first_intact(
    paths: Sequence[AnyPath], open_checkpoint: Callable[[AnyPath], CheckpointReader]
) -> tuple[CheckpointReader | None, list[tuple[AnyPath, str]]]:
    """Return the first checkpoint in `paths` that opens without DamagedCheckpoint, and the damaged paths before it.

    Each damaged path comes with a description of its damage. The checkpoint is None if `paths` is empty. Raises
    DamagedCheckpoint if all checkpoints are damaged.
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
            "to start the run from the beginning"
        )
    return None, []


def _copy(name: str, rectangle: StoredRectangle, low: Shape, part: Tensor, verify: bool) -> None:
    """Fill `part` with values of `rectangle`, from its index `low` on."""
    try:
        file = TorchFile(rectangle.file, rectangle.start, rectangle.length)
        stored = file.content
        if not isinstance(stored, StoredTensor) or (stored.shape, stored.dtype) != (rectangle.shape, part.dtype):
            raise ValueError(f"it is {stored}")
        file.read(stored, name, low, part, verify=verify)
    except ValueError as error:
        where = f"{rectangle.file} is damaged at {name} (which begins at byte {rectangle.start})"
        raise ValueError(f"{where}: {error}") from error


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
