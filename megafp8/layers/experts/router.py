"""Router of a layer with experts: it chooses the experts of each token and their weights.

Logits, scores and losses are computed in fp32 (fp64 if the model is), whatever the dtype of the model. The experts
with the highest scores are chosen. Of equal scores the lower index wins, so the choice depends only on the scores.

*Losses of the router* are added to the gradient, but not to the reported loss. `_AddLoss` passes its input through, and
in backward it returns the gradient of the router's loss (`BuildContext.auxiliary_loss_grad`). The losses are means over
the sequences (aux_loss) or tokens (z_loss) of the global batch, and sums over layers. Loss masks do not change them,
because all tokens are routed. The aux loss of a sequence needs the choices of all its tokens; if ranks hold slices of
the sequence, their counts are summed. The mean scores need no such sum, because the loss is linear in them. The aux
loss of the global batch uses the choices of the previous step, which are summed over all ranks anyway.

*Padding* is routed too, so that shapes do not depend on it. But it does not count in the losses, the load, the
selection bias or the capacity of experts. Padding tokens are identical, so they would all choose the same experts. The
aux loss of a sequence ignores its padding; means over the tokens of the global batch count padding as zeros.

*Load.* Backward also counts how many tokens chose each expert (`RouterLoad`). Forward cannot count them, because it
runs twice if it is recomputed, and it also runs in evaluations.

*Experts without computation* return their input. They are the last outputs of the router, and choices of them have no
rows: the router returns the sum of their weights for each token.

Shapes: n tokens, b sequences, e experts of the layer (with experts without computation, `router_outputs`), k experts
per token, h hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megafp8.config import MoeFfnConfig
from megafp8.layers.context import BuildContext, replicated_parameters
from megafp8.linear.fp32_linear import fp32_linear
from megafp8.numerics.batch_invariance import sigmoid
from megafp8.numerics.implementations import triton_module
from megafp8.numerics.philox import Key, key_of, philox
from megafp8.parallel import collectives
from megafp8.parallel.sharding import Init

_kernels = triton_module("megafp8.layers.experts.largest_kernel")


class _SqrtSoftplus(Function):
    """Square root of softplus, y = √log(1 + eˣ). Forward saves y, because dy/dx = (1 - e^(-y²)) / 2y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return y elementwise."""
        y = F.softplus(x).sqrt_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """Return the gradient of x, which is 0 where y underflowed to 0."""
        (y,) = ctx.saved_tensors
        return torch.where(y > 0, dy * -torch.expm1(-y.square()) / (2 * y), 0.0)


def _score_function(score: str, *, batch_invariant: bool) -> Callable[[Tensor], Tensor]:
    """Return the function that computes scores from logits `[n, e]` for a value of `model.moe.score`."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": partial(torch.softmax, dim=1),
        "sigmoid": partial(sigmoid, batch_invariant=batch_invariant),
        "sqrtsoftplus": _SqrtSoftplus.apply,
    }
    return functions[score]


class RouterLoad:
    """Sums that a router's backward passes accumulate in a step, on this rank. All tensors are float64.

    Attributes:
        tokens: Number of tokens that chose each expert, `[e]`.
        scores: Sum over tokens of their scores of each expert, `[e]`. The scores of each token add up to 1.
        losses: Aux loss and z-loss as they enter the gradient, `[2]`.
        dropped: Number of choices beyond the capacity of experts, `[1]`.
    """

    def __init__(self, experts: int, device: torch.device) -> None:
        self.sums = torch.zeros(2 * experts + 3, dtype=torch.float64, device=device)
        self.tokens, self.scores, self.losses, self.dropped = self.sums.split([experts, experts, 2, 1])

    def zero(self) -> None:
        """Reset all sums to zero."""
        self.sums.zero_()


