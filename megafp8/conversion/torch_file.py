"""The files of `torch.save`, read without running what is in them, and written before there is anything to put in.

Such a file is a zip archive of uncompressed records: `data.pkl`, a pickle of the saved object in which each tensor is
a name of a storage, and `data/0`, `data/1`, ..., the bytes of the storages.

Reading. A pickle is a program: it names functions of any module and calls them. `TorchFile` runs it with a table of
the few names that plain data need (dictionaries, dtypes, torch's rebuilding of tensors, which here only notes where
one lies). Every other name becomes an empty class of that name, so that an enumeration of a library that is not
installed, or `os.system`, comes out as an object that holds its arguments and does nothing. Tensors are read later,
one at a time, into buffers of their size: mapped pages would count as memory used. A record's CRC-32 is checked before
its first tensor is read, where the file has one (torch can be told to leave it out, and then writes 0).

Writing. `reserve` has torch write the file for tensors without values (`torch.serialization.skip_data`), and the space
for their bytes stays empty; it says where that space lies. `seal` then puts the checksums in. So a file of any size is
written in any order with no tensor in memory but the one that is written.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megafp8.distributed.sharding import Shape

_BLOCK = 1 << 25  # bytes that are checksummed at a time
_LOCAL_HEADER, _DIRECTORY_ENTRY, _DESCRIPTOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class Unknown:
    """An object of a class or function that was named in a file and not imported. It holds what it was made of."""

    def __init__(self, *arguments: Any, **_: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__}>"


class _Storage(NamedTuple):
    record: str
    dtype: torch.dtype


class StoredTensor(NamedTuple):
    """A tensor of a file: its record, and the first byte in there."""

    record: str
    start: int
    shape: Shape
    stride: Shape
    dtype: torch.dtype

    @property
    def is_contiguous(self) -> bool:
        rows = zip(self.shape, self.stride, _contiguous(self.shape), strict=True)
        return all(size == 1 or stride == needed for size, stride, needed in rows)


class _Record(NamedTuple):
    """Where a record's bytes lie, and their checksum, 0 for none."""

    start: int
    size: int
    crc: int


class TorchFile:
    """The file at `path`; `content` is what was saved, with a `StoredTensor` for each tensor.

    `unsafe`: import the classes and functions that the file names, and call them as it says. Only for files of people
    you trust with your account. Raises ValueError naming the file where it is damaged, or was not written by
    `torch.save`.
    """

    def __init__(self, path: Path, *, unsafe: bool = False) -> None:
        self.path = path
        self._sound: set[str] = set()  # records whose bytes were checked
        try:
            self._records = _directory(path)
            if self._bytes("byteorder", b"little") != b"little":
                raise ValueError("it was written on a big-endian machine")
            self.content = _Reader(io.BytesIO(self._bytes("data.pkl")), unsafe).load()
        except Exception as error:  # damaged bytes, pickles above all, raise nearly anything
            if isinstance(error, OSError):
                raise ValueError(f"{path} cannot be read: {error.strerror}") from error
            if unsafe and isinstance(error, (ImportError, AttributeError)):
                raise ValueError(f"{path} names code that is not installed: {error}; read it without unsafe") from error
            raise ValueError(f"{path} is damaged, or no file of torch.save: {error}") from error

    def _bytes(self, name: str, default: bytes | None = None) -> bytes:
        if name not in self._records and default is not None:
            return default
        record = self._records[name]
        with self.path.open("rb") as stream:
            stream.seek(record.start)
            content = stream.read(record.size)
        if record.crc and zlib.crc32(content) != record.crc:
            raise ValueError(f"its record {name} is not what was saved")
        return content

    def read_rows(self, tensor: StoredTensor, name: str, first: int, out: Tensor) -> None:
        """Fill `out`, contiguous, with rows of `tensor` from row `first` on. `name` is for messages."""
        assert tensor.is_contiguous, name
        assert out.is_contiguous(), name
        assert out.dtype == tensor.dtype, name
        row = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        begin, record = tensor.start + first * row, self._records.get(tensor.record)
        if record is None or begin < 0 or begin + out.numel() * out.element_size() > record.size:
            raise ValueError(f"{self.path} is damaged: {name} is not inside its record {tensor.record}")
        try:
            self._check(tensor.record, name)
            with self.path.open("rb", buffering=0) as stream:
                _fill(stream, record.start + begin, out.flatten().view(torch.uint8).numpy().data)
        except (OSError, EOFError) as error:
            raise ValueError(f"{self.path}: {name} cannot be read: {error}") from error

    def _check(self, name: str, tensor: str) -> None:
        """Compare a record with its checksum, once."""
        record = self._records[name]
        if record.crc == 0 or name in self._sound:
            return
        with self.path.open("rb", buffering=0) as stream:
            if _checksum(stream, record) != record.crc:
                raise ValueError(f"{self.path} is damaged at {tensor}: its bytes are not those that were saved")
        self._sound.add(name)


