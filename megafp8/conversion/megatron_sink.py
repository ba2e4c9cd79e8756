"""Megatron-LM's classic checkpoints as a sink: a folder for its `--load`, one file a rank, any TP, PP, virtual PP.

Sizes, names and arguments are known before the first tensor, so `begin` writes all files with empty space for their
tensors (`torch_file.reserve`). Tensors may then come in any order; each is written to its rows or columns of each
rank's tensor, in blocks of 32 MiB. `finish` adds checksums, for which the files are read once more.

Names are those of Transformer Engine's layers, Megatron-LM's default, or of its own ("local"). The files hold no
optimizer or random-number state. Where the source knows its step the folder is `iter_<step>`, to be loaded with
--finetune, or with --no-load-optim --no-load-rng to keep the count; else it is `release`, which Megatron-LM loads as
weights alone.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megafp8.checkpoint.files import BLOCK_BYTES, sync, write_at
from megafp8.checkpoint.torch_file import as_bytes, reserve, seal, tensor_starts
from megafp8.config import ModelConfig
from megafp8.conversion.base import Source
from megafp8.conversion.megatron_args import Implementation, layout_args, write_args
from megafp8.conversion.megatron_names import OUTPUT, Place, place, runs, their_shape, with_transformer_engine
from megafp8.conversion.megatron_source import FILES, TRACKER
from megafp8.conversion.model import check_source, seq_length
from megafp8.conversion.target import Sink
from megafp8.distributed.sharding import Shape

_WITH_STATE = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")


class _Target(NamedTuple):
    """A tensor of theirs: the pipeline rank of its stage, the stage's key in the file, the tensor's key in that."""

    pipeline_rank: int
    stage: str
    key: str


class MegatronSink(Sink):
    """Writes the folder `path` for TP `tensor`, PP `pipeline`.

    `virtual_pipeline`: stages a pipeline rank, None for one. `implementation`: the --transformer-impl that Megatron-LM
    will be started with.
    """

    def __init__(
        self,
        path: str | Path,
        tensor: int = 1,
        pipeline: int = 1,
        virtual_pipeline: int | None = None,
        implementation: Implementation = "transformer_engine",
    ) -> None:
        super().__init__(path)
        self.tensor, self.pipeline, self.implementation = tensor, pipeline, implementation
        self.virtual = virtual_pipeline or 1

    def begin(self, source: Source, options: Mapping[str, Any]) -> Collection[str]:
        self._model, self._shapes = check_source(source)
        self._check_layout(self._model)
        multiple = self._model.vocab_multiple * self.tensor
        assert self._model.vocab_size is not None
        self._padded_vocab = -(-self._model.vocab_size // multiple) * multiple
        about = self._about(source)
        fresh = self._open_journal(source, self._shapes, options, [self.virtual, vars(about["args"])])
        step = about["iteration"]
        self._tracker = f"{step}" if step else "release"
        self._folder = self.hidden / (f"iter_{step:07d}" if step else "release")
        self._reserve(about, fresh)
        return [name for name in self._shapes if name not in self._journal.done]

    def _check_layout(self, model: ModelConfig) -> None:
        t, stages = self.tensor, self.pipeline * self.virtual
        if min(t, self.pipeline, self.virtual) < 1:
            raise ValueError(f"a layout of TP {t}, PP {self.pipeline}, virtual PP {self.virtual}: sizes are 1 or more")
        sizes = {
            "num_attention_heads": model.num_attention_heads,
            "num_query_groups": model.query_groups,
            "ffn_hidden_size": model.ffn_size,
        }
        for key, size in sizes.items():
            if size % t:
                raise ValueError(f"TP {t} does not divide the model's {key} = {size}; take a divisor of it")
        if model.num_layers % stages:
            raise ValueError(
                f"Megatron-LM gives each stage the same number of layers, and {self.pipeline} × {self.virtual} stages "
                f"(PP × virtual PP) do not divide {model.num_layers} layers"
            )
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(f"virtual PP {self.virtual} with PP 1: Megatron-LM has virtual stages from PP 2 on")

    def _about(self, source: Source) -> dict[str, Any]:
        """Content of a file besides weights."""
        model, step = self._model, source.about.get("step")
        step = step if isinstance(step, int) else 0
        dtypes = Counter(source.tensors[name].dtype for name in self._shapes)
        layers = model.num_layers // (self.pipeline * self.virtual)
        args = write_args(model, seq_length(source) or model.max_position_embeddings)
        dtype = dtypes.most_common(1)[0][0]
        args |= layout_args(
            self.tensor, self.pipeline, self.virtual, layers, self._padded_vocab, dtype, self.implementation
        )
        args |= {
            "iteration": step,
            "consumed_train_samples": source.about.get("consumed_samples", 0),
            "skipped_train_samples": 0,
            "consumed_valid_samples": 0,
            "tokenizer_type": _tokenizer_type(source.tokenizer_files),
        }
        about = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": step}
        return about | {"num_floating_point_operations_so_far": 0}

    def _targets(self, name: str) -> Iterator[tuple[Place, _Target]]:
        """Where our tensor `name` goes: one tensor of theirs, or two for tied weights on two stages."""
        there, last = place(name), self.pipeline * self.virtual - 1
        if there.layer is not None:
            stage, layer = divmod(there.layer, self._model.num_layers // (last + 1))
            yield there, self._target(stage, there.named(layer))
            return
        yield there, self._target(0 if there.key.startswith("embedding.") else last, there.key)
        if self._model.tie_embeddings and name == "model.embedding.word.weight" and last > 0:
            yield Place(None, OUTPUT), self._target(last, OUTPUT)

    def _target(self, stage: int, key: str) -> _Target:
        v, p = divmod(stage, self.pipeline)
        key = with_transformer_engine(key) if self.implementation == "transformer_engine" else key
        return _Target(p, f"model{v}" if self.virtual > 1 else "model", key)

    def _reserve(self, about: dict[str, Any], fresh: bool) -> None:
        """Write the files where the conversion starts anew; the first byte of each tensor goes to `self._starts`."""
        self._starts: dict[tuple[int, _Target], int] = {}
        for p in range(self.pipeline):
            content: dict[str, Any] = dict(about)
            content |= {f"model{v}": {} for v in range(self.virtual)} if self.virtual > 1 else {"model": {}}
            tensors = {}
            for name in self._shapes:
                for _, target in self._targets(name):
                    if target.pipeline_rank == p:
                        tensors[target.stage, target.key] = self._their_shape(name), self._source.tensors[name].dtype
                        if self.implementation == "transformer_engine" and target.key.endswith(_WITH_STATE):
                            # FP8 state that Transformer Engine expects, and that may be None.
                            content[target.stage][target.key.removesuffix("weight") + "_extra_state"] = None
            for rank in range(self.tensor):
                file = self._file(rank, p)
                if fresh:
                    file.parent.mkdir(parents=True)
                    reserve(file, content, tensors)
                    sync(file.parent)
                starts = tensor_starts(file)
                self._starts |= {(rank, _Target(p, *keys)): start for keys, start in starts.items()}
        sync(self._folder)

    def _file(self, rank: int, pipeline_rank: int) -> Path:
        folder = f"mp_rank_{rank:02d}" + (f"_{pipeline_rank:03d}" if self.pipeline > 1 else "")
        return self._folder / folder / FILES[0]

    def _their_shape(self, name: str) -> Shape:
        return their_shape(name, self._shapes[name], self._model, self.tensor, self._padded_vocab)

    def write(self, name: str, tensor: Tensor) -> None:
        assert tuple(tensor.shape) == self._shapes[name], f"{name}: {tuple(tensor.shape)}"
        row_bytes = math.prod(self._their_shape(name)[1:]) * tensor.element_size()
        for there, target in self._targets(name):
            for run in runs(name, self._shapes[name], self._model, self.tensor, self._padded_vocab):
                start = self._starts[run.rank, target]
                values = tensor.narrow(there.dim or 0, run.ours, run.length)
                first = 0 if there.dim == 1 else run.theirs
                with self._file(run.rank, target.pipeline_rank).open("r+b", buffering=0) as stream:
                    most = max(1, BLOCK_BYTES // row_bytes)
                    for at in range(0, values.shape[0], most):
                        block = values[at : at + most].contiguous()
                        write_at(stream, start + (first + at) * row_bytes, as_bytes(block))
        self._journal.add(name)

    def finish(self) -> None:
        self._check_done(self._shapes)
        for p in range(self.pipeline):
            for rank in range(self.tensor):
                seal(self._file(rank, p))
        (self.hidden / TRACKER).write_text(self._tracker, encoding="utf-8")
        self._copy_tokenizer()


def _tokenizer_type(files: Collection[Path]) -> str | None:
    """Megatron-LM's name for the tokenizer in `files`, compared at load only where it reads a vocab file."""
    names = {file.name for file in files}
    if "tokenizer.json" in names:
        return "HuggingFaceTokenizer"
    if any(name.endswith(".model") for name in names):
        return "SentencePieceTokenizer"
    return "GPT2BPETokenizer" if {"vocab.json", "merges.txt"} <= names else None
