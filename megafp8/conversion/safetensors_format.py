"""Read and write the safetensors file format.

A file consists of eight bytes with the header's length, the header in JSON, and the bytes of the tensors:

    {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ..., "__metadata__": {"format": "pt"}}

Offsets count from the end of the header and leave no gaps. The library `safetensors` is not used, because a conversion
must write the complete header before the first tensor, write tensors in any order and in parts, and read into buffers
of the tensors' size. The library maps files instead: mapped pages count as used memory, and if a mapped file is
truncated, the process is killed instead of getting an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafp8.checkpoint.files import parse_object, read_into
from megafp8.checkpoint.torch_file import as_bytes
from megafp8.conversion.base import TensorInfo
from megafp8.host.messages import name_text, value_text
from megafp8.parallel.sharding import Shape

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
QUANTIZED = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
}
"""Dtypes of quantized weights and of their scales. Weights that are not quantized do not have these dtypes."""
STORED = {**DTYPES, **QUANTIZED}
_NAMES = {dtype: name for name, dtype in STORED.items()}
_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_MAX_DIMS = 64


class Entry(NamedTuple):
    """Location of a tensor in a file.

    Attributes:
        file: File that holds the tensor.
        dtype: Name of the dtype in the safetensors format.
        shape: Shape of the tensor.
        start: Position of the tensor's first byte in the file.
        parts: Locations of the tensor's rows, if these are not contiguous in one file.
        values: Function that returns the rows from a first to a last index, if the tensor is stored with another dtype
            or shape.
    """

    file: Path
    dtype: str
    shape: Shape
    start: int
    parts: tuple[Entry, ...] = ()
    values: Callable[[int, int], Tensor] | None = None

    @classmethod
    def joined(cls, parts: Sequence[Entry]) -> Entry:
        """Return a tensor that consists of the rows of all `parts`."""
        first = parts[0]
        rows = sum(part.shape[0] for part in parts)
        return first._replace(shape=(rows, *first.shape[1:]), parts=tuple(parts))

    def rows(self, first: int, last: int) -> Entry:
        """Return the location of rows `[first, last)`."""
        if self.parts:
            begins = [0, *accumulate(part.shape[0] for part in self.parts)]
            cut = ((part, max(first - i, 0), min(last, j) - i) for part, (i, j) in zip(self.parts, pairwise(begins)))
            return Entry.joined([part.rows(i, j) for part, i, j in cut if i < j])
        shape, values = (last - first, *self.shape[1:]), self.values
        if values is not None:
            return self._replace(shape=shape, values=lambda low, high: values(first + low, first + high))
        row_bytes = math.prod(self.shape[1:]) * STORED[self.dtype].itemsize
        return self._replace(shape=shape, start=self.start + first * row_bytes)

    def element(self, index: int) -> Entry:
        """Return the location of the tensor at `index` of the first dim, without this dim."""
        shape, values = self.shape[1:], self.values
        if values is not None:
            return self._replace(shape=shape, values=lambda low, high: values(index, index + 1)[0, low:high])
        return self._replace(shape=shape, start=self.rows(index, index + 1).start)


def read_header(file: Path) -> dict[str, Entry]:
    """Return the locations of the tensors in a safetensors file by name, after checking that the file has all bytes.

    Raises ValueError, with the name of the file and the tensor, if the file is damaged.
    """
    described, data, size = _read_json(file)
    entries = {name: _entry(file, name, x, data, size) for name, x in described.items() if name != _METADATA}
    _check_apart(file, described, entries)
    return entries


def read_metadata(file: Path) -> dict[str, Any]:
    """Return the texts in a safetensors file's header that do not describe tensors, by name."""
    metadata = _read_json(file)[0].get(_METADATA)
    return metadata if isinstance(metadata, dict) else {}


def _read_json(file: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header of a safetensors file, the position of the first tensor's bytes, and the file's size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"{file} is damaged or not a safetensors file: a header of {length} bytes in {size}")
            text = stream.read(length)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    return parse_object(f"the header of {file}", text), 8 + length, size


def _entry(file: Path, name: str, about: Any, data: int, size: int) -> Entry:
    """Return the location of one tensor in the header. The header ends at byte `data`; the file has `size` bytes."""
    try:
        dtype, shape, (start, end) = about["dtype"], tuple(about["shape"]), about["data_offsets"]
        valid = len(shape) <= _MAX_DIMS and all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, start, end))
        valid = valid and start <= end and name.isprintable()
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid or not isinstance(dtype, str):
        raise ValueError(f"{file} is damaged: the entry of {name_text(name)} in its header is {value_text(about)}")
    if dtype in STORED and math.prod(shape) * STORED[dtype].itemsize != end - start:
        raise ValueError(f"{file} is damaged: {name} is {dtype} {list(shape)}, but has {end - start} bytes")
    if data + end > size:
        raise ValueError(f"{file} is truncated: {name} ends at byte {data + end}, but the file has {size}")
    return Entry(file, dtype, shape, data + start)


def _check_apart(file: Path, described: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
    """Raise ValueError if two tensors share bytes, because a small file could then have huge tensors."""
    ranges = sorted((*described[name]["data_offsets"], name) for name in entries)
    for (_, end, name), (start, _, following) in pairwise(ranges):
        if start < end:
            raise ValueError(f"{file} is damaged: {name} and {following} share bytes")


def header(tensors: Mapping[str, TensorInfo]) -> tuple[bytes, dict[str, int]]:
    """Return the first bytes of a file that holds `tensors` in this order, and the position of each tensor's bytes."""
    described: dict[str, Any] = {_METADATA: {"format": "pt"}}
    starts, at = {}, 0
    for name, info in tensors.items():
        starts[name], end = at, at + info.nbytes
        described[name] = {"dtype": _NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    first = len(text).to_bytes(8, "little") + text
    return first, {name: len(first) + start for name, start in starts.items()}


def read_rows(entry: Entry, name: str, first: int, last: int, padding: int = 0) -> Tensor:
    """Read rows `[first, last)` along dim 0 of the tensor at `entry`, and append `padding` rows of zeros.

    Raises ValueError, with the names of file and tensor, if the rows cannot be read.
    """
    dtype, rest = STORED[entry.dtype], entry.shape[1:]
    if entry.values is not None:
        rows = entry.values(first, last)
        return rows if not padding else torch.cat([rows, torch.zeros(padding, *rest, dtype=dtype)])
    if entry.parts:
        parts = entry.rows(first, last).parts if first < last else ()
        pieces = [read_rows(part, name, 0, part.shape[0]) for part in parts]
        return torch.cat([*pieces, torch.zeros(padding, *rest, dtype=dtype)])
    rows = torch.empty(last - first + padding, *rest, dtype=dtype)
    rows[last - first :] = 0
    try:
        with entry.file.open("rb", buffering=0) as stream:
            start = entry.start + first * math.prod(rest) * dtype.itemsize
            read_into(stream, start, as_bytes(rows[: last - first]))
    except EOFError:
        raise ValueError(f"{entry.file} is truncated in the middle of {name}") from None
    except OSError as error:
        raise ValueError(f"{entry.file}: {name} cannot be read: {error.strerror}") from error
    return rows
