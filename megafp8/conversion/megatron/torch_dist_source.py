"""Source that reads Megatron core's distributed checkpoints (`--ckpt-format torch_dist`), saved by any layout.

    <dir>/latest_checkpointed_iteration.txt    100, or release
    <dir>/iter_0000100/metadata.json           the formats: {"sharded_backend": "torch_dist", ...}
    <dir>/iter_0000100/common.pt               data that is not sharded, including the run's arguments (`args`)
    <dir>/iter_0000100/.metadata               the index of torch.distributed.checkpoint
    <dir>/iter_0000100/__0_0.distcp            data
    <dir>/iter_0000100/run_config.yaml         the run's config, instead of arguments, if Megatron Bridge saved it

Tensors are global. They have the names in `megatron.names` for one tensor-parallel rank and one pipeline stage, with
these differences:

    decoder.layers.self_attention.linear_qkv.weight          [l, n, h]       all layers, if they are of one kind
    decoder.layers.3.self_attention.linear_qkv.weight        [n, h]          otherwise, with numbers in the model
    decoder.layers.3.mlp.experts.experts.linear_fc1.weight   [e, 2f, h]      all experts of a layer
    decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight [2f, h]         with `singleton_local_shards`
    decoder.layers.3.mlp.linear_fc1.weight_w, ..._v          [f, h]          gate and up, with `singleton_local_shards`

Shapes: l layers, e experts, n rows of queries, keys and values, f MLP width, h hidden. linear_fc1 has all rows of gate,
then all rows of up. Tied output layers are stored once. Adam's state has the names of the weights:

    optimizer.state.exp_avg.<key>, ...exp_avg_sq.<key>       not read unless it has the weight's shape
    optimizer.state.fp32_param.<key>, or ...param.<key>      fp32 masters; the second with the distributed optimizer

Optimizers that are not distributed use these names, as do distributed optimizers with
`--dist-ckpt-optim-fully-reshardable`. The state of other distributed optimizers (`dp_reshardable`) is not read. It
consists of flat buffers `optimizer.distributed.dp_group_idx_0.gbuf_idx_0...bucket_idx_0.exp_avg`. The positions of the
weights in these buffers depend on the saving job's model-parallel ranks, order of parameters, buckets and padding,
which are not in any file. Objects (`_extra_state`, random-number states) are ignored. Code in the files is not run
(`torch_file`, `dcp.parse_index`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megafp8.checkpoint.dcp import INDEX_FILE, check_data_files, parse_index
from megafp8.checkpoint.files import parse_object, read_file
from megafp8.checkpoint.reader import TensorReader
from megafp8.checkpoint.torch_file import StoredTensor, TorchFile
from megafp8.conversion.base import CheckpointSource, TensorInfo, optimizer_key
from megafp8.conversion.megatron.args import read_args
from megafp8.conversion.megatron.names import OUTPUT, MegatronPlace, RankSlice, canonical, place, runs, their_shape
from megafp8.conversion.megatron.run_config import RUN_CONFIG_FILE, bridge_args
from megafp8.conversion.megatron.source import (
    BERT_HEAD,
    COMMON_FILE,
    EMBEDDING,
    NO_WEIGHTS,
    about_run,
    content_of,
    find_iteration,
    refuse_t5,
    tokens_before_padding,
)
from megafp8.conversion.model import check_size, model_tensors
from megafp8.conversion.target import tokenizer_files
from megafp8.host.messages import join_names
from megafp8.layers.activation.record import ACTIVATIONS
from megafp8.parallel.sharding import Shape
from megafp8.spec import ModelSpec

CONFIG_FILE = "metadata.json"
HALVES = {"gate": "_w", "up": "_v"}
"""Suffixes of the two tensors into which `singleton_local_shards` splits linear_fc1."""
_FLAT = "optimizer.distributed.dp_group_idx_"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)")
_MASTERS = ("fp32_param", "param")


class _Candidate(NamedTuple):
    """Stored tensor that may hold one of our tensors.

    Attributes:
        key: Canonical key of the stored tensor.
        lead: Indices of our tensor in additional leading dims (layer, expert).
        counts: Sizes of these leading dims.
        half: Whether the stored tensor is only gate or only up.
    """

    key: str
    lead: Shape
    counts: Shape
    half: bool


class _Part(NamedTuple):
    """Location of one of our tensors: slices `runs` along `dim` of stored tensor `key` at leading indices `lead`."""

    key: str
    lead: Shape
    runs: list[RankSlice]
    dim: int


class TorchDistSource(CheckpointSource):
    """Source that reads a distributed checkpoint of Megatron core.

    Args:
        path: Folder of one iteration, or the folder for Megatron-LM's `--load`, in which the newest iteration is read.
        vocab_size: Number of tokens before padding; by default from the arguments.

    Raises:
        ValueError: A file is missing, damaged or not supported. The message names it.
    """

    def __init__(self, path: str | Path, vocab_size: int | None = None) -> None:
        self.path = find_iteration(Path(path))
        _check_backend(self.path)
        index_file = self.path / INDEX_FILE
        index = parse_index(index_file, read_file(index_file))
        check_data_files(self.path, index)
        self._reader = TensorReader(self.path, index)
        common = TorchFile(self.path / COMMON_FILE)
        by_bridge = isinstance(common.content, dict) and "args" not in common.content
        by_bridge = by_bridge and (self.path / RUN_CONFIG_FILE).is_file()
        content = common.content | {"args": bridge_args(self.path)} if by_bridge else content_of(common)
        args = content["args"]
        infos = {
            key: TensorInfo(tuple(entry.size), entry.properties.dtype)
            for key, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._stored = _weights(self.path, infos)
        if EMBEDDING not in self._stored:
            raise ValueError(f"{self.path} has no {EMBEDDING}: it is not a GPT or BERT model")
        self._padded_vocab = self._stored[EMBEDDING][1].shape[0]
        try:
            vocab = tokens_before_padding(args, vocab_size, self._padded_vocab)
            multiple = args.get("make_vocab_size_divisible_by") or 128
            self.model = read_args(args, vocab, multiple, bert=BERT_HEAD in self._stored)
            shapes = [info.shape for _, info in self._stored.values()]
            check_size(self.model, shapes, stacked=max((shape[0] for shape in shapes if shape), default=0))
        except (TypeError, KeyError, AttributeError, IndexError, ArithmeticError, ValueError) as error:
            raise ValueError(f"{self.path / RUN_CONFIG_FILE if by_bridge else common.path}: {error}") from error
        self.about = about_run(content, args)
        self._parts: dict[str, _Part] = {}
        self.tensors = self._check()
        steps = set(_optimizer_steps(common, content.get("optimizer")))
        state = self._optimizer_state(infos) if len(steps) == 1 else {}
        self._flat = next((key for key in index.state_dict_metadata if _FLAT in key), None)
        if state:
            self.tensors |= state
            self.about["optimizer_steps"] = steps.pop()
        self.tokenizer_files = tokenizer_files(self.path if by_bridge else self.path.parent)

    def _check(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of our tensors, after checking that the checkpoint has all of them and no others."""
        used, tensors = {OUTPUT} if self.model.head.tied else set(), {}
        for name, shape in model_tensors(self.model).items():
            at = place(name)
            expected = their_shape(name, shape, self.model, 1, self._padded_vocab)
            options = list(_candidates(at, name, self.model))
            candidate = next((option for option in options if option.key in self._stored), None)
            if candidate is None:
                keys = " or ".join(option.key for option in options)
                raise ValueError(f"{self.path} has no tensor {keys}, which its arguments require")
            key, info = self._stored[candidate.key]
            expected = (*candidate.counts, *(shape if candidate.half else expected))
            if info.shape != expected:
                shapes = f"has shape {list(info.shape)}, but {list(expected)} by the arguments"
                raise ValueError(f"{self.path}: {key} {shapes}")
            if not info.dtype.is_floating_point:
                raise ValueError(f"{self.path}: {key} is {info.dtype}, not floating point")
            whole = [RankSlice(0, 0, 0, shape[0])]
            where = whole if candidate.half else runs(name, shape, self.model, 1, self._padded_vocab)
            self._parts[name] = _Part(key, candidate.lead, where, at.dim or 0)
            used.add(candidate.key)
            tensors[name] = TensorInfo(shape, info.dtype)
        unknown = sorted(self._stored.keys() - used)
        if unknown:
            names = join_names(unknown)
            raise ValueError(f"{self.path} has {len(unknown)} tensors that megafp8 does not know: {names}")
        return tensors

    def _optimizer_state(self, infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return shape and dtype of Adam's moments and the masters; empty if any has a shape unlike its weight.

        `infos` has all stored tensors.
        """
        names, tensors = defaultdict(list), {}
        for name, part in self._parts.items():
            names[part.key].append(name)
        parts = {}
        for key, info in infos.items():
            match = _STATE.fullmatch(key)
            if match is None or match[2] not in names:
                continue
            if info.shape != infos[match[2]].shape:
                return {}
            kind = "master" if match[1] in _MASTERS else match[1]
            for name in names[match[2]]:
                ours = optimizer_key(kind, name)
                parts[ours] = self._parts[name]._replace(key=key)
                tensors[ours] = TensorInfo(self.tensors[name].shape, info.dtype)
        self._parts |= parts
        return tensors

    def why_without(self, name: str) -> str:
        """Return a message for the user that explains why the tensor `name` cannot be read."""
        if self._flat is None or not name.startswith("optimizer."):
            return super().why_without(name)
        return (
            f"{self.path} has Adam's state in flat buffers of each rank ({self._flat}), but no file states where the "
            "weights are in them; load it in Megatron-LM and save it with --dist-ckpt-optim-fully-reshardable"
        )

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, assembled from its slices in the stored tensor."""
        shape, dtype = self.tensors[name]
        part = self._parts[name]
        out = torch.zeros(shape, dtype=dtype)  # rows of padding that the checkpoint does not have stay zero
        first = min(run.theirs for run in part.runs)
        length = max(run.theirs + run.length for run in part.runs) - first
        low = (*part.lead, *(first if dim == part.dim else 0 for dim in range(len(shape))))
        if len(part.runs) == 1:
            self._read(part, low, out.narrow(part.dim, part.runs[0].ours, length))
            return out
        # Checksums cover whole rectangles, so the data between the slices must be read, too.
        buffer = torch.empty([length if dim == part.dim else n for dim, n in enumerate(shape)], dtype=dtype)
        self._read(part, low, buffer)
        for run in part.runs:
            values = buffer.narrow(part.dim, run.theirs - first, run.length)
            out.narrow(part.dim, run.ours, run.length).copy_(values)
        return out

    def _read(self, part: _Part, low: Shape, target: Tensor) -> None:
        self._reader.read_into(part.key, low, target[(None,) * len(part.lead)], verify=True)


def _check_backend(folder: Path) -> None:
    """Raise ValueError if `folder` is not a torch_dist checkpoint."""
    for name in (CONFIG_FILE, COMMON_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is not a distributed checkpoint of Megatron core: it has no {name}")
    config = folder / CONFIG_FILE
    backend = parse_object(config, read_file(config)).get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(
            f"{folder / CONFIG_FILE} has sharded_backend = {backend!r}: megafp8 reads torch_dist. A Megatron-LM that "
            "reads the checkpoint can save it with --ckpt-format torch_dist"
        )
    if not (folder / INDEX_FILE).is_file():
        raise ValueError(f"{folder} has no {INDEX_FILE}: it is not complete")


def _weights(path: Path, infos: Mapping[str, TensorInfo]) -> dict[str, tuple[str, TensorInfo]]:
    """Return the weights among the stored tensors by canonical key: the stored key, shape and dtype."""
    keys = [key for key in infos if "optimizer" not in key.split(".") and not key.endswith(NO_WEIGHTS)]
    refuse_t5(path, [key.replace("coder.layers.", "coder.layers.0.", 1) for key in keys])
    return {canonical(key): (key, infos[key]) for key in keys}


def _optimizer_steps(common: TorchFile, tree: Any) -> Iterator[int]:
    """Yield the step counts in `tree`, the state of the optimizers in common.pt."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree if isinstance(tree, list) else ()):
        if key not in ("step", "common_step"):
            yield from _optimizer_steps(common, value)
        elif isinstance(value, StoredTensor) and value.shape in ((), (1,)):
            count = torch.empty(value.shape, dtype=value.dtype)
            common.read(value, key, (0,) * count.dim(), count)
            yield int(count)
        elif isinstance(value, (int, float)):
            yield int(value)


def _candidates(at: MegatronPlace, name: str, model: ModelSpec) -> Iterator[_Candidate]:
    """Yield the stored tensors, by canonical key, that may hold our tensor `name`, which has the place `at`."""
    layers: dict[str, tuple[Shape, Shape]] = {"": ((), ())}
    half = None
    if at.layer is not None:
        half = HALVES.get(name.split(".")[-2]) if ACTIVATIONS[model.layers[at.layer].ffn.activation].gated else None
        stacked = ((at.layer,), (model.num_layers,))
        layers = {"decoder.layers.": stacked, f"decoder.layers.{at.layer}.": ((), ())}
    experts: dict[str, tuple[Shape, Shape]] = {at.key: ((), ())}
    if at.layer is not None and at.expert is not None:
        key = at.key.replace("local_experts.*", "experts")
        alone = key.replace(".experts.experts.", f".experts.experts.{at.expert}.")
        experts = {key: ((at.expert,), (model.layers[at.layer].ffn.num_experts,)), alone: ((), ())}
    for prefix, (layer, layer_count) in layers.items():
        for key, (expert, expert_count) in experts.items():
            yield _Candidate(prefix + key, layer + expert, layer_count + expert_count, False)
            if half is not None:
                yield _Candidate(prefix + key + half, layer + expert, layer_count + expert_count, True)
