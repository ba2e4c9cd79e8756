"""Source and sink of megafp8's own checkpoints, with everything that a run saves, tensor by tensor.

The sink writes one checkpoint folder of any name. A folder `<run>/checkpoints/step_00000100` is the run's checkpoint of
step 100, and the run resumes from it if the source had optimizer state and a run's config. With weights only, a run
starts by `checkpoint.init_from`. The source compares the CRC-32 of every rectangle that it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from megafp8.checkpoint import CheckpointReader, latest
from megafp8.checkpoint.dcp import INDEX_FILE
from megafp8.checkpoint.files import Checksum, read_verified, write_checksums, write_file
from megafp8.checkpoint.store import METADATA_FILE, OWN_KEYS, metadata_json
from megafp8.checkpoint.writer import CheckpointWriter
from megafp8.config import LongRopeConfig, model_spec, with_keys
from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.target import TOKENIZER_FOLDER, Sink, tokenizer_files, with_companions
from megafp8.spec import ModelSpec


class NativeSource(CheckpointSource):
    """Source that reads a native checkpoint. For a run's folder, it reads the newest complete checkpoint.

    Args:
        path: Checkpoint folder, run folder, or `checkpoints` folder of a run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = find_checkpoint(Path(path))
        self._reader = CheckpointReader(self.path)
        self.about = self._reader.metadata
        try:
            self.model = _model(self.about["config"])
            self.tokenizer_files = _tokenizer_files(self._reader, self.about["config"])
        except (KeyError, TypeError, AttributeError, ValidationError) as error:
            raise ValueError(f"{self.path / METADATA_FILE} is damaged: no valid config.model: {error}") from error
        self.tensors = self._reader.tensors

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, after comparing the CRC-32 of its rectangles."""
        return self._reader.read(name, verify=True)

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows `[first, last)` of a tensor, after comparing the CRC-32 of the rectangles that contain them."""
        rest = self.tensors[name].shape[1:]
        return self._reader.read(name, (first, *(0 for _ in rest)), (last - first, *rest), verify=True)


class NativeSink(Sink):
    """Sink that writes a complete native checkpoint folder. Metadata that the source does not have is left out."""

    def begin(self, source: CheckpointSource, options: Mapping[str, Any]) -> Collection[str]:
        """Create or continue the hidden folder, and return the names of the tensors yet to be written."""
        self._open_journal(source, source.tensors, options)
        self._writer = CheckpointWriter(self.hidden, self._journal.done)
        return [name for name in source.tensors if name not in self._writer.names]

    def write(self, name: str, tensor: Tensor) -> None:
        """Append a tensor to the data files."""
        self._journal.add(self._writer.add(name, tensor))

    def finish(self) -> None:
        """Write the index, metadata.json, checksums.json and the tokenizer."""
        source, sums = self._source, self._writer.finish()
        about = {key: value for key, value in source.about.items() if key not in OWN_KEYS}
        about.setdefault("config", {"model": dict(source.model.keys)})
        about["converted_from"] = str(source.path)
        about["tensors"] = len(source.tensors)
        about["bytes"] = sum(info.nbytes for info in source.tensors.values())
        metadata = metadata_json(self.path, int(source.about.get("step", 0)), about)
        sums[METADATA_FILE] = write_file(self.hidden / METADATA_FILE, metadata)
        for file in source.tokenizer_files:
            sums[f"{TOKENIZER_FOLDER}/{file.name}"] = Checksum.from_content(file.read_bytes())
        write_checksums(self.hidden, sums)
        self._copy_tokenizer()


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, otherwise the newest checkpoint of the run `path`.

    Raises ValueError if the run has no checkpoint.
    """
    if is_checkpoint(path):
        return path
    newest = latest(path / "checkpoints") or latest(path)
    if not isinstance(newest, Path):
        raise ValueError(f"{path} is not a native checkpoint ({INDEX_FILE}), and contains none (step_<number>)")
    return newest


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` looks like the folder of a native checkpoint."""
    return (path / INDEX_FILE).is_file() or (path / METADATA_FILE).is_file()


def _model(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model of a run's config.

    If the config does not state the number of positions, it is LongRoPE's extended length or the sequence length.
    """
    model = model_spec(config["model"])
    if model.stem.max_position_embeddings is not None:
        return model
    if (longrope := model.keys["longrope"]) is not None:
        length = LongRopeConfig(**longrope).extended_length
    else:
        length = config.get("training", {}).get("seq_length")
    return with_keys(model, max_position_embeddings=length)


def _tokenizer_files(reader: CheckpointReader, config: Mapping[str, Any]) -> list[Path]:
    """Return the tokenizer files in the checkpoint, or else the existing files that the run's config names.

    Raises DamagedCheckpoint if a file in the checkpoint differs from its checksum.
    """
    files = tokenizer_files(Path(str(reader.path)))
    for file in files:
        name = f"{TOKENIZER_FOLDER}/{file.name}"
        if reader.sums is not None and name in reader.sums:
            read_verified(reader.path, name, reader.sums)
    path = ((config.get("data") or {}).get("tokenizer") or {}).get("path")
    return files or (with_companions(Path(path)) if path and Path(path).is_file() else [])
