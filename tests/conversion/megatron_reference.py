"""What Megatron-LM's ranks hold of a model, head by head from its public definition, and models to shard.

A rank of tensor-parallel rank r of t has, of an attention with a query heads in g groups of width d, the groups
[r·g/t, (r+1)·g/t): for each the rows of its query heads, of its key head, of its value head. Of a gated MLP it has its
shard of gate above its shard of up. `SelfAttention`, `MLP`, `GPTModel` in megatron/core say so.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.config import ModelConfig
from tests.conversion.families import RandomSource

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "head_dim": 6,
    "ffn_hidden_size": 24,
    "vocab_size": 50,
    "vocab_multiple": 8,
    "max_position_embeddings": 32,
}
MODELS = {
    "llama": TINY | {"num_attention_heads": 8, "num_query_groups": 4, "rope_theta": 5e5, "rope_scaling": {}},
    "gpt2": TINY
    | {
        "position_embedding": "learned",
        "normalization": "layernorm",
        "activation": "gelu_tanh",
        "linear_bias": True,
        "tie_embeddings": True,
    },
    "qwen2": TINY | {"num_query_groups": 2, "qkv_bias": True, "tie_embeddings": True, "norm_eps": 1e-6},
    "qwen3": TINY | {"num_query_groups": 2, "qk_norm": True, "sliding_window": 8, "full_attention_layers": [1, 3]},
    "swiglu, biases, sinks": TINY | {"linear_bias": True, "attention_sinks": True},
    "exact gelu": TINY | {"activation": "gelu", "linear_bias": True, "position_embedding": "none"},
}


def heads(x: Tensor, d: int) -> list[Tensor]:
    return list(x.split(d))


def fused_qkv(w: Mapping[str, Tensor], kind: str, model: ModelConfig, r: int, t: int) -> Tensor:
    d, per_group = model.channels, model.num_attention_heads // model.query_groups
    q, k, v = (heads(w[f"attention.{part}.{kind}"], d) for part in "qkv")
    rows = []
    for group in range(r * model.query_groups // t, (r + 1) * model.query_groups // t):
        rows += [*q[group * per_group : (group + 1) * per_group], k[group], v[group]]
    return torch.cat(rows)


def shard(x: Tensor, r: int, t: int, dim: int = 0) -> Tensor:
    return x.chunk(t, dim)[r]


def layer(w: Mapping[str, Tensor], model: ModelConfig, r: int, t: int, te: bool) -> dict[str, Tensor]:
    """One layer on tensor rank r of t; `w`: its whole tensors by our names."""
    first, second = "input_layernorm.", "pre_mlp_layernorm."
    if te:
        first, second = "self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"
    found = {}
    for kind in ("weight", "bias"):
        if f"attention_norm.{kind}" in w:
            found[first + kind] = w[f"attention_norm.{kind}"]
            found[second + kind] = w[f"mlp_norm.{kind}"]
        if f"attention.q.{kind}" in w:
            found[f"self_attention.linear_qkv.{kind}"] = fused_qkv(w, kind, model, r, t)
        if f"mlp.up.{kind}" in w:
            gate = [shard(w[f"mlp.gate.{kind}"], r, t)] if model.activation == "swiglu" else []
            found[f"mlp.linear_fc1.{kind}"] = torch.cat([*gate, shard(w[f"mlp.up.{kind}"], r, t)])
    found["self_attention.linear_proj.weight"] = shard(w["attention.proj.weight"], r, t, 1)
    found["mlp.linear_fc2.weight"] = shard(w["mlp.down.weight"], r, t, 1)
    if model.linear_bias:
        found["self_attention.linear_proj.bias"] = w["attention.proj.bias"]
        found["mlp.linear_fc2.bias"] = w["mlp.down.bias"]
    if model.attention_sinks:
        found["self_attention.core_attention.softmax_offset"] = shard(w["attention.sink.weight"], r, t)
    if model.qk_norm:
        found["self_attention.q_layernorm.weight"] = w["attention.q_norm.weight"]
        found["self_attention.k_layernorm.weight"] = w["attention.k_norm.weight"]
    return found


def stage(
    whole: Mapping[str, Tensor], model: ModelConfig, layers: range, r: int, t: int, *, te: bool, multiple: int
) -> dict[str, Tensor]:
    """`GPTModel.state_dict` of a stage; the vocabulary is padded with zeros to a multiple of t · `multiple`."""

    def padded(name: str) -> Tensor:
        rows = -(-TINY["vocab_size"] // (multiple * t)) * multiple * t
        x = whole[f"model.{name}.weight"]
        return shard(torch.cat([x, x.new_zeros(max(0, rows - len(x)), x.shape[1])])[:rows], r, t)

    found: dict[str, Tensor] = {}
    first, last = layers.start == 0, layers.stop == model.num_layers
    if first:
        found["embedding.word_embeddings.weight"] = padded("embedding.word")
        if model.position_embedding == "learned":
            found["embedding.position_embeddings.weight"] = whole["model.embedding.position.weight"]
    for here, i in enumerate(layers):
        prefix = f"model.layers.{i}."
        w = {name.removeprefix(prefix): x for name, x in whole.items() if name.startswith(prefix)}
        found |= {f"decoder.layers.{here}.{key}": x for key, x in layer(w, model, r, t, te).items()}
    if last:
        for kind in ("weight", "bias"):
            if f"model.final_norm.{kind}" in whole:
                found[f"decoder.final_layernorm.{kind}"] = whole[f"model.final_norm.{kind}"]
        if not model.tie_embeddings:
            found["output_layer.weight"] = padded("output")
        elif not first:
            found["output_layer.weight"] = padded("embedding.word")
    return found


def rank(
    whole: Mapping[str, Tensor],
    model: ModelConfig,
    r: int,
    p: int,
    layout: tuple[int, int, int],
    *,
    te: bool,
    multiple: int,
) -> dict[str, dict[str, Tensor]]:
    """The models in the file of tensor rank r, pipeline rank p, under `layout` (TP, PP, virtual PP)."""
    t, pipeline, virtual = layout
    per_stage = model.num_layers // (pipeline * virtual)
    found = {}
    for v in range(virtual):
        start = (v * pipeline + p) * per_stage
        layers = range(start, start + per_stage)
        key = "model" if virtual == 1 else f"model{v}"
        found[key] = stage(whole, model, layers, r, t, te=te, multiple=multiple)
    return found


def save(
    folder: Path,
    source: RandomSource,
    args: Mapping[str, Any],
    layout: tuple[int, int, int],
    *,
    te: bool = True,
    multiple: int = 8,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write what Megatron-LM would; the folder for its --load. `more`: besides arguments and weights in every file."""
    t, p, _ = layout
    sizes = {"tensor_model_parallel_size": t, "pipeline_model_parallel_size": p}
    for r in range(t):
        for s in range(p):
            name = f"mp_rank_{r:02d}" + (f"_{s:03d}" if p > 1 else "")
            path = folder / "iter_0000100" / name / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            models = rank(source.whole, source.model, r, s, layout, te=te, multiple=multiple)
            content = {"args": argparse.Namespace(**{**args, **sizes}), "checkpoint_version": 3.0, "iteration": 100}
            cut = {key: OrderedDict((n, x.clone()) for n, x in model.items()) for key, model in models.items()}
            torch.save({**content, **cut, **(more or {})}, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder
