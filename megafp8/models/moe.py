"""A layer's mixture of experts, divided over expert-parallel ranks, and its shared expert.

    router -> rows by expert -> to the experts' ranks -> up, activation, down -> back -> weighted sum

The experts of a rank are two parameters: the first linear layers of all of them, and the second. In a checkpoint each
expert's weights have names of their own (`layers.0.mlp.experts.3.up.weight`), so they fit every layout.

In FP8 each expert's layers have scales of their own. A shared expert is an MLP like that of a layer without experts.

Shapes: s sequence, b micro-batch, n = s·b tokens of this rank, k experts of each, h hidden, m rows of this rank's
experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megafp8.config import ModelConfig
from megafp8.config.activations import ACTIVATIONS
from megafp8.distributed import collectives
from megafp8.distributed.sharding import Init, unsharded
from megafp8.expert_parallel.exchange import exchange
from megafp8.fp8.group_state import GroupState
from megafp8.fp8.groups import RowGroups
from megafp8.models.context import BuildContext, new_parameter, replicated_parameter
from megafp8.models.mlp import MLP, exact_gelu
from megafp8.models.recompute import KEEP_ALL, BlockMemory
from megafp8.models.router import Router
from megafp8.ops.activation import activation
from megafp8.ops.fusion import LinearInput
from megafp8.ops.grouped_linear import grouped_linear
from megafp8.ops.linear import high_precision_linear
from megafp8.ops.permute import by_expert, combine, permute
from megafp8.plan import Neighbor


class Experts(nn.Module):
    """The experts of this rank: rows `[m, h]`, by expert, -> `[m, h]`."""

    def __init__(self, name: str, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        assert config.moe is not None
        ranks, rank = collectives.size(context.expert), 0 if context.expert is None else context.expert.rank()
        count, h, f = config.moe.num_experts // ranks, config.hidden_size, config.expert_size
        self.kind, self.activation = config.activation, ACTIVATIONS[config.activation]
        own = range(rank * count, (rank + 1) * count)
        first = ("gate", "up") if self.activation.gated else ("up",)
        into = [shard for e in own for part in first for shard in unsharded(f"{name}.{e}.{part}.weight", (f, h))]
        out_of = [shard for e in own for shard in unsharded(f"{name}.{e}.down.weight", (h, f))]
        between = Neighbor(
            self.kind, "per_tensor" if self.activation.fused else "none", "exact GELU has no fused kernel"
        )
        self.up_state = self._state([f"{name}.{e}.{self.activation.up_layer}" for e in own], context, after=between)
        self.down_state = self._state([f"{name}.{e}.down" for e in own], context, before=between)
        out_std = config.init_std / math.sqrt(2 * config.num_layers)
        of_experts = {"replicated_over_tp": False, "expert": True}
        self.up = new_parameter(context, into, Init("normal", config.init_std), **of_experts)
        self.down = new_parameter(context, out_of, Init("normal", out_std), **of_experts)

    @staticmethod
    def _state(names: Sequence[str], context: BuildContext, **neighbors: Neighbor) -> GroupState:
        """How a linear layer of each expert runs; amaxes are those of all ranks that hold the expert."""
        sites = [replace(context.site(**neighbors), name=name, tokens=None, expert=True) for name in names]
        return context.fp8.group([context.fp8.linear(site, amax_group=context.expert_data) for site in sites])

    def forward(self, rows_mh: Tensor, ends_e: Tensor) -> Tensor:
        """`ends_e`: int32, where the rows of each expert end."""
        groups = RowGroups.of(ends_e, len(rows_mh))
        handoff = self.up_state.grad_handoff(rows_mh, self.up, groups)
        y = grouped_linear(rows_mh, self.up, groups, self.up_state, handoff)
        if not len(y):  # kernels are not launched for no rows
            activated: Tensor | LinearInput = y[:, : self.down.shape[1]]
        elif self.activation.fused:
            form = self.down_state.input_format(rows_mh, self.down, groups)
            activated = activation(self.kind, y, None, form, handoff)
        else:
            activated = exact_gelu(y, self.activation.gated)
        return grouped_linear(activated, self.down, groups, self.down_state)


class SharedExpert(nn.Module):
    """An MLP that every token passes, with an optional gate of its own for each token."""

    def __init__(self, name: str, config: ModelConfig, context: BuildContext, memory: BlockMemory) -> None:
        super().__init__()
        assert config.moe is not None
        assert config.moe.shared_ffn_hidden_size is not None
        as_mlp = config.model_copy(update={"ffn_hidden_size": config.moe.shared_ffn_hidden_size})
        before = Neighbor("mlp_norm", "none", "the router and the experts read the norm's output too")
        self.mlp = MLP(name, as_mlp, context, input=before, memory=replace(memory, norms=False))
        self.gate: nn.Parameter | None = None
        if config.moe.shared_gate:
            shards = unsharded(f"{name}_gate.weight", (1, config.hidden_size))
            self.gate = replicated_parameter(context, shards, Init("normal", config.init_std))

    def forward(self, x_sbh: Tensor) -> Tensor:
        y_sbh = self.mlp(x_sbh)
        if self.gate is None:
            return y_sbh
        return high_precision_linear(x_sbh, self.gate).sigmoid() * y_sbh


class MoE(nn.Module):
    """`[s, b, h]` (or `[s/t, b, h]` sequence-parallel) -> the same shape. Tokens are not replicated over ranks."""

    def __init__(self, name: str, config: ModelConfig, context: BuildContext, memory: BlockMemory = KEEP_ALL) -> None:
        super().__init__()
        assert config.moe is not None
        self.group = context.expert
        init = Init("normal", config.init_std)
        self.router = Router(f"{name}.router", config.hidden_size, config.moe, context, init)
        self.experts = Experts(f"{name}.experts", config, context)
        self.shared: SharedExpert | None = None
        if config.moe.shared_ffn_hidden_size is not None:
            self.shared = SharedExpert(f"{name}.shared", config, context, memory)

    #: The form in which the norm before it gives its input: values.
    input_format = None

    def forward(self, x_sbh: Tensor | LinearInput) -> Tensor:
        assert isinstance(x_sbh, Tensor)
        x_nh = x_sbh.flatten(0, 1)
        routing = self.router(x_nh, sequences=x_sbh.shape[1])
        counts_e = routing.tokens.sum(dim=0)
        permutation = by_expert(routing.experts, len(counts_e))
        rows_mh = permute(x_nh, permutation)
        if self.group is None or self.group.size() == 1:
            results_mh = self.experts(rows_mh, counts_e.cumsum(0, dtype=torch.int32))
        else:
            with_ranks = exchange(counts_e, self.group)
            arrived_mh = with_ranks.to_experts(rows_mh)
            results_mh = with_ranks.to_tokens(self.experts(arrived_mh, with_ranks.ends_e))
        y_sbh = combine(results_mh, routing.weights, permutation).view_as(x_sbh)
        return y_sbh if self.shared is None else y_sbh + self.shared(x_sbh)
