"""Mixture of experts, divided over expert-parallel ranks, with an optional shared expert.

    all-gather   tokens of all ranks -> rows by expert -> up, activation, down -> weighted sum -> reduce-scatter
    all-to-all   rows by expert -> to the experts' ranks -> up, activation, down -> back -> weighted sum

*All-gather*: each rank receives all tokens and computes the outputs of its own experts; then the ranks' sums are added
up. A token is sent once to each rank, however many of its experts are there, and message sizes do not depend on the
choices. This moves fewer bytes if there are no more ranks than experts per token. Each expert may also be split over
ranks (expert tensor parallelism), which adds more summands. *All-to-all*: a token is sent once to each of its experts.

The experts of a rank are two parameters: the first linear layers of all experts, and the second linear layers. In a
checkpoint the weights of each expert have separate names (`layers.0.mlp.experts.3.up.weight`), so they fit every
layout.

*Latents* (LatentMoE): experts may read and write tokens of a smaller width l. Each rank projects its own tokens before
it dispatches them, and projects the combined results. The router and the shared expert read tokens of the full width.

In FP8, the linear layers of each expert have separate scales. The latent projections, which every rank holds whole,
stay in high precision. A shared expert is an MLP like the MLP of a layer without experts.

Shapes: s sequence length, b micro-batch size, n = s·b tokens of this rank, k experts per token, h hidden size, l width
of the experts' input (h without latents), m rows of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megafp8.config import MlpConfig, MoeFfnConfig
from megafp8.fp8.speed_model import LinearSize
from megafp8.layers.activation.op import activation
from megafp8.layers.activation.record import ACTIVATIONS
from megafp8.layers.build import PartBuild
from megafp8.layers.context import BuildContext, new_parameter, replicated_parameters
from megafp8.layers.costs import DispatchTraffic, KernelWork, MicroBatch, fp8_bytes
from megafp8.layers.experts.bias_op import with_biases
from megafp8.layers.experts.exchange import plan_dispatch
from megafp8.layers.experts.own_rows import MARGIN, RowBound, own_rows
from megafp8.layers.experts.permute_op import Permutation, combine, expert_input, permute, scale_rows
from megafp8.layers.experts.router import Router
from megafp8.layers.mixer import FeedForward, Tokens
from megafp8.layers.mlp.module import MLP
from megafp8.layers.mlp.op import unfused
from megafp8.layers.norm.module import Norm, block_norm, normalized
from megafp8.layers.whole_linear import WholeLinear
from megafp8.linear.fusion import LinearInput
from megafp8.linear.group_state import GroupState
from megafp8.linear.grouped_linear import grouped_linear
from megafp8.linear.linear import high_precision_linear
from megafp8.linear.state import InputFormat, LinearState, QuantizedGradHandoff
from megafp8.numerics.batch_invariance import sigmoid
from megafp8.numerics.groups import RowGroups
from megafp8.parallel import collectives
from megafp8.parallel.sharding import Init, shard_dim, unsharded
from megafp8.parallel.tensor.mappings import (
    gather_from_sequence_parallel,
    start_gather_from_sequence_parallel,
    start_reduce_scatter_to_sequence_parallel,
)
from megafp8.plan import Neighbor
from megafp8.spec import ModelSpec


class Experts(nn.Module):
    """MLPs of this rank's experts, which map rows `[m, l]`, sorted by expert, to `[m, l]`."""

    def __init__(self, name: str, record: MoeFfnConfig, model: ModelSpec, context: BuildContext) -> None:
        super().__init__()
        parts, part = collectives.size(context.expert_tensor), collectives.rank(context.expert_tensor)
        ranks, rank = collectives.size(context.expert) // parts, collectives.rank(context.expert) // parts
        count, h, f = record.num_experts // ranks, record.latent_size or model.hidden_size, record.width
        self.kind, self.activation = record.activation, ACTIVATIONS[record.activation]
        self.batch_invariant = context.batch_invariant
        self.local_experts = local_experts = range(rank * count, (rank + 1) * count)
        first = ("gate", "up") if self.activation.gated else ("up",)
        into = [
            shard_dim(f"{name}.{e}.{layer}.weight", (f, h), 0, part, parts) for e in local_experts for layer in first
        ]
        out_of = [shard_dim(f"{name}.{e}.down.weight", (h, f), 1, part, parts) for e in local_experts]
        fuses: Literal["per_tensor or blocks", "none"] = "per_tensor or blocks" if self.activation.fused else "none"
        between = Neighbor(self.kind, fuses, f"{self.kind} has no fused kernel")
        weighted, sent = "their rows are multiplied by weights first", "their outputs are sent to other ranks"
        before = Neighbor("permutation", "none" if record.scale_inputs else "any", weighted)
        after = Neighbor("sum over experts", "any" if context.gathers_tokens else "none", sent)
        up_names, down_names = (
            [f"{name}.{e}.{layer}" for e in local_experts] for layer in (self.activation.up_layer, "down")
        )
        biased = model.mlp_bias
        up_width = self.activation.up_width(f) // parts
        self.up_state = self._state(
            up_names, (h, up_width), context, parallel="column", before=before, after=between, adds_bias=biased
        )
        self.down_state = self._state(
            down_names, (f // parts, h), context, parallel="row", before=between, after=after, adds_bias=biased
        )
        spec = {"replicated_over_tp": False, "expert": True}
        self.up = new_parameter(context, into, Init("normal", model.hidden_init_std), matrix=True, **spec)
        into_stream = record.latent_size is None
        std = model.output_init_std if into_stream else model.hidden_init_std
        self.down = new_parameter(context, out_of, Init("normal", std), matrix=True, **spec)
        self.up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if biased:
            assert parts == 1
            zeros, spec = Init("zeros"), spec | {"weight_decay": False}
            into = [x for e in local_experts for layer in first for x in unsharded(f"{name}.{e}.{layer}.bias", (f,))]
            out_of = [x for e in local_experts for x in unsharded(f"{name}.{e}.down.bias", (h,))]
            self.up_bias = new_parameter(context, into, zeros, **spec)
            self.down_bias = new_parameter(context, out_of, zeros, **spec)

    @staticmethod
    def _state(names: Sequence[str], size: tuple[int, int], context: BuildContext, **site: Any) -> GroupState:
        """Plan how one linear layer of every expert runs.

        Amaxes are taken over all ranks that hold the expert.

        Args:
            names: Name of the layer in each expert.
            size: Inputs and outputs of the layer on this rank.
            context: Process groups and FP8 manager.
            **site: Other fields of `LinearSite`.
        """
        parts, fp8 = collectives.size(context.expert_tensor), context.fp8
        group = context.expert_tensor if parts > 1 else None
        rows = context.expert_rows if collectives.size(context.expert_rows) > parts else None
        site |= {"tokens": None, "expert": True, "tensor_parallel": parts}
        if context.whole_experts:
            site["gathers_values"] = "no other rank has a shard of them"
        elif not fp8.gathers_one_weight(names):
            site["gathers_values"] = "other experts of the layer are not FP8 with one scale per weight"
        sites = [replace(context.site(), name=name, inputs=size[0], outputs=size[1], **site) for name in names]
        return fp8.group(
            [fp8.linear(x, tp_group=group, amax_group=context.expert_amax, expert_rows=rows) for x in sites]
        )

    def input_format(self, x: Tensor, groups: RowGroups) -> InputFormat | None:
        """Return the input format of the experts' rows; None for values.

        Only the device and dtype of `x` matter.
        """
        return self.up_state.input_format(x, self.up, groups)

    def grad_handoff(self, x: Tensor, groups: RowGroups) -> QuantizedGradHandoff | None:
        """Return the handoff for a quantized gradient of the experts' outputs.

        The operation after the experts quantizes the gradient. The result is None if the experts quantize it
        themselves. Only the device and dtype of `x` matter.
        """
        return self.down_state.grad_handoff(x, self.down, groups)

    def forward(
        self, rows_ml: Tensor | LinearInput, groups: RowGroups, handoff: QuantizedGradHandoff | None = None
    ) -> Tensor:
        """Compute the experts' outputs `[m, l]` from their rows.

        Args:
            rows_ml: Rows sorted by expert, in the format `input_format`.
            groups: Row range of each expert.
            handoff: Result of `grad_handoff`, which the operation after the experts gets, too.
        """
        like = rows_ml if isinstance(rows_ml, Tensor) else rows_ml.tensor
        up_handoff = self.up_state.grad_handoff(like, self.up, groups)
        y = grouped_linear(rows_ml, self.up, groups, self.up_state, up_handoff)
        y = with_biases(y, self.up_bias, groups.ends_e)
        if not len(y):  # kernels cannot be launched without rows
            activated: Tensor | LinearInput = y[:, : self.down.shape[1]]
        elif self.activation.fused:
            form = self.down_state.input_format(like, self.down, groups)
            activated = activation(self.kind, y, None, form, up_handoff)
        else:
            activated = unfused(self.kind, batch_invariant=self.batch_invariant)(y)
        results = grouped_linear(activated, self.down, groups, self.down_state, handoff)
        return with_biases(results, self.down_bias, groups.ends_e)


class SharedExpert(nn.Module):
    """MLP that processes every token, with an optional gate computed from the token."""

    def __init__(self, build: PartBuild[MlpConfig], gated: bool) -> None:
        super().__init__()
        model, context = build.model, build.context
        self.mlp = MLP(build)
        self.batch_invariant = context.batch_invariant
        self.gate: nn.Parameter | None = None
        if gated:
            shapes = {f"{build.name}_gate.weight": (1, model.hidden_size)}
            self.gate = replicated_parameters(context, shapes, Init("normal", model.score_init_std), scores=True)

    def forward(self, x_sbh: Tensor) -> Tensor:
        """Return the MLP's output `[s, b, h]`, multiplied by the sigmoid of the gate if there is one."""
        y_sbh = self.mlp(x_sbh)
        if self.gate is None:
            return y_sbh
        invariant = self.batch_invariant
        gate = high_precision_linear(x_sbh, self.gate, batch_invariant=invariant)
        return sigmoid(gate, batch_invariant=invariant) * y_sbh


_EXPERTS_NORM, _EXPERTS_OUTPUT_NORM = "experts_norm", "experts_output_norm"
_SHARED_NORM, _SHARED_OUTPUT_NORM = "shared_norm", "shared_output_norm"


@dataclass(frozen=True)
class RoutedTokens:
    """Token ids and padding mask that a layer with experts reads, with one element per token.

    Args:
        ids_n: Token ids, int64; None unless they choose the experts.
        padding_n: Whether each token is padding, bool; None if no token is.
    """

    ids_n: Tensor | None = None
    padding_n: Tensor | None = None

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Tensors that are not None."""
        return [x for x in (self.ids_n, self.padding_n) if x is not None]


class MoE(FeedForward):
    """Feed-forward network that sends each token to a few of its experts.

    The layer always reads the norm's values, even if `input` could quantize them. Tokens are not replicated over
    ranks.
    """

    def __init__(self, build: PartBuild[MoeFfnConfig]) -> None:
        super().__init__()
        name, record, model, context = build.name, build.record, build.model, build.context
        self.name, self.num_experts = name, record.num_experts
        self.drops = record.capacity_factor is not None or record.zero_experts is not None
        self.group, self.gathers_tokens = context.expert, context.gathers_tokens
        self.parts = collectives.size(context.expert_tensor)
        self.overlap, self.during_exchange = context.expert_overlap, context.during_exchange
        self.row_bound = context.row_bound or RowBound(context.buffer_device)
        init = Init("normal", model.score_init_std)
        self.router = Router(
            f"{name}.router", model.hidden_size, record, context, init, biased=model.mlp_bias,
            hashed=model.stem.known_vocab_size if record.routing == "hash" else None, norm_eps=model.norm.eps,
        )  # fmt: skip
        self.sequence_group = context.tensor if context.sequence_sharded else None
        self.experts = Experts(f"{name}.experts", record, model, context)
        self.latent_down: WholeLinear | None = None
        self.latent_up: WholeLinear | None = None
        self.width = record.latent_size or model.hidden_size
        if record.latent_size is not None:
            h, (into, out_of) = model.hidden_size, (model.hidden_init_std, model.output_init_std)
            self.latent_down = WholeLinear(f"{name}.latent_down", h, self.width, context, into)
            self.latent_up = WholeLinear(f"{name}.latent_up", self.width, h, context, out_of)
        self.shared: SharedExpert | None = None
        self.shared_factor = record.shared_scaling_factor
        if record.shared is not None:
            before = Neighbor("mlp_norm", "none", "the router and the experts read the norm's output too")
            shared = PartBuild(f"{name}.shared", record.shared, model, context, before, build.memory)
            self.shared = SharedExpert(shared, record.shared_gate)
        self.norms: nn.ModuleDict | None = None
        if record.separate_norms:
            names = (_EXPERTS_NORM, _EXPERTS_OUTPUT_NORM, _SHARED_NORM, _SHARED_OUTPUT_NORM)
            self.norms = nn.ModuleDict({which: block_norm(f"{name}.{which}", model, context) for which in names})

    @property
    def routers(self) -> Sequence[Router]:
        """Router of the layer."""
        return (self.router,)

    def flops(self, batch: MicroBatch) -> float:
        """Return the forward FLOPs of the router, the shared expert's gate and the chosen experts, if the load is even.

        The number is correct only on a rank that holds all experts.
        """
        gate = 0 if self.shared is None or self.shared.gate is None else self.shared.gate.numel()
        share = self.router.moe.top_k / self.router.moe.router_outputs
        weights = self.router.weight.numel() + gate + share * (self.experts.up.numel() + self.experts.down.numel())
        return 2.0 * batch.tokens * weights

    def rows(self, batch: MicroBatch) -> int:
        """Return the number of rows of this rank's experts if the load is even."""
        return int(batch.own_tokens * self.router.moe.top_k * self.parts * self._computed_share)

    @property
    def _computed_share(self) -> float:
        """Share of choices that fall on experts with computation if the load is even."""
        return self.num_experts / self.router.moe.router_outputs

    def reserved_rows(self, batch: MicroBatch) -> int:
        """Return the number of rows that buffers have room for if the load is even."""
        if collectives.size(self.group) == 1:  # a row for each choice
            return batch.own_tokens * self.router.moe.top_k
        return int(self.rows(batch) * min(batch.expert_room, self.most_room)) if batch.replayed else self.rows(batch)

    @property
    def most_room(self) -> float:
        """Largest room for the rows of this rank's experts, as a multiple of an even load.

        Tokens that are gathered have at most one row for each of the rank's experts. The room of an all-to-all is part
        of its messages, so it is never larger than `MARGIN`.
        """
        ranks, k = collectives.size(self.group), self.router.moe.top_k
        if not self.gathers_tokens:
            return MARGIN
        return ranks * min(k, len(self.experts.local_experts)) / (k * self._computed_share)

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward, by tensor, if the load is even."""
        moe, experts, e, w = self.router.moe, self.experts, batch.element, batch.statistic
        up, down, rows, count = (
            experts.up_state.states[0],
            experts.down_state.states[0],
            self.reserved_rows(batch),
            len(experts.local_experts),
        )
        saved = {} if self.shared is None else self.shared.mlp.saved(batch)
        # The router's input is the norm's output. A shared expert may save the same tensor.
        shared_form = None if self.shared is None else self.shared.mlp.up.state.plan.saved
        shares_input = shared_form == "high" and batch.tokens == batch.own_tokens and self.norms is None

        def kept_input(state: LinearState) -> int:
            if state.plan.saved == "high":
                return rows * state.site.inputs * e
            granularity = batch.granularity(state.plan.name, "input")
            share, rest = divmod(rows, count)
            shares = [share + 1] * rest + [share] * (count - rest)
            return sum(fp8_bytes(granularity, state.site.inputs, x) for x in shares)

        n = moe.router_outputs
        hidden = self.router.weight.shape[1]
        token_bytes = hidden * e * (not shares_input) + (n + (n + 1) * (moe.z_loss > 0)) * w  # input, scores, logits
        token_bytes += moe.top_k * (8 + w)  # indices and weights of experts
        token_bytes += (1 + moe.top_k) * w * moe.normalize
        if moe.zero_experts is not None:  # their weights' sum and mask, and the tokens that they return
            token_bytes += w + moe.top_k + hidden * e * (self.norms is not None)
        aux = batch.sequences * (1 + n) * w * (self.router.aux_loss > 0)
        return saved | {
            "router": batch.own_tokens * token_bytes + aux + 8 * (2 * n + 3),
            "latent sums of experts": 0 if self.latent_up is None else batch.own_tokens * self.width * e,
            "rows of experts": 8 * rows,  # int64 indices
            "expert input": kept_input(up),
            "expert up output": rows * up.site.outputs * e,
            "expert down input": kept_input(down),
            "expert output": rows * down.site.outputs * e,
            "unscaled expert input": (rows * (up.site.inputs * e + 8) + batch.own_tokens * moe.top_k * w)
            * moe.scale_inputs,
            "expert sizes": 0 if up.plan.fp8 and experts.up_bias is None else 4 * count,
            "inputs and outputs of norms": self._saved_norms(batch),
        }

    def _saved_norms(self, batch: MicroBatch) -> int:
        """Return the bytes of the residual stream, outputs before their norms, and the router's norm and scales."""
        if self.norms is None:
            return 0
        h, statistics = self.router.weight.shape[1], 5 + 2 * self.router.moe.top_k  # includes unscaled expert weights
        return batch.own_tokens * (4 * h * batch.element + statistics * batch.statistic) + h * batch.element

    def activation_bytes(self, batch: MicroBatch) -> int:
        """Return the bytes that recomputing the shared expert's activation moves.

        The experts' activation is never recomputed.
        """
        return 0 if self.shared is None else self.shared.mlp.activation_bytes(batch)

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the work of activations, the small kernels of the router, and both permutations of rows."""
        up, down = self.experts.up_state.states[0].site, self.experts.down_state.states[0].site
        element_rows, copies = self.rows(batch) * batch.element, 6 if self.router.moe.scale_inputs else 4
        forward = element_rows * (up.outputs + down.inputs + copies * up.inputs)
        experts = KernelWork(forward, forward + element_rows * up.outputs, kernels=10)
        if self.experts.up_bias is not None:
            results = element_rows * (up.outputs + down.outputs)
            experts += KernelWork(2 * results, results, kernels=2)
        if self.router.moe.zero_experts is not None:  # a product in fp32 and a sum
            moved = 10.0 * batch.own_tokens * self.router.weight.shape[1] * batch.element
            experts += KernelWork(moved, moved, kernels=6)
        if self.norms is not None:  # four norms, and the router's
            moved = 3.0 * 5 * batch.own_tokens * self.router.weight.shape[1] * batch.element
            experts += KernelWork(moved, 1.5 * moved, 12)
        return experts if self.shared is None else experts + self.shared.mlp.work(batch)

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Return the bytes of the gradients of the experts' inputs and outputs, and of gathered tokens."""
        sites = [group.states[0].site for group in (self.experts.up_state, self.experts.down_state)]
        ranks = collectives.size(self.group)
        gathered = 2 * ranks * batch.own_tokens * self.width if self.gathers_tokens and ranks > 1 else 0
        rows = self.reserved_rows(batch) * sum(x.inputs + x.outputs for x in sites)
        return (rows + gathered) * batch.element

    def router_gemms(self, batch: MicroBatch) -> list[LinearSize]:
        """Return the router's GEMM as a bf16 GEMM with three times the outputs.

        An fp32 product takes three bf16 products.
        """
        return [LinearSize(batch.own_tokens, self.router.weight.shape[1], 3 * self.router.moe.router_outputs)]

    def dispatch_traffic(self, batch: MicroBatch) -> DispatchTraffic | None:
        """Return the bytes that ranks exchange to dispatch tokens; None if one rank holds all experts."""
        ranks = collectives.size(self.group)
        if ranks == 1:
            return None
        tokens = batch.own_tokens * self.width * batch.element
        rows = self.router.moe.top_k * self._computed_share * (MARGIN if batch.replayed else 1)
        received = tokens * (ranks - 1) * (1 if self.gathers_tokens else rows / ranks)
        return DispatchTraffic(ranks, tokens, received, self.gathers_tokens)

    def inputs(self, layer: int, tokens: Tokens) -> RoutedTokens:
        """Return the token ids (if the router needs them) and the padding mask of this rank's tokens."""
        ids_bs = None if self.router.table is None else tokens.ids_bs
        key = "routed tokens", ids_bs is None, tokens.depth
        return tokens.once(key, lambda: RoutedTokens(self._own(ids_bs), self._own(tokens.padding_bs)))

    def _own(self, x_bs: Tensor | None) -> Tensor | None:
        """Return the elements of `x_bs` for the tokens of this rank's residual stream, `[n]`."""
        if x_bs is None:
            return None
        x_sb = x_bs.t()
        if self.sequence_group is not None:
            x_sb = collectives.own_slice(x_sb, self.sequence_group)
        return x_sb.flatten()

    def forward(self, x_sbh: Tensor | LinearInput, inputs: RoutedTokens | None = None) -> Tensor:
        """Return the weighted outputs of the experts plus the shared expert's output, `[s, b, h]`. Collective."""
        assert isinstance(x_sbh, Tensor)
        x_nh, tokens = x_sbh.flatten(0, 1), RoutedTokens() if inputs is None else inputs
        # Without separate norms, experts and router read one tensor. Autograd then adds their gradients first and needs
        # one pass less.
        expert_x_nh = x_nh if self.norms is None else self._normed(_EXPERTS_NORM, x_sbh).flatten(0, 1)
        x_nl = expert_x_nh if self.latent_down is None else self.latent_down(expert_x_nh)
        run = self._all_gather if self.gathers_tokens else self._all_to_all
        finish, identity_n1 = run(x_nh, x_nl, x_sbh.shape[1], tokens)
        shared = None
        if self.shared is not None:
            shared = self._normed(_SHARED_OUTPUT_NORM, self.shared(self._normed(_SHARED_NORM, x_sbh)))
            shared = shared if self.shared_factor == 1 else shared * self.shared_factor
        y_nl = finish()
        y_nh = y_nl if self.latent_up is None else self.latent_up(y_nl)
        if identity_n1 is not None:
            y_nh = (y_nh + identity_n1 * expert_x_nh).to(y_nh.dtype)
        y_sbh = self._normed(_EXPERTS_OUTPUT_NORM, y_nh.view_as(x_sbh))
        return y_sbh if shared is None else y_sbh + shared

    def _normed(self, which: str, x_sbh: Tensor) -> Tensor:
        """Apply the norm `which`, or return the input unchanged if the layer has no separate norms."""
        if self.norms is None:
            return x_sbh
        norm = self.norms[which]
        assert isinstance(norm, Norm)
        return normalized(norm, x_sbh)

    def _all_gather(
        self, x_nh: Tensor, x_nl: Tensor, sequences: int, tokens: RoutedTokens
    ) -> tuple[Callable[[], Tensor], Tensor | None]:
        """Run the experts with all-gather dispatch: each rank computes its experts for the tokens of all ranks.

        The gather of tokens overlaps with the router. The reduce-scatter of the results overlaps with the work before
        the returned function is called.

        Args:
            x_nh: Tokens as the router reads them.
            x_nl: Tokens as the experts read them.
            sequences: Number of sequences; token i belongs to sequence i mod `sequences`.
            tokens: Token ids and padding mask.

        Returns:
            Function that waits for the sum and returns the experts' outputs for this rank's tokens, `[n, l]`, and
            `Routing.identity_n1`.
        """
        gathered = start_gather_from_sequence_parallel(x_nl, self.overlap, self.during_exchange)
        routing = self.router(x_nh, sequences, tokens.ids_n, tokens.padding_n)
        chosen = collectives.all_gather(routing.experts, self.group)
        x = gathered()
        # Gather the weights after the tokens. Backward then reduces the gradients of the weights before the gradients
        # of the tokens; the router's backward waits only for the former.
        weights = gather_from_sequence_parallel(routing.weights, self.group)
        permutation, ends_e = own_rows(
            chosen, self.num_experts, self.experts.local_experts, self.row_bound, self.name,
            share=self._computed_share, drops=self.drops,
        )  # fmt: skip
        groups = RowGroups.from_ends(ends_e, len(permutation.order))
        handoff = self.experts.grad_handoff(x, groups)
        rows_ml: Tensor | LinearInput
        if self.router.moe.scale_inputs:
            rows_ml, weights = self._scaled(x, weights, permutation)
        else:
            rows_ml = expert_input(x, permutation, self.experts.input_format(x, groups))
        y = combine(self.experts(rows_ml, groups, handoff), weights, permutation, handoff)
        return start_reduce_scatter_to_sequence_parallel(y, self.overlap, self.during_exchange), routing.identity_n1

    @staticmethod
    def _scaled(x_nl: Tensor, weights_nk: Tensor, permutation: Permutation) -> tuple[Tensor, Tensor]:
        """Return the experts' inputs times their weights, and ones as the weights of the outputs."""
        return scale_rows(permute(x_nl, permutation), weights_nk, permutation), torch.ones_like(weights_nk)

    def _all_to_all(
        self, x_nh: Tensor, x_nl: Tensor, sequences: int, tokens: RoutedTokens
    ) -> tuple[Callable[[], Tensor], Tensor | None]:
        """Run the experts with all-to-all dispatch: each token is sent to the ranks of its experts.

        Arguments and result are the same as in `_all_gather`.
        """
        assert self.group is not None
        routing = self.router(x_nh, sequences, tokens.ids_n, tokens.padding_n)
        between = plan_dispatch(routing.experts, self.num_experts, self.group, self.row_bound, self.name)
        permutation = between.by_rank
        if self.router.moe.scale_inputs:
            rows_ml, weights = self._scaled(x_nl, routing.weights, permutation)
        else:
            rows_ml, weights = permute(x_nl, permutation), routing.weights
        groups = RowGroups.from_ends(between.ends_e, sum(between.received))
        own_rows_ml = between.to_experts(rows_ml, self.experts.input_format(rows_ml, groups))
        y_nl = combine(between.to_tokens(self.experts(own_rows_ml, groups)), weights, permutation)
        return lambda: y_nl, routing.identity_n1
