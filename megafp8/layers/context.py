"""Build context of the model's layers: process groups, FP8 manager, dtype, device, storage of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.config import Config
from megafp8.fp8.manager import Fp8Manager
from megafp8.layers.experts.own_rows import RowBound
from megafp8.linear.state import LinearState
from megafp8.parallel.data.plan import plan_type
from megafp8.parallel.sharding import Init, ParamShard, Shape, empty_parameter, shard_dim, unsharded
from megafp8.parallel.tensor.lora import Lora
from megafp8.parallel.tensor.mappings import nothing
from megafp8.parallel.tp_overlap import NO_COMM, TPOverlap
from megafp8.plan import LinearSite, WeightStorage


@dataclass(frozen=True)
class BuildContext:
    """Settings and process groups that every layer constructor receives; layers read nothing else of the job.

    Attributes:
        tensor: Tensor-parallel group.
        fp8: FP8 manager of the model.
        dtype: Dtype of the parameters.
        device: Device of the parameters.
        sequence_parallel: Value of `parallel.sequence_parallel`. It has no effect if the tensor-parallel group has one
            rank.
        context_parallel: Ranks that share the tokens of the same sequences; None if this rank has whole sequences.
        tp_overlap: Overlap of tensor-parallel communication with GEMMs; None means no overlap, one collective at a
            time.
        tokens: Tokens of a micro-batch on this rank between tensor-parallel regions; None if their number varies.
        weight_storage: Place of the weights between steps, see `megafp8.plan.LinearSite`.
        param_gather: Whether weights may be gathered in FP8, see `megafp8.plan.LinearSite`.
        keeps_transposes: Whether transposed FP8 copies of weights may be kept between micro-batches.
        real_device: Device of buffers if `device` is the meta device; None means `device`.
        expert: Ranks over which the experts of a layer are divided; None if this rank has all experts.
        expert_tensor: Ranks of `expert` over which each expert is sharded.
        expert_amax: Ranks that hold the same experts, whole or in shards.
        expert_rows: Ranks of `expert_amax` with token rows of the same micro-batch.
        whole_experts: Whether FSDP leaves the weights of experts whole, because no other rank has a shard of them.
        gathers_tokens: Whether tokens reach their experts by an all-gather, instead of an all-to-all.
        expert_overlap: Overlap of the communication of tokens to experts with GEMMs.
        during_exchange: Function that backward calls while it gathers or reduces gradients of tokens for experts.
        row_bound: Limit on the number of rows for which a rank's expert buffers have room.
        sequence_group: Ranks that hold slices of the same sequences between tensor-parallel regions.
        global_batch: Number of sequences in a step.
        global_tokens: Number of tokens in a step.
        seed: Seed of the random streams of dropout.
        auxiliary_loss_grad: Gradient of the losses of routers and indexers, fp32 `[]`, whatever the loss and the
            gradients are multiplied by; None means 1.
        encoder_tokens: Counterpart of `tokens` in the encoder of T5, where `tokens` counts the tokens of the decoder.
        lora: LoRA adapters of the blocks' linear layers, with all other weights frozen; None means full training.
        records_logits: Whether attention records the largest logit of each head (`Mixer.largest_logits_a`).
        constants: Constant tensors that layers create once and share, by the values that determine them.
        shared_modules: Modules that layers share, by the first of these layers.
        shares_linears: Whether several layers run the linear layers that are built with this context.
    """

    tensor: ProcessGroup
    fp8: Fp8Manager
    dtype: torch.dtype
    device: torch.device
    sequence_parallel: bool
    context_parallel: ProcessGroup | None = None
    tp_overlap: TPOverlap | None = None
    tokens: int | None = None
    weight_storage: WeightStorage = "resident"
    param_gather: bool = False
    keeps_transposes: bool = True
    real_device: torch.device | None = None
    expert: ProcessGroup | None = None
    expert_tensor: ProcessGroup | None = None
    expert_amax: ProcessGroup | None = None
    expert_rows: ProcessGroup | None = None
    whole_experts: bool = False
    gathers_tokens: bool = True
    expert_overlap: TPOverlap = NO_COMM
    during_exchange: Callable[[], None] = nothing
    row_bound: RowBound | None = None
    sequence_group: ProcessGroup | None = None
    global_batch: int = 1
    global_tokens: int = 1
    seed: int = 0
    auxiliary_loss_grad: Tensor | None = None
    encoder_tokens: int | None = None
    lora: Lora | None = None
    records_logits: bool = False
    constants: dict[Any, Tensor] = field(default_factory=dict)
    shared_modules: dict[int, Any] = field(default_factory=dict)
    shares_linears: bool = False

    @property
    def buffer_device(self) -> torch.device:
        """Device of tensors that are not parameters. It is a real device even if parameters are allocated later."""
        return self.real_device or self.device

    @property
    def batch_invariant(self) -> bool:
        """Whether the model is batch-invariant (`megafp8.numerics.batch_invariance`)."""
        return self.fp8.batch_invariant

    @property
    def sequence_sharded(self) -> bool:
        """Whether activations between tensor-parallel regions hold only this rank's slice of the sequence."""
        return self.sequence_parallel and self.tensor.size() > 1

    def site(self, **neighbors: Any) -> LinearSite:
        """Return the `LinearSite` of a linear layer in this model; `neighbors` are further fields of it."""
        return LinearSite(
            tokens=self.tokens, weight_storage=self.weight_storage, param_gather=self.param_gather,
            keeps_transpose=self.keeps_transposes, shared=self.shares_linears, **neighbors,
        )  # fmt: skip

    def linear_options(self) -> dict[str, Any]:
        """Return the constructor arguments that all tensor-parallel linear layers share."""
        return {
            "group": self.tensor,
            "fp8": self.fp8,
            "dtype": self.dtype,
            "device": self.device,
            "sequence_parallel": self.sequence_parallel,
            "tp_overlap": self.tp_overlap,
            "lora": self.lora,
        }


