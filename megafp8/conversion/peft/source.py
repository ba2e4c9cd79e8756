"""Source that reads a PEFT adapter folder (huggingface/peft): LoRA, and the Hugging Face model to which it belongs.

    adapter_config.json           rank, alpha, and the base model's folder (`base_model_name_or_path`)
    adapter_model.safetensors     base_model.model.<module>.lora_A.weight [r, k], lora_B.weight [n, r]

A Hugging Face module may hold several of our projections (Phi-3's qkv_proj). Each projection then gets the whole A, and
its rows of B. There is one exception: if the rank is `r` of the config times the number of projections, and B is block-
diagonal, each projection gets its own rows of A and its own block of B. `PeftSink` writes our adapters in this form.

Adapters that do anything other than add scale · B A to weights are refused (DoRA, trained biases or embeddings, initial
values that change the base model).

Shapes: n outputs and k inputs of a module, r rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megafp8.checkpoint.files import parse_object, read_file
from megafp8.checkpoint.rectangles import TensorInfo
from megafp8.conversion.adapters import AdaptedSource, MergedSource
from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.huggingface.names import Location
from megafp8.conversion.huggingface.source import HfSource
from megafp8.conversion.peft.patterns import matches_end
from megafp8.conversion.safetensors_format import DTYPES, Entry, read_header, read_rows
from megafp8.conversion.target import TOKENIZER_NAMES, own_files
from megafp8.data.hub import NotOnThisMachine, is_hub_name, local_folder
from megafp8.parallel.tensor.lora import A, B

ADAPTER_CONFIG_FILE, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
SUFFIXES = {A: ".lora_A.weight", B: ".lora_B.weight"}
_TENSOR = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight")
_PLAIN_START = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that do not change the weights of the base model."""
_REFUSED = (
    "use_dora",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
)
"""Keys that must be absent, false or empty."""


class _Module(NamedTuple):
    """Adapted Hugging Face module: the locations of A and B in the file, and the factor of the product B A."""

    a: Entry
    b: Entry
    scale: float


def open_peft(path: str | Path, vocab_multiple: int = 128) -> CheckpointSource:
    """Open the base model, with the adapters of the folder `path` merged into it."""
    return MergedSource(PeftSource(path, vocab_multiple))


