"""Config keys and rules of experts, which replace the MLP of a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from megafp8.host.problems import Problem, divisors
from megafp8.layers.activation.record import ACTIVATIONS, ActivationName
from megafp8.layers.mlp.record import MEGATRON_LINEARS, MlpConfig
from megafp8.section import Channels, Count, Experts, NonNegative, PositiveFloat, PositiveInt, Section
from megafp8.spec import ModelSection, PartRecord, RunConfig


class MoeKeys(Section):
    """Config keys of a layer with experts."""

    num_experts: Experts = 1
    """Number of experts in a layer."""
    top_k: Experts = 2
    """Number of experts that the router chooses for each token."""
    zero_experts: Experts | None = None
    """Number of experts without computation, which return their input (LongCat-Flash, arXiv:2509.01322;
    zero_expert_num). The router chooses among num_experts + zero_experts, so a token has between 0 and top_k experts
    with computation. They have no capacity, and their selection bias stays 0. Default: none."""
    ffn_hidden_size: Channels | None = None
    """Inner width of an expert. Default: model.ffn_hidden_size."""
    shared_ffn_hidden_size: Channels | None = None
    """Inner width of the shared expert, an MLP that processes every token (DeepSeek, Qwen2-MoE). Default: no shared
    expert."""
    latent_size: Channels | None = None
    """Width of the tokens that experts read and write (LatentMoE of Nemotron 3 Super and Ultra; moe_latent_size). All
    experts of a layer share one projection before them and one after their weighted sum. The router and the shared
    expert read tokens of hidden_size. Ranks send each other tokens of this width. Default: hidden_size, without
    projections."""
    shared_scaling_factor: PositiveFloat = 1.0
    """Factor of the shared expert's output (Cohere: 0.5, as scaling_factor)."""
    shared_gate: bool = False
    """Multiply the shared expert's output by the sigmoid of a learned projection of the token (Qwen2-MoE)."""
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """Function that turns the router's logits into scores: softmax over all experts; or, for each expert separately,
    sigmoid (DeepSeek-V3) or the square root of softplus (DeepSeek-V4)."""
    normalize: bool = True
    """Divide the scores of a token's chosen experts by their sum (Hugging Face's norm_topk_prob)."""
    scaling_factor: PositiveFloat = 1.0
    """Factor of the chosen experts' scores, applied after normalization (routed_scaling_factor)."""
    num_groups: Experts = 1
    """Number of groups of neighboring experts (DeepSeek's n_group). A token chooses its experts from its best groups
    only. Groups are ranked by their largest score with softmax, and by the sum of their two largest scores with the
    other score functions."""
    top_groups: Experts | None = None
    """Number of groups from which a token's experts are chosen (DeepSeek's topk_group). Default: all groups."""
    selection_bias: bool = False
    """Add a bias to each expert's score when experts are chosen, but not when their outputs are weighted. The bias
    balances the load without an auxiliary loss (Wang et al. 2024, arXiv:2408.15664; DeepSeek-V3)."""
    bias_update_rate: NonNegative = 0.001
    """Amount by which the selection bias changes after each step. It grows for experts with fewer tokens than the mean
    and shrinks for experts with more. 0 keeps the bias constant. No effect without selection_bias."""
    scale_inputs: bool = False
    """Multiply an expert's inputs, not its outputs, by the weights of its tokens (Llama 4; Megatron-LM's
    moe_apply_probs_on_input)."""
    separate_norms: bool = False
    """Give the experts and the shared expert separate input norms and separate output norms, instead of one common
    input norm (Gemma 4). The router then reads the residual stream through a norm without weights, times a learned
    scale per channel, divided by √hidden_size. The weights of experts are multiplied by a learned scale per expert."""
    capacity_factor: PositiveFloat | None = None
    """Capacity of an expert, as a multiple of the mean number of tokens per expert in a rank's micro-batch
    (Megatron-LM's moe_expert_capacity_factor). An expert keeps the tokens with the highest weights and adds nothing to
    the others, which are dropped. The dropped tokens depend on the layout. Default: no token is dropped."""
    aux_loss: NonNegative = 0.0
    """Weight of the load-balancing loss. For each sequence and layer, the loss is num_experts times the sum over
    experts of the expert's share of the sequence's choices times its mean score (DeepSeek-V3's sequence-wise loss, eq.
    17 to 20; Megatron-LM's seq_aux_loss). It is 1 if the load is even. It is averaged over sequences and summed over
    layers. Loss masks do not affect it, because all tokens are routed; padding does not count."""
    aux_loss_scope: Literal["sequence", "global_batch"] = "sequence"
    """Set of choices that aux_loss balances. sequence: the choices of each sequence. global_batch: the choices of all
    sequences of a step together, so that experts can specialize (Qiu et al. 2025, arXiv:2501.11873; Megatron-LM's
    global_aux_loss). The loss then uses each expert's share of the previous step's choices. All ranks know these
    shares, so the loss does not depend on the layout."""
    z_loss: NonNegative = 0.0
    """Weight of the router's z-loss: the squared logsumexp of the router's logits, averaged over tokens and summed over
    layers (Zoph et al. 2022, arXiv:2202.08906). Loss masks do not affect it; padding
    counts as zero."""


