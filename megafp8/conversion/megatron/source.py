"""Source that reads Megatron-LM's classic checkpoints (`--ckpt-format torch`), with any TP, PP, virtual PP and EP.

    <dir>/latest_checkpointed_iteration.txt             100, or release
    <dir>/iter_0000100/mp_rank_01/model_optim_rng.pt    tensor rank 1, without pipeline stages
    <dir>/iter_0000100/mp_rank_01_002/...               tensor rank 1, pipeline rank 2
    <dir>/iter_0000100/mp_rank_01_002_003/...           and expert rank 3; mp_rank_01_003 without pipeline stages

There is one file per rank. It has the run's arguments (`args`), its iteration, and the weights of the rank in `model`,
or with a virtual pipeline in `model0`, `model1`, ... in the order of the model. Layers of a stage count from 0, so a
layer's number in the model follows from the number of layers on earlier stages. The constructor opens all files, reads
names and shapes, and checks that every tensor of the model is present on every rank, and that no other tensor would be
left out. All expert ranks have all tensors except the experts. Optimizer state is not read, because each version and
mode of Megatron-LM shards it differently.

Files are read without running the code in them (`torch_file`). Replicated tensors are read from the first rank. The
checksum of a record is compared before the record is used. If neither the file nor the caller states the size of the
vocabulary before padding, all rows count as tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafp8.checkpoint.pickle_reader import PickledObject
from megafp8.checkpoint.torch_file import StoredTensor, TorchFile
from megafp8.conversion.base import CheckpointSource, TensorInfo
from megafp8.conversion.megatron.args import read_args
from megafp8.conversion.megatron.names import OUTPUT, MegatronPlace, canonical, place, runs, their_shape
from megafp8.conversion.model import check_size, model_tensors
from megafp8.conversion.target import tokenizer_files
from megafp8.host.messages import join_names, name_text, value_text
from megafp8.host.object_store import AnyPath

TRACKER = "latest_checkpointed_iteration.txt"
COMMON_FILE = "common.pt"
"""File of a distributed checkpoint that holds all data that is not sharded."""
FILES = ("model_optim_rng.pt", "model_rng.pt")  # the second name is used by old versions with a distributed optimizer
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
NO_WEIGHTS = ("_extra_state", "inv_freq")  # FP8 state, and constants
BERT_HEAD = "lm_head.dense.weight"
EMBEDDING = "embedding.word_embeddings.weight"


class Rank(NamedTuple):
    """Tensor-, pipeline- and expert-parallel rank of a file. A layout is also stored as a `Rank`, with the sizes."""

    tensor: int
    pipeline: int = 0
    expert: int = 0

    def folder(self, layout: Rank) -> str:
        """Return the name of the rank's folder in a checkpoint with this layout."""
        pipeline = f"_{self.pipeline:03d}" if layout.pipeline > 1 else ""
        return f"mp_rank_{self.tensor:02d}{pipeline}" + (f"_{self.expert:03d}" if layout.expert > 1 else "")

    @property
    def ranks(self) -> Iterator[Rank]:
        """All ranks of this layout."""
        return (Rank(r, s, e) for s in range(self.pipeline) for r in range(self.tensor) for e in range(self.expert))


class _Stage(NamedTuple):
    """Pipeline stage: its tensors, by (tensor rank, expert rank) and canonical key, and its number of layers."""

    tensors: dict[tuple[int, int], dict[str, StoredTensor]]
    layers: int


class _Part(NamedTuple):
    """Location of one of our tensors: the file and stored tensor of each tensor rank."""

    files: list[TorchFile]
    tensors: list[StoredTensor]
    place: MegatronPlace


