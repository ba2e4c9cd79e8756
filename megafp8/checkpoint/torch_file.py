"""Read `torch.save` archives without running code, and write archives before their values are known.

An archive is a zip file of uncompressed records. `data.pkl` is a pickle of the saved object, in which each tensor names
a storage, and `data/0`, `data/1`, ... are the bytes of the storages. A checkpoint's data file holds many archives, one
for each rectangle. A checkpoint of Megatron-LM has one archive per rank.

Reading. A pickle is a program that may call functions of any module, so it is read by `pickle_reader`, which calls
nothing. Only dictionaries, dtypes and torch's functions for rebuilding tensors are interpreted; for a tensor, only its
location is recorded. Everything else, such as an enumeration of a library that is not installed, or `os.system`,
becomes an inert `PickledObject`. Tensors are read later, into buffers of their size; memory maps would count as used
memory. `torch.load` ignores the CRC-32 of a record. Here it is compared before the first tensor of the record is read,
unless it is 0, because torch can be told to omit it and then writes 0. All sizes in an archive are compared with the
archive's size before anything is allocated.

Writing. `reserve` lets torch write an archive for tensors without values (`torch.serialization.skip_data`).
`tensor_starts` returns where the bytes of the tensors belong. `seal` stores the checksums once the tensors are written.
So an archive of any size can be written in any order, with one tensor in memory at a time.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megafp8.checkpoint.files import BLOCK_BYTES, RawFile, allocate, crc32_of, open_raw, read_at, read_into, read_some
from megafp8.checkpoint.pickle_reader import check_tree, read_pickle
from megafp8.host.object_store import AnyPath, ObjectPath, is_transient
from megafp8.host.object_store.reader import REQUEST_BYTES, ObjectReader
from megafp8.parallel.sharding import Shape

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


DTYPE_NAMES = {("torch", name): x for name, x in vars(torch).items() if isinstance(x, torch.dtype)}
"""Torch's dtypes, by their module and name in pickles."""
_CONSTANTS = DTYPE_NAMES | {
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): torch.uint8,
}
_MAX_PICKLE_BYTES = 1 << 28
_MAX_DIMS = 64
_MAX_SIZE = 1 << 62


class _Storage(NamedTuple):
    record: str
    dtype: torch.dtype


