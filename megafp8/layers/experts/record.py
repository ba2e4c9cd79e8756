"""Experts instead of the MLP of a layer: their keys and rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from megafp8.host.problems import Problem, divisors
from megafp8.layers.activation.record import ActivationName
from megafp8.layers.mlp.record import MEGATRON_LINEARS, MlpConfig
from megafp8.section import Channels, Count, Experts, NonNegative, PositiveFloat, PositiveInt, Section
from megafp8.spec import ModelSection, PartRecord, RunConfig


class MoeKeys(Section):
    """The keys of a layer with experts."""

    num_experts: Experts = 1
    """Number of experts of a layer."""
    top_k: Experts = 2
    """Number of experts that the router chooses for each token."""
    ffn_hidden_size: Channels | None = None
    """Inner width of an expert. Default: model.ffn_hidden_size."""
    shared_ffn_hidden_size: Channels | None = None
    """Inner width of a shared expert, an MLP that every token passes (DeepSeek, Qwen2-MoE). Default: none."""
    latent_size: Channels | None = None
    """Experts read and give tokens of this width: a projection that all experts share comes before them, and one behind
    their weighted sum (LatentMoE of Nemotron 3 Super and Ultra; moe_latent_size). Router and shared expert read whole
    tokens. Ranks send each other this width. Default: hidden_size, without projections."""
    shared_gate: bool = False
    """Multiply the shared expert's output by the sigmoid of a learned projection of the token (Qwen2-MoE)."""
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """Function of the router's logits: softmax over all experts, or of each sigmoid (DeepSeek-V3) or the square root of
    softplus (DeepSeek-V4)."""
    normalize: bool = True
    """Divide the scores of a token's chosen experts by their sum (Hugging Face's norm_topk_prob)."""
    scaling_factor: PositiveFloat = 1.0
    """Multiply the scores of chosen experts by this, after normalization (routed_scaling_factor)."""
    num_groups: Experts = 1
    """Number of groups of neighbouring experts (DeepSeek's n_group). A token's experts are chosen from its best groups
    only: those whose largest score (softmax), or sum of the two largest (others), is highest."""
    top_groups: Experts | None = None
    """Number of groups that a token's experts are chosen from (DeepSeek's topk_group). Default: all."""
    selection_bias: bool = False
    """Add a bias to each expert's score where experts are chosen, not where outputs are weighted. It balances the load
    without an auxiliary loss (Wang et al. 2024, arXiv:2408.15664; DeepSeek-V3)."""
    bias_update_rate: NonNegative = 0.001
    """After each step, the selection bias of experts with less than the mean number of tokens grows by this, and that
    of the others shrinks by it. No effect without selection_bias. 0: the bias is constant."""
    scale_inputs: bool = False
    """Multiply an expert's inputs, not its outputs, by the weights of its tokens (Llama 4; Megatron-LM's
    moe_apply_probs_on_input)."""
    separate_norms: bool = False
    """The shared expert and the experts have norms of their own, of inputs and of outputs, instead of one norm of their
    input. The router reads the residual stream by a norm without weights, multiplied by a learned scale of each channel
    / √hidden_size, and weights of experts are multiplied by a learned scale of each expert (Gemma 4)."""
    capacity_factor: PositiveFloat | None = None
    """An expert takes at most so many times the mean number of tokens of a rank's micro-batch, those with the highest
    weights, and no output for the others (Megatron-LM's moe_expert_capacity_factor; token dropping). Which are dropped
    depends on the layout. Default: no token is dropped."""
    aux_loss: NonNegative = 0.0
    """Weight of the load-balancing loss: for each sequence and layer, num_experts times the sum over experts of their
    share of the sequence's choices and their mean score (DeepSeek-V3's sequence-wise loss, eq. 17 to 20; Megatron-LM's
    seq_aux_loss). 1 if the load is even. Averaged over sequences and added up over layers, whatever loss masks leave
    out: all tokens are routed, padding too."""
    aux_loss_scope: Literal["sequence", "global_batch"] = "sequence"
    """Whose choices aux_loss makes even. sequence: those of each sequence. global_batch: those of all, so that experts
    may specialize (Qiu et al. 2025, arXiv:2501.11873; Megatron-LM's global_aux_loss): with each expert's share of the
    choices of the step before, which all ranks know, so it depends on no layout."""
    z_loss: NonNegative = 0.0
    """Weight of the square of log Z of the router's logits, averaged over tokens, also those that loss masks leave out,
    and added up over layers (Zoph et al. 2022, arXiv:2202.08906)."""


