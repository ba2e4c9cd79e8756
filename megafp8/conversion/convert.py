"""Convert a checkpoint by copying one tensor after another from a source to a sink, and verify the result.

An interrupted conversion continues when the same command is repeated (`target`). The result is verified before it gets
its final name.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from glob import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from megafp8.checkpoint.files import reading_once
from megafp8.checkpoint.torch_file import as_bytes
from megafp8.conversion.base import CheckpointSource, TensorInfo, is_weight
from megafp8.conversion.flat import differences, flat_keys
from megafp8.conversion.model import is_mtp, training_dtypes, without_mtp
from megafp8.conversion.target import Sink, is_taken
from megafp8.spec import ModelSpec

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # from malloc.h
_AHEAD_BYTES = 1 << 29
_SPARE_BYTES = 64 * 2**20  # indices, headers, journals


def keep_freed_memory() -> None:
    """Tell glibc's allocator, if the system uses glibc, to keep up to 1 GiB of freed memory for this process.

    Otherwise each tensor gets new pages, which the kernel first fills with zeros. Dequantizing experts of 58 MB then
    takes three times as long.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 256 << 20)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        mallopt(_M_ARENA_MAX, 1)  # otherwise threads have separate arenas, which do not keep memory of this size


class Selected(CheckpointSource):
    """Selection of the tensors of another source, which may be cast.

    Args:
        source: Source of the tensors.
        weights_only: Whether to leave out optimizer state.
        dtype: Dtype to which weights are cast, or None. A tensor that training in `dtype` keeps in fp32 is cast to
            fp32. A cast requires `weights_only`, because optimizer state belongs to the uncast weights.
        mtp: Whether to include the layers of multi-token prediction.
    """

    def __init__(
        self, source: CheckpointSource, *, weights_only: bool, dtype: torch.dtype | None, mtp: bool = True
    ) -> None:
        assert weights_only or dtype is None
        self._source = source
        self.path, self.model, self.about = source.path, source.model if mtp else without_mtp(source), source.about
        self.tokenizer_files = source.tokenizer_files
        in_training = {} if dtype is None else training_dtypes(source, dtype)

        def cast_to(name: str, stored: torch.dtype) -> torch.dtype:
            return stored if dtype is None or not stored.is_floating_point else in_training.get(name, dtype)

        self.tensors = {
            name: TensorInfo(info.shape, cast_to(name, info.dtype))
            for name, info in source.tensors.items()
            if (is_weight(name) or not weights_only) and (mtp or not is_mtp(source.model, name))
        }

    @property
    def rounded(self) -> int:
        """Number of tensors that have fewer bits per value than in the source."""
        return sum(
            info.dtype.itemsize < self._source.tensors[name].dtype.itemsize for name, info in self.tensors.items()
        )

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, cast to its dtype in this selection (rounded to nearest even)."""
        return self._source.read(name).to(self.tensors[name].dtype)


class Moved(NamedTuple):
    """Statistics of a conversion or a comparison."""

    tensors: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.bytes / max(self.seconds, 1e-9) / 1e9
        return f"{self.tensors} tensors, {self.bytes / 1e9:.2f} GB in {self.seconds:.3g} s ({rate:.2f} GB/s)"


def convert(source: CheckpointSource, sink: Sink, options: Mapping[str, Any]) -> Moved:
    """Copy all tensors that the sink does not have yet. The result is complete, but not published.

    `options` must be equal to continue an interrupted conversion, as must the source's path and files. Raises
    ValueError if the sink's format cannot express this model, or if the disk is too small.
    """
    start, folder = time.monotonic(), source.path.resolve()
    if sink.path.resolve().is_relative_to(folder):
        raise ValueError(f"{sink.path} is inside its source {folder}; choose another path")
    if not is_taken(sink.path):
        _check_room(source, sink.path)
    names = list(sink.begin(source, {"source_files": _files_digest(source.path), **options}))
    sizes = {name: source.tensors[name].nbytes for name in names}
    with reading_once(), closing(_read_ahead(source, names, sizes)) as tensors:
        for name in _with_progress(names, sizes, "convert"):
            sink.write(name, next(tensors))
    sink.finish()
    return Moved(len(names), sum(sizes.values()), time.monotonic() - start)


def _read_ahead(
    source: CheckpointSource, names: Sequence[str], sizes: Mapping[str, int]
) -> Generator[Tensor, None, None]:
    """Yield the tensors of these names. If two successive tensors are small, a thread reads the second one ahead."""
    with ThreadPoolExecutor(1) as threads:
        ahead: Future[Tensor] | None = None
        for name, following in zip_longest(names, names[1:]):
            tensor = source.read(name) if ahead is None else ahead.result()
            ahead = None
            if following is not None and sizes[name] + sizes[following] <= _AHEAD_BYTES:
                ahead = threads.submit(copy_context().run, source.read, following)
            yield tensor
            del tensor


def verify(source: CheckpointSource, target: CheckpointSource) -> Moved:
    """Compare the model configs and every value of `source` and `target`, bit for bit.

    Hashes are compared, so one tensor at a time is in memory. Rows of padding after the vocabulary are not compared.
    Raises ValueError at the first difference.
    """
    start = time.monotonic()
    if fields := differences(source.model, target.model):
        written, expected = flat_keys(target.model), flat_keys(source.model)
        changes = ", ".join(f"{field} is {written[field]}, not {expected[field]}" for field in fields)
        raise ValueError(f"{target.path} describes a different model than {source.path}: {changes}")
    missing = [name for name in source.tensors if is_weight(name) and name not in target.tensors]
    unknown = [name for name in target.tensors if name not in source.tensors]
    if missing or unknown:
        raise ValueError(f"{target.path} lacks {missing[:3]} of {source.path}, and has {unknown[:3]} in addition")
    sizes = {name: info.nbytes for name, info in target.tensors.items()}
    with reading_once():
        for name in _with_progress(list(target.tensors), sizes, "verify"):
            source_print, target_print = (_fingerprint(name, one.read(name), source.model) for one in (source, target))
            if source_print != target_print:
                raise ValueError(f"{name} is {target_print} in {target.path} and {source_print} in {source.path}")
    return Moved(len(sizes), sum(sizes.values()), time.monotonic() - start)


def _check_room(source: CheckpointSource, path: Path) -> None:
    """Raise ValueError if the disk of `path` has too little space for the data that is not written yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.parent.glob(f".{escape(path.name)}.*/**/*")
    needed = sum(info.nbytes for info in source.tensors.values()) + _SPARE_BYTES
    needed, free = needed - sum(file.stat().st_blocks * 512 for file in begun), shutil.disk_usage(path.parent).free
    if needed > free:
        raise ValueError(
            f"{path.parent} has {free / 1e9:.2f} GB free, but {needed / 1e9:.2f} GB are needed; make room "
            "and repeat the command, or save elsewhere"
        )


def _with_progress(names: list[str], sizes: Mapping[str, int], what: str) -> Iterable[str]:
    seconds = 0.2 if sys.stderr.isatty() else 30  # in a log file, each update is a line
    total = sum(sizes[name] for name in names)
    with tqdm(total=total, unit="B", unit_scale=True, desc=what, dynamic_ncols=True, mininterval=seconds) as bar:
        for name in names:
            yield name
            bar.update(sizes[name])


def _files_digest(path: Path) -> str:
    """Return a hash that changes when a file of the source is written, added or removed."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()


def _fingerprint(name: str, tensor: Tensor, model: ModelSpec) -> str:
    """Return shape, dtype and SHA-256 of a tensor's bits as text, without rows of padding after the vocabulary."""
    if name.endswith((".embedding.word.weight", ".output.weight", ".output.bias")):
        tensor = tensor[: model.stem.vocab_size]
    info = TensorInfo(tuple(tensor.shape), tensor.dtype)
    return f"{info} with SHA-256 {hashlib.sha256(as_bytes(tensor)).hexdigest()[:16]}…"
