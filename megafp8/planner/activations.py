"""Bytes that a block saves for its backward pass, tensor by tensor, on one rank and for one micro-batch.

These follow what the autograd Functions of `megafp8.ops` save, each storage once (q, k and v are views of one). Where
the CPU and CUDA differ, this is CUDA. Recompute and offload are those of `megafp8.models.recompute`.

Shapes: m tokens of a micro-batch, m_own of them on this rank between tensor-parallel regions; h hidden, a query and g
key-value heads of width d, f MLP width, all of this rank; e bytes of an element, w of a statistic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megafp8.config import Config, LatentAttentionConfig
from megafp8.config.activations import ACTIVATIONS
from megafp8.expert_parallel.own_rows import MARGIN
from megafp8.fp8 import Fp8Manager
from megafp8.fp8.recipes.base import OPERANDS, OperandName
from megafp8.fp8.tensor import Granularity
from megafp8.models.recompute import BlockMemory
from megafp8.plan import LinearPlan, LinearSite
from megafp8.planner.outline import LinearLayer, ModelOutline

ELEMENT = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
"""Bytes of an element, by the name of its dtype in a config."""


@dataclass(frozen=True)
class Sizes:
    """A rank's shard of a block and of a micro-batch; see Shapes."""

    m: int
    m_own: int
    h: int
    a: int
    g: int
    d: int
    f: int
    up: int  # outputs of the MLP's first linear layer
    e: int
    w: int


def sizes(config: Config) -> Sizes:
    model, t, training = config.model, config.parallel.tensor, config.training
    m = training.seq_length // config.parallel.context * training.micro_batch_size
    e = ELEMENT[training.precision]
    return Sizes(
        m=m,
        m_own=m // t if config.parallel.sequence_parallel else m,
        h=model.hidden_size,
        a=model.num_attention_heads // t,
        g=model.query_groups // t,
        d=model.channels,
        f=model.ffn_size // t,
        up=ACTIVATIONS[model.activation].up_width(model.ffn_size) // t,
        e=e,
        w=max(4, e),
    )


def at_layer(config: Config, index: int) -> Config:
    """`config` with the number of tokens of layer `index`, which in T5's decoder is another."""
    if not config.model.is_decoder(index):
        return config
    lengths = {"seq_length": config.decoder_length, "decoder_seq_length": config.decoder_length}
    return config.model_copy(update={"training": config.training.model_copy(update=lengths)})


def own_decoder_tokens(config: Config) -> int:
    """Tokens of T5's decoder on this rank between tensor-parallel regions; else 0."""
    return 0 if config.decoder_length is None else sizes(at_layer(config, config.model.num_layers)).m_own


def granularity(fp8: Fp8Manager, layer: str, operand: OperandName) -> Granularity:
    """Which elements of an operand of an FP8 layer share a scale."""
    recipes = fp8.recipe.operands(layer) if fp8.recipe is not None else None
    assert recipes is not None
    return recipes[OPERANDS.index(operand)].granularity(operand)


def fp8_bytes(granularity: Granularity, r: int, c: int) -> int:
    """Bytes of an FP8 matrix `[r, c]` with its scales."""
    return r * c + 4 * (math.prod(granularity.grid(r, c)) + granularity.two_level)


def _saved_input(fp8: Fp8Manager, plan: LinearPlan, k: int, x: Sizes) -> int:
    """Bytes that a linear layer saves of its input, k channels of this rank."""
    if plan.saved == "recompute":
        return 0
    if plan.saved == "high":
        return x.m * k * x.e
    tokens = x.m_own if plan.saved == "columnwise shard" else x.m
    return fp8_bytes(granularity(fp8, plan.name, "input"), k, tokens)