class _Reader(pickle.Unpickler):
    """A pickle of plain data and tensors; see the head of this file."""

    def __init__(self, stream: BinaryIO, unsafe: bool) -> None:
        super().__init__(stream)
        self.unsafe = unsafe
        self.classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"):
            return getattr(self, name)
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.uint8
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if self.unsafe:
            return super().find_class(module, name)
        key = (module, name)
        return self.classes.setdefault(key, type(name, (Unknown,), {"__module__": module, "__qualname__": name}))

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, record, _, _ = pid
        return _Storage(f"data/{record}", dtype)

    def _rebuild_tensor_v2(self, storage: _Storage, offset: int, size: Shape, stride: Shape, *_: Any) -> StoredTensor:
        dtype = storage.dtype
        return StoredTensor(storage.record, offset * dtype.itemsize, tuple(size), tuple(stride), dtype)

    def _rebuild_tensor_v3(
        self, storage: _Storage, offset: int, size: Shape, stride: Shape, _: Any, __: Any, dtype: torch.dtype, *___: Any
    ) -> StoredTensor:
        return StoredTensor(storage.record, offset * dtype.itemsize, tuple(size), tuple(stride), dtype)

    def _rebuild_parameter(self, data: StoredTensor, *_: Any) -> StoredTensor:
        return data


def reserve(
    path: Path, content: Mapping[str, Any], tensors: Mapping[tuple[str, str], tuple[Shape, torch.dtype]]
) -> None:
    """Write the file of `content`, with `tensors` in it that have no values yet.

    `tensors`: shape and dtype by (key of a dictionary in `content`, key in there). Raises OSError where the disk has
    no room for the values.
    """
    whole = {key: dict(value) if isinstance(value, dict) else value for key, value in content.items()}
    with FakeTensorMode():
        for (outer, inner), (shape, dtype) in tensors.items():
            whole[outer][inner] = torch.empty(shape, dtype=dtype)
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(whole, path)
    with path.open("r+b") as stream:
        size = path.stat().st_size
        try:
            os.posix_fallocate(stream.fileno(), 0, size)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: {size:,} bytes are needed for {path}") from error


def tensor_starts(path: Path) -> dict[tuple[str, str], int]:
    """The first byte of each tensor in a file of `reserve`."""
    file = TorchFile(path)
    return {
        (outer, inner): file._records[tensor.record].start + tensor.start
        for outer, value in file.content.items()
        if isinstance(value, dict)
        for inner, tensor in value.items()
        if isinstance(tensor, StoredTensor)
    }


def seal(path: Path) -> None:
    """Put the checksums of all records into a file of `reserve` whose tensors are written. Safe to repeat."""
    with path.open("r+b", buffering=0) as stream, zipfile.ZipFile(path) as archive:
        at = archive.start_dir
        for info in archive.infolist():
            record = _record(stream, info)
            crc = struct.pack("<I", _checksum(stream, record))
            entry = os.pread(stream.fileno(), 46, at)
            assert entry[:4] == _DIRECTORY_ENTRY
            assert os.pread(stream.fileno(), 4, record.start + record.size) == _DESCRIPTOR
            os.pwrite(stream.fileno(), crc, record.start + record.size + 4)
            os.pwrite(stream.fileno(), crc, at + 16)
            at += 46 + sum(struct.unpack("<HHH", entry[28:34]))


def _directory(path: Path) -> dict[str, _Record]:
    """The records of an archive by name, without the folder that all of them are in."""
    with path.open("rb", buffering=0) as stream:
        if os.pread(stream.fileno(), 4, 0) != _LOCAL_HEADER:
            raise ValueError("it does not begin as a zip archive (torch before 1.6 wrote none: load and save it anew)")
        with zipfile.ZipFile(path) as archive:
            return {info.filename.partition("/")[2]: _record(stream, info) for info in archive.infolist()}


def _record(stream: BinaryIO, info: zipfile.ZipInfo) -> _Record:
    header = os.pread(stream.fileno(), 30, info.header_offset)
    if header[:4] != _LOCAL_HEADER or info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"its record {info.filename} is not where the directory says, or compressed")
    start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
    return _Record(start, info.file_size, info.CRC)


def _checksum(stream: BinaryIO, record: _Record) -> int:
    crc, buffer = 0, memoryview(bytearray(min(_BLOCK, record.size)))
    for at in range(0, record.size, _BLOCK):
        block = buffer[: min(_BLOCK, record.size - at)]
        _fill(stream, record.start + at, block)
        crc = zlib.crc32(block, crc)
    return crc


def _fill(stream: BinaryIO, start: int, view: memoryview) -> None:
    """Read as many bytes as `view` has. Raises EOFError where the file ends before."""
    done = 0
    while done < len(view):
        got = os.preadv(stream.fileno(), [view[done : done + (1 << 30)]], start + done)
        if got == 0:
            raise EOFError("the file is cut off")
        done += got


def _contiguous(shape: Shape) -> Shape:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
