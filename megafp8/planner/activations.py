"""Bytes that a block saves for its backward pass, tensor by tensor, on one rank and for one micro-batch.

These follow what the autograd Functions of `megafp8.ops` save, each storage once (q, k and v are views of one). Where
the CPU and CUDA differ, this is CUDA. Recompute and offload are those of `megafp8.models.recompute`.

Shapes: m tokens of a micro-batch, m_own of them on this rank between tensor-parallel regions; h hidden, a query and g
key-value heads of width d, f MLP width, all of this rank; e bytes of an element, w of a statistic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megafp8.config import Config, LatentAttentionConfig
from megafp8.config.activations import ACTIVATIONS
from megafp8.expert_parallel.own_rows import MARGIN
from megafp8.fp8 import Fp8Manager
from megafp8.fp8.recipes.base import OPERANDS, OperandName
from megafp8.fp8.tensor import Granularity
from megafp8.models.build import build_stage
from megafp8.models.context import planning_context
from megafp8.models.gpt import cross_layer_sizes, expert_layer_sizes, fp8_layer_sizes
from megafp8.models.recompute import BlockMemory, block_memory
from megafp8.plan import LinearPlan
from megafp8.planner.stages import stages_of

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


class PlannedFp8(Fp8Manager):
    """A manager of plans that are known: `planned`, by layer, has those of some block of the same kind, with its names.

    `like`: the first block of the same kind for each block.
    """

    def __init__(self, of: Fp8Manager, plans: Mapping[str, LinearPlan], like: Mapping[int, int]) -> None:
        super().__init__(of.recipe, amax_group=None, include=of.include, exclude=of.exclude)
        self.planned, self.like = plans, like


def layer_plans(config: Config, fp8: Fp8Manager) -> Mapping[str, LinearPlan]:
    """Plans of the model's linear layers by name; unless `fp8` has any, the model is constructed on the meta device.

    It is constructed with few channels: plans do not depend on their number, and an absurd one cannot be constructed.
    """
    if isinstance(fp8, PlannedFp8):
        return fp8.planned
    if not fp8.plans:
        for layers in stages_of(config)[1]:
            _build(config, fp8, layers, block_memory(config.parallel, len(layers)))
    return {plan.name: plan for plan in fp8.plans}


def _build(config: Config, fp8: Fp8Manager, layers: range, memory: Sequence[BlockMemory]) -> None:
    """Construct a narrow model of `layers` on the meta device, which plans them."""
    t = config.parallel.tensor
    few = {"num_attention_heads": t, "num_query_groups": t, "head_dim": 8, "vocab_size": t, "vocab_multiple": 1}
    sizes: dict[str, Any] = {"hidden_size": 8 * t, "ffn_hidden_size": 8 * t, "max_position_embeddings": 1} | few
    if (moe := config.model.moe) is not None:
        narrow = {"ffn_hidden_size": 8, "shared_ffn_hidden_size": moe.shared_ffn_hidden_size and 8 * t}
        sizes["moe"] = moe.model_copy(update=narrow)
    model, context = config.model.model_copy(update=sizes), planning_context(config, fp8)
    build_stage(model, context, layers=layers, positions=1, memory=memory)


class Kinds:
    """Blocks of one model and selection of FP8 layers, in any layout: what is known of them is computed once.

    `names`: the linear layers of each block, of alike experts the first. `places`: the same number for blocks whose
    plans differ by the layout only. `plans`: by layout, then by place and recompute; filled by `planned_fp8`.
    """

    def __init__(self, config: Config, fp8: Fp8Manager) -> None:
        model, self.fp8 = config.model, fp8
        self.names: dict[int, list[str]] = {}
        self.places: dict[int, int] = {}
        self.plans: dict[tuple[Any, ...], dict[tuple[int, BlockMemory], list[LinearPlan]]] = {}
        first: dict[tuple[Any, ...], int] = {}
        for index in model.layers:
            at = range(index, index + 1)
            names = [*fp8_layer_sizes(model, 1, at), *cross_layer_sizes(model, 1, at)]
            names += [name for name in expert_layer_sizes(model, 1, index) if ".experts.0." in name]
            selected = (*((fp8.selects(x), fp8.recipe and fp8.recipe.operands(x)) for x in names), len(names))
            ends = (index == 0, model.is_decoder(index), index >= model.num_blocks, model.window_of(index))
            self.names[index], self.places[index] = names, first.setdefault((*ends, *selected), index)


def planned_fp8(config: Config, kinds: Kinds) -> PlannedFp8:
    """The manager of `kinds` with the plans of `config`; of alike blocks one is constructed, unless `kinds` has it."""
    p, t, of = config.parallel, config.training, kinds.fp8
    layout: tuple[Any, ...] = (p.tensor, p.sequence_parallel, p.context, p.expert, p.expert_tensor, p.expert_dispatch)
    layout += (p.zero, p.fsdp, config.fp8.param_gather, t.micro_batch_size, t.seq_length, p.overlap_tensor)
    plans: dict[str, LinearPlan] = {}
    like: dict[int, int] = {}
    first: dict[tuple[int, BlockMemory], int] = {}
    known = kinds.plans.setdefault(layout, {})
    for layers in stages_of(config)[1]:
        for index, memory in zip(layers, block_memory(p, len(layers))):
            kind, names = (kinds.places[index], memory), kinds.names[index]
            if kind not in known:
                own = Fp8Manager(of.recipe, amax_group=None, include=of.include, exclude=of.exclude)
                own.smooth_swiglu = of.smooth_swiglu
                _build(config, own, range(index, index + 1), [memory])
                found = {plan.name: plan for plan in own.plans}
                known[kind] = [found[name] for name in names]
            like[index] = first.setdefault(kind, index)
            plans.update(zip(names, known[kind]))
    return PlannedFp8(of, plans, like)


def kind_of(fp8: Fp8Manager, index: int) -> int:
    """The first block that is like block `index`, as far as is known."""
    return fp8.like[index] if isinstance(fp8, PlannedFp8) else index


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


def saved_by_block(config: Config, fp8: Fp8Manager, index: int, memory: BlockMemory) -> dict[str, int]:
    """Bytes that block `index` saves for its backward pass, offloaded or not; of cross attention at most these."""
    plans, x_encoder, config = layer_plans(config, fp8), sizes(config), at_layer(config, index)
    x, model = sizes(config), config.model
    stream, ahead = x.m_own * x.h * x.e, index >= model.num_blocks
    tokens = {"tokens": 8 * x.m} if ahead else {}  # int64, of the embedding
    if memory.full:
        return {"block input": stream * (2 if ahead else 1), **tokens}
    layers = fp8_layer_sizes(model, config.parallel.tensor, range(index, index + 1))
    ups, proj, mlp = _by_place([plans[layer] for layer in layers], latent=model.latent_attention is not None)
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
        saved["cross attention"] = stream + statistics + _saved_by_cross(fp8, plans, index, x, x_encoder, memory)
    experts = expert_layers(config, fp8, index)
    if experts is not None:
        # The router's input is the norm's output, which a shared expert may save too.
        shares_input = bool(mlp) and mlp[0].saved == "high" and x.m == x.m_own
        saved |= _saved_by_experts(config, fp8, experts, shares_input=shares_input)
    return saved


def _saved_by_cross(
    fp8: Fp8Manager, plans: Mapping[str, LinearPlan], index: int, x: Sizes, x_encoder: Sizes, memory: BlockMemory
) -> int:
    """Of cross attention without its norm; what layers share of the encoder's output is counted for each."""
    q, kv, proj = (plans[f"layers.{index}.cross_attention.{part}"] for part in ("q", "kv", "proj"))
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
    micro-batch if the load is even; inputs k, outputs n and plan of the first layer of each, and of the second."""

    experts: int
    rows: int
    up: tuple[int, int]
    up_plan: LinearPlan
    down: tuple[int, int]
    down_plan: LinearPlan

    @property
    def layers(self) -> tuple[tuple[tuple[int, int], LinearPlan], ...]:
        return (self.up, self.up_plan), (self.down, self.down_plan)


def expert_layers(config: Config, fp8: Fp8Manager, index: int) -> ExpertLayers | None:
    """Those of layer `index`; None where it has an MLP."""
    moe, plans = config.model.moe_of(index), layer_plans(config, fp8)
    if moe is None:
        return None
    p = config.parallel
    sizes_of_all = expert_layer_sizes(config.model, p.expert_tensor, index)
    up, down = (name for name in sizes_of_all if ".experts.0." in name)
    experts, rows = moe.num_experts // p.expert, sizes(config).m_own * moe.top_k * p.expert_tensor
    if p.expert_ranks > 1 and config.gathers_tokens and _has_graphs(config):
        rows = int(rows * MARGIN)
    up_plan, down_plan = (replace(plans[name], name=name) for name in (up, down))
    return ExpertLayers(experts, rows, sizes_of_all[up], up_plan, sizes_of_all[down], down_plan)


def _has_graphs(config: Config) -> bool:
    """Whether steps of experts on CUDA are replayed, as far as is known without asking the recipe."""
    return config.training.cuda_graphs is not False and config.training.precision == "bf16"


def _saved_expert_input(config: Config, fp8: Fp8Manager, own: ExpertLayers, k: int, plan: LinearPlan) -> int:
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
        "expert input": _saved_expert_input(config, fp8, own, own.up[0], own.up_plan),
        "expert up output": rows * own.up[1] * x.e,
        "expert down input": _saved_expert_input(config, fp8, own, own.down[0], own.down_plan),
        "expert output": rows * x.h * x.e,
        "experts of rows": rows * own.experts * x.e * config.model.linear_bias,
        "expert sizes": 0 if own.up_plan.fp8 else 4 * own.experts,
    }


def block_backward(config: Config, fp8: Fp8Manager, index: int) -> int:
    """Bytes that the backward of block `index` needs at most beside what is saved: in its MLP, or in its experts.

    These are the gradients of the activation's output and input, the latter FP8 in both orientations if it is fused
    with the cast, and of the residual stream, sharded and gathered. Dropout's mask is not stored, but behind it the
    gradient of the MLP's output is another tensor than that of the residual stream.
    """
    x, kind = sizes(at_layer(config, index)), ACTIVATIONS[config.model.activation]
    experts = expert_layers(config, fp8, index)
    stream = x.m_own * x.h * x.e * (2 if config.model.hidden_dropout else 1)
    if experts is not None:
        return experts.rows * (sum(experts.up) + sum(experts.down)) * x.e + stream
    fused = layer_plans(config, fp8)[f"layers.{index}.mlp.{kind.up_layer}"].grad_output == "fused"
    return x.m * x.f * x.e + x.m * x.up * (2 if fused else x.e) + stream + x.m * x.h * x.e


def deferred_wgrad(config: Config, fp8: Fp8Manager, index: int) -> int:
    """Bytes of the operands of block `index`'s weight gradients, for schedules that compute these separately: of each
    linear layer the input and the output's gradient, columnwise in FP8."""
    plans, total, at = layer_plans(config, fp8), 0, range(index, index + 1)
    x, encoder, t = sizes(at_layer(config, index)), sizes(config), config.parallel.tensor
    for name, (k, n) in (fp8_layer_sizes(config.model, t, at) | cross_layer_sizes(config.model, t, at)).items():
        tokens = encoder.m if name.endswith(".kv") else x.m
        total += tokens * (k + n) * (x.e if plans[name].gemms[2] == "high" else 1)
    experts = expert_layers(config, fp8, index)
    if experts is not None:
        total += sum(experts.rows * (k + n) * (x.e if p.gemms[2] == "high" else 1) for (k, n), p in experts.layers)
    return total
