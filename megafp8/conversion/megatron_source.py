"""Megatron-LM's classic checkpoints (`--ckpt-format torch`) as a source: one file a rank, any TP, PP and virtual PP.

    <dir>/latest_checkpointed_iteration.txt             100, or release
    <dir>/iter_0000100/mp_rank_01/model_optim_rng.pt    tensor rank 1, where there are no pipeline stages
    <dir>/iter_0000100/mp_rank_01_002/...               tensor rank 1, pipeline rank 2

A file has the run's arguments (`args`), its iteration, and the weights of its rank: `model`, or with a virtual pipeline
`model0`, `model1`, ... in the order of the model. Layers of a stage count from 0, so a layer's number in the model
follows from the number of layers on the stages before. The constructor opens all files, reads names and shapes, and
checks that every tensor of the model is there on every rank and that no other would be left out. Optimizer state is
not read: each version and mode of Megatron-LM shards it in another way.

Files are read without running code in them (`torch_file`), replicated tensors from the first rank. A record's checksum
is compared before it is used. Where neither the file nor the caller gives the size of the vocabulary before padding,
all rows count as tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafp8.checkpoint.torch_file import StoredTensor, TorchFile
from megafp8.conversion.base import Source, TensorInfo
from megafp8.conversion.megatron_args import read_args
from megafp8.conversion.megatron_names import OUTPUT, Place, canonical, place, runs, their_shape
from megafp8.conversion.model import model_tensors
from megafp8.conversion.target import tokenizer_files

TRACKER = "latest_checkpointed_iteration.txt"
FILES = ("model_optim_rng.pt", "model_rng.pt")  # the second: old versions with a distributed optimizer
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_NO_WEIGHTS = ("_extra_state", "inv_freq")  # FP8 state, and constants
_EMBEDDING = "embedding.word_embeddings.weight"


class _Stage(NamedTuple):
    """A pipeline stage: its tensors on each tensor rank, by canonical key, and its number of layers."""

    tensors: list[dict[str, StoredTensor]]
    layers: int


class _Part(NamedTuple):
    """Where a tensor of ours lies: file and stored tensor of each tensor rank."""

    files: list[TorchFile]
    tensors: list[StoredTensor]
    place: Place


class MegatronSource(Source):
    """The checkpoint at `path`: the folder given to Megatron-LM's `--load` (its newest), or one iteration's in there.

    `unsafe`: let files import and run code, for arguments that cannot be read otherwise; only for trusted files.
    `vocab_size`: tokens before padding. Raises ValueError naming the file or folder that is not supported.
    """

    def __init__(self, path: str | Path, unsafe: bool = False, vocab_size: int | None = None) -> None:
        self.path = find_iteration(Path(path))
        ranks = _rank_files(self.path)
        self._t, p = max(ranks)[0] + 1, max(ranks)[1] + 1
        self._files = {rank: TorchFile(file, unsafe=unsafe) for rank, file in ranks.items()}
        args = _common_args(self._files, self._t, p)
        self._stages = list(_stages(self._files, self._t, p))
        first = self._files[0, 0]
        rows = [tensors[_EMBEDDING].shape[0] for tensors in self._stages[0].tensors if _EMBEDDING in tensors]
        if len(rows) != self._t:
            raise ValueError(f"{first.path} has no {_EMBEDDING}: it is not the first stage of a GPT model")
        self._padded_vocab = sum(rows)
        try:
            vocab = _vocab_size(args, vocab_size, self._padded_vocab)
            self.model = read_args(args, vocab, args.get("make_vocab_size_divisible_by") or 128)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{first.path}: {error}") from error
        about = {"step": first.content.get("iteration"), "consumed_samples": args.get("consumed_train_samples")}
        self.about = {key: value for key, value in about.items() if isinstance(value, int)}
        self._parts: dict[str, _Part] = {}
        self.tensors = self._check()
        self.tokenizer_files = tokenizer_files(self.path.parent)

    def _check(self) -> dict[str, TensorInfo]:
        """Our tensors, after checking that the files have all of them and nothing else."""
        layers = [(s, i) for s, stage in enumerate(self._stages) for i in range(stage.layers)]
        if len(layers) != self.model.num_layers:
            raise ValueError(f"{self.path} has {len(layers)} layers, and num_layers = {self.model.num_layers}")
        last = len(self._stages) - 1
        used = {(last, OUTPUT)} if self.model.tie_embeddings else set()
        tensors = {}
        for name, shape in model_tensors(self.model).items():
            there = place(name)
            outer = 0 if there.key.startswith("embedding.") else last
            s, layer = (outer, 0) if there.layer is None else layers[there.layer]
            key = there.named(layer)
            used.add((s, key))
            part = _Part(self._stage_files(s), [self._find(s, r, key) for r in range(self._t)], there)
            expected = their_shape(name, shape, self.model, self._t, self._padded_vocab)
            for file, tensor in zip(part.files, part.tensors, strict=True):
                _check_tensor(f"{file.path}: {key}", tensor, expected, part.tensors[0].dtype)
            self._parts[name] = part
            tensors[name] = TensorInfo(shape, part.tensors[0].dtype)
        for s, stage in enumerate(self._stages):
            for file, found in zip(self._stage_files(s), stage.tensors, strict=True):
                unknown = sorted(key for key in found if (s, key) not in used)
                if unknown:
                    raise ValueError(f"{file.path} has {len(unknown)} tensors that no model of ours has: {unknown[:3]}")
        return tensors

    def _stage_files(self, s: int) -> list[TorchFile]:
        p = len(self._files) // self._t
        return [self._files[rank, s % p] for rank in range(self._t)]

    def _find(self, s: int, rank: int, key: str) -> StoredTensor:
        found = self._stages[s].tensors[rank].get(key)
        if found is None:
            raise ValueError(f"{self._stage_files(s)[rank].path} has no tensor {key}, which its arguments promise")
        return found

    def read(self, name: str) -> Tensor:
        shape, dtype = self.tensors[name]
        files, tensors, there = self._parts[name]
        out = torch.zeros(shape, dtype=dtype)  # zeros in rows of padding that theirs does not have
        for run in runs(name, shape, self.model, self._t, self._padded_vocab):
            if there.dim is not None or run.rank == 0:
                dim = there.dim or 0
                low = tuple(run.theirs if d == dim else 0 for d in range(len(shape)))
                files[run.rank].read(tensors[run.rank], name, low, out.narrow(dim, run.ours, run.length))
        return out


def is_megatron(path: Path) -> bool:
    """Whether `path` looks like a folder of Megatron-LM's checkpoints, or one of these."""
    return (path / TRACKER).is_file() or any(path.glob("mp_rank_*"))


