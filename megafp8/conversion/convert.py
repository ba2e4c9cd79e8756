"""From one checkpoint to another: open what is there, move tensor after tensor, compare.

A killed conversion is repeated with the same command and goes on where it stopped. So that it does not go on with
something else, a note lies beside a target until it is finished, and compared where that was asked for: what is
converted, as it was then, and with which options. A sink's own journal, in its hidden folder, says how far it came.

    <parent>/.<name>.conversion.json    the note
    <parent>/.<name>.converting/        the sink's hidden folder
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from megafp8.checkpoint.store import write_text
from megafp8.config import ModelConfig
from megafp8.conversion.base import Sink, Source, TensorInfo
from megafp8.conversion.hf_config import canonical, differences
from megafp8.conversion.target import check_free, is_taken

_SPARE_BYTES = 64 * 2**20  # indices, headers, journals


class Selected:
    """A source of whose tensors only weights are wanted, if `weights_only`, and these in `dtype`, if that is given."""

    def __init__(self, source: Source, *, weights_only: bool, dtype: torch.dtype | None) -> None:
        self._source, self._dtype = source, dtype
        self.path, self.model, self.about = source.path, source.model, source.about
        self.tokenizer_files = source.tokenizer_files
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(info.shape, dtype or info.dtype)
            for name, info in source.tensors.items()
            if is_weight(name) or not weights_only
        }

    def read(self, name: str) -> Tensor:
        """A whole tensor, rounded to nearest even where `dtype` is narrower."""
        return self._source.read(name).to(self.tensors[name].dtype)


class Moved(NamedTuple):
    """What a conversion, or a comparison, has done."""

    tensors: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.bytes / max(self.seconds, 1e-9) / 1e9
        return f"{self.tensors} tensors, {self.bytes / 1e9:.2f} GB in {self.seconds:.3g} s ({rate:.2f} GB/s)"


class Note:
    """The note beside a target that says of which conversion it is."""

    def __init__(self, target: Path, source: Source, options: Mapping[str, Any]) -> None:
        self.target = target
        self.path = target.with_name(f".{target.name}.conversion.json")
        self._content = {"source": str(source.path.resolve()), "source_files": _files_digest(source.path), **options}

    def check(self) -> bool:
        """Whether there is anything to convert: False where it is done, and was only not yet compared.

        Raises ValueError where the target is another conversion's, half done, holds something from before, or would lie
        inside its source.
        """
        if self.target.resolve().is_relative_to(self._content["source"]):
            raise ValueError(f"{self.target} lies inside {self._content['source']}, its source; choose another path")
        if not self.path.exists():
            check_free(self.target)
            return True
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError:  # killed in the middle of the note, so nothing was moved yet
            return True
        if differing := [key for key, value in self._content.items() if found.get(key) != value]:
            what = ", ".join(f"{key} was {found.get(key)} and is {self._content[key]}" for key in differing)
            raise ValueError(
                f"{self.target} is half done by another conversion: {what}. Repeat that one, or delete {self.path} and "
                f"the hidden folder beside it to begin anew"
            )
        return not is_taken(self.target)

    def write(self) -> None:
        write_text(self.path, json.dumps(self._content, indent=2) + "\n")

    def remove(self) -> None:
        """The conversion is over."""
        self.path.unlink()


def is_weight(name: str) -> bool:
    return name.startswith("model.")


def convert(source: Source, sink: Sink, note: Note) -> Moved:
    """Move what is not there yet.

    Raises ValueError where the sink cannot hold this model, and where the disk has too little room.
    """
    start = time.monotonic()
    _check_room(source, sink.path)
    names = list(sink.begin(source))
    sizes = {name: num_bytes(source.tensors[name]) for name in names}
    note.write()  # only now: what cannot begin leaves no claim
    for name in _with_progress(names, sizes, "convert"):
        sink.write(name, source.read(name))
    sink.finish()
    return Moved(len(names), sum(sizes.values()), time.monotonic() - start)


def verify(source: Source, target: Source) -> Moved:
    """Compare every value of `target` with that of `source`, bit for bit, and the two descriptions of the model.

    By fingerprints, so that only one tensor is in memory. Rows past the vocabulary mean nothing and are left out.
    Raises ValueError at the first difference.
    """
    start = time.monotonic()
    if fields := differences(source.model, target.model):
        theirs, ours = canonical(target.model), canonical(source.model)
        said = ", ".join(f"{field} is {theirs[field]}, not {ours[field]}" for field in fields)
        raise ValueError(f"{target.path} describes another model than {source.path}: {said}")
    missing = [name for name in source.tensors if is_weight(name) and name not in target.tensors]
    unknown = [name for name in target.tensors if name not in source.tensors]
    if missing or unknown:
        raise ValueError(f"{target.path} lacks {missing[:3]} of {source.path} and has {unknown[:3]} besides")
    sizes = {name: num_bytes(info) for name, info in target.tensors.items()}
    for name in _with_progress(list(target.tensors), sizes, "verify"):
        there, here = (_fingerprint(name, one.read(name), source.model) for one in (source, target))
        if there != here:
            raise ValueError(f"{name} is {here} in {target.path} and {there} in {source.path}")
    return Moved(len(sizes), sum(sizes.values()), time.monotonic() - start)


def num_bytes(info: TensorInfo) -> int:
    return torch.Size(info.shape).numel() * info.dtype.itemsize


def _check_room(source: Source, path: Path) -> None:
    """Raise ValueError where the disk of `path` has no room for what is still to come."""
    path.parent.mkdir(parents=True, exist_ok=True)
    needed = sum(num_bytes(info) for info in source.tensors.values()) + _SPARE_BYTES
    begun = (
        file.stat().st_blocks * 512
        for folder in path.parent.glob(f".{escape(path.name)}.*/")
        for file in folder.rglob("*")
    )
    needed, free = needed - sum(begun), shutil.disk_usage(path.parent).free
    if needed > free:
        raise ValueError(
            f"{path.parent} has {free / 1e9:.2f} GB free, and {needed / 1e9:.2f} GB are needed; make room "
            "and repeat the command, or save elsewhere"
        )


def _with_progress(names: list[str], sizes: Mapping[str, int], what: str) -> Iterable[str]:
    seconds = 0.2 if sys.stderr.isatty() else 30  # in a file each update is a line
    total = sum(sizes[name] for name in names)
    with tqdm(total=total, unit="B", unit_scale=True, desc=what, dynamic_ncols=True, mininterval=seconds) as bar:
        for name in names:
            yield name
            bar.update(sizes[name])


def _files_digest(path: Path) -> str:
    """Changes when a file of the source is written, added or removed."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()


def _fingerprint(name: str, tensor: Tensor, model: ModelConfig) -> str:
    """Shape, dtype and SHA-256 of the bits, without rows past the vocabulary."""
    if name.endswith((".embedding.word.weight", ".output.weight")):
        tensor = tensor[: model.vocab_size]
    bits = tensor.reshape(-1).view(torch.uint8).numpy().data
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} {dtype} with SHA-256 {hashlib.sha256(bits).hexdigest()[:16]}…"