class PeftSource(AdaptedSource):
    """Source with the weights of the base model, and with A and B of the adapters.

    Raises ValueError, with the file and the key or tensor, if the adapters are not supported.

    Args:
        path: Adapter folder.
        vocab_multiple: The base model's vocabulary is padded to a multiple of this number.
    """

    def __init__(self, path: str | Path, vocab_multiple: int = 128) -> None:
        self.path = Path(path)
        config = read_adapter_config(self.path)
        self.base: str | None = config["base_model_name_or_path"]
        self._base = HfSource(_base_folder(self.path, self.base), vocab_multiple)
        self.model, self.about = self._base.model, self._base.about
        tokenizer_files = own_files(self.path, TOKENIZER_NAMES)
        self.tokenizer_files = tokenizer_files or self._base.tokenizer_files
        self._matrices: dict[str, Tensor] = {}
        self.scales = self._split(_modules(self.path, config), config["r"])
        matrices = {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in self._matrices.items()}
        self.tensors: Mapping[str, TensorInfo] = {**self._base.tensors, **matrices}

    def read(self, name: str) -> Tensor:
        """Return a weight of the base model, or A or B of a projection."""
        return self._matrices[name] if name in self._matrices else self._base.read(name)

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows `[first, last)` of `read(name)`."""
        return self._matrices[name][first:last] if name in self._matrices else self._base.read_rows(name, first, last)

    def _split(self, modules: Mapping[str, _Module], rank: int) -> dict[str, float]:
        """Divide A and B of each module among our projections, and return the scale of each projection."""
        scales: dict[str, float] = {}
        parts: dict[str, dict[str, Location]] = {}
        for name, info in self._base.tensors.items():
            if not name.startswith("model.layers.") or not name.endswith(".weight") or len(info.shape) != 2:
                continue
            location = self._base.location(name, info.shape)
            if location.outer is None and (module := location.name.removesuffix(".weight")) in modules:
                parts.setdefault(module, {})[name.removesuffix(".weight")] = location
        if unknown := sorted(modules.keys() - parts.keys()):
            raise ValueError(f"{self.path / ADAPTER_FILE} adapts {unknown[0]}, which no block of {self._base.path} has")
        for module, (a_entry, b_entry, scale) in modules.items():
            a, b = (read_rows(x, module, 0, x.shape[0]) for x in (a_entry, b_entry))
            module_parts = parts[module]
            location = next(iter(module_parts.values()))
            n, k = reversed(location.shape) if location.transposed else location.shape
            if a.shape[1] != k or b.shape[0] != n or a.shape[0] != b.shape[1]:
                raise ValueError(
                    f"{self.path / ADAPTER_FILE}: A {list(a.shape)} and B {list(b.shape)} of {module} do not fit "
                    f"{self._base.path}, in which {module} is {[n, k]}"
                )
            blocks = _blocks(b, [location.rows for location in module_parts.values()], rank)
            for i, (stem, location) in enumerate(module_parts.items()):
                ranks = slice(i * rank, (i + 1) * rank) if blocks else slice(None)
                if blocks and not a[ranks].any():  # not adapted
                    continue
                self._matrices |= {f"{stem}.{A}": a[ranks], f"{stem}.{B}": b[location.rows][:, ranks].contiguous()}
                scales[stem] = scale
        return scales


def _blocks(b: Tensor, rows: list[Tensor], rank: int) -> bool:
    """Return whether B is block-diagonal, with `rank` columns for each projection; `rows` are the rows of each."""
    if len(rows) == 1 or b.shape[1] != len(rows) * rank:
        return False
    rest = b.clone()
    for i, block_rows in enumerate(rows):
        rest[block_rows, i * rank : (i + 1) * rank] = 0
    return not rest.any()


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Return adapter_config.json of the folder `path`. Raises ValueError if it is damaged or not supported."""
    file = path / ADAPTER_CONFIG_FILE
    config = parse_object(file, read_file(file))
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type = {config.get('peft_type')!r}; supported: 'LORA'")
    refused = [key for key in _REFUSED if config.get(key)]
    refused += ["bias"] if config.get("bias", "none") != "none" else []
    refused += ["init_lora_weights"] if config.get("init_lora_weights") not in _PLAIN_START else []
    if refused:
        key = refused[0]
        raise ValueError(
            f"{file}: {key} = {config[key]!r}: this adapter does more than add a product of two matrices to weights; "
            "merge it by PEFT's merge_and_unload, and convert the merged model"
        )
    if type(config.get("r")) is not int or config["r"] < 1 or not _is_number(config.get("lora_alpha")):
        raise ValueError(f"{file} is damaged: it has no r and lora_alpha")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(map(_is_number, patterns.values())):
        raise ValueError(f"{file}: alpha_pattern is not a mapping from patterns to numbers")
    if not isinstance(config.get("base_model_name_or_path"), str | None):
        raise ValueError(f"{file}: base_model_name_or_path = {config['base_model_name_or_path']!r} is not text")
    return {"base_model_name_or_path": None} | config | {"alpha_pattern": patterns}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _base_folder(path: Path, base: str | None) -> Path:
    what = f"{path / ADAPTER_CONFIG_FILE}: base_model_name_or_path = {base!r}"
    if base is not None and is_hub_name(base):
        try:
            return local_folder(base)
        except NotOnThisMachine as error:
            raise ValueError(f"{what}: {error}") from None
    if base is None or not Path(base).is_dir():
        raise ValueError(f"{what} is not a folder on this machine; set it to the folder of the adapter's base model")
    return Path(base)


def _modules(path: Path, config: Mapping[str, Any]) -> dict[str, _Module]:
    """Return the adapted modules in the file, by name."""
    file = path / ADAPTER_FILE
    if not file.is_file() and (path / "adapter_model.bin").is_file():
        raise ValueError(
            f"{path} has its tensors in adapter_model.bin, a pickle, which can run arbitrary code when it is read; if "
            "you trust it, load and save it by PEFT"
        )
    pairs: dict[str, dict[str, Entry]] = {}
    for name, entry in read_header(file).items():
        match = _TENSOR.fullmatch(name)
        if match is None or len(entry.shape) != 2 or entry.dtype not in DTYPES:
            raise ValueError(
                f"{file} has a tensor {name}, {entry.dtype} {list(entry.shape)}; supported: lora_A and lora_B of "
                f"linear layers, of dtype {', '.join(DTYPES)}"
            )
        pairs.setdefault(match[1], {})[match[2]] = entry
    if not pairs:
        raise ValueError(f"{file} has no tensors")
    modules = {}
    for module, pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise ValueError(f"{file} has only one of lora_A and lora_B of {module}")
        rank = pair["A"].shape[0]
        if rank == 0:
            raise ValueError(f"{file}: lora_A of {module} has no rows")
        try:
            patterns = config["alpha_pattern"].items()  # the first that matches counts, as in PEFT
            alpha = next((alpha for pattern, alpha in patterns if matches_end(pattern, module)), config["lora_alpha"])
        except ValueError as error:
            raise ValueError(f"{path / ADAPTER_CONFIG_FILE}: alpha_pattern: {error}") from None
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        modules[module] = _Module(pair["A"], pair["B"], scale)
    return modules