class MoeConfig(MoeKeys):
    """Mixture of experts: for each token a router chooses some of a layer's experts, each an MLP, and adds their
    outputs, weighted by the router's scores. Only with capacity_factor are tokens dropped."""

    num_experts: Experts
    """Number of experts of a layer."""
    first_dense_layers: Count = 0
    """Number of layers at the start of the model that have an MLP instead of experts (DeepSeek)."""
    layer_interval: PositiveInt = 1
    """Every so many layers have experts, the others an MLP: layer i, counted from 0, where i + 1 is a multiple of it
    (Hugging Face's decoder_sparse_step)."""

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return layer >= self.first_dense_layers and (layer + 1) % self.layer_interval == 0


class MoeFfnConfig(PartRecord, MoeKeys):
    """Experts. Keys that are not given have the values of the section model.moe."""

    module: ClassVar[str] = "megafp8.layers.experts.module:MoE"
    tensor_prefix: ClassVar[str] = "mlp"
    hugging_face: ClassVar[Mapping[str, str]] = {
        "router": "mlp.gate", "router.bias": "mlp.gate.e_score_correction_bias", "router.table": "mlp.gate.tid2eid",
        "latent_down": "mlp.fc1_latent_proj", "latent_up": "mlp.fc2_latent_proj",
        **{f"experts.*.{x}": f"mlp.experts.*.{x}_proj" for x in ("gate", "up", "down")},
        **{f"shared.{x}": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")},
    }  # fmt: skip
    megatron: ClassVar[Mapping[str, str]] = {
        "router": "mlp.router", "router.bias": "mlp.router.expert_bias",
        "shared_gate.weight": "mlp.shared_experts.gate_weight",
        "latent_down": "mlp.fc1_latent_proj", "latent_up": "mlp.fc2_latent_proj",
        **{f"experts.*.{x}": f"mlp.experts.local_experts.*.{y}" for x, y in MEGATRON_LINEARS.items()},
        **{f"shared.{x}": f"mlp.shared_experts.{y}" for x, y in MEGATRON_LINEARS.items()},
    }  # fmt: skip

    kind: Literal["moe"] = "moe"
    """Experts."""
    routing: Literal["top_k", "hash"] = "top_k"
    """How a token's experts are chosen. top_k: the experts with the highest scores. hash: the experts that a fixed
    random table has for the token's id, each expert about equally often (Roller et al. 2021, arXiv:2106.04426;
    DeepSeek-V4's first layers); the router's scores are their weights, and aux_loss and selection_bias do not apply."""
    activation: ActivationName = "swiglu"
    """Activation of the experts and of the shared expert. Default: model.activation."""

    def resolved(self, model: ModelSection) -> MoeFfnConfig:
        section = {} if model.moe is None else {name: getattr(model.moe, name) for name in MoeKeys.model_fields}
        values: dict[str, Any] = {"activation": model.activation} | section | self.given
        values["ffn_hidden_size"] = values.get("ffn_hidden_size") or model.ffn_hidden_size or 4 * model.hidden_size
        return MoeFfnConfig.model_construct(**values)

    @property
    def width(self) -> int:
        """Inner width of an expert."""
        assert self.ffn_hidden_size is not None, "the record is not resolved"
        return self.ffn_hidden_size

    @property
    def shared(self) -> MlpConfig | None:
        """Record of the shared expert, or None without one."""
        if self.shared_ffn_hidden_size is None:
            return None
        return MlpConfig.model_construct(ffn_hidden_size=self.shared_ffn_hidden_size, activation=self.activation)

    @property
    def normalizes_input(self) -> bool:
        return self.separate_norms

    @property
    def has_router_loss(self) -> bool:
        return self.aux_loss > 0 or self.z_loss > 0

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        shared = self.shared_ffn_hidden_size
        return {} if shared is None else {"moe.shared_ffn_hidden_size": shared}

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        if model.moe is None and "num_experts" not in self.given:
            rule = "there is no section model.moe, and the number of experts is not given"
            yield Problem(f"{path}.kind", self.kind, rule, f"give {path}.num_experts, or model.moe")
            return
        record = self.resolved(model)
        for problem in _expert_rules(record, model):
            yield replace(problem, path=_path_of(problem.path, self, path))
        if self.routing == "hash" and model.mtp_num_layers and model.spec.layers[model.num_layers - 1].ffn == record:
            rule = "layers of multi-token prediction are like the last one, and would need ids of later tokens"
            works = "let the last layer have routing: top_k, or set model.mtp_num_layers=0"
            yield Problem(f"{path}.routing", "hash", rule, works)


def _path_of(path: str, record: MoeFfnConfig, record_path: str) -> str:
    """Return the path of a key of experts: in a kind of layer if it is given there, else in the section model.moe."""
    section, _, key = path.rpartition(".")
    return f"{record_path}.{key}" if section == "model.moe" and key in record.given else path


def experts(m: ModelSection) -> Iterator[Problem]:
    """Yield the rules about the section model.moe that are broken in any run."""
    if m.moe is None:
        return
    yield from _expert_rules(MoeFfnConfig().resolved(m), m)
    if not m.spec.has_experts and not m.pattern:
        key = "first_dense_layers" if m.moe.first_dense_layers else "layer_interval"
        rule = f"none of the {m.num_layers} layers has experts"
        works = f"try {int(key == 'layer_interval')}, or leave model.moe out"
        yield Problem(f"model.moe.{key}", getattr(m.moe, key), rule, works)


def _expert_rules(x: MoeFfnConfig, m: ModelSection) -> Iterator[Problem]:
    """Yield the rules that the complete record of a layer's experts breaks, with paths of the section model.moe."""
    count = x.num_experts
    if x.top_k > count:
        rule = f"a token goes to different experts, and model.moe.num_experts is {count}"
        yield Problem("model.moe.top_k", x.top_k, rule, f"try {count} or less")
    if x.latent_size is not None and m.linear_bias:
        rule = "model.linear_bias is true, and the projections of the latents have no biases"
        yield Problem("model.moe.latent_size", x.latent_size, rule, "leave it out, or try model.linear_bias=false")
    if x.separate_norms:
        path, rule = "model.moe.separate_norms", "it is for a shared expert beside experts, after RMSNorm of both"
        if x.shared_ffn_hidden_size is None:
            yield Problem(path, True, rule, "set model.moe.shared_ffn_hidden_size, or leave it out")
        if m.norm_position not in ("pre", "both") or m.normalization != "rmsnorm" or m.parallel_block:
            yield Problem(path, True, rule, "try normalization rmsnorm and norm_position both, or leave it out")
    if x.shared_gate and x.shared_ffn_hidden_size is None:
        works = "set model.moe.shared_ffn_hidden_size, or leave it out"
        yield Problem("model.moe.shared_gate", True, "there is no shared expert", works)
    if count % x.num_groups:
        rule = f"model.moe.num_experts ({count}) is not a multiple of it"
        yield Problem("model.moe.num_groups", x.num_groups, rule, divisors(count, x.num_groups))
        return
    if x.top_groups is None:
        return
    if x.top_groups > x.num_groups:
        rule = f"model.moe.num_groups is {x.num_groups}"
        yield Problem("model.moe.top_groups", x.top_groups, rule, f"try {x.num_groups} or less")
    elif x.top_groups * (count // x.num_groups) < x.top_k:
        rule = f"so many groups have {x.top_groups * (count // x.num_groups)} experts, and model.moe.top_k is {x.top_k}"
        works = f"try {-(-x.top_k * x.num_groups // count)} or more"
        yield Problem("model.moe.top_groups", x.top_groups, rule, works)


def expert_layout(config: RunConfig) -> Iterator[Problem]:
    """Yield the rules between experts and the layout that are broken."""
    m, p, records = config.model, config.parallel, config.spec.expert_records
    if not records:
        for key in ("expert", "expert_tensor"):
            if getattr(p, key) > 1:
                works = "try 1, or set model.moe"
                yield Problem(f"parallel.{key}", getattr(p, key), "the model has no experts", works)
        return
    for record in records:
        yield from _divided(config, record)
    if p.expert_tensor > 1 and m.linear_bias:
        rule = "model.linear_bias is true, and the biases of an expert's outputs belong to one rank"
        yield Problem("parallel.expert_tensor", p.expert_tensor, rule, "try 1")
    if p.expert_tensor > 1 and p.expert_dispatch == "all_to_all":
        rule = "it sends a token to one rank for each of its experts, and parallel.expert_tensor splits experts"
        yield Problem("parallel.expert_dispatch", "all_to_all", rule, "try all_gather, or parallel.expert_tensor=1")
    if p.tensor > 1 and not p.sequence_parallel:
        rule = f"parallel.tensor is {p.tensor}, and without it each rank would send the same tokens to experts"
        yield Problem("parallel.sequence_parallel", False, rule, "try true, or parallel.tensor=1")


def _divided(config: RunConfig, record: MoeFfnConfig) -> Iterator[Problem]:
    """Yield the rules about the sizes of one kind of experts, which ranks divide."""
    p = config.parallel
    if record.num_experts % p.expert:
        rule = f"model.moe.num_experts ({record.num_experts}) is not a multiple of it"
        yield Problem("parallel.expert", p.expert, rule, divisors(record.num_experts, p.expert))
    if record.width % p.expert_tensor:
        rule = f"the width of an expert ({record.width}) is not a multiple of it"
        yield Problem("parallel.expert_tensor", p.expert_tensor, rule, divisors(record.width, p.expert_tensor))
    latent = record.latent_size
    sizes = {
        "model.hidden_size" if latent is None else "model.moe.latent_size": latent or config.model.hidden_size,
        "model.moe.ffn_hidden_size": record.width // p.expert_tensor,
    }
    for key, width in sizes.items():
        if config.device != "cpu" and config.training.precision == "bf16" and width % 8:
            rule = "GEMMs of all experts at once take bf16 matrices of a multiple of 8 columns"
            yield Problem(key, width, rule, f"try {-(-width // 8) * 8}")


def expert_ranks(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Rules between experts and the number of ranks."""
    p = config.parallel
    stage_ranks, rest = divmod(world_size, p.pipeline)
    if rest or stage_ranks % (p.tensor * p.context):
        return
    cut = f" over parallel.expert_tensor ({p.expert_tensor})" if p.expert_tensor > 1 else ""
    for key, size, count, over in (
        ("expert_tensor", p.expert_tensor, stage_ranks, ""),
        ("expert", p.expert, stage_ranks // p.expert_tensor, cut),
    ):
        if count % size:
            rule = f"it must divide the {count} data-, context- and tensor-parallel ranks of a pipeline stage{over}"
            ranks = p.pipeline * math.lcm(p.tensor * p.context, p.expert_ranks)
            works = f"start a multiple of {ranks} processes, or {divisors(count, size)}"
            yield Problem(f"parallel.{key}", size, rule, works)
            return