class MegatronSource(CheckpointSource):
    """Source that reads a classic Megatron-LM checkpoint.

    Args:
        path: Folder of one iteration, or the folder for Megatron-LM's `--load`, in which the newest iteration is read.
        vocab_size: Number of tokens before padding; by default from the arguments.

    Raises:
        ValueError: The checkpoint is damaged or not supported. The message names the file or folder.
    """

    def __init__(self, path: str | Path, vocab_size: int | None = None) -> None:
        self.path = find_iteration(Path(path))
        _check_classic(self.path)
        self._files, self._layout = _rank_files(self.path)
        self._t = self._layout.tensor
        args = _common_args(self._files, self._layout)
        self._stages = list(_stages(self._files, self._layout))
        first = self._files[Rank(0)]
        tensors_of_ranks = [tensors for (_, e), tensors in self._stages[0].tensors.items() if e == 0]
        rows = [tensors[EMBEDDING].shape[0] for tensors in tensors_of_ranks if EMBEDDING in tensors]
        if len(rows) != self._t:
            raise ValueError(f"{first.path} has no {EMBEDDING}: it is not the first stage of a GPT or BERT model")
        self._padded_vocab = sum(rows)
        try:
            vocab = tokens_before_padding(args, vocab_size, self._padded_vocab)
            bert = any(BERT_HEAD in stage.tensors[0, 0] for stage in self._stages)
            self.model = read_args(args, vocab, args.get("make_vocab_size_divisible_by") or 128, bert=bert)
            ranks = (tensors for stage in self._stages for tensors in stage.tensors.values())
            check_size(self.model, [tensor.shape for tensors in ranks for tensor in tensors.values()])
        except (TypeError, KeyError, AttributeError, IndexError, ArithmeticError, ValueError) as error:
            raise ValueError(f"{first.path}: {error}") from error
        experts = max((record.num_experts for record in self.model.expert_records), default=1)
        if experts % self._layout.expert:
            folders = f"{self.path} has folders for {self._layout.expert} expert ranks"
            raise ValueError(f"{folders}, but num_experts = {args.get('num_experts')}")
        self._experts_of_rank = experts // self._layout.expert
        self.about = about_run(first.content, args)
        self._parts: dict[str, _Part] = {}
        self.tensors = self._check()
        self.tokenizer_files = tokenizer_files(self.path.parent)

    def _check(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of our tensors, after checking that the files have all of them and nothing else."""
        layers = [(s, i) for s, stage in enumerate(self._stages) for i in range(stage.layers)]
        if len(layers) != self.model.num_layers:
            raise ValueError(f"{self.path} has {len(layers)} layers, but num_layers = {self.model.num_layers}")
        last, experts = len(self._stages) - 1, range(self._layout.expert)
        used = {(last, e, OUTPUT) for e in experts} if self.model.head.tied else set()
        tensors = {}
        for name, shape in model_tensors(self.model).items():
            at = place(name)
            outer = 0 if at.key.startswith("embedding.") else last
            s, layer = (outer, 0) if at.layer is None else layers[at.layer]
            expert_rank, number = divmod(at.expert or 0, self._experts_of_rank)
            key = at.named(layer, number)
            expected = their_shape(name, shape, self.model, self._t, self._padded_vocab)
            # The loop ends at the first copy, which will be read.
            for e in reversed(experts if at.expert is None else [expert_rank]):
                used.add((s, e, key))
                files = [self._file(s, r, e) for r in range(self._t)]
                part = _Part(files, [self._find(s, r, e, key) for r in range(self._t)], at)
                for file, tensor in zip(part.files, part.tensors, strict=True):
                    _check_tensor(f"{file.path}: {key}", tensor, expected, part.tensors[0].dtype)
            self._parts[name] = part
            tensors[name] = TensorInfo(shape, part.tensors[0].dtype)
        for s, stage in enumerate(self._stages):
            for (r, e), infos in stage.tensors.items():
                unknown = sorted(key for key in infos if (s, e, key) not in used)
                if unknown:
                    path, names = self._file(s, r, e).path, join_names(unknown)
                    raise ValueError(f"{path} has {len(unknown)} tensors that megafp8 does not know: {names}")
        return tensors

    def _file(self, s: int, r: int, e: int) -> TorchFile:
        """Return the file of stage s on tensor rank r and expert rank e."""
        return self._files[Rank(r, s % self._layout.pipeline, e)]

    def _find(self, s: int, r: int, e: int, key: str) -> StoredTensor:
        info = self._stages[s].tensors[r, e].get(key)
        if info is None:
            raise ValueError(f"{self._file(s, r, e).path} has no tensor {key}, which its arguments require")
        return info

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, assembled from the tensors of all tensor-parallel ranks."""
        shape, dtype = self.tensors[name]
        files, tensors, at = self._parts[name]
        out = torch.zeros(shape, dtype=dtype)  # rows of padding that the file does not have stay zero
        for run in runs(name, shape, self.model, self._t, self._padded_vocab):
            if at.dim is not None or run.rank == 0:
                dim = at.dim or 0
                low = tuple(run.theirs if d == dim else 0 for d in range(len(shape)))
                files[run.rank].read(tensors[run.rank], name, low, out.narrow(dim, run.ours, run.length))
        return out


def is_megatron(path: Path) -> bool:
    """Return whether `path` looks like a classic Megatron-LM checkpoint, or like a folder of such checkpoints."""
    return not is_distributed(path) and ((path / TRACKER).is_file() or any(path.glob("mp_rank_*")))


def is_distributed(path: Path) -> bool:
    """Return whether `path` is a Megatron core `dist_checkpointing` checkpoint, or a folder with such a newest one."""
    try:
        return (find_iteration(path) / COMMON_FILE).is_file()
    except ValueError:
        return False


def find_iteration(path: Path) -> Path:
    """Return the newest iteration's folder that the tracker file in `path` names, or `path` if there is no tracker.

    Raises ValueError if the tracker is damaged, or names a folder that does not exist.
    """
    tracker = path / TRACKER
    if not tracker.is_file():
        return path
    content = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if content != "release" and not content.isdecimal():
        raise ValueError(f"{tracker} is damaged: it has {content[:40]!r} instead of an iteration or release")
    folder = path / (content if content == "release" else f"iter_{int(content):07d}")
    if not folder.is_dir():
        raise ValueError(f"{tracker} names {content}, but there is no {folder}")
    return folder


def _check_classic(folder: Path) -> None:
    """Raise ValueError if `folder` does not contain folders of ranks."""
    if (folder / COMMON_FILE).exists():
        raise ValueError(f"{folder} has Megatron-LM's format torch_dist: read it as torch_dist, not as megatron")
    if (folder / ".metadata").exists():
        raise ValueError(
            f"{folder} is a distributed checkpoint of Megatron-LM without {COMMON_FILE} (torch_dcp, fsdp_dtensor); "
            "megafp8 reads the formats torch and torch_dist. Megatron-LM can convert it: start your training script "
            "with --load FOLDER --ckpt-convert-format torch --ckpt-convert-save NEW_FOLDER"
        )
    if not any(folder.glob("mp_rank_*")):
        raise ValueError(f"{folder} is not a checkpoint of Megatron-LM: it has no {TRACKER} and no folders mp_rank_*")


def _rank_files(folder: Path) -> tuple[dict[Rank, TorchFile], Rank]:
    """Return the file of each rank, and the layout. Raises ValueError if a rank's file is missing."""
    numbers = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _RANK.fullmatch(path.name)
        if match is None:
            raise ValueError(f"{path}: unknown name; megafp8 reads mp_rank_<tensor>_<pipeline>_<expert>")
        present = [path / name for name in FILES if (path / name).is_file()]
        if not present:
            raise ValueError(f"{path} has no {FILES[0]}")
        ranks = tuple(int(number) for number in match.groups() if number is not None)
        numbers[ranks] = TorchFile(present[0])
    if len({len(ranks) for ranks in numbers}) > 1:
        names = ", ".join(numbers[ranks].path.parent.name for ranks in (min(numbers, key=len), max(numbers, key=len)))
        raise ValueError(f"{folder} has folders of several layouts: {names}")
    # If a name has two numbers, the arguments determine whether the second one is the pipeline or the expert rank.
    args = content_of(next(iter(numbers.values())))["args"]
    without_stages = args.get("pipeline_model_parallel_size") == 1 and (args.get("expert_model_parallel_size") or 1) > 1
    files = {Rank(n[0], 0, n[1]) if len(n) == 2 and without_stages else Rank(*n): x for n, x in numbers.items()}
    layout = Rank(*(max(axis) + 1 for axis in zip(*files, strict=True)))
    if missing := [rank for rank in layout.ranks if rank not in files]:
        sizes = " × ".join(str(size) for size in (layout if layout.expert > 1 else layout[:2]))
        raise ValueError(f"{folder} has no {missing[0].folder(layout)} of {sizes} ranks")
    return files, layout


def content_of(file: TorchFile) -> Mapping[str, Any]:
    """Return the content of a file, with the arguments (`args`) as a dictionary. Raises ValueError if it has none."""
    content = file.content
    args = content.get("args") if isinstance(content, dict) else None
    if not isinstance(args, PickledObject) or type(args.state) is not dict:
        raise ValueError(f"{file.path} has no arguments (args), so its model is unknown")
    return content | {"args": args.state}


def _common_args(files: Mapping[Rank, TorchFile], layout: Rank) -> dict[str, Any]:
    """Return the arguments of the first file. Raises ValueError if a file has none or is from another checkpoint."""
    first: dict[str, Any] = {}
    for file in files.values():
        content = content_of(file)
        version = content.get("checkpoint_version", 0)
        if not isinstance(version, (int, float)) or version < 3.0:
            raise ValueError(
                f"{file.path} has checkpoint_version {version}: before 3.0 the rows of query_key_value had "
                "another order. Load and save it with a newer Megatron-LM, which corrects the order"
            )
        args = content["args"]
        for axis, axis_size in layout._asdict().items():
            key = f"{axis}_model_parallel_size"
            if args.get(key, axis_size) != axis_size:
                raise ValueError(f"{file.path} has {key} = {args[key]}, but there are folders for {axis_size}")
        if (args.get("expert_tensor_parallel_size") or layout.tensor) != layout.tensor:
            raise ValueError(
                f"{file.path} has expert_tensor_parallel_size = {args['expert_tensor_parallel_size']}; megafp8 only "
                f"reads experts that are sharded like the other layers, over {layout.tensor} ranks"
            )
        first = first or args | {"iteration": content.get("iteration")}
        for key in ("num_layers", "hidden_size"):
            if args.get(key) != first.get(key):
                raise ValueError(f"{file.path} has {key} = {args.get(key)}, but another file has {first.get(key)}")
        if content.get("iteration") != first["iteration"]:
            raise ValueError(f"{file.path} has iteration {content.get('iteration')}, others have {first['iteration']}")
    return first


def _stages(files: Mapping[Rank, TorchFile], layout: Rank) -> Iterator[_Stage]:
    """Yield the stages in the order of the model: virtual stage 0 of all pipeline ranks, then virtual stage 1, ..."""
    virtual = max(sum(re.fullmatch(r"model\d+", str(key)) is not None for key in f.content) for f in files.values())
    for v in range(max(virtual, 1)):
        key = f"model{v}" if virtual else "model"
        for s in range(layout.pipeline):
            ranks_of_stage = {(rank.tensor, rank.expert): rank for rank in layout.ranks if rank.pipeline == s}
            tensors = {at: _model(files[rank], key, bool(virtual)) for at, rank in ranks_of_stage.items()}
            layers = {key.split(".")[2] for key in tensors[0, 0] if key.startswith("decoder.layers.")}
            if layers != {str(i) for i in range(len(layers))}:
                raise ValueError(f"{files[Rank(0, s)].path} has layers {sorted(layers)} on one stage")
            yield _Stage(tensors, len(layers))


def _model(file: TorchFile, key: str, may_lack: bool) -> dict[str, StoredTensor]:
    """Return the weights of one stage by canonical key. If `may_lack` is True, the stage may be missing in the file."""
    if key not in file.content and not may_lack:
        raise ValueError(f"{file.path} has no weights: it has {join_names(file.content)}, but no {key}")
    sizes = {}
    leaves = dict(_leaves(file.content.get(key, {}), ""))
    refuse_t5(file.path, leaves)
    for name, value in leaves.items():
        if name.endswith(NO_WEIGHTS) or value is None:
            continue
        if not isinstance(value, StoredTensor):
            raise ValueError(f"{file.path}: {name_text(name)} is {value_text(value)}, not a plain tensor")
        if name.endswith("mlp.experts.weight1"):
            raise ValueError(
                f"{file.path}: {name} holds all experts of a layer (--moe-use-legacy-grouped-gemm); megafp8 only reads "
                "experts with separate weights"
            )
        sizes[canonical(name)] = value
    return sizes


def refuse_t5(path: AnyPath, names: Collection[str]) -> None:
    """Raise ValueError if `names`, the names of the weights in `path`, belong to a T5 model."""
    if any(name.startswith(("encoder_relative_pos_emb.", "lm_head.output_layer.")) for name in names) or all(
        any(name.startswith(f"{stack}.layers.") for name in names) for stack in ("encoder", "decoder")
    ):
        raise ValueError(f"{path} is a T5 model; megafp8 reads Megatron-LM's GPT and BERT")


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a state dict. It is nested in models from before Megatron core."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def _check_tensor(what: str, tensor: StoredTensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{what} has shape {list(tensor.shape)}, but {list(shape)} by the arguments")
    if not tensor.dtype.is_floating_point or tensor.dtype != dtype:
        raise ValueError(f"{what} is {tensor.dtype}, and {dtype} on the first rank; they must be equal floating point")
    if not tensor.is_contiguous:
        raise ValueError(f"{what} is not contiguous (strides {list(tensor.stride)})")


def about_run(content: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, int]:
    """Return `CheckpointSource.about` for a file with this content and these arguments: step and consumed samples."""
    about = {"step": content.get("iteration"), "consumed_samples": args.get("consumed_train_samples")}
    return {key: value for key, value in about.items() if isinstance(value, int)}


def tokens_before_padding(args: Mapping[str, Any], given: int | None, padded: int) -> int:
    """Return the number of tokens before padding to `padded` rows. `given` is the user's number, or None."""
    size = args.get("vocab_size")
    if given is not None and not 0 < given <= padded:
        raise ValueError(f"vocab_size is {given}, but the embedding has {padded} rows")
    if given is not None or not isinstance(size, int) or size <= 0:
        return given or padded
    # Megatron-LM's NullTokenizer has one token more than its argument states: the end of a document.
    return min(size + (args.get("tokenizer_type") == "NullTokenizer"), padded)