class MoeConfig(MoeKeys):
    """Mixture of experts: a router chooses some experts for each token, and the layer adds their weighted outputs.

    Each expert is an MLP, and the router's scores are the weights. Tokens are dropped only if capacity_factor is set.
    """

    num_experts: Experts
    """Number of experts in a layer."""
    first_dense_layers: Count = 0
    """Number of layers at the start of the model that have an MLP instead of experts (DeepSeek)."""
    layer_interval: PositiveInt = 1
    """Interval between layers with experts (Hugging Face's decoder_sparse_step). Layer i, counted from 0, has experts
    if i + 1 is a multiple of the interval; the other layers have an MLP. Default: every layer has experts."""

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts."""
        return layer >= self.first_dense_layers and (layer + 1) % self.layer_interval == 0


class MoeFfnConfig(PartRecord, MoeKeys):
    """Mixture of experts. Keys that are not set have the values of the section model.moe."""

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
    """Kind of feed-forward network: experts."""
    routing: Literal["top_k", "hash"] = "top_k"
    """Method that chooses a token's experts. top_k: the experts with the highest scores. hash: the experts that a fixed
    random table lists for the token's id, each expert about equally often (Roller et al. 2021, arXiv:2106.04426;
    DeepSeek-V4's first layers). With hash the router's scores are still the weights, and aux_loss and selection_bias
    have no effect."""
    activation: ActivationName = "swiglu"
    """Activation of the experts and of the shared expert. Default: model.activation."""

    def resolved(self, model: ModelSection) -> MoeFfnConfig:
        """Return the complete record, with missing keys filled in from `model.moe` and `model`."""
        section = {} if model.moe is None else {name: getattr(model.moe, name) for name in MoeKeys.model_fields}
        values: dict[str, Any] = {"activation": model.activation} | section | self.given
        values["ffn_hidden_size"] = values.get("ffn_hidden_size") or model.ffn_hidden_size or 4 * model.hidden_size
        return MoeFfnConfig.model_construct(**values)

    @property
    def router_outputs(self) -> int:
        """Number of experts among which the router chooses, including experts without computation."""
        return self.num_experts + (self.zero_experts or 0)

    @property
    def width(self) -> int:
        """Inner width of an expert."""
        assert self.ffn_hidden_size is not None, "the record is not resolved"
        return self.ffn_hidden_size

    @property
    def shared(self) -> MlpConfig | None:
        """Record of the shared expert; None if there is no shared expert."""
        if self.shared_ffn_hidden_size is None:
            return None
        return MlpConfig.model_construct(ffn_hidden_size=self.shared_ffn_hidden_size, activation=self.activation)

    @property
    def normalizes_input(self) -> bool:
        """Whether the experts normalize their input themselves."""
        return self.separate_norms

    @property
    def has_router_loss(self) -> bool:
        """Whether the router has a load-balancing loss or a z-loss."""
        return self.aux_loss > 0 or self.z_loss > 0

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Return the inner width of the shared expert, which tensor parallelism divides."""
        shared = self.shared_ffn_hidden_size
        return {} if shared is None else {"moe.shared_ffn_hidden_size": shared}

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Yield the rules that the keys at `path` break in any run."""
        if model.moe is None and "num_experts" not in self.given:
            rule = "there is no section model.moe, and the number of experts is not given"
            yield Problem(f"{path}.kind", self.kind, rule, f"give {path}.num_experts, or model.moe")
            return
        record = self.resolved(model)
        for problem in _expert_rules(record, model):
            yield replace(problem, path=_path_of(problem.path, self, path))
        if self.routing == "hash" and model.mtp_num_layers and model.spec.layers[model.num_layers - 1].ffn == record:
            rule = "multi-token prediction layers copy the last layer and would need the ids of later tokens"
            works = "let the last layer have routing: top_k, or set model.mtp_num_layers=0"
            yield Problem(f"{path}.routing", "hash", rule, works)


def _path_of(path: str, record: MoeFfnConfig, record_path: str) -> str:
    """Return the path of a key of experts: the layer's record if the key is set there, otherwise section model.moe."""
    section, _, key = path.rpartition(".")
    return f"{record_path}.{key}" if section in ("model", "model.moe") and key in record.given else path


