"""Sink for Megatron core's distributed checkpoints: a folder for Megatron-LM's `--load` in any layout.

The names are Transformer Engine's; in this format, Megatron core's own layers have the same names. Layers are stacked,
in rectangles of one layer (and one expert), unless only some layers have experts; `torch_dist_source` explains the
details. q, k and v are one tensor, in rectangles of parts of a query group, so each of them can be written separately.
The checkpoint has no optimizer or random-number state. It also has no `_extra_state`, so Megatron-LM must be told to
accept this (`--dist-ckpt-strictness`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafp8.checkpoint.files import to_json, write_file
from megafp8.checkpoint.writer import CheckpointWriter
from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.megatron.args import Implementation, layout_args
from megafp8.conversion.megatron.names import RankSlice, place, runs, their_shape, with_transformer_engine
from megafp8.conversion.megatron.sink import describe, folder_of
from megafp8.conversion.megatron.source import COMMON_FILE, TRACKER
from megafp8.conversion.megatron.torch_dist_source import CONFIG_FILE
from megafp8.conversion.model import check_source, common_dtype
from megafp8.conversion.target import Sink
from megafp8.parallel.sharding import Shape

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""Naming scheme of the tensors, which Megatron-LM reads before it requests tensors."""


class _Part(NamedTuple):
    """Slice of our tensor (`run`), and its rectangle, which begins at `low`, in Megatron's tensor `key` of `shape`."""

    run: RankSlice
    key: str
    low: Shape
    shape: Shape


class TorchDistSink(Sink):
    """Sink that writes a distributed checkpoint of Megatron core.

    Args:
        path: Folder to write.
        implementation: The --transformer-impl with which Megatron-LM will be started.
    """

    def __init__(self, path: Any, implementation: Implementation = "transformer_engine") -> None:
        super().__init__(path)
        self.implementation = implementation

    def begin(self, source: CheckpointSource, options: Mapping[str, Any]) -> Collection[str]:
        """Create or continue the hidden folder, and return the names of the weights yet to be written.

        Raises ValueError if Megatron-LM has no such model.
        """
        self._model, self._shapes = check_source(source)
        self._padded_vocab = self._model.stem.rows
        dtype = common_dtype(source, self._shapes)
        layout = layout_args(1, 1, 1, 1, self._model.num_layers, self._padded_vocab, dtype, self.implementation)
        layout |= {"ckpt_format": "torch_dist", "use_dist_ckpt": True}
        self._about = describe(source, self._model, layout) | {"content_metadata": _CONTENT}
        self._open_journal(source, self._shapes, options, [vars(self._about["args"])])
        tracker, folder = folder_of(self._about["iteration"])
        self._folder = self.hidden / folder
        self._folder.mkdir(exist_ok=True)
        (self.hidden / TRACKER).write_text(tracker, encoding="utf-8")
        self._writer = CheckpointWriter(self._folder, self._journal.done)
        done = self._writer.parts
        return [name for name in self._shapes if any((key, low) not in done for _, key, low, _ in self._parts(name))]

    def _parts(self, name: str) -> Iterator[_Part]:
        """Yield the rectangles of our tensor `name`, one for each slice."""
        at, model = place(name), self._model
        shape = their_shape(name, self._shapes[name], model, 1, self._padded_vocab)
        key, lead, counts = at.key, [], []
        if at.layer is not None:
            layer = model.layers[at.layer]
            alone = layer.has_experts and self.implementation == "transformer_engine"
            stacked = len({layer.has_experts for layer in model.layers}) == 1
            prefix = "decoder.layers." if stacked else f"decoder.layers.{at.layer}."
            key = with_transformer_engine(prefix + key.replace("local_experts.*", "experts"), alone)
            if stacked:
                lead, counts = [at.layer], [model.num_layers]
            if at.expert is not None:
                lead, counts = [*lead, at.expert], [*counts, layer.ffn.num_experts]
        for run in runs(name, self._shapes[name], model, 1, self._padded_vocab):
            low = (run.theirs if dim == (at.dim or 0) else 0 for dim in range(len(shape)))
            yield _Part(run, key, (*lead, *low), (*counts, *shape))

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the rectangles of our weight `name` to the data files."""
        assert tuple(tensor.shape) == self._shapes[name], f"{name}: {tuple(tensor.shape)}"
        dim, done = place(name).dim or 0, self._writer.parts
        for run, key, low, shape in self._parts(name):
            if (key, low) not in done:
                values = tensor.narrow(dim, run.ours, run.length).contiguous()
                leading = (None,) * (len(shape) - tensor.dim())
                self._journal.add(self._writer.add(key, values[leading], low, shape))

    def finish(self) -> None:
        """Write the index, common.pt, metadata.json and the tokenizer."""
        self._journal.flush()
        self._writer.finish()
        torch.save(self._about, self._folder / COMMON_FILE)
        write_file(self._folder / CONFIG_FILE, to_json(_BACKENDS))
        self._copy_tokenizer()
