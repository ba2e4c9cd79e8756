"""Sink for Megatron-LM's classic checkpoints: a folder for its `--load` with one file per rank, in any layout.

Sizes, names and arguments are known before the first tensor arrives, so `begin` writes all files with empty space for
their tensors (`torch_file.reserve`). Tensors may then arrive in any order. Each one is written to its rows or columns
of each rank's tensor, in blocks of 32 MiB. `finish` adds checksums, for which it reads the files again.

The names are Transformer Engine's with --moe-grouped-gemm, or Megatron-LM's own ("local") without it. All expert ranks
have copies of all tensors except the experts. The files have no optimizer or random-number state. If the source knows
its step, the folder is `iter_<step>`. Load it with --finetune, or with --no-load-optim --no-load-rng to keep the step.
Otherwise the folder is `release`, from which Megatron-LM loads only weights.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafp8.checkpoint.files import BLOCK_BYTES, sync, write_at
from megafp8.checkpoint.torch_file import as_bytes, reserve, seal, tensor_starts
from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.megatron.args import Implementation, layout_args, write_args
from megafp8.conversion.megatron.names import OUTPUT, place, runs, their_shape, with_transformer_engine
from megafp8.conversion.megatron.source import FILES, TRACKER, Rank
from megafp8.conversion.model import check_source, common_dtype, seq_length
from megafp8.conversion.target import Sink
from megafp8.parallel.sharding import Shape
from megafp8.spec import ModelSpec

_WITH_STATE = re.compile(r"(linear_(?:qkv|proj|fc1|fc2)\.)weight\d*$")


class _Target(NamedTuple):
    """Megatron-LM tensor: pipeline and expert rank of its file, key of its stage in the file, and key in the stage."""

    pipeline_rank: int
    expert_rank: int
    stage: str
    key: str


class MegatronSink(Sink):
    """Sink that writes a classic Megatron-LM checkpoint.

    Args:
        path: Folder to write.
        tensor: Number of tensor-parallel ranks.
        pipeline: Number of pipeline-parallel ranks.
        virtual_pipeline: Number of stages per pipeline rank; None means one.
        implementation: The --transformer-impl with which Megatron-LM will be started.
        expert: Number of expert-parallel ranks.
    """

    def __init__(
        self,
        path: str | Path,
        tensor: int = 1,
        pipeline: int = 1,
        virtual_pipeline: int | None = None,
        implementation: Implementation = "transformer_engine",
        expert: int = 1,
    ) -> None:
        super().__init__(path)
        self.layout, self.implementation = Rank(tensor, pipeline, expert), implementation
        self.virtual = virtual_pipeline or 1

    def begin(self, source: CheckpointSource, options: Mapping[str, Any]) -> Collection[str]:
        """Write all files without tensors, and return the names of the weights yet to be written.

        Raises ValueError if Megatron-LM has no such model, or if the layout does not divide it.
        """
        self._model, self._shapes = check_source(source)
        self._check_layout(self._model)
        multiple = self._model.stem.vocab_multiple * self.layout.tensor
        self._padded_vocab = -(-self._model.stem.known_vocab_size // multiple) * multiple
        layers = self._model.num_layers // (self.layout.pipeline * self.virtual)
        dtype = common_dtype(source, self._shapes)
        layout = layout_args(*self.layout, self.virtual, layers, self._padded_vocab, dtype, self.implementation)
        about = describe(source, self._model, layout)
        fresh = self._open_journal(source, self._shapes, options, [self.virtual, vars(about["args"])])
        self._tracker, folder = folder_of(about["iteration"])
        self._folder = self.hidden / folder
        self._reserve(about, fresh)
        return [name for name in self._shapes if name not in self._journal.done]

    def _check_layout(self, model: ModelSpec) -> None:
        (t, p, e), stages = self.layout, self.layout.pipeline * self.virtual
        if min(t, p, e, self.virtual) < 1:
            raise ValueError(f"a layout of TP {t}, PP {p}, EP {e}, virtual PP {self.virtual}: sizes must be at least 1")
        parts = [part for layer in model.distinct_layers for part in (layer.mixer, layer.ffn)]
        sizes = [(key, size) for part in parts for key, size in part.widths(model).items()]
        sizes += [("moe.ffn_hidden_size", record.width) for record in model.expert_records]
        for key, size in sizes:
            if size % t:
                raise ValueError(f"TP {t} does not divide the model's {key} = {size}; use one of its divisors")
        for experts in [record.num_experts for record in model.expert_records] or [1]:
            if experts % e:
                raise ValueError(
                    f"EP {e} does not divide the model's moe.num_experts = {experts}; use one of its divisors"
                )
        if model.num_layers % stages:
            raise ValueError(
                f"Megatron-LM gives each stage the same number of layers, but {p} × {self.virtual} stages "
                f"(PP × virtual PP) do not divide {model.num_layers} layers"
            )
        if self.virtual > 1 and self.layout.pipeline == 1:
            raise ValueError(f"virtual PP {self.virtual} with PP 1: Megatron-LM has virtual stages only if PP > 1")

    def _targets(self, name: str) -> Iterator[_Target]:
        """Yield the tensors to which our tensor `name` is written.

        An expert is written to its own expert rank, and any other tensor to every expert rank. Tied weights on two
        stages are two tensors.
        """
        at, last = place(name), self.layout.pipeline * self.virtual - 1
        if at.layer is None:
            keys = {0 if at.key.startswith("embedding.") else last: at.key}
            if self._model.head.tied and name == "model.embedding.word.weight" and last > 0:
                keys[last] = OUTPUT
            sparse, expert_ranks = False, range(self.layout.expert)
        else:
            stage, layer = divmod(at.layer, self._model.num_layers // (last + 1))
            spec = self._model.layers[at.layer]
            sparse, experts = spec.has_experts, spec.ffn.num_experts if spec.has_experts else 1
            e, number = divmod(at.expert or 0, experts // self.layout.expert or 1)
            keys = {stage: at.named(layer, number)}
            expert_ranks = range(self.layout.expert) if at.expert is None else range(e, e + 1)
        for stage, key in keys.items():
            v, p = divmod(stage, self.layout.pipeline)
            if self.implementation == "transformer_engine":
                key = with_transformer_engine(key, sparse)
            for e in expert_ranks:
                yield _Target(p, e, f"model{v}" if self.virtual > 1 else "model", key)

    def _reserve(self, about: dict[str, Any], fresh: bool) -> None:
        """Write the files if the conversion is new, and store the position of each tensor in `self._starts`."""
        self._starts: dict[tuple[int, _Target], int] = {}
        infos: dict[tuple[int, int], dict[_Target, tuple[Shape, torch.dtype]]] = defaultdict(dict)
        for name in self._shapes:
            for target in self._targets(name):
                infos[target[:2]][target] = self._their_shape(name), self._source.tensors[name].dtype
        for rank in self.layout.ranks:
            content: dict[str, Any] = dict(about)
            content |= {f"model{v}": {} for v in range(self.virtual)} if self.virtual > 1 else {"model": {}}
            targets = infos[rank.pipeline, rank.expert]
            if self.implementation == "transformer_engine":
                for target in targets:  # Transformer Engine expects keys for FP8 state; their value may be None
                    if _WITH_STATE.search(target.key):
                        content[target.stage][_WITH_STATE.sub(r"\1_extra_state", target.key)] = None
            file = self._file(rank)
            if fresh:
                file.parent.mkdir(parents=True)
                reserve(file, content, {(target.stage, target.key): info for target, info in targets.items()})
                sync(file.parent)
            starts = tensor_starts(file)
            self._starts |= {(rank.tensor, target): starts[target.stage, target.key] for target in targets}
        sync(self._folder)

    def _file(self, rank: Rank) -> Path:
        return self._folder / rank.folder(self.layout) / FILES[0]

    def _their_shape(self, name: str) -> Shape:
        return their_shape(name, self._shapes[name], self._model, self.layout.tensor, self._padded_vocab)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write our weight `name` to its rows or columns in the tensors of all ranks that hold it."""
        assert tuple(tensor.shape) == self._shapes[name], f"{name}: {tuple(tensor.shape)}"
        megatron_place, row_bytes = place(name), math.prod(self._their_shape(name)[1:]) * tensor.element_size()
        for target in self._targets(name):
            for run in runs(name, self._shapes[name], self._model, self.layout.tensor, self._padded_vocab):
                start = self._starts[run.rank, target]
                values = tensor.narrow(megatron_place.dim or 0, run.ours, run.length)
                first = 0 if megatron_place.dim == 1 else run.theirs
                file = self._file(Rank(run.rank, target.pipeline_rank, target.expert_rank))
                with file.open("r+b", buffering=0) as stream:
                    most = max(1, BLOCK_BYTES // row_bytes)
                    for at in range(0, values.shape[0], most):
                        block = values[at : at + most].contiguous()
                        write_at(stream, start + (first + at) * row_bytes, as_bytes(block))
        self._journal.add(name)

    def finish(self) -> None:
        """Store the checksums in all files, and write the tracker file and the tokenizer."""
        self._check_done(self._shapes)
        for rank in self.layout.ranks:
            seal(self._file(rank))
        (self.hidden / TRACKER).write_text(self._tracker, encoding="utf-8")
        self._copy_tokenizer()


def describe(source: CheckpointSource, model: ModelSpec, layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint except for the weights. `layout` holds arguments that describe its layout."""
    step = source.about.get("step")
    step = step if isinstance(step, int) else 0
    args = write_args(model, seq_length(source) or model.stem.max_position_embeddings) | dict(layout)
    args |= {
        "iteration": step,
        "consumed_train_samples": source.about.get("consumed_samples", 0),
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "tokenizer_type": _tokenizer_type(source.tokenizer_files),
    }
    about = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": step}
    return about | {"num_floating_point_operations_so_far": 0}


def folder_of(step: int) -> tuple[str, str]:
    """Return the content of the tracker file, and the name of the folder, for a checkpoint of `step` (0: unknown)."""
    return (f"{step}", f"iter_{step:07d}") if step else ("release", "release")


def _tokenizer_type(files: Collection[Path]) -> str | None:
    """Return Megatron-LM's name for the tokenizer in `files`. It is only compared at load if a vocab file is used."""
    names = {file.name for file in files}
    if "tokenizer.json" in names:
        return "HuggingFaceTokenizer"
    if any(name.endswith(".model") for name in names):
        return "SentencePieceTokenizer"
    return "GPT2BPETokenizer" if {"vocab.json", "merges.txt"} <= names else None