class Routing(NamedTuple):
    """Experts of each token and their weights."""

    experts: Tensor
    """Chosen experts, best first, int64 `[n, k]`; `num_experts` marks a choice without a row."""
    weights: Tensor
    """Weights of the chosen experts, fp32 or fp64 `[n, k]`."""
    tokens: Tensor
    """Number of tokens of each sequence that chose each expert, without padding, int64 `[b, e]`."""
    identity_n1: Tensor | None = None
    """Factor of each token's input in its output, fp32 or fp64; None if every expert computes."""

    def without_zero_experts(self, moe: MoeFfnConfig) -> Routing:
        """Move the weights of experts without computation to `identity_n1`."""
        if moe.zero_experts is None:
            return self
        computed_nk = (self.experts < moe.num_experts) | (self.experts == moe.router_outputs)
        identity_n1 = self.weights.masked_fill(computed_nk, 0.0).sum(dim=1, keepdim=True)
        return self._replace(experts=self.experts.clamp(max=moe.num_experts), identity_n1=identity_n1)


class _AddLoss(Function):
    """Identity of a tensor that adds a loss to the gradient in backward, and sums to a `RouterLoad`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, loss: Tensor | None, load: RouterLoad, sums: Tensor, loss_grad: Tensor | None
    ) -> Tensor:
        """Return `x`.

        Args:
            ctx: Context of autograd.
            x: Tensor to pass through.
            loss: Loss whose gradient backward adds; None for no loss.
            load: Sums to which backward adds.
            sums: Values that backward adds to `load.sums`.
            loss_grad: Gradient of `loss`, fp32 `[]`; None for 1.
        """
        ctx.save_for_backward(sums)
        ctx.load, ctx.dtype, ctx.loss_grad = load, None if loss is None else loss.dtype, loss_grad
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        """Return `dx` and the gradient of the loss."""
        (sums,) = ctx.saved_tensors
        ctx.load.sums.add_(sums)
        if ctx.dtype is None:
            return dx, *[None] * 4
        loss_grad = torch.ones((), device=dx.device) if ctx.loss_grad is None else ctx.loss_grad
        return dx, loss_grad.to(ctx.dtype), *[None] * 3


def choose(scores_ne: Tensor, moe: MoeFfnConfig, bias_e: Tensor | None) -> Tensor:
    """Choose the experts of each token by the router's scores plus the selection bias; return int64 `[n, k]`."""
    ranked_ne = scores_ne.detach() if bias_e is None else scores_ne.detach() + bias_e
    if moe.top_groups is not None and moe.top_groups < moe.num_groups:
        in_group = ranked_ne.unflatten(1, (moe.num_groups, -1))
        best = 1 if moe.score == "softmax" else 2
        groups_ng = in_group.topk(min(best, in_group.shape[2]), dim=2).values.sum(dim=2)
        chosen_ng = torch.zeros_like(groups_ng, dtype=torch.bool)
        chosen_ng.scatter_(1, _largest(groups_ng, moe.top_groups), True)
        ranked_ne = in_group.masked_fill(~chosen_ng.unsqueeze(2), -torch.inf).flatten(1)
    return _largest(ranked_ne, moe.top_k)


def weigh(scores_ne: Tensor, experts_nk: Tensor, moe: MoeFfnConfig) -> Tensor:
    """Return the weights of each token's experts `[n, k]`: their scores, normalized and scaled by the config."""
    weights_nk = scores_ne.gather(1, experts_nk)
    if moe.normalize:
        weights_nk = weights_nk / (weights_nk.sum(dim=1, keepdim=True) + 1e-20)
    return weights_nk * moe.scaling_factor


def hash_table(tokens: int, moe: MoeFfnConfig, key: Key, device: torch.device) -> Tensor:
    """Return random experts for each token id, int64 `[tokens, k]`.

    The experts of an id are all different, and every expert is used about equally often. The ids are shuffled and
    divided into groups of e ids, where e is the number of experts. In each group, choice c of the ids runs through the
    experts in a random order, rotated by a random number that differs between choices.
    """
    if device.type == "meta":  # skip the shuffle, which takes seconds for a large vocabulary
        return torch.empty(tokens, moe.top_k, dtype=torch.int64, device=device)
    e, groups = moe.router_outputs, -(-tokens // moe.router_outputs)

    def orders(stream: int, rows: int, size: int) -> Tensor:
        """Return random permutations of `size` numbers, `[rows, size]`."""
        counter = torch.arange(rows * size, device=device) + (stream << 40)
        return philox(counter, key)[0].view(rows, size).argsort(dim=1, stable=True)

    place_t = orders(0, 1, tokens).flatten().argsort()
    group_t, row_t = place_t // e, place_t % e
    experts_ge, rotations_gk = orders(1, groups, e), orders(2, groups, e)[:, : moe.top_k]
    return experts_ge[group_t].gather(1, (row_t.unsqueeze(1) + rotations_gk[group_t]) % e)


def within_capacity(
    experts_nk: Tensor, weights_nk: Tensor, moe: MoeFfnConfig, padding_n: Tensor | None = None
) -> Tensor:
    """Return `experts_nk` with e in place of each choice beyond its expert's capacity.

    An expert keeps the choices with the largest weights. Padding gets only the room that other tokens leave.
    """
    if moe.capacity_factor is None:
        return experts_nk
    n, k = experts_nk.shape
    capacity = math.ceil(moe.capacity_factor * n * k / moe.router_outputs)
    weights_ne = weights_nk.new_full((n, moe.router_outputs), -torch.inf).scatter(1, experts_nk, weights_nk.detach())
    if padding_n is not None:
        weights_ne = weights_ne.masked_fill(padding_n.unsqueeze(1), -torch.inf)
    places_ne = weights_ne.argsort(dim=0, descending=True, stable=True).argsort(dim=0)
    dropped_nk = places_ne.gather(1, experts_nk) >= capacity
    if moe.zero_experts is not None:
        dropped_nk = dropped_nk & (experts_nk < moe.num_experts)
    return experts_nk.masked_fill(dropped_nk, moe.router_outputs)


def _count(experts_nk: Tensor, b: int, experts: int, padding_n: Tensor | None) -> Tensor:
    """Count the tokens of each of b sequences that chose each expert, without padding, int64 `[b, e]`."""
    sequences_n1 = torch.arange(len(experts_nk), device=experts_nk.device).remainder(b).unsqueeze(1)
    cells = (sequences_n1 * experts + experts_nk).flatten()
    counted_nk = torch.ones_like(experts_nk)
    if padding_n is not None:
        counted_nk = counted_nk.masked_fill(padding_n.unsqueeze(1), 0)
    return cells.new_zeros(b * experts).scatter_add_(0, cells, counted_nk.flatten()).view(b, experts)


def _largest(x: Tensor, count: int) -> Tensor:
    """Return the columns of the `count` largest values of each row, in descending order.

    Of equal values the first column comes first; `Tensor.topk` does not define their order.
    """
    if x.is_cuda and x.dtype == torch.float32 and x.shape[1] <= _kernels().MOST_COLUMNS:
        return _kernels().largest(x.contiguous(), count)
    return x.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()  # frees the other columns


class Router(nn.Module):
    """Router that maps tokens `[n, h]` to a `Routing`.

    Args:
        name: Prefix of the names of its tensors.
        hidden_size: Width of the tokens.
        moe: Record of the layer's experts.
        context: Process groups, dtype and device of the model.
        init: Initialization of the weight.
        biased: Whether logits have a learned bias.
        hashed: Number of token ids if a fixed table chooses the experts by id; None to choose experts by score.
        norm_eps: Number added to the mean square of the router's norm (`moe.separate_norms`).

    Attributes:
        scale: Learned scale of each channel `[h]` (`moe.separate_norms`); otherwise None.
        expert_scale: Learned scale of each expert's weight `[e]` (`moe.separate_norms`); otherwise None.
        bias: Selection bias, fp32 `[e]`; None without `moe.selection_bias`. It has no gradient; `update` changes it.
        table: Experts of each token id, int64 `[hashed, k]`; None without `hashed`.
        shares: Each expert's share of the choices of the previous step, fp32 `[e]`; None unless the aux loss is of the
            global batch. It has no gradient; `update` changes it.
        load: Sums that the backward passes of a step accumulate.
    """

    def __init__(
        self, name: str, hidden_size: int, moe: MoeFfnConfig, context: BuildContext, init: Init, *,
        biased: bool = False, hashed: int | None = None, norm_eps: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.moe, self.batch_invariant = name, moe, context.batch_invariant
        self.score = _score_function(moe.score, batch_invariant=context.batch_invariant)
        self.group: ProcessGroup | None = context.sequence_group
        self.global_batch, self.global_tokens = context.global_batch, context.global_tokens
        self.loss_grad = context.auxiliary_loss_grad
        shapes = {f"{name}.weight": (moe.router_outputs, hidden_size)}
        self.weight = replicated_parameters(context, shapes, init, scores=True)
        self.logit_bias: nn.Parameter | None = None
        if biased:
            bias = {f"{name}.logit_bias": (moe.router_outputs,)}
            self.logit_bias = replicated_parameters(context, bias, Init("zeros"), weight_decay=False)
        self.scale: nn.Parameter | None = None
        self.expert_scale: nn.Parameter | None = None
        self.norm_eps = norm_eps
        if moe.separate_norms:
            self.scale, self.expert_scale = (
                replicated_parameters(context, {f"{name}.{which}": (n,)}, Init("ones"), weight_decay=False)
                for which, n in (("scale", hidden_size), ("expert_scale", moe.router_outputs))
            )
        device = context.buffer_device
        self.bias: Tensor | None = None
        if moe.selection_bias and hashed is None:
            self.bias = torch.zeros(moe.router_outputs, dtype=torch.float32, device=device)
        self.table = None if hashed is None else hash_table(hashed, moe, key_of(context.seed, f"{name}.table"), device)
        self.aux_loss = moe.aux_loss if hashed is None else 0.0
        self.shares: Tensor | None = None
        if self.aux_loss and moe.aux_loss_scope == "global_batch":
            e = moe.router_outputs
            self.shares = torch.full((e,), 1 / e, dtype=torch.float32, device=device)
        self.load = RouterLoad(moe.router_outputs, device)

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that belong to the weights but have no gradient, by name."""
        return {name: x for name, x in (("bias", self.bias), ("table", self.table)) if x is not None}

    def forward(
        self, x_nh: Tensor, sequences: int, ids_n: Tensor | None = None, padding_n: Tensor | None = None
    ) -> Routing:
        """Choose the experts of each token.

        Args:
            x_nh: Tokens.
            sequences: Number of sequences in `x_nh`; token i belongs to sequence i mod `sequences`.
            ids_n: Token ids, needed only if a table chooses the experts.
            padding_n: Whether each token is padding and does not count, bool; None if no token is.

        Returns:
            Routing. Backward through its weights adds the gradients of the router's losses.
        """
        if self.scale is not None:
            h = len(self.scale)
            x_nh = F.rms_norm(x_nh, (h,), eps=self.norm_eps) * (self.scale * h**-0.5)
        logits_ne = fp32_linear(x_nh, self.weight, batch_invariant=self.batch_invariant)
        if self.logit_bias is not None:
            logits_ne = logits_ne + self.logit_bias.to(logits_ne.dtype)
        scores_ne = self.score(logits_ne)
        if self.table is None:
            experts_nk = choose(scores_ne, self.moe, self.bias)
        else:
            assert ids_n is not None
            experts_nk = self.table[ids_n]
        weights_nk = weigh(scores_ne, experts_nk, self.moe)
        if self.expert_scale is not None:
            weights_nk = weights_nk * self.expert_scale.to(weights_nk.dtype)[experts_nk]
        tokens_be = _count(experts_nk, sequences, self.moe.router_outputs, padding_n)
        routing = Routing(within_capacity(experts_nk, weights_nk, self.moe, padding_n), weights_nk, tokens_be)
        if not torch.is_grad_enabled():
            return routing.without_zero_experts(self.moe)
        shares_ne = scores_ne if self.aux_loss else scores_ne.detach()
        if self.moe.score != "softmax":
            shares_ne = shares_ne / shares_ne.sum(dim=1, keepdim=True)
        weights_nk = self._with_losses(routing, logits_ne, shares_ne, padding_n)
        return routing._replace(weights=weights_nk).without_zero_experts(self.moe)

    def _with_losses(self, routing: Routing, logits_ne: Tensor, shares_ne: Tensor, padding_n: Tensor | None) -> Tensor:
        """Return the weights `[n, k]` of `routing`, such that their backward adds the router's losses and load."""
        moe, zero = self.moe, logits_ne.new_zeros(())
        dropped_nk = routing.experts == moe.router_outputs
        if padding_n is not None:
            shares_ne = shares_ne.masked_fill(padding_n.unsqueeze(1), 0.0)
            dropped_nk = dropped_nk & ~padding_n.unsqueeze(1)
        counts_be = routing.tokens.to(shares_ne.dtype)
        sums = [counts_be.sum(dim=0), shares_ne.detach().sum(dim=0)]
        aux = self._aux_loss(counts_be, shares_ne) if self.aux_loss else zero
        z = self._z_loss(logits_ne, padding_n) if moe.z_loss else zero
        sums.append(torch.stack([aux, z, dropped_nk.sum().to(aux.dtype)]).detach())
        loss = aux + z if self.aux_loss or moe.z_loss else None
        return _AddLoss.apply(routing.weights, loss, self.load, torch.cat(sums).double(), self.loss_grad)

    def _z_loss(self, logits_ne: Tensor, padding_n: Tensor | None) -> Tensor:
        """Return this rank's part of the z-loss, which keeps logits small."""
        squares_n = logits_ne.logsumexp(dim=1).square()
        if padding_n is not None:
            squares_n = squares_n.masked_fill(padding_n, 0.0)
        return squares_n.sum() * (self.moe.z_loss / self.global_tokens)

    def _aux_loss(self, counts_be: Tensor, shares_ne: Tensor) -> Tensor:
        """Return this rank's part of the load-balancing loss."""
        (b, experts), k = counts_be.shape, self.moe.top_k
        if self.shares is not None:
            return (self.shares * shares_ne.sum(dim=0)).sum() * (self.aux_loss * experts / self.global_tokens)
        counts_be = collectives.all_reduce(counts_be.clone(), self.group)  # other ranks hold slices of the sequences
        s = (counts_be.sum(dim=1, keepdim=True) / k).clamp(min=1)  # a sequence may consist of padding
        mean_be = shares_ne.unflatten(0, (-1, b)).sum(dim=0) / s  # this rank's part of the mean
        return (counts_be * (experts / (k * s)) * mean_be).sum() * (self.aux_loss / self.global_batch)

    @torch.no_grad()
    def update(self, tokens_e: Tensor) -> None:
        """Update the selection bias and the shares after a step.

        The bias moves against the load. The bias of a frozen router does not change. `tokens_e` is the number of tokens
        of all ranks that chose each expert.
        """
        if self.shares is not None:
            self.shares.copy_(tokens_e / tokens_e.sum())
        if self.bias is not None and self.weight.requires_grad:
            signs_e = (tokens_e.mean() - tokens_e).sign().to(self.bias.dtype)
            signs_e[self.moe.num_experts :] = 0.0  # experts without computation take what the others leave
            self.bias += self.moe.bias_update_rate * signs_e
