"""megafp8's own checkpoints as a source and as a sink: everything that a run saves, tensor by tensor.

A target is one checkpoint's folder, of any name. Called `<run>/checkpoints/step_00000100` it is that run's checkpoint
of step 100, and a run resumes from it if the source had optimizer state and the config of a run. Of weights alone, as
Hugging Face has them, a run is started with `checkpoint.init_from`.

The values of a checkpoint are in zip archives, one a rectangle, as `torch.save` writes them. Each carries a CRC-32 of
its values, which `torch.load` does not look at; here it is checked before anything is read, so a bit that has flipped
is found and named. That is a second pass over bytes that the first has brought into memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from megafp8.checkpoint import CheckpointReader, archives, latest
from megafp8.checkpoint.checksums import CHECKSUMS_FILE, Checksum, checksums_text, read_verified
from megafp8.checkpoint.dcp import INDEX_FILE
from megafp8.checkpoint.reader import StoredRectangle
from megafp8.checkpoint.store import METADATA_FILE, OWN_KEYS, metadata_text, write_text
from megafp8.checkpoint.writer import CheckpointWriter
from megafp8.config import ModelConfig
from megafp8.conversion.base import Source, TensorInfo
from megafp8.conversion.target import TOKENIZER_FOLDER, Target, tokenizer_files, with_companions


class NativeSource:
    """A checkpoint folder, or a run's folder or its checkpoints folder: of these the newest complete checkpoint."""

    def __init__(self, path: str | Path) -> None:
        self.path = find_checkpoint(Path(path))
        self._reader = CheckpointReader(self.path)
        self.about: Mapping[str, Any] = self._reader.metadata
        try:
            self.model = _model(self.about["config"])
            self.tokenizer_files: Collection[Path] = _tokenizer_files(self._reader, self.about["config"])
        except (KeyError, TypeError, AttributeError, ValidationError) as error:
            raise ValueError(f"{self.path / METADATA_FILE} is damaged: no valid config.model: {error}") from error
        self.tensors: Mapping[str, TensorInfo] = {n: TensorInfo(*kind) for n, kind in self._reader.tensors.items()}

    def read(self, name: str) -> Tensor:
        """A whole tensor. Raises ValueError naming file and tensor where its data are damaged."""
        for rectangle in self._reader.rectangles.get(name, ()):
            _check(name, rectangle)
        return self._reader.read(name)

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows `[first, last)` of `read(name)`, of which nothing else is read from the disk."""
        for rectangle in self._reader.rectangles.get(name, ()):
            row, rows = rectangle.offset[0], rectangle.shape[0]
            if first < row + rows and row < last:
                _check(name, rectangle)
        rest = self.tensors[name].shape[1:]
        return self._reader.read(name, (first, *(0 for _ in rest)), (last - first, *rest))


class NativeSink:
    """Writes the complete checkpoint folder `path`. What the source does not know of a run is left out."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._target = Target(self.path)

    def begin(self, source: Source) -> Collection[str]:
        self._source = source
        self._journal = self._target.begin(source, "native")
        self._writer = CheckpointWriter(self._target.hidden, self._journal.done)
        return [name for name in source.tensors if name not in self._writer.names]

    def write(self, name: str, tensor: Tensor) -> None:
        self._journal.add(self._writer.add(name, tensor))

    def finish(self) -> None:
        sums = self._writer.finish()
        about = {key: value for key, value in self._source.about.items() if key not in OWN_KEYS}
        about.setdefault("config", {"model": self._source.model.model_dump(mode="json")})
        about["converted_from"] = str(self._source.path)
        about["tensors"] = len(self._source.tensors)
        about["bytes"] = sum(info.dtype.itemsize * math.prod(info.shape) for info in self._source.tensors.values())
        step = int(self._source.about.get("step", 0))
        text = metadata_text(self.path, step, about)
        for file in self._source.tokenizer_files:
            sums[f"{TOKENIZER_FOLDER}/{file.name}"] = Checksum.of(file.read_bytes())
        sums[METADATA_FILE] = write_text(self._target.hidden / METADATA_FILE, text)
        write_text(self._target.hidden / CHECKSUMS_FILE, checksums_text(sums))
        self._target.publish(self._source.tokenizer_files)


def find_checkpoint(path: Path) -> Path:
    """`path` where it is a checkpoint, or the newest one of the run `path`. Raises ValueError where there is none."""
    if (path / INDEX_FILE).is_file() or (path / METADATA_FILE).is_file():
        return path
    found = latest(path / "checkpoints") or latest(path)
    if found is None:
        raise ValueError(f"{path} is no native checkpoint ({INDEX_FILE}), and holds none (step_<number>)")
    return found


def _model(config: Mapping[str, Any]) -> ModelConfig:
    """The model of a run's config, with its number of positions, which is the sequence length where none is given."""
    model = ModelConfig.model_validate(config["model"])
    positions = model.max_position_embeddings or config.get("training", {}).get("seq_length")
    return model.model_copy(update={"max_position_embeddings": positions})


def _check(name: str, rectangle: StoredRectangle) -> None:
    """Raise ValueError where the values of `rectangle` are not those that were saved."""
    damage = archives.find_damage(rectangle.file, rectangle.start, rectangle.length)
    if damage is not None:
        raise ValueError(f"{rectangle.file} is damaged at {name} (from byte {rectangle.start} on): {damage}")


def _tokenizer_files(reader: CheckpointReader, config: Mapping[str, Any]) -> list[Path]:
    """What the checkpoint has of its tokenizer, or else the file that the run's config names, if it is still there.

    Raises DamagedCheckpoint where a file of the checkpoint is not what was written.
    """
    found = tokenizer_files(reader.path)
    for file in found:
        name = f"{TOKENIZER_FOLDER}/{file.name}"
        if reader.sums is not None and name in reader.sums:
            read_verified(reader.path, name, reader.sums)
    given = ((config.get("data") or {}).get("tokenizer") or {}).get("path")
    return found or (with_companions(Path(given)) if given and Path(given).is_file() else [])
