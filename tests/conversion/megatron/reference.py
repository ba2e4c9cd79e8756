"""What Megatron-LM's ranks hold of a model, head by head from its public definition, and models to shard.

A rank of tensor-parallel rank r of t has, of an attention with a query heads in g groups of width d, the groups
[r·g/t, (r+1)·g/t): for each the rows of its query heads, of its key head, of its value head. Of a gated MLP it has its
shard of gate above its shard of up. Of e experts, rank x of n expert-parallel ranks has [x·e/n, (x+1)·e/n), each cut
like an MLP, and with the other ranks' copies of all else. `SelfAttention`, `MLP`, `SequentialMLP`, `TEGroupedMLP`,
`SharedExpertMLP`, `GPTModel`, `BertModel`, `BertLMHead`, `Pooler` in megatron/core say so.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.spec import ModelSpec
from tests.conversion.families import GROUPED_EXPERTS, RandomSource

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
        "hidden_dropout": 0.1,
        "attention_dropout": 0.2,
        "position_embedding": "learned",
        "normalization": "layernorm",
        "activation": "gelu_tanh",
        "linear_bias": True,
        "tie_embeddings": True,
    },
    "qwen2": TINY | {"num_query_groups": 2, "qkv_bias": True, "tie_embeddings": True, "norm_eps": 1e-6},
    "qwen3": TINY | {"num_query_groups": 2, "qk_norm": True, "sliding_window": 8, "full_attention_layers": [1, 3]},
    "swiglu, biases, sinks": TINY | {"linear_bias": True, "attention_sinks": True},
    "mixtral": TINY
    | {"num_query_groups": 2, "moe": {"num_experts": 4, "aux_loss": 0.01, "aux_loss_scope": "global_batch"}},
    "all of experts": TINY
    | {
        "moe": GROUPED_EXPERTS
        | {
            "top_k": 4,
            "ffn_hidden_size": 20,
            "latent_size": 8,
            "shared_ffn_hidden_size": 12,
            "shared_gate": True,
            "bias_update_rate": 0.01,
            "aux_loss": 0.02,
            "z_loss": 0.001,
        }
    },
    "exact gelu": TINY | {"activation": "gelu", "linear_bias": True, "position_embedding": "none"},
}
BERT: dict[str, Any] = TINY | {
    "architecture": "bert",
    "position_embedding": "learned",
    "normalization": "layernorm",
    "activation": "gelu_tanh",
    "transform_activation": "gelu",
    "linear_bias": True,
    "tie_embeddings": True,
    "token_types": 2,
    "binary_head": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
READ_ONLY = {"bert": BERT, "bert without pairs": BERT | {"token_types": 0, "binary_head": False, "activation": "gelu"}}


def heads(x: Tensor, d: int) -> list[Tensor]:
    return list(x.split(d))


def fused_qkv(w: Mapping[str, Tensor], kind: str, model: ModelSpec, r: int, t: int) -> Tensor:
    mixer = model.layers[0].mixer
    d, groups, per_group = mixer.channels, mixer.groups, mixer.num_attention_heads // mixer.groups
    q, k, v = (heads(w[f"attention.{part}.{kind}"], d) for part in "qkv")
    rows = []
    for group in range(r * groups // t, (r + 1) * groups // t):
        rows += [*q[group * per_group : (group + 1) * per_group], k[group], v[group]]
    return torch.cat(rows)


def shard(x: Tensor, r: int, t: int, dim: int = 0) -> Tensor:
    return x.chunk(t, dim)[r]


def mlp(w: Mapping[str, Tensor], name: str, r: int, t: int) -> tuple[Tensor, Tensor]:
    """linear_fc1 and linear_fc2 of a gated MLP."""
    gate, up = (shard(w[f"{name}.{part}.weight"], r, t) for part in ("gate", "up"))
    return torch.cat([gate, up]), shard(w[f"{name}.down.weight"], r, t, 1)


def experts(w: Mapping[str, Tensor], r: int, t: int, x: int, n: int, te: bool) -> dict[str, Tensor]:
    """The experts of a layer on tensor rank r of t and expert rank x of n, its router and shared expert."""
    found = {"mlp.router.weight": w["mlp.router.weight"]}
    per_rank = len(w["mlp.router.weight"]) // n
    for here in range(per_rank):
        for fc, weight in enumerate(mlp(w, f"mlp.experts.{x * per_rank + here}", r, t), 1):
            grouped, own = f"linear_fc{fc}.weight{here}", f"local_experts.{here}.linear_fc{fc}.weight"
            found[f"mlp.experts.{grouped if te else own}"] = weight
    if "mlp.router.bias" in w:
        found["mlp.router.expert_bias"] = w["mlp.router.bias"]
    if "mlp.latent_down.weight" in w:
        found["mlp.fc1_latent_proj.weight"] = w["mlp.latent_down.weight"]
        found["mlp.fc2_latent_proj.weight"] = w["mlp.latent_up.weight"]
    if "mlp.shared.up.weight" in w:
        for fc, weight in enumerate(mlp(w, "mlp.shared", r, t), 1):
            found[f"mlp.shared_experts.linear_fc{fc}.weight"] = weight
        found["mlp.shared_experts.gate_weight"] = w["mlp.shared_gate.weight"]
    return found


def layer(
    w: Mapping[str, Tensor], model: ModelSpec, r: int, t: int, te: bool, x: int = 0, n: int = 1
) -> dict[str, Tensor]:
    """One layer on tensor rank r of t, expert rank x of n; `w`: its whole tensors by our names."""
    first, second = "input_layernorm.", "pre_mlp_layernorm."
    sparse = "mlp.router.weight" in w
    if te:
        first = "self_attention.linear_qkv.layer_norm_"
        second = second if sparse else "mlp.linear_fc1.layer_norm_"
    found = {}
    for kind in ("weight", "bias"):
        if f"attention_norm.{kind}" in w:
            found[first + kind] = w[f"attention_norm.{kind}"]
            found[second + kind] = w[f"mlp_norm.{kind}"]
        if f"attention.q.{kind}" in w:
            found[f"self_attention.linear_qkv.{kind}"] = fused_qkv(w, kind, model, r, t)
        if f"mlp.up.{kind}" in w:
            gate = [shard(w[f"mlp.gate.{kind}"], r, t)] if model.layers[0].ffn.activation == "swiglu" else []
            found[f"mlp.linear_fc1.{kind}"] = torch.cat([*gate, shard(w[f"mlp.up.{kind}"], r, t)])
    found["self_attention.linear_proj.weight"] = shard(w["attention.proj.weight"], r, t, 1)
    if sparse:
        found |= experts(w, r, t, x, n, te)
    else:
        found["mlp.linear_fc2.weight"] = shard(w["mlp.down.weight"], r, t, 1)
    if model.mlp_bias:
        found["self_attention.linear_proj.bias"] = w["attention.proj.bias"]
        found["mlp.linear_fc2.bias"] = w["mlp.down.bias"]
    if model.layers[0].mixer.attention_sinks:
        found["self_attention.core_attention.softmax_offset"] = shard(w["attention.sink.weight"], r, t)
    if model.layers[0].mixer.qk_norm:
        found["self_attention.q_layernorm.weight"] = w["attention.q_norm.weight"]
        found["self_attention.k_layernorm.weight"] = w["attention.k_norm.weight"]
    return found


def stage(
    whole: Mapping[str, Tensor],
    model: ModelSpec,
    layers: range,
    r: int,
    t: int,
    x: int,
    n: int,
    *,
    te: bool,
    multiple: int,
) -> dict[str, Tensor]:
    """`state_dict` of a stage of GPTModel or BertModel; the vocabulary is padded with zeros to a multiple of
    t · `multiple`."""
    bert = model.architecture == "bert"
    stack = "encoder" if bert else "decoder"

    def padded(name: str, kind: str = "weight") -> Tensor:
        rows = -(-model.stem.known_vocab_size // (multiple * t)) * multiple * t
        x = whole[f"model.{name}.{kind}"]
        return shard(torch.cat([x, x.new_zeros(max(0, rows - len(x)), *x.shape[1:])])[:rows], r, t)

    found: dict[str, Tensor] = {}
    first, last = layers.start == 0, layers.stop == model.num_layers
    if first:
        found["embedding.word_embeddings.weight"] = padded("embedding.word")
        if model.stem.position_embedding == "learned":
            found["embedding.position_embeddings.weight"] = whole["model.embedding.position.weight"]
        if model.stem.token_types:
            found["embedding.tokentype_embeddings.weight"] = whole["model.embedding.token_type.weight"]
    for here, i in enumerate(layers):
        prefix = f"model.layers.{i}."
        w = {name.removeprefix(prefix): x for name, x in whole.items() if name.startswith(prefix)}
        found |= {f"{stack}.layers.{here}.{key}": x for key, x in layer(w, model, r, t, te, x, n).items()}
    if last:
        for kind in ("weight", "bias"):
            if f"model.final_norm.{kind}" in whole:
                found[f"{stack}.final_layernorm.{kind}"] = whole[f"model.final_norm.{kind}"]
        if not model.head.tied:
            found["output_layer.weight"] = padded("output")
        elif not first:
            found["output_layer.weight"] = padded("embedding.word")
        heads = {"transform": "lm_head.dense", "transform_norm": "lm_head.layer_norm"} if bert else {}
        heads |= {"pooler": "pooler.dense", "binary_head": "binary_head"} if model.head.binary else {}
        for ours, theirs in heads.items():
            found |= {f"{theirs}.{kind}": whole[f"model.{ours}.{kind}"] for kind in ("weight", "bias")}
        if bert:
            found["output_layer.bias"] = padded("output", "bias")
    return found


def rank(
    whole: Mapping[str, Tensor],
    model: ModelSpec,
    r: int,
    p: int,
    x: int,
    layout: tuple[int, ...],
    *,
    te: bool,
    multiple: int,
) -> dict[str, dict[str, Tensor]]:
    """The models in the file of tensor rank r, pipeline rank p, expert rank x, under `layout`."""
    t, pipeline, virtual, n = *layout, *[1] * (4 - len(layout))
    per_stage = model.num_layers // (pipeline * virtual)
    found = {}
    for v in range(virtual):
        start = (v * pipeline + p) * per_stage
        layers = range(start, start + per_stage)
        key = "model" if virtual == 1 else f"model{v}"
        found[key] = stage(whole, model, layers, r, t, x, n, te=te, multiple=multiple)
    return found


def folders(layout: tuple[int, ...]) -> dict[tuple[int, int, int], str]:
    """Tensor, pipeline and expert rank of each file under `layout` (TP, PP, virtual PP, EP), and its folder."""
    t, p, _, n = *layout, *[1] * (4 - len(layout))
    return {
        (r, s, x): f"mp_rank_{r:02d}" + (f"_{s:03d}" if p > 1 else "") + (f"_{x:03d}" if n > 1 else "")
        for r in range(t)
        for s in range(p)
        for x in range(n)
    }


def save(
    folder: Path,
    source: RandomSource,
    args: Mapping[str, Any],
    layout: tuple[int, ...],
    *,
    te: bool = True,
    multiple: int = 8,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write what Megatron-LM would; the folder for its --load. `more`: besides arguments and weights in every file."""
    sizes = {"tensor_model_parallel_size": layout[0], "pipeline_model_parallel_size": layout[1]}
    if len(layout) == 4:
        sizes["expert_model_parallel_size"] = layout[3]
    for ranks, name in folders(layout).items():
        path = folder / "iter_0000100" / name / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        models = rank(source.whole, source.model, *ranks, layout, te=te, multiple=multiple)
        content = {"args": argparse.Namespace(**{**args, **sizes}), "checkpoint_version": 3.0, "iteration": 100}
        cut = {key: OrderedDict((n, x.clone()) for n, x in model.items()) for key, model in models.items()}
        torch.save({**content, **cut, **(more or {})}, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def chosen(logits_ne: Tensor, args: Mapping[str, Any], bias_e: Tensor | None) -> Tensor:
    """Each token's weight for each expert, zero for those not chosen (`topk_routing_with_score_function`)."""
    k, groups, top = args["moe_router_topk"], args.get("moe_router_num_groups"), args.get("moe_router_group_topk")
    sigmoid, pre = args.get("moe_router_score_function") == "sigmoid", args.get("moe_router_pre_softmax")
    scores_ne = logits_ne.sigmoid() if sigmoid else logits_ne.softmax(1) if pre else logits_ne
    rows = []
    for scores in scores_ne:
        ranked = scores if bias_e is None else scores + bias_e
        allowed = range(len(scores))
        if top:
            members = [range(g * len(scores) // groups, (g + 1) * len(scores) // groups) for g in range(groups)]
            totals = [sum(sorted((float(ranked[e]) for e in of), reverse=True)[: k // top]) for of in members]
            best = sorted(range(groups), key=lambda g: -totals[g])[:top]
            allowed = [e for g in best for e in members[g]]
        experts = sorted(allowed, key=lambda e: -float(ranked[e]))[:k]
        values = scores[experts]
        if sigmoid and k > 1:
            values = values / values.sum()
        elif not sigmoid and not pre:
            values = values.softmax(0)
        row = torch.zeros_like(scores)
        row[experts] = values * (args.get("moe_router_topk_scaling_factor") or 1.0)
        rows.append(row)
    return torch.stack(rows)