def find_iteration(path: Path) -> Path:
    """The folder that holds the ranks' folders. Raises ValueError where there is none, or one of another format."""
    folder = path
    tracker = path / TRACKER
    if tracker.is_file():
        content = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if content != "release" and not content.isdecimal():
            raise ValueError(f"{tracker} is damaged: it says {content[:40]!r}, and not an iteration or release")
        folder = path / (content if content == "release" else f"iter_{int(content):07d}")
        if not folder.is_dir():
            raise ValueError(f"{tracker} says {content}, and there is no {folder}")
    if any((folder / name).exists() for name in (".metadata", "common.pt")):
        raise ValueError(
            f"{folder} is a distributed checkpoint of Megatron-LM (torch_dist, torch_dcp or zarr), and megafp8 reads "
            "the classic format. Megatron-LM converts it: start your training script with --load of it and "
            "--ckpt-convert-format torch --ckpt-convert-save NEW_FOLDER"
        )
    if not any(folder.glob("mp_rank_*")):
        raise ValueError(f"{folder} is no checkpoint of Megatron-LM: it has no {TRACKER} and no folders mp_rank_*")
    return folder


def _rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """The file of each (tensor rank, pipeline rank), none of which is missing."""
    ranks = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _RANK.fullmatch(path.name)
        if match is None or match[3] is not None:
            raise ValueError(
                f"{path}: expert parallelism, or an unknown name; megafp8 reads mp_rank_<tensor>_<pipeline>"
            )
        found = [path / name for name in FILES if (path / name).is_file()]
        if not found:
            raise ValueError(f"{path} has no {FILES[0]}")
        ranks[int(match[1]), int(match[2] or 0)] = found[0]
    t, p = (max(rank[axis] for rank in ranks) + 1 for axis in (0, 1))
    missing = [(r, s) for r in range(t) for s in range(p) if (r, s) not in ranks]
    if missing:
        r, s = missing[0]
        raise ValueError(f"{folder} has no mp_rank_{r:02d}" + (f"_{s:03d}" if p > 1 else "") + f" of {t} × {p} ranks")
    return ranks