def saved_by_block(outline: ModelOutline, index: int, memory: BlockMemory) -> dict[str, int]:
    """Bytes that block `index` saves for its backward pass, offloaded or not; of cross attention at most these."""
    fp8, x_encoder, config = outline.fp8, sizes(outline.config), at_layer(outline.config, index)
    in_block = [x.plan for x in outline.layers[index].in_block]
    cross = [plan for plan in in_block if ".cross_attention." in plan.name]
    x, model = sizes(config), config.model
    stream, ahead = x.m_own * x.h * x.e, index >= model.num_blocks
    tokens = {"tokens": 8 * x.m} if ahead else {}  # int64, of the embedding
    if memory.full:
        return {"block input": stream * (2 if ahead else 1), **tokens}
    others = [plan for plan in in_block if plan not in cross]
    ups, proj, mlp = _by_place(others, latent=model.latent_attention is not None)
    statistics = x.m_own * x.w * (2 if model.normalization == "layernorm" else 1)
    sums, branches = 1 if model.parallel_block else 2, 2 * (model.norm_position in ("output", "both"))
    saved = {
        # Where attention and MLP read it without a norm between, it is among their inputs.
        "residual stream": stream * sums * (model.norm_position != "output"),
        "norm statistics": 2 * statistics * (model.norm_position != "output") + branches * statistics,
        "outputs before their norms": branches * stream,
        **tokens,
    }
    if ahead:  # inputs of three more norms and of the projection
        saved["multi-token prediction"] = 5 * stream + 3 * statistics
    if model.latent_attention is None:
        saved["qkv input"] = _saved_input(fp8, ups[0], x.h, x)
        saved["q, k, v"] = x.m * (x.a + 2 * x.g) * x.d * x.e
    else:
        saved |= _saved_by_latents(model.latent_attention, fp8, ups, x)
        latent, of_head = model.latent_attention, 3 * x.d  # values padded to the width of keys
        if memory.attention:  # what they are made of, and the rotary key of all heads
            of_head = x.d + latent.nope_head_dim + latent.value_head_dim
            saved["rotary key"] = x.m * latent.rope_head_dim * x.e
        saved["q, k, v"] = x.m * x.a * of_head * x.e
    narrower = model.value_channels < x.d  # then the output is cut off for the projection
    if not memory.attention or (proj.saved == "high" and not narrower):  # also the projection's input
        saved["attention output"] = x.m * x.a * x.d * x.e
    if not memory.attention:
        saved["attention log-sums"] = x.m * x.a * x.w
        if model.qk_norm == "projection":
            saved["q and k after their norms"] = x.m * ((x.a + x.g) * x.d * x.e + 2 * x.w)
        elif model.qk_norm:
            saved["q and k before and after their norms"] = x.m * (x.a + x.g) * (2 * x.d * x.e + x.w)
    if proj.saved != "high" or narrower:
        saved["proj input"] = _saved_input(fp8, proj, x.a * model.value_channels, x)
    if mlp:
        saved |= _saved_by_mlp(config, fp8, mlp, _mlp_width(config, index))
    if model.is_decoder(index):
        saved["cross attention"] = stream + statistics + _saved_by_cross(fp8, cross, x, x_encoder, memory)
    experts = expert_layers(outline, index)
    if experts is not None:
        # The router's input is the norm's output, which a shared expert may save too.
        shares_input = bool(mlp) and mlp[0].saved == "high" and x.m == x.m_own
        saved |= _saved_by_experts(config, fp8, experts, shares_input=shares_input)
    return saved


def _saved_by_cross(
    fp8: Fp8Manager, plans: Sequence[LinearPlan], x: Sizes, x_encoder: Sizes, memory: BlockMemory
) -> int:
    """Of cross attention without its norm; what layers share of the encoder's output is counted for each."""
    q, kv, proj = plans
    inputs = _saved_input(fp8, q, x.h, x) + _saved_input(fp8, kv, x.h, x_encoder)
    inputs += _saved_input(fp8, proj, x.a * x.d, x)
    heads = x.m * x.a * x.d * x.e + 2 * x_encoder.m * x.g * x.d * x.e
    return inputs + heads + (0 if memory.attention else x.m * x.a * (x.d * x.e * (proj.saved != "high") + x.w))


def _by_place(
    plans: Sequence[LinearPlan], *, latent: bool
) -> tuple[Sequence[LinearPlan], LinearPlan, Sequence[LinearPlan]]:
    """The plans of a block's linear layers: before attention, after it, and of its MLP."""
    before = 2 if latent else 1
    return plans[:before], plans[before], plans[before + 1 :]


def _saved_by_latents(
    latent: LatentAttentionConfig, fp8: Fp8Manager, ups: Sequence[LinearPlan], x: Sizes
) -> dict[str, int]:
    """Of the input and the latents, before attention itself."""
    ranks = [rank for rank in (latent.q_rank, latent.kv_rank) if rank is not None]
    up_inputs = [_saved_input(fp8, plan, rank, x) for plan, rank in zip(ups[-len(ranks) :], ranks, strict=True)]
    if latent.q_rank is None and not (ups[0].saved == "high" and x.m == x.m_own):  # else it is the latents' input
        up_inputs.append(_saved_input(fp8, ups[0], x.h, x))
    return {
        "latents' input": x.m_own * x.h * x.e,
        "latents": x.m_own * sum(ranks) * x.e,
        "statistics of their norms": len(ranks) * x.m_own * x.w,
        "up inputs": sum(up_inputs),
    }


def _mlp_width(config: Config, index: int) -> int:
    """Width of the MLP of a layer, or of its shared expert, on a rank; 0 if it has neither."""
    moe = config.model.moe_of(index)
    return (config.model.ffn_size if moe is None else moe.shared_ffn_hidden_size or 0) // config.parallel.tensor


def _saved_by_mlp(config: Config, fp8: Fp8Manager, mlp: Sequence[LinearPlan], f: int) -> dict[str, int]:
    x, kind, (up, down) = sizes(config), ACTIVATIONS[config.model.activation], mlp
    saved = {"up input": _saved_input(fp8, up, x.h, x), "up output": x.m * kind.up_width(f) * x.e}
    if kind.gated and not kind.fused:
        saved["activated gate"] = x.m * f * x.e
    saved["down input"] = _saved_input(fp8, down, f, x)
    return saved


