"""What every layer of the model is built with: process groups, FP8 manager, dtype, device, storage of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.config import Config
from megafp8.fp8.manager import Fp8Manager
from megafp8.layers.experts.own_rows import RowBound
from megafp8.parallel.data.plan import plan_type
from megafp8.parallel.sharding import Init, ParamShard, empty_parameter
from megafp8.parallel.tensor.lora import Lora
from megafp8.parallel.tp_overlap import NO_COMM, TPOverlap
from megafp8.plan import LinearSite, WeightStorage


@dataclass(frozen=True)
class BuildContext:
    """Passed down through the constructors; layers read nothing else of the job.

    `sequence_parallel` is what the config says; with a tensor group of one rank it has no effect. `context_parallel`:
    the ranks that share the tokens of the same sequences; None where this rank has whole ones. `tp_overlap`: overlap of
    tensor-parallel communication with GEMMs; None: one collective at a time. `tokens`: of a micro-batch on this rank
    between tensor-parallel regions; None where they vary. `weight_storage`, `param_gather`: see
    `megafp8.plan.LinearSite`.

    For experts: `expert`: the ranks over which a layer's are divided; None where this rank has all. `expert_tensor`:
    those of them over which each expert is cut. `expert_amax`: the ranks that hold the same experts; `expert_rows`:
    those of them with rows of the same micro-batch. `whole_experts`: no other rank has a shard of their weights, which
    FSDP leaves whole. `gathers_tokens`, `expert_overlap`, `row_bound`: how tokens get to
    them. `sequence_group`: the ranks that hold slices of the same sequences between tensor-parallel regions.
    `global_batch`, `global_tokens`: sequences and tokens of a step.

    `seed`: of the random streams of dropout. `auxiliary_loss_grad`: fp32 `[]`, the gradient of the losses of routers
    and indexers, whatever the loss and the gradients are multiplied by; None: 1. `encoder_tokens`: as `tokens`, in the
    encoder of T5; `tokens` are then its decoder's. `lora`: adapts linear layers of blocks, and all other weights are
    frozen. `records_logits`: attention records its heads' largest logits (`Mixer.largest_logits_a`). `constants`:
    tensors that layers make once and share, by what they depend on.
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
    real_device: torch.device | None = None
    expert: ProcessGroup | None = None
    expert_tensor: ProcessGroup | None = None
    expert_amax: ProcessGroup | None = None
    expert_rows: ProcessGroup | None = None
    whole_experts: bool = False
    gathers_tokens: bool = True
    expert_overlap: TPOverlap = NO_COMM
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

    @property
    def buffer_device(self) -> torch.device:
        """The device of tensors that are no parameters: real also where parameters are allocated later."""
        return self.real_device or self.device

    @property
    def batch_invariant(self) -> bool:
        """Whether the model is batch-invariant (`megafp8.numerics.batch_invariance`)."""
        return self.fp8.batch_invariant

    @property
    def sequence_sharded(self) -> bool:
        """Activations between tensor-parallel regions hold only this rank's slice of the sequence."""
        return self.sequence_parallel and self.tensor.size() > 1

    def site(self, **neighbors: Any) -> LinearSite:
        """The place of a linear layer in this model; `neighbors`: fields of `LinearSite`."""
        return LinearSite(
            tokens=self.tokens, weight_storage=self.weight_storage, param_gather=self.param_gather, **neighbors
        )

    def linear_options(self) -> dict[str, Any]:
        """Arguments that all tensor-parallel linear layers share."""
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
    """`empty_parameter` in the model's precision and on its device."""
    return empty_parameter(shards, init, context.dtype, context.device, **spec)


def replicated_parameter(context: BuildContext, shards: Sequence[ParamShard], init: Init, **spec: Any) -> nn.Parameter:
    """One that all tensor-parallel ranks hold, and use on their own slices of the sequence if it is sharded."""
    spec |= {"replicated_over_tp": True, "reduce_over_tp": context.sequence_sharded}
    return new_parameter(context, shards, init, **spec)


def tokens_per_rank(config: Config, *, encoder: bool = False) -> int:
    """Tokens of a micro-batch on a rank, between tensor-parallel regions; of T5 in its decoder or its encoder."""
    p, t = config.parallel, config.training
    length = t.seq_length if encoder or config.decoder_length is None else config.decoder_length
    return length // p.context // (p.tensor if p.sequence_parallel else 1) * t.micro_batch_size


@dataclass(frozen=True)
class PlannedGroup:
    """As much of a process group as constructors of layers ask for, where there is none."""

    ranks: int = 1

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


def lora_of(config: Config) -> Lora | None:
    """What the config adapts by LoRA."""
    lora = config.lora
    return None if lora is None else Lora(lora.rank, lora.alpha, frozenset(config.lora_targets))


def weight_storage(config: Config) -> WeightStorage:
    """Where a rank's weights are between steps."""
    return plan_type(config.parallel.zero, config.parallel.fsdp).weight_storage


def planning_context(config: Config, fp8: Fp8Manager) -> BuildContext:
    """To construct layers as the first tensor-parallel rank has them, on the meta device without process groups."""
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
        expert=cast(ProcessGroup, PlannedGroup(config.parallel.expert_ranks)),
        expert_tensor=cast(ProcessGroup, PlannedGroup(config.parallel.expert_tensor)),
        gathers_tokens=config.gathers_tokens,
        lora=lora_of(config),
    )