def _common_args(files: Mapping[tuple[int, int], TorchFile], t: int, p: int) -> dict[str, Any]:
    """The arguments. Raises ValueError where a file has none, or belongs to another checkpoint than the first."""
    first: dict[str, Any] = {}
    for file in files.values():
        content = file.content
        if not isinstance(content, dict) or not isinstance(getattr(content.get("args"), "__dict__", None), dict):
            raise ValueError(f"{file.path} has no arguments (args), so it does not say what model it is")
        version = content.get("checkpoint_version", 0)
        if not isinstance(version, (int, float)) or version < 3.0:
            raise ValueError(
                f"{file.path} has checkpoint_version {version}: before 3.0 the rows of query_key_value had "
                "another order. Load and save it with a newer Megatron-LM, which puts them right"
            )
        args = vars(content["args"])
        for key, found in (("tensor_model_parallel_size", t), ("pipeline_model_parallel_size", p)):
            if args.get(key, found) != found:
                raise ValueError(f"{file.path} says {key} = {args[key]}, and there are folders for {found}")
        first = first or args | {"iteration": content.get("iteration")}
        for key in ("num_layers", "hidden_size"):
            if args.get(key) != first.get(key):
                raise ValueError(f"{file.path} has {key} = {args.get(key)}, and another file has {first.get(key)}")
        if content.get("iteration") != first["iteration"]:
            raise ValueError(f"{file.path} is of iteration {content.get('iteration')}, others of {first['iteration']}")
    return first


def _stages(files: Mapping[tuple[int, int], TorchFile], t: int, p: int) -> Iterator[_Stage]:
    """The stages in the order of the model: virtual stage 0 of all pipeline ranks, then virtual stage 1, ..."""
    virtual = max(sum(re.fullmatch(r"model\d+", str(key)) is not None for key in f.content) for f in files.values())
    for v in range(max(virtual, 1)):
        for s in range(p):
            tensors = [_model(files[rank, s], f"model{v}" if virtual else "model", bool(virtual)) for rank in range(t)]
            layers = {key.split(".")[2] for key in tensors[0] if key.startswith("decoder.layers.")}
            if layers != {str(i) for i in range(len(layers))}:
                raise ValueError(f"{files[0, s].path} has layers {sorted(layers)} on one stage")
            yield _Stage(tensors, len(layers))


def _model(file: TorchFile, key: str, may_lack: bool) -> dict[str, StoredTensor]:
    """The weights of one stage by canonical key. `may_lack`: a virtual stage without weights is not in the file."""
    if key not in file.content and not may_lack:
        raise ValueError(f"{file.path} has no weights: there is {', '.join(map(str, file.content))}, and no {key}")
    found = {}
    for name, value in _leaves(file.content.get(key, {}), ""):
        if name.endswith(_NO_WEIGHTS) or value is None:
            continue
        if not isinstance(value, StoredTensor):
            raise ValueError(f"{file.path}: {name} is {value!r}, and no plain tensor")
        found[canonical(name)] = value
    return found


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Names and values of a state dict, which is nested in models from before Megatron core."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def _check_tensor(what: str, tensor: StoredTensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{what} has shape {list(tensor.shape)}, and {list(shape)} by the arguments")
    if not tensor.dtype.is_floating_point or tensor.dtype != dtype:
        raise ValueError(f"{what} is {tensor.dtype}, and {dtype} on the first rank; floating point, and equal, is read")
    if not tensor.is_contiguous:
        raise ValueError(f"{what} is not contiguous (strides {list(tensor.stride)})")


def _vocab_size(args: Mapping[str, Any], given: int | None, padded: int) -> int:
    """Tokens before padding."""
    size = args.get("vocab_size")
    if given is not None and not 0 < given <= padded:
        raise ValueError(f"vocab_size {given} was given, and the embedding has {padded} rows")
    if given is not None or not isinstance(size, int) or size <= 0:
        return given or padded
    # Megatron-LM's NullTokenizer has one token more than its argument says, the end of a document.
    return min(size + (args.get("tokenizer_type") == "NullTokenizer"), padded)