def new_parameter(context: BuildContext, shards: Sequence[ParamShard], init: Init, **spec: Any) -> nn.Parameter:
    """Return an uninitialized parameter (`empty_parameter`) in the model's dtype and on its device."""
    return empty_parameter(shards, init, context.dtype, context.device, **spec)


def sharded_parameters(context: BuildContext, shapes: Mapping[str, Shape], init: Init, **spec: Any) -> nn.Parameter:
    """Return one parameter that stacks a slice of each of several tensors, whose names and whole `shapes` are given.

    Each tensor-parallel rank holds a slice of the first dim.
    """
    rank, ranks = context.tensor.rank(), context.tensor.size()
    shards = [shard_dim(name, shape, 0, rank, ranks) for name, shape in shapes.items()]
    return new_parameter(context, shards, init, replicated_over_tp=False, **spec)


def replicated_parameters(context: BuildContext, shapes: Mapping[str, Shape], init: Init, **spec: Any) -> nn.Parameter:
    """Return one parameter that stacks several tensors, whose names and `shapes` are given, whole on each rank.

    If the sequence is sharded, each rank applies the parameter to its own slice, and the group sums the gradients.
    """
    spec |= {"replicated_over_tp": True, "reduce_over_tp": context.sequence_sharded}
    return new_parameter(context, [x for name, shape in shapes.items() for x in unsharded(name, shape)], init, **spec)


def replicated_product(
    context: BuildContext, name: str, layer: str, parts: Mapping[str, int], inputs: int, *, init: Init, reason: str
) -> tuple[nn.Parameter, LinearState]:
    """Return the weight and state of the product `<name>.<layer>`, which all tensor-parallel ranks hold whole.

    It stays in high precision for this `reason`. `parts` holds the number of rows of each part of the weight.
    """
    shapes = {f"{name}.{part}.weight": (n, inputs) for part, n in parts.items() if n}
    site = LinearSite(f"{name}.{layer}", inputs, sum(parts.values()), high_precision=reason)
    return replicated_parameters(context, shapes, init, matrix=True), context.fp8.linear(site)


def sharded_product(
    context: BuildContext, name: str, inputs: int, outputs: int, *, init: Init, reason: str
) -> tuple[nn.Parameter, LinearState]:
    """Return the weight and state of the product `name`, whose outputs are sharded over the tensor-parallel group.

    It stays in high precision for this `reason`. `outputs` is their number on all ranks.
    """
    weight = sharded_parameters(context, {f"{name}.weight": (outputs, inputs)}, init, matrix=True)
    site = LinearSite(name, inputs, outputs // context.tensor.size(), high_precision=reason)
    return weight, context.fp8.linear(site)


def tokens_per_rank(config: Config, *, encoder: bool = False) -> int:
    """Return the number of tokens of a micro-batch on one rank between tensor-parallel regions.

    For T5 this is the number in the decoder, or with `encoder` in the encoder.
    """
    p, t = config.parallel, config.training
    length = t.seq_length if encoder or config.decoder_length is None else config.decoder_length
    return length // p.context // (p.tensor if p.sequence_parallel else 1) * t.micro_batch_size


@dataclass(frozen=True)
class PlannedGroup:
    """Stand-in for a process group when a layout is planned without processes."""

    ranks: int = 1

    def size(self) -> int:
        """Return the number of ranks."""
        return self.ranks

    def rank(self) -> int:
        """Return 0: layers are planned for the first rank."""
        return 0


def lora_of(config: Config) -> Lora | None:
    """Return the LoRA settings of the config, or None if it trains without LoRA."""
    lora = config.lora
    return None if lora is None else Lora(lora.rank, lora.alpha, frozenset(config.lora_targets))


def weight_storage(config: Config) -> WeightStorage:
    """Return the form in which a rank stores weights between steps."""
    return plan_type(config.parallel.zero, config.parallel.fsdp).weight_storage


def planning_context(config: Config, fp8: Fp8Manager) -> BuildContext:
    """Return the context for constructing the layers of the first tensor-parallel rank on the meta device.

    No process groups are needed.
    """
    return BuildContext(
        tensor=cast(ProcessGroup, PlannedGroup(config.parallel.tensor)),
        fp8=fp8,
        dtype=torch.float32,
        device=torch.device("meta"),
        sequence_parallel=config.parallel.sequence_parallel,
        tokens=tokens_per_rank(config),
        encoder_tokens=tokens_per_rank(config, encoder=True),
        weight_storage=weight_storage(config),
        param_gather=config.fp8.param_gather,
        keeps_transposes=config.fp8.keep_weight_transposes,
        expert=cast(ProcessGroup, PlannedGroup(config.parallel.expert_ranks)),
        expert_tensor=cast(ProcessGroup, PlannedGroup(config.parallel.expert_tensor)),
        gathers_tokens=config.gathers_tokens,
        lora=lora_of(config),
    )