class ExpertLayers(NamedTuple):
    """The linear layers of a rank's experts, which are alike: `experts` of them, with room for `rows` in all of a
    micro-batch if the load is even; the first layer of each, and the second."""

    experts: int
    rows: int
    up: LinearLayer
    down: LinearLayer


def expert_layers(outline: ModelOutline, index: int) -> ExpertLayers | None:
    """Those of layer `index`; None where it has an MLP."""
    if not outline.layers[index].of_experts:
        return None
    up, down = outline.layers[index].of_experts
    config, p, moe = outline.config, outline.config.parallel, outline.config.model.moe
    assert moe is not None
    rows = sizes(config).m_own * moe.top_k * p.expert_tensor
    if p.expert_ranks > 1 and config.gathers_tokens and _has_graphs(config):
        rows = int(rows * MARGIN)
    return ExpertLayers(up.copies, rows, up, down)


def _has_graphs(config: Config) -> bool:
    """Whether steps of experts on CUDA are replayed, as far as is known without asking the recipe."""
    return config.training.cuda_graphs is not False and config.training.precision == "bf16"


def _saved_expert_input(config: Config, fp8: Fp8Manager, own: ExpertLayers, layer: LinearLayer) -> int:
    plan, k = layer.plan, layer.site.inputs
    if plan.saved == "high":
        return own.rows * k * ELEMENT[config.training.precision]
    return own.experts * fp8_bytes(granularity(fp8, plan.name, "input"), k, own.rows // own.experts)


def _saved_by_experts(config: Config, fp8: Fp8Manager, own: ExpertLayers, *, shares_input: bool) -> dict[str, int]:
    """Of a layer's router and experts, if the load is even. `shares_input`: the router's input is saved already."""
    x, rows, moe = sizes(config), own.rows, config.model.moe
    assert moe is not None
    e, b = moe.num_experts, config.training.micro_batch_size
    of_token = x.h * x.e * (not shares_input) + (e + (e + 1) * (moe.z_loss > 0)) * x.w  # input, scores, logits
    of_token += moe.top_k * (8 + x.w)  # indices and weights of experts
    of_token += (1 + moe.top_k) * x.w * moe.normalize
    return {
        "router": x.m_own * of_token + b * (1 + e) * x.w * (moe.aux_loss > 0) + 8 * (2 * e + 3),
        "rows of experts": 8 * rows,  # int64 indices
        "expert input": _saved_expert_input(config, fp8, own, own.up),
        "expert up output": rows * own.up.site.outputs * x.e,
        "expert down input": _saved_expert_input(config, fp8, own, own.down),
        "expert output": rows * x.h * x.e,
        "experts of rows": rows * own.experts * x.e * config.model.linear_bias,
        "expert sizes": 0 if own.up.plan.fp8 else 4 * own.experts,
    }


def block_backward(outline: ModelOutline, index: int) -> int:
    """Bytes that the backward of block `index` needs at most beside what is saved: in its MLP, or in its experts.

    These are the gradients of the activation's output and input, the latter FP8 in both orientations if it is fused
    with the cast, and of the residual stream, sharded and gathered. Dropout's mask is not stored, but behind it the
    gradient of the MLP's output is another tensor than that of the residual stream.
    """
    config = outline.config
    x, kind = sizes(at_layer(config, index)), ACTIVATIONS[config.model.activation]
    experts = expert_layers(outline, index)
    stream = x.m_own * x.h * x.e * (2 if config.model.hidden_dropout else 1)
    if experts is not None:
        widths = sum(layer.site.inputs + layer.site.outputs for layer in (experts.up, experts.down))
        return experts.rows * widths * x.e + stream
    (up,) = (y.plan for y in outline.layers[index].in_block if y.plan.name.endswith(f".mlp.{kind.up_layer}"))
    fused = up.grad_output == "fused"
    return x.m * x.f * x.e + x.m * x.up * (2 if fused else x.e) + stream + x.m * x.h * x.e


def deferred_wgrad(outline: ModelOutline, index: int) -> int:
    """Bytes of the operands of block `index`'s weight gradients, for schedules that compute these separately: of each
    linear layer the input and the output's gradient, columnwise in FP8."""
    x, total = sizes(at_layer(outline.config, index)), 0
    for layer in outline.layers[index].in_block:
        element = x.e if layer.plan.gemms[2] == "high" else 1
        total += tokens_of(layer.site, x) * (layer.site.inputs + layer.site.outputs) * element
    experts = expert_layers(outline, index)
    if experts is not None:
        for layer in (experts.up, experts.down):
            element = x.e if layer.plan.gemms[2] == "high" else 1
            total += experts.rows * (layer.site.inputs + layer.site.outputs) * element
    return total


def tokens_of(site: LinearSite, x: Sizes) -> int:
    """Tokens of a micro-batch that a linear layer of a block computes on this rank."""
    if site.tokens is None:  # whole on each rank, of the tokens between tensor-parallel regions
        return x.m_own
    return site.tokens * (site.tensor_parallel if site.sequence_parallel else 1)
