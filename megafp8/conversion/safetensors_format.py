"""The safetensors file format: eight bytes with the header's length, the header in JSON, then the tensors' bytes.

    {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ..., "__metadata__": {"format": "pt"}}

Offsets count from the header's end and leave no gaps. We read and write it ourselves, in some hundred lines, because a
conversion wants what the library does not give: a header that is complete before the first tensor is there, tensors
written in any order and in parts, and reads into a buffer of their size (mapped pages would count as memory used, and
a file cut off while it is mapped ends the process instead of raising an error).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from megafp8.distributed.sharding import Shape

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
_MOST_HEADER_BYTES = 100_000_000  # the library's own limit


class Entry(NamedTuple):
    """A tensor in a file: what it is, and where its first byte lies."""

    file: Path
    dtype: str
    shape: Shape
    start: int
    nbytes: int


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, which are all there. Raises ValueError naming the file, and the tensor."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
                raise ValueError(f"{file} is no safetensors file, or damaged: a header of {length} bytes in {size}")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file} is damaged: its header is no JSON object")
    return {name: _entry(file, name, about, 8 + length, size) for name, about in header.items() if name != _METADATA}


def _entry(file: Path, name: str, about: Any, data: int, size: int) -> Entry:
    """One tensor of the header; `data`: where the header ends, `size`: the file's."""
    try:
        dtype, shape, (start, end) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, start, end)) and start <= end
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound or not isinstance(dtype, str):
        raise ValueError(f"{file} is damaged: its header says of {name}: {str(about)[:200]}")
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != end - start:
        raise ValueError(f"{file} is damaged: {name} is {dtype} {list(shape)} and has {end - start} bytes")
    if data + end > size:
        raise ValueError(f"{file} is truncated: {name} ends at byte {data + end}, and the file has {size}")
    return Entry(file, dtype, shape, data + start, end - start)


def header(tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file of `tensors`, in their order, and where in the file each begins."""
    said: dict[str, Any] = {_METADATA: {"format": "pt"}}
    starts, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        starts[name], end = at, at + math.prod(shape) * dtype.itemsize
        said[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8
    first = len(text).to_bytes(8, "little") + text
    return first, {name: len(first) + start for name, start in starts.items()}


def read_rows(entry: Entry, name: str, first: int, last: int, padding: int = 0) -> Tensor:
    """Rows `[first, last)` along dim 0 of the tensor at `entry`, and `padding` rows of zeros.

    Raises ValueError naming file and tensor.
    """
    dtype, rest = DTYPES[entry.dtype], entry.shape[1:]
    row = math.prod(rest) * dtype.itemsize
    size = (last - first) * row
    bytes_ = torch.empty(size + padding * row, dtype=torch.uint8)
    bytes_[size:] = 0
    view, done = bytes_[:size].numpy().data, 0
    try:
        with entry.file.open("rb", buffering=0) as stream:
            stream.seek(entry.start + first * row)
            while done < len(view):
                got = stream.readinto(view[done:])
                if not got:
                    raise ValueError(f"{entry.file} is truncated in the middle of {name}")
                done += got
    except OSError as error:
        raise ValueError(f"{entry.file}: {name} cannot be read: {error.strerror}") from error
    return bytes_.view(dtype).view(last - first + padding, *rest)


def write_at(stream: BinaryIO, start: int, values: Tensor) -> None:
    """Write the bytes of `values`, contiguous, from byte `start` of a file on."""
    view, done = values.flatten().view(torch.uint8).numpy().data, 0
    while done < len(view):
        done += os.pwrite(stream.fileno(), view[done : done + (1 << 30)], start + done)