class StoredTensor(NamedTuple):
    """Tensor of an archive: the name of its record, and its first byte within the record."""

    record: str
    start: int
    shape: Shape
    stride: Shape
    dtype: torch.dtype

    @property
    def is_contiguous(self) -> bool:
        """Whether the values are stored in row-major order without gaps."""
        packed = (math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        return all(size == 1 or stride == needed for size, stride, needed in zip(self.shape, self.stride, packed))


class _Record(NamedTuple):
    """Byte range of a record in the file, and its CRC-32 (0 if the archive has no CRC-32)."""

    start: int
    size: int
    crc: int


class _Section(io.RawIOBase):
    """File-like view of the bytes `[start, start + length)` of an unbuffered file.

    torch has a similar view, but it seeks wrongly from the end, where a zip archive has its directory.
    """

    def __init__(self, file: RawFile, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        """Return True: the view can be read."""
        return True

    def seekable(self) -> bool:
        """Return True: the view has random access."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to a position within the view, and return it."""
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        """Read into the beginning of `buffer`, and return the number of bytes read; 0 at the end."""
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        done = read_some(self._file, self._start + self._at, view) if len(view) else 0
        self._at += done
        return done


class TorchFile:
    """Reader of a `torch.save` archive. `content` is the saved object, with a `StoredTensor` for each tensor.

    The archive is the file at `path`, or its bytes `[start, start + length)`. Raises ValueError, with the file's name,
    if the archive is damaged or was not written by `torch.save`.
    """

    def __init__(self, path: AnyPath, start: int = 0, length: int | None = None) -> None:
        self.path = path
        self._verified: set[str] = set()
        self._object = ObjectReader(path) if isinstance(path, ObjectPath) else None
        try:
            if self._object is not None and length is not None and length <= REQUEST_BYTES:
                self._object.hold(start, length)
            size = path.stat().st_size - start if length is None else length
            with self._open() as stream:
                self._records = _read_directory(stream, start, size)
                if "byteorder" in self._records and self._read_record(stream, "byteorder", 64) != b"little":
                    raise ValueError("it was written on a big-endian machine")
                pickled = self._read_record(stream, "data.pkl", _MAX_PICKLE_BYTES)
            builders: dict[tuple[str, str], Callable[..., Any]] = {
                ("collections", "OrderedDict"): _ordered_dict,
                ("torch", "Size"): shape_of,
                ("torch._utils", "_rebuild_tensor_v2"): self._rebuild_tensor_v2,
                ("torch._utils", "_rebuild_tensor_v3"): self._rebuild_tensor_v3,
                ("torch._utils", "_rebuild_parameter"): self._rebuild_parameter,
            }
            self.content = read_pickle(pickled, constants=_CONSTANTS, builders=builders, persistent=_storage)
            check_tree(self.content, len(pickled))
        except Exception as error:  # `zipfile` raises many types of errors for damaged bytes
            if is_transient(error):
                raise
            if isinstance(error, OSError):
                raise ValueError(f"{path} cannot be read: {error.strerror}") from error
            raise ValueError(f"{path} is damaged, or is not a torch.save file: {error}") from error

    def _open(self) -> RawFile:
        return open_raw(self.path) if self._object is None else self._object

    def _read_record(self, stream: RawFile, name: str, limit: int) -> bytes:
        record = self._records.get(name)
        if record is None or record.size > limit:
            raise ValueError(f"it has no record {name}" + (f" of at most {limit} bytes" if record else ""))
        if not self._is_intact(stream, name):
            raise ValueError(f"its record {name} does not match its checksum")
        content = bytearray(record.size)
        read_into(stream, record.start, memoryview(content))
        return bytes(content)

    def read(self, tensor: StoredTensor, name: str, low: Shape, target: Tensor, *, verify: bool = True) -> None:
        """Fill `target` with the rectangle of `tensor` that begins at index `low` and has the shape of `target`.

        Rows are copied through a buffer of `BLOCK_BYTES`, unless `target` is on the CPU, contiguous, and consists of
        whole rows of `tensor`. A tensor that is not stored contiguously is read completely.

        Args:
            tensor: Stored tensor.
            name: Name of the tensor, for messages.
            low: First index of the rectangle.
            target: Tensor to fill, with any strides, on any device, in the stored dtype.
            verify: Whether to compare the CRC-32 of the record, unless this was done before.
        """
        assert target.dtype == tensor.dtype, name
        while len(tensor.shape) > 1 and tensor.shape[0] == 1:  # blocks consist of rows, which become smaller
            tensor = tensor._replace(shape=tensor.shape[1:], stride=tensor.stride[1:])
            low, target = low[1:], target[0]
        if not tensor.is_contiguous:
            span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride))
            flat = torch.empty(0 if 0 in tensor.shape else span, dtype=tensor.dtype)
            self.read(tensor._replace(shape=(len(flat),), stride=(1,)), name, (0,), flat, verify=verify)
            whole = flat.as_strided(tensor.shape, tensor.stride)
            target.copy_(whole[tuple(slice(o, o + n) for o, n in zip(low, target.shape))])
            return
        if target.dim() == 0:
            target, low, tensor = target.view(1), (0,), tensor._replace(shape=(1,))
        rest = tensor.shape[1:]
        row_bytes = math.prod(rest) * target.element_size()
        begin, record = tensor.start + low[0] * row_bytes, self._records.get(tensor.record)
        if record is None or begin < 0 or begin + len(target) * row_bytes > record.size:
            raise ValueError(f"{self.path} is damaged: {name} is not inside its record {tensor.record}")
        begin += record.start
        try:
            with self._open() as stream:
                if verify and not self._is_intact(stream, tensor.record):
                    raise ValueError(f"{self.path} is damaged at {name}: its bytes do not match their checksum")
                if target.shape[1:] == rest and target.is_contiguous() and target.device.type == "cpu":
                    read_into(stream, begin, as_bytes(target))
                    return
                columns = (slice(None), *(slice(o, o + n) for o, n in zip(low[1:], target.shape[1:])))
                for rows in target.split(max(1, BLOCK_BYTES // max(1, row_bytes))):
                    block = torch.empty((len(rows), *rest), dtype=target.dtype)
                    read_into(stream, begin, as_bytes(block))
                    rows.copy_(block[columns])
                    begin += len(rows) * row_bytes
        except (OSError, EOFError) as error:
            if is_transient(error):
                raise
            raise ValueError(f"{self.path}: {name} cannot be read: {error}") from error

    def is_damaged(self) -> bool:
        """Return whether the bytes of any record do not match its CRC-32."""
        with self._open() as stream:
            return not all(self._is_intact(stream, name) for name in self._records)

    def _rebuild_tensor_v2(
        self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any, dtype: Any = None
    ) -> StoredTensor:
        shape, strides = shape_of(size), shape_of(stride)
        if not isinstance(storage, _Storage) or not is_size(offset) or len(shape) != len(strides):
            raise ValueError("a tensor without storage, offset, shape and strides")
        dtype = storage.dtype if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):
            raise ValueError("a tensor without a dtype")
        span = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides))
        record = self._records.get(storage.record)
        if record is None or (offset + span) * dtype.itemsize > record.size:
            raise ValueError(f"a tensor that is not inside its record {storage.record[:40]}")
        return StoredTensor(storage.record, offset * dtype.itemsize, shape, strides, dtype)

    def _rebuild_tensor_v3(self, *arguments: Any) -> StoredTensor:
        return self._rebuild_tensor_v2(*arguments[:4], dtype=arguments[6])

    def _rebuild_parameter(self, data: Any, *_: Any) -> StoredTensor:
        if not isinstance(data, StoredTensor):
            raise ValueError("a parameter that is not a tensor")
        return data

    def _is_intact(self, stream: RawFile, name: str) -> bool:
        """Return whether a record matches its CRC-32. A match is remembered, so it is computed only once."""
        record = self._records[name]
        if record.crc and name not in self._verified:
            if crc32_of(stream, record.start, record.size) != record.crc:
                return False
            self._verified.add(name)
        return True


