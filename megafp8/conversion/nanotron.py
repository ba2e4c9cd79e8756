"""Source that reads nanotron's checkpoints of Llama and Qwen2, saved by any tensor- and pipeline-parallel layout.

    <dir>/latest.txt                                     100
    <dir>/100/model_config.json                          the network: fields of LlamaConfig or Qwen2Config
    <dir>/100/config.yaml, checkpoint_metadata.json      the run's config, its step and consumed samples
    <dir>/100/model/model/final_layer_norm/pp_block/model_weight.safetensors
    <dir>/100/model/model/decoder/3/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-2_tp-rank-1-of-4.safetensors

Each file holds one tensor, `data`; folders and file form its name. The metadata of a shard state its slices in the
whole tensor, and the whole shape:

    local_global_slices_pairs   0,16,None|None,None,None#16,32,None|None,None,None;16,24,None|...
    unsharded_shape             (64, 32), or (np.int64(64), 32)

qkv_proj holds all rows of queries, then of keys, then of values, and each tensor-parallel rank a part of each;
gate_up_proj likewise holds gate and up. Norms are stored once, and so is a tied output layer, as the embedding.

The format is that of nanotron's main branch of April 2026, checkpoint version 1.5 (`serialize/weights.py`,
`serialize/metadata.py`, `parallel/sharded_parameters.py`, `models/llama.py`, `models/qwen.py`,
`config/models_config.py`). Other classes, experts and muP are refused, and so is `rope_scaling`, which nanotron stores
but does not apply. Optimizer state is not read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafp8.checkpoint.files import parse_object, read_file
from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface.config import build_model
from megafp8.conversion.huggingface.layers import num_layers
from megafp8.conversion.huggingface.names import FUSED_GATE_UP, NORMS, QKV, TensorNames, fused, in_layers, qkv
from megafp8.conversion.huggingface.source import HfSource
from megafp8.conversion.keys import Fields, only, same, unread
from megafp8.conversion.safetensors_format import Entry, read_header, read_metadata, read_rows
from megafp8.host.messages import value_text
from megafp8.spec import ModelSpec

CONFIG_FILE, ABOUT_FILE, TRACKER = "model_config.json", "checkpoint_metadata.json", "latest.txt"
_LAYER = {"attention.proj": "attn.o_proj", "mlp.down": "mlp.down_proj"}
NAMES = TensorNames({
    "embedding.word": "model.token_position_embeddings.pp_block.token_embedding",
    "final_norm": "model.final_layer_norm.pp_block", "output": "model.lm_head.pp_block",
    **in_layers("model.decoder.*.pp_block", NORMS, _LAYER, fused("attn.qkv_proj", qkv, QKV), FUSED_GATE_UP),
})  # fmt: skip
_FILE = re.compile(r"model_(\w+?)(?:_pp-rank-\d+-of-\d+_tp-rank-\d+-of-(\d+))?\.safetensors")
_UNREAD = (
    "bos_token_id eos_token_id pad_token_id initializer_range pretraining_tp use_cache z_loss_enabled "
    "z_loss_coefficient log_attn_probs ring_attn_heads_k_stride flex_attention_mask _attn_implementation "
    "_fused_rotary_emb _fused_rms_norm _use_doc_masking is_llama_config is_qwen2_config rope_interleaved "
    "attention_bias sliding_window_size no_rope_layer"
)
"""Fields that do not change logits, or that are read by other means than `_TRAITS`."""
_TRAITS = (
    same(
        num_layers="num_hidden_layers", hidden_size="hidden_size", ffn_hidden_size="intermediate_size",
        num_attention_heads="num_attention_heads", num_query_groups=("num_key_value_heads", None),
        max_position_embeddings="max_position_embeddings", rope_theta=("rope_theta", 10000.0),
        norm_eps=("rms_norm_eps", 1e-6), tie_embeddings=("tie_word_embeddings", False), vocab_size="vocab_size",
    ),
    only(hidden_act="silu", rope_seq_len_interpolation_factor=None, moe_config=None, _use_qkv_packed=True),
    only(rope_scaling=None, why="because nanotron stores it, but does not apply it"),
    unread(*_UNREAD.split()),
)  # fmt: skip


class _Slice(NamedTuple):
    """Rows or columns of a whole tensor, from `start` to `stop`, which a shard holds from `at` on."""

    start: int
    stop: int
    at: int
    shard: Entry


class NanotronSource(HfSource):
    """Source that reads a checkpoint of nanotron.

    Args:
        path: Folder of one step, or of all steps, in which the newest is read.
        vocab_multiple: The vocabulary is padded with zeros to a multiple of this number (model.vocab_multiple).

    Raises:
        ValueError: A file is missing, damaged or not supported. The message names it.
    """

    config_file = CONFIG_FILE

    def __init__(self, path: str | Path, vocab_multiple: int = 128) -> None:
        self.path = find_step(Path(path))
        file, run = self.path / CONFIG_FILE, self.path / "config.yaml"
        config = parse_object(file, read_file(file))
        if run.is_file() and re.search(rb"^\s*use_mup: *true\b", read_file(run), re.MULTILINE):
            raise ValueError(f"{run} has use_mup = true: megafp8 reads models of nanotron's standard parametrization")
        try:
            model = read_model(config)
        except (ValueError, TypeError, ArithmeticError) as error:
            raise ValueError(f"{file}: {error}") from error
        self.about, self.tokenizer_files = _about(self.path / ABOUT_FILE), []
        names = NAMES._replace(rotation="neighbors" if config.get("rope_interleaved") else "halves")
        self._open("nanotron", names, model, _entries(self.path / "model"), vocab_multiple)


def find_step(path: Path) -> Path:
    """Return the newest step's folder that latest.txt in `path` names, or `path` if there is no latest.txt."""
    tracker = path / TRACKER
    step = tracker.read_text(encoding="utf-8", errors="replace").strip() if tracker.is_file() else ""
    return path / step if step.isdecimal() else path