def experts(m: ModelSection) -> Iterator[Problem]:
    """Yield the rules that the section model.moe breaks in any run."""
    if m.moe is None:
        return
    yield from _expert_rules(MoeFfnConfig().resolved(m), m)
    if not m.spec.has_experts and not m.pattern:
        key = "first_dense_layers" if m.moe.first_dense_layers else "layer_interval"
        rule = f"none of the {m.num_layers} layers has experts"
        works = f"try {int(key == 'layer_interval')}, or leave model.moe out"
        yield Problem(f"model.moe.{key}", getattr(m.moe, key), rule, works)


def _expert_rules(x: MoeFfnConfig, m: ModelSection) -> Iterator[Problem]:
    """Yield the rules that a layer's complete expert record breaks. Paths name keys of the section model.moe."""
    count = x.num_experts
    if x.top_k > x.router_outputs:
        added = "" if x.zero_experts is None else f" + zero_experts ({x.zero_experts})"
        rule = f"the experts of a token must be different, and model.moe.num_experts is {count}{added}"
        yield Problem("model.moe.top_k", x.top_k, rule, f"try {x.router_outputs} or less")
    if x.zero_experts is not None and x.num_groups > 1:
        rule = f"model.moe.num_groups is {x.num_groups}, and experts without computation are in no group"
        yield Problem("model.moe.zero_experts", x.zero_experts, rule, "leave it out, or try model.moe.num_groups=1")
    if ACTIVATIONS[x.activation].learned:
        yield Problem("model.activation", x.activation, "experts have no learned activation", "try swiglu")
    if x.latent_size is not None and m.spec.mlp_bias:
        rule = f"model.linear_bias is {str(m.linear_bias).lower()}, and latent projections have no biases"
        yield Problem("model.moe.latent_size", x.latent_size, rule, "leave it out, or try model.linear_bias=false")
    if x.separate_norms:
        path, rule = "model.moe.separate_norms", "it needs a shared expert, and RMSNorm before experts"
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
        rule = f"these groups have {x.top_groups * (count // x.num_groups)} experts, and model.moe.top_k is {x.top_k}"
        works = f"try {-(-x.top_k * x.num_groups // count)} or more"
        yield Problem("model.moe.top_groups", x.top_groups, rule, works)


def expert_layout(config: RunConfig) -> Iterator[Problem]:
    """Yield the rules between experts and the parallel layout that a config breaks."""
    m, p, records = config.model, config.parallel, config.spec.expert_records
    if not records:
        for key in ("expert", "expert_tensor"):
            if getattr(p, key) > 1:
                works = "try 1, or set model.moe"
                yield Problem(f"parallel.{key}", getattr(p, key), "the model has no experts", works)
        return
    for record in records:
        yield from _divided(config, record)
    if p.expert_tensor > 1 and m.spec.mlp_bias:
        value = str(m.linear_bias).lower()
        rule = f"model.linear_bias is {value}, and the biases of an expert's outputs belong to one rank"
        yield Problem("parallel.expert_tensor", p.expert_tensor, rule, "try 1")
    if p.expert_tensor > 1 and p.expert_dispatch == "all_to_all":
        rule = "it sends a token to one rank for each of its experts, and parallel.expert_tensor splits experts"
        yield Problem("parallel.expert_dispatch", "all_to_all", rule, "try all_gather, or parallel.expert_tensor=1")
    if p.tensor > 1 and not p.sequence_parallel:
        rule = f"parallel.tensor is {p.tensor}, and without it each rank would send the same tokens to experts"
        yield Problem("parallel.sequence_parallel", False, rule, "try true, or parallel.tensor=1")


def _divided(config: RunConfig, record: MoeFfnConfig) -> Iterator[Problem]:
    """Yield the rules that the sizes of one kind of experts break when ranks divide them."""
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
            rule = "grouped GEMMs of experts need bf16 matrices with a multiple of 8 columns"
            yield Problem(key, width, rule, f"try {-(-width // 8) * 8}")


def expert_ranks(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Yield the rules between experts and the number of ranks that a config breaks."""
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