def _ordered_dict() -> dict[Any, Any]:
    """Return an empty dictionary for an OrderedDict. The pickle sets its items later."""
    return {}


def _storage(pid: Any) -> _Storage:
    """Return the storage that a persistent id names. The id is ("storage", dtype, record, device, elements)."""
    if type(pid) is not tuple or len(pid) != 5 or not isinstance(pid[1], torch.dtype) or type(pid[2]) is not str:
        raise ValueError("a storage without dtype and record")
    return _Storage(f"data/{pid[2]}", pid[1])


def is_size(value: Any) -> bool:
    """Return whether a value in a file is a valid size or offset."""
    return type(value) is int and 0 <= value <= _MAX_SIZE


def shape_of(values: Any) -> Shape:
    """Return the shape, strides or offsets in a file as a tuple. Raises ValueError if they are not valid sizes."""
    if type(values) in (tuple, list) and len(values) <= _MAX_DIMS:
        for value in values:  # `is_size` inlined for speed: a large index has about 100,000 shapes
            if type(value) is not int or not 0 <= value <= _MAX_SIZE:
                break
        else:
            return tuple(values)
    raise ValueError(f"sizes that are not up to {_MAX_DIMS} numbers from 0 to {_MAX_SIZE}")


def reserve(
    path: Path, content: Mapping[str, Any], tensors: Mapping[tuple[str, str], tuple[Shape, torch.dtype]]
) -> None:
    """Write an archive of `content`, with space for `tensors`, which have no values yet.

    Args:
        path: File to write.
        content: Object to save; some of its values are dictionaries to which the tensors are added.
        tensors: Shape and dtype of each tensor, by the key of a dictionary in `content` and the tensor's key in it.

    Raises:
        OSError: The disk has too little space for the values.
    """
    whole = {key: dict(value) if isinstance(value, dict) else value for key, value in content.items()}
    with FakeTensorMode():
        for (outer, inner), (shape, dtype) in tensors.items():
            whole[outer][inner] = torch.empty(shape, dtype=dtype)
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(whole, path)
    allocate(path, path.stat().st_size)


def tensor_starts(path: Path) -> dict[tuple[str, str], int]:
    """Return the position in bytes of each tensor in an archive that `reserve` has written, by the keys given there."""
    file = TorchFile(path)
    return {
        (outer, inner): file._records[tensor.record].start + tensor.start
        for outer, value in file.content.items()
        if isinstance(value, dict)
        for inner, tensor in value.items()
        if isinstance(tensor, StoredTensor)
    }


def seal(path: Path) -> None:
    """Store the checksums of all records, once the tensors of an archive by `reserve` are written. Safe to repeat."""
    with path.open("r+b", buffering=0) as stream, zipfile.ZipFile(path) as archive:
        at = archive.start_dir
        for info in archive.infolist():
            record = _find_record(stream, 0, info)
            crc = struct.pack("<I", crc32_of(stream, record.start, record.size))
            entry = os.pread(stream.fileno(), 46, at)
            assert entry[:4] == _DIRECTORY_ENTRY
            assert os.pread(stream.fileno(), 4, record.start + record.size) == _DESCRIPTOR
            os.pwrite(stream.fileno(), crc, record.start + record.size + 4)
            os.pwrite(stream.fileno(), crc, at + 16)
            at += 46 + sum(struct.unpack("<HHH", entry[28:34]))


def as_bytes(contiguous: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    flat = contiguous.as_strided((contiguous.numel(),), (1,))  # dims of size 1 may have any stride
    return flat.view(torch.uint8).numpy().data


def _read_directory(stream: RawFile, start: int, length: int) -> dict[str, _Record]:
    """Return the records of an archive by name, without the name of their common folder."""
    if read_at(stream, start, 4) != _LOCAL_HEADER:
        raise ValueError(
            "it does not begin as a zip archive (torch before 1.6 used another format: load it and save it again)"
        )
    records: dict[str, _Record] = {}
    with zipfile.ZipFile(io.BufferedReader(_Section(stream, start, length), 1 << 16)) as archive:
        if min((info.header_offset for info in archive.infolist()), default=0):  # zipfile takes the last directory
            raise ValueError("its directory belongs to another archive that follows it")
        for info in archive.infolist():
            record, name = _find_record(stream, start, info), info.filename.partition("/")[2]
            if record.start + record.size > start + length:
                raise ValueError(f"its record {name[:80]} of {record.size} bytes extends beyond its end")
            if name in records:
                raise ValueError(f"it has two records {name[:80]}")
            records[name] = record
    return records


def _find_record(stream: RawFile, archive_start: int, info: zipfile.ZipInfo) -> _Record:
    at = archive_start + info.header_offset
    header = read_at(stream, at, 30)
    if header[:4] != _LOCAL_HEADER or info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"its record {info.filename[:80]} is compressed, or is not where the directory states")
    return _Record(at + 30 + sum(struct.unpack("<HH", header[26:30])), info.file_size, info.CRC)
