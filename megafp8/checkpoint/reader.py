"""Reading whole tensors of a checkpoint in one process, whatever layout wrote it, with no process group.

Loading fills a running model's slices, all ranks together. Tools want the opposite: one tensor after the other, whole,
in a process that has little memory. So each of a tensor's rectangles is copied from where it lies in its file straight
to its place in the result, and what does not lie in the asked part is not read. A rectangle that is cut along its
columns passes through a block of a few MiB. Memory is the result, the index, and that block.

A rectangle is stored as `torch.save` writes it: a zip archive with a small pickle and the raw values. `torch.load` to
the device `meta` reads the former alone and tells where the latter begin. docs/checkpoint-format.md has the details.

What it gives up: values are not verified, as a part of a file says nothing about the file's checksum. metadata.json and
the index are, and sizes of files.
"""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from megafp8.checkpoint import dcp
from megafp8.checkpoint.checksums import Checksum
from megafp8.checkpoint.opened import open_checkpoint
from megafp8.distributed.sharding import Shape

_BLOCK_BYTES = 16 * 2**20


class StoredRectangle(NamedTuple):
    """A rectangle of a global tensor, and the bytes of a file that hold it as `torch.save` wrote it."""

    offset: Shape
    shape: Shape
    file: Path
    start: int
    length: int


class CheckpointReader:
    """A complete checkpoint folder, to be read tensor by tensor.

    Making one reads metadata.json and the index, no values. Raises ValueError naming the file where the folder is no
    checkpoint, or one of its files is missing, shorter than it should be, damaged, or may not be read.
    """

    path: Path
    metadata: dict[str, Any]
    """What metadata.json says; verified, as the index is."""
    sums: dict[str, Checksum] | None
    """Checksums of the files by name; None where the checkpoint is from before checksums."""
    tensors: dict[str, tuple[Shape, torch.dtype]]
    """Global shape and dtype by global name; layers in the order of their numbers."""
    rectangles: dict[str, list[StoredRectangle]]
    """How each tensor lies in the files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        opened = open_checkpoint(self.path)
        self.metadata, self.sums, index = opened.metadata, opened.sums, opened.index
        self.tensors, self.rectangles = {}, {}
        for name, entry in sorted(index.state_dict_metadata.items(), key=lambda item: _by_number(item[0])):
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{self.path} is no checkpoint of megafp8: its {name} is no tensor")
            self.tensors[name] = tuple(entry.size), entry.properties.dtype
            self.rectangles[name] = []
            for chunk in entry.chunks:
                stored = index.storage_data.get(MetadataIndex(name, chunk.offsets))
                if stored is None or stored.transform_descriptors:
                    how = "without saying where" if stored is None else "compressed, which is not read"
                    raise ValueError(f"{self.path / dcp.INDEX_FILE} lists a rectangle of {name} {how}")
                file = self.path / stored.relative_path
                self.rectangles[name].append(
                    StoredRectangle(tuple(chunk.offsets), tuple(chunk.sizes), file, stored.offset, stored.length)
                )

    def read(self, name: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """The tensor `name`, or its rectangle of `shape` at `offset`: contiguous, on the CPU, in its stored dtype.

        Default: from the beginning, and to the end. Raises ValueError for a name that is not there, a rectangle that
        leaves the tensor, a tensor that is only partly in the checkpoint, and a file that is damaged.
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
        result = torch.empty(size, dtype=dtype)
        filled = 0
        for rectangle in self.rectangles[name]:
            ends = [min(o + n, r + m) for o, n, r, m in zip(low, size, rectangle.offset, rectangle.shape)]
            begins = [max(o, r) for o, r in zip(low, rectangle.offset)]
            if all(begin < end for begin, end in zip(begins, ends)):
                part = result[tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, low))]
                _copy(name, rectangle, tuple(b - r for b, r in zip(begins, rectangle.offset)), part)
                filled += part.numel()
        if filled < result.numel():
            raise ValueError(f"{self.path} holds only {filled} of {result.numel()} values of {name}")
        return result


def _copy(name: str, rectangle: StoredRectangle, low: Shape, part: Tensor) -> None:
    """Fill `part` with the values of `rectangle` from its index `low` on."""
    with rectangle.file.open("rb") as stream:
        archive = cast(IO[bytes], _create_file_view(stream, rectangle.start, rectangle.length))
        where = f"{rectangle.file} is damaged at {name} (from byte {rectangle.start} on)"
        try:
            header = torch.load(archive, map_location="meta", weights_only=True)
            contiguous = header.is_contiguous()
            if not contiguous:  # by somebody else's hand
                archive.seek(0)
                values = torch.load(archive, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # a damaged archive raises nearly anything
            raise ValueError(f"{where}: {type(error).__name__}") from error
        if (tuple(header.shape), header.dtype) != (rectangle.shape, part.dtype):
            raise ValueError(f"{where}: it is {list(header.shape)} {header.dtype}")
        if not contiguous:
            part.copy_(values[tuple(slice(o, o + n) for o, n in zip(low, part.shape))])
            return
        first = header.storage_offset() * header.element_size() + header.untyped_storage()._checkpoint_offset
        stream.seek(rectangle.start + first)
        if not _copy_rows(stream, rectangle.shape or (1,), low or (0,), part if part.dim() else part.view(1)):
            raise ValueError(f"{where}: the file ends")


def _copy_rows(stream: IO[bytes], shape: Shape, low: Shape, part: Tensor) -> bool:
    """Fill `part` from index `low` of the contiguous tensor of `shape` that begins where `stream` stands.

    False where the file ends before.
    """
    row_bytes = math.prod(shape[1:]) * part.element_size()
    stream.seek(low[0] * row_bytes, 1)
    if part.shape[1:] == shape[1:] and part.is_contiguous():
        return _fill(stream, part)
    columns = tuple(slice(o, o + n) for o, n in zip(low[1:], part.shape[1:]))
    rows = max(1, _BLOCK_BYTES // row_bytes)
    for target in part.split(rows):
        block = torch.empty((len(target), *shape[1:]), dtype=part.dtype)
        if not _fill(stream, block):
            return False
        target.copy_(block[(slice(None), *columns)])
    return True


def _fill(stream: IO[bytes], contiguous: Tensor) -> bool:
    """Read the bytes of `contiguous`; False where the file ends before."""
    view = contiguous.view(-1).view(torch.uint8).numpy().data
    return stream.readinto(view) == len(view)  # type: ignore[attr-defined]


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sorts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
