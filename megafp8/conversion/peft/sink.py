"""Sink for PEFT adapter folders: A and B of a run with LoRA, which `peft.PeftModel` adds to its base model.

The modules are the modules of the base model's folder, as its config.json determines them. If a Hugging Face module
holds several of our projections (GPT-NeoX's query_key_value), it gets the A matrices of all of them, one below the
other, and a block-diagonal B. Its rank and alpha are multiplied by the number of projections, so that the sum is the
same. Projections that are not adapted have zeros.

The rows of B are in the order of the base model's rows (`huggingface.names`). Adapters are small, so a block of B is
written by reading and writing the whole matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megafp8.checkpoint.files import allocate, to_json, write_at
from megafp8.checkpoint.rectangles import TensorInfo
from megafp8.checkpoint.torch_file import as_bytes
from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.flat import differences, flat_keys
from megafp8.conversion.huggingface.config import read_config
from megafp8.conversion.huggingface.names import Location, TensorNames
from megafp8.conversion.huggingface.source import CONFIG_FILE, read_config_file
from megafp8.conversion.model import model_tensors, without_mtp
from megafp8.conversion.native import NativeSource, find_checkpoint
from megafp8.conversion.peft.source import ADAPTER_CONFIG_FILE, ADAPTER_FILE, PREFIX, SUFFIXES, read_adapter_config
from megafp8.conversion.safetensors_format import header, read_header, read_rows
from megafp8.conversion.target import Sink
from megafp8.parallel.tensor.lora import A, B, Lora
from megafp8.spec import ModelSpec


class _Block(NamedTuple):
    """Location of one of our matrices in the PEFT tensor `name`: rows of an A, or rows and columns of a B."""

    name: str
    rows: Tensor | slice
    columns: slice


class PeftSink(Sink):
    """Sink that writes a PEFT adapter folder.

    Args:
        path: Folder to write.
        base: Hugging Face folder of the base model; by default the origin of the run's weights (checkpoint.init_from).
    """

    def __init__(self, path: str | Path, base: str | Path | None = None) -> None:
        super().__init__(path)
        self._given_base = base

    def begin(self, source: CheckpointSource, options: Mapping[str, Any]) -> Collection[str]:
        """Allocate the adapter file, and return the names of the matrices yet to be written.

        Raises ValueError if there is no base folder, or if it describes a different model.
        """
        lora: Lora = source.about["adapters"]
        base = str(self._given_base or _base_of(source.about["base"], source.path))
        family, model = read_config(read_config_file(Path(base)))
        ours = without_mtp(source)
        if fields := differences(ours, model):
            requested, expected = flat_keys(model), flat_keys(ours)
            changes = ", ".join(f"{field} is {requested[field]}, not {expected[field]}" for field in fields)
            raise ValueError(f"{Path(base) / CONFIG_FILE} describes a different model than {source.path}: {changes}")
        locations = _locations(family.names, model)
        parts_of: dict[str, list[str]] = {}
        for stem, location in locations.items():
            parts_of.setdefault(_module(location), []).append(stem)
        stems = [name.removesuffix(f".{A}") for name in source.tensors if name.endswith(f".{A}")]
        theirs: dict[str, TensorInfo] = {}
        self._blocks: dict[str, _Block] = {}
        ranks: dict[str, int] = {}
        for stem in stems:
            location = locations[stem]
            module = _module(location)
            parts = parts_of[module]
            i, ranks[module] = parts.index(stem), lora.rank * len(parts)
            (_, k), b = source.tensors[f"{stem}.{A}"].shape, source.tensors[f"{stem}.{B}"]
            outputs = location.shape[1 if location.transposed else 0]
            rank_columns = slice(i * lora.rank, (i + 1) * lora.rank)
            for x, shape in ((A, (ranks[module], k)), (B, (outputs, ranks[module]))):
                name = f"{PREFIX}{module}{SUFFIXES[x]}"
                theirs[name] = TensorInfo(shape, b.dtype)
                self._blocks[f"{stem}.{x}"] = _Block(
                    name, *((rank_columns, slice(None)) if x == A else (location.rows, rank_columns))
                )
        targets = {module: _target(module, ranks, parts_of) for module in ranks}
        larger = {targets[module]: rank for module, rank in ranks.items() if rank != lora.rank}
        self._config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": lora.rank,
            "lora_alpha": _alpha(lora.alpha),
            "target_modules": sorted(set(targets.values())),
            "rank_pattern": larger,
            "alpha_pattern": {target: _alpha(lora.scale * rank) for target, rank in larger.items()},
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": any(locations[stem].transposed for stem in stems),
            "inference_mode": True,
        }
        first, _ = header(theirs)
        if self._open_journal(source, source.tensors, options, [self._config, first.hex()]):
            (self.hidden / ADAPTER_FILE).write_bytes(first)
            allocate(self.hidden / ADAPTER_FILE, len(first) + sum(info.nbytes for info in theirs.values()))
        return [name for name in source.tensors if name not in self._journal.done]

    def write(self, name: str, tensor: Tensor) -> None:
        """Write A or B of one of our projections to its block of the PEFT tensor."""
        block, file = self._blocks[name], self.hidden / ADAPTER_FILE
        entry = read_header(file)[block.name]
        values = read_rows(entry, block.name, 0, entry.shape[0])
        values[block.rows, block.columns] = tensor
        with file.open("r+b", buffering=0) as stream:
            write_at(stream, entry.start, as_bytes(values))
        self._journal.add(name)

    def finish(self) -> None:
        """Write adapter_config.json."""
        self._check_done(self._source.tensors)
        (self.hidden / ADAPTER_CONFIG_FILE).write_bytes(to_json(self._config))


def _locations(names: TensorNames, model: ModelSpec) -> dict[str, Location]:
    """Return the location of the weight of each of our projections."""
    weights = {name: shape for name, shape in model_tensors(model).items() if name.endswith(".weight")}
    return {name.removesuffix(".weight"): names.locate(model, name, shape) for name, shape in weights.items()}


def _module(weight: Location) -> str:
    """Return the name of the Hugging Face module that has this weight."""
    return weight.name.removesuffix(".weight")


def _target(module: str, adapted: Collection[str], modules: Collection[str]) -> str:
    """Return the shortest end of a module's name that only adapted modules have."""
    words = module.split(".")
    for i in reversed(range(len(words))):
        end = ".".join(words[i:])
        if all(other in adapted for other in modules if f".{other}".endswith(f".{end}")):
            return end
    raise AssertionError(module)


def _alpha(alpha: float) -> float:
    """Return LoRA's alpha, as an integer if possible, because PEFT declares it as an integer."""
    return int(alpha) if alpha == int(alpha) else alpha


def _base_of(folder: str | None, run: Path) -> str:
    """Return the Hugging Face folder from which a run with LoRA started, if necessary through several runs."""
    path = Path(folder or "")
    if folder is not None and (path / CONFIG_FILE).is_file():
        return folder
    if folder is not None and (path / ADAPTER_CONFIG_FILE).is_file():
        return _base_of(read_adapter_config(path)["base_model_name_or_path"], run)
    if folder is not None:
        try:
            config = NativeSource(find_checkpoint(path)).about["config"]
        except ValueError:
            config = {}
        if config.get("lora") is not None:
            return _base_of(config["checkpoint"]["init_from"], run)
    raise ValueError(
        f"{run}: an adapter folder names the modules of a Hugging Face model, but the run's weights come from "
        f"{folder}, which is not one on this machine; give the model's folder by --base (--to hf converts a native one)"
    )