def is_nanotron(path: Path) -> bool:
    """Return whether `path` is a checkpoint of nanotron, or a folder with such a newest one."""
    return (find_step(path) / CONFIG_FILE).is_file()


def read_model(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a model_config.json describes. Raises ValueError if megafp8 does not read it."""
    classes = [key for key, value in config.items() if re.fullmatch(r"is_\w+_config", key) and value is True]
    if classes not in (["is_llama_config"], ["is_qwen2_config"]):
        refuse("the model class", classes, "is_llama_config, is_qwen2_config")
    known = {key for trait in _TRAITS for key in trait.keys}
    if unknown := sorted(key for key in config.keys() - known if config[key] not in (None, False)):
        refuse(unknown[0], config[unknown[0]], "null or false")
    layers = num_layers(config)
    fields: Fields = {"linear_bias": False}
    for trait in _TRAITS:
        fields |= trait.read(config)
    if classes == ["is_qwen2_config"]:  # Llama's class ignores these fields
        interval, window = config.get("no_rope_layer"), config.get("sliding_window_size")
        rotates = [not interval or (i + 1) % interval != 0 for i in range(layers)]
        fields["qkv_bias"] = bool(config.get("attention_bias"))
        fields["mixer.position_embedding"] = ["rope" if x else "none" for x in rotates]
        fields["mixer.sliding_window"] = [window if x else None for x in rotates]
    return build_model(fields)


def _about(file: Path) -> dict[str, int]:
    """Return `CheckpointSource.about` of a checkpoint_metadata.json."""
    training = parse_object(file, read_file(file)).get("metas")
    training = training if isinstance(training, dict) else {}
    about = {"step": training.get("last_train_step"), "consumed_samples": training.get("consumed_train_samples")}
    return {key: value for key, value in about.items() if type(value) is int}


def _entries(folder: Path) -> dict[str, Entry]:
    """Return the whole tensors in `folder` by name. Raises ValueError if a shard is missing or damaged."""
    entries, shards, sizes = dict[str, Entry](), defaultdict[str, list[Path]](list), dict[str, int]()
    for file in sorted(folder.rglob("*.safetensors")):
        match = _FILE.fullmatch(file.name)
        if match is None:
            raise ValueError(f"{file}: unknown name; megafp8 reads model_<name>_pp-rank-<p>-of-<n>_tp-rank-<t>-of-<n>")
        name = ".".join((*file.parent.relative_to(folder).parts, match[1]))
        if match[2] is None:
            entries[name] = _data(file)
        else:
            shards[name].append(file)
            sizes[name] = int(match[2])
    for name, files in shards.items():
        names = [re.sub(r"(?<=_tp-rank-)\d+", "{}", file.name) for file in files]
        ranks = (files[0].with_name(names[0].format(rank)) for rank in range(sizes[name]))
        if missing := next((file for file in ranks if file not in files), None):
            raise ValueError(f"{missing} is missing; {files[0].name} is one of {sizes[name]} shards")
        if len(files) > sizes[name]:
            raise ValueError(f"{files[0].parent} has shards of several layouts: {files[0].name}, {files[-1].name}")
        entries[name] = _whole(name, files)
    return entries


def _data(file: Path) -> Entry:
    entries = read_header(file)
    if [*entries] != ["data"]:
        raise ValueError(f"{file} has the tensors {[*entries][:3]}; a file of nanotron has one, data")
    return entries["data"]


def _whole(name: str, files: list[Path]) -> Entry:
    """Return the tensor `name`, whose rows or columns are divided among the shards in `files`."""
    shards, slices, dims, shape = [_data(file) for file in files], list[_Slice](), set[int](), tuple[int, ...]()
    for file, shard in zip(files, shards, strict=True):
        metadata = read_metadata(file)
        try:
            shape = tuple(map(int, re.findall(r"\d+", metadata["unsharded_shape"].replace("np.int64", ""))))
            for pair in metadata["local_global_slices_pairs"].split(";"):
                local, whole = map(_ranges, pair.split("#"), (shard.shape, shape))
                if [stop - start for start, stop in local] != [stop - start for start, stop in whole]:
                    raise ValueError
                dims |= {dim for dim, sizes in enumerate(zip(whole, shape, strict=True)) if sizes[0] != (0, sizes[1])}
                dim = max(dims, default=0)
                slices.append(_Slice(*whole[dim], local[dim][0], shard))
        except (KeyError, ValueError, IndexError, AttributeError):
            raise ValueError(f"{file} has no slices of a tensor in its metadata: {value_text(metadata)}") from None
    dim = max(dims, default=0)
    slices.sort(key=lambda piece: piece.start)
    rest = [(shard.dtype, *shard.shape[:dim], *shard.shape[dim + 1 :]) for shard in shards]
    whole_once = [piece.start for piece in slices] == [0, *(piece.stop for piece in slices[:-1])]
    if (
        len(dims) > 1 or not whole_once or slices[-1].stop != shape[dim]
        or rest != [(shards[0].dtype, *shape[:dim], *shape[dim + 1 :])] * len(shards)
        or sum(shard.shape[dim] for shard in shards) != shape[dim]
    ):  # fmt: skip
        shapes = ", ".join(f"{shard.dtype} {list(shard.shape)}" for shard in shards)
        raise ValueError(f"{files[0].parent}: the shards of {name} ({shapes}) do not make up {list(shape)}")
    if dim == 0:
        return Entry.joined([x.shard.rows(x.at, x.at + x.stop - x.start) for x in slices])

    def columns(first: int, last: int) -> Tensor:
        rows = ((x, read_rows(x.shard, name, first, last)) for x in slices)
        return torch.cat([part[:, x.at : x.at + x.stop - x.start] for x, part in rows], dim=1)

    return shards[0]._replace(shape=shape, values=columns)


def _ranges(text: str, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return the range of indices in each dim of slices such as `0,16,None|None,None,None`."""
    ranges = []
    for part, size in zip(text.split("|"), shape, strict=True):
        start, stop, step = part.split(",")
        first, last = int(start) if start != "None" else 0, int(stop) if stop != "None" else size
        if step not in ("None", "1") or not 0 <= first < last <= size:
            raise ValueError
        ranges.append((first, last))
    return ranges
