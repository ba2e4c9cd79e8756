"""Small native checkpoints with everything that a run saves, made by `save` from known values."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.checkpoint import save
from megafp8.config import model_spec
from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.format_names import WRITTEN_NAMES
from megafp8.conversion.formats import FORMATS as ALL_FORMATS
from megafp8.conversion.target import Sink

MODEL = model_spec({
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
    "vocab_size": 100, "max_position_embeddings": 64,
})  # fmt: skip
SHAPES = {
    "embedding.word.weight": (128, 32),
    **{
        f"layers.{i}.{name}": shape
        for i in range(2)
        for name, shape in {
            "attention_norm.weight": (32,),
            "attention.q.weight": (32, 32),
            "attention.k.weight": (16, 32),
            "attention.v.weight": (16, 32),
            "attention.proj.weight": (32, 32),
            "mlp_norm.weight": (32,),
            "mlp.gate.weight": (48, 32),
            "mlp.up.weight": (48, 32),
            "mlp.down.weight": (32, 48),
        }.items()
    },
    "final_norm.weight": (32,),
    "output.weight": (128, 32),
}
FORMATS = [name for name in WRITTEN_NAMES if not ALL_FORMATS[name].adapters]
"""Formats of whole models that are written."""
STEP = 30
ABOUT: dict[str, Any] = {
    "consumed_samples": 240,
    "tokens": 240 * 64,
    "optimizer_steps": 29,
    "tokenizer_fingerprint": "abc",
    "layout": {"tensor": 2},
    "config": {"model": dict(MODEL.keys), "seed": 7},
}


def value(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Another name has other values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))).to(dtype)


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return {f"model.{name}": value(name, shape, dtype) for name, shape in SHAPES.items()}


def everything() -> dict[str, Tensor]:
    """Weights in bf16, masters, moments, FP8 state: of shapes of no, one and two dims."""
    state = weights()
    for key in ("master", "exp_avg", "exp_avg_sq"):
        state |= {f"optimizer.{key}.{n}": value(key + n, shape, torch.float32) for n, shape in SHAPES.items()}
    state["fp8.layers.0.attention.qkv.input.scale"] = torch.tensor(0.25)
    state["fp8.layers.0.attention.qkv.input.amax_history"] = value("history", (16,), torch.float32)
    return state


def convert(source: CheckpointSource, sink: Sink) -> Path:
    """The whole of `source`; the path of the result."""
    for name in sink.begin(source, {}):
        sink.write(name, source.read(name))
    sink.finish()
    sink.publish()
    return sink.path


def make(folder: Path, tensors: Mapping[str, Tensor] | None = None) -> Path:
    """A checkpoint of a run in `folder`, and its path."""
    return save(folder / "checkpoints", STEP, everything() if tensors is None else tensors, ABOUT)
