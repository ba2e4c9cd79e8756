"""The router of a layer with experts: which experts each token goes to, and with which weights.

Logits, scores and losses are computed in fp32 (fp64 if the model is), whatever the dtype of the model. Experts are
chosen by score, of equal scores the one with the lower index, so the choice depends on nothing but the scores.

*Losses of the router* are added to the gradient, not to the loss that is reported: `_AddLoss` passes its input through
and in backward gives the router's loss its gradient (`BuildContext.auxiliary_loss_grad`). They are means over the
sequences (aux_loss) or tokens (z_loss) of the global batch, and sums over layers. A loss mask does not change them: all
tokens are routed. The aux loss of a sequence needs the choices of all its
tokens; where ranks hold slices of it, their counts are summed. The mean scores need not be: the loss is linear in them.
The aux loss of the global batch has the choices of the step before, which are summed over all ranks anyway.

*Padding* is routed too, so that shapes do not depend on it, but it counts nowhere: not in the losses, the load and the
selection bias, nor in the capacity of experts. Its tokens are all alike, so they choose the same experts. The aux loss
of a sequence is that of its other tokens alone; means over the tokens of the global batch have padding as zeros.

*Load.* Backward also adds up how many tokens chose each expert (`load`), in `RouterLoad`. Not forward, which runs twice
where it is recomputed, and also in evaluations.

Shapes: n tokens, b sequences, e experts of the layer, k experts of a token, h hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megafp8.config import MoeFfnConfig
from megafp8.layers.context import BuildContext, replicated_parameter
from megafp8.linear.fp32_linear import fp32_linear
from megafp8.numerics.batch_invariance import sigmoid
from megafp8.numerics.philox import Key, key_of, philox
from megafp8.parallel import collectives
from megafp8.parallel.sharding import Init, unsharded


class _SqrtSoftplus(Function):
    """y = √log(1 + eˣ), of which y is kept: its derivative is (1 - e^(-y²)) / 2y. Where it underflows, that is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = F.softplus(x).sqrt_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.where(y > 0, dy * -torch.expm1(-y.square()) / (2 * y), 0.0)


def _score_function(score: str, *, batch_invariant: bool) -> Callable[[Tensor], Tensor]:
    """Return what computes scores of experts from logits `[n, e]`, by `model.moe.score`."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": partial(torch.softmax, dim=1),
        "sigmoid": partial(sigmoid, batch_invariant=batch_invariant),
        "sqrtsoftplus": _SqrtSoftplus.apply,
    }
    return functions[score]


class RouterLoad:
    """What a router's backward passes add up in a step, on this rank: float64 tensors.

    `tokens` `[e]`: choices of each expert. `scores` `[e]`: of all tokens, those of a token adding up to 1. `losses`:
    the aux loss and the z-loss, as they enter the gradient. `dropped` `[1]`: choices beyond the capacity of experts.
    """

    def __init__(self, experts: int, device: torch.device) -> None:
        self.sums = torch.zeros(2 * experts + 3, dtype=torch.float64, device=device)
        self.tokens, self.scores, self.losses, self.dropped = self.sums.split([experts, experts, 2, 1])

    def zero(self) -> None:
        self.sums.zero_()


class Routing(NamedTuple):
    """`experts`: int64 `[n, k]`, the best first, e for a choice that is dropped; `weights`: `[n, k]`, fp32 or fp64;
    `tokens`: int64 `[b, e]`, how many tokens of each sequence chose each expert, without padding."""

    experts: Tensor
    weights: Tensor
    tokens: Tensor


class _AddLoss(Function):
    """The identity of its first argument; its backward adds the gradient of `loss`, if there is one, and to `load`.

    `loss_grad`: fp32 `[]`, the gradient of `loss`; None: 1.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, loss: Tensor | None, load: RouterLoad, sums: Tensor, loss_grad: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(sums)
        ctx.load, ctx.dtype, ctx.loss_grad = load, None if loss is None else loss.dtype, loss_grad
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        (sums,) = ctx.saved_tensors
        ctx.load.sums.add_(sums)
        if ctx.dtype is None:
            return dx, *[None] * 4
        loss_grad = torch.ones((), device=dx.device) if ctx.loss_grad is None else ctx.loss_grad
        return dx, loss_grad.to(ctx.dtype), *[None] * 3


def choose(scores_ne: Tensor, moe: MoeFfnConfig, bias_e: Tensor | None) -> Tensor:
    """The experts of each token, int64 `[n, k]`, from the router's scores."""
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
    """The weights of each token's experts, from the router's scores."""
    weights_nk = scores_ne.gather(1, experts_nk)
    if moe.normalize:
        weights_nk = weights_nk / (weights_nk.sum(dim=1, keepdim=True) + 1e-20)
    return weights_nk * moe.scaling_factor


def hash_table(tokens: int, moe: MoeFfnConfig, key: Key, device: torch.device) -> Tensor:
    """Random experts of each token id, int64 `[tokens, k]`, a token's all different and each expert equally often.

    Ids in random order are divided into groups of as many as there are experts. A group has the experts in a random
    order, which is rotated by another random number for each choice.
    """
    if device.type == "meta":  # without the order of its ids, which takes seconds for a large vocabulary
        return torch.empty(tokens, moe.top_k, dtype=torch.int64, device=device)
    e, groups = moe.num_experts, -(-tokens // moe.num_experts)

    def orders(stream: int, rows: int, size: int) -> Tensor:
        """Random permutations of `size` numbers, `[rows, size]`."""
        counter = torch.arange(rows * size, device=device) + (stream << 40)
        return philox(counter, key)[0].view(rows, size).argsort(dim=1, stable=True)

    place_t = orders(0, 1, tokens).flatten().argsort()
    group_t, row_t = place_t // e, place_t % e
    experts_ge, rotations_gk = orders(1, groups, e), orders(2, groups, e)[:, : moe.top_k]
    return experts_ge[group_t].gather(1, (row_t.unsqueeze(1) + rotations_gk[group_t]) % e)


def within_capacity(
    experts_nk: Tensor, weights_nk: Tensor, moe: MoeFfnConfig, padding_n: Tensor | None = None
) -> Tensor:
    """`experts_nk` with e instead of choices beyond an expert's capacity, which keeps those of the largest weights.

    Padding takes what room is left.
    """
    if moe.capacity_factor is None:
        return experts_nk
    n, k = experts_nk.shape
    capacity = math.ceil(moe.capacity_factor * n * k / moe.num_experts)
    weights_ne = weights_nk.new_full((n, moe.num_experts), -torch.inf).scatter(1, experts_nk, weights_nk.detach())
    if padding_n is not None:
        weights_ne = weights_ne.masked_fill(padding_n.unsqueeze(1), -torch.inf)
    places_ne = weights_ne.argsort(dim=0, descending=True, stable=True).argsort(dim=0)
    return experts_nk.masked_fill(places_ne.gather(1, experts_nk) >= capacity, moe.num_experts)


def _count(experts_nk: Tensor, b: int, experts: int, padding_n: Tensor | None) -> Tensor:
    """How many tokens of each of b sequences chose each expert, int64 `[b, e]`."""
    sequences_n1 = torch.arange(len(experts_nk), device=experts_nk.device).remainder(b).unsqueeze(1)
    cells = (sequences_n1 * experts + experts_nk).flatten()
    counted_nk = torch.ones_like(experts_nk)
    if padding_n is not None:
        counted_nk = counted_nk.masked_fill(padding_n.unsqueeze(1), 0)
    return cells.new_zeros(b * experts).scatter_add_(0, cells, counted_nk.flatten()).view(b, experts)


@cache
def _kernels() -> ModuleType:
    from megafp8.layers.experts import largest_kernel as largest  # needs Triton, which comes with torch's CUDA builds

    return largest


def _largest(x: Tensor, count: int) -> Tensor:
    """Indices of the largest values of each row; of equal ones the first. `Tensor.topk` does not say which."""
    if x.is_cuda and x.dtype == torch.float32 and x.shape[1] <= _kernels().MOST_COLUMNS:
        return _kernels().largest(x.contiguous(), count)
    return x.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()  # the rest is freed


class Router(nn.Module):
    """Tokens `[n, h]` -> `Routing`.

    `biased`: logits have a learned bias. `scale` `[h]`, `expert_scale` `[e]`: those of `moe.separate_norms`, or None.
    `hashed`: number of token ids, whose experts are those of `table` (int64 `[hashed, k]`); None: experts are chosen by
    score. `load`: what training steps leave in it. `bias`: fp32 `[e]`, added to the scores where experts are chosen;
    None without `moe.selection_bias`. `shares`: fp32 `[e]`, of the choices of the step before; None unless the aux loss
    is that of the global batch. They have no gradient: `update` moves them.
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
        shards = unsharded(f"{name}.weight", (moe.num_experts, hidden_size))
        self.weight = replicated_parameter(context, shards, init)
        self.logit_bias: nn.Parameter | None = None
        if biased:
            bias = unsharded(f"{name}.logit_bias", (moe.num_experts,))
            self.logit_bias = replicated_parameter(context, bias, Init("zeros"), weight_decay=False)
        self.scale: nn.Parameter | None = None
        self.expert_scale: nn.Parameter | None = None
        self.norm_eps = norm_eps
        if moe.separate_norms:
            self.scale, self.expert_scale = (
                replicated_parameter(context, unsharded(f"{name}.{which}", (n,)), Init("ones"), weight_decay=False)
                for which, n in (("scale", hidden_size), ("expert_scale", moe.num_experts))
            )
        device = context.buffer_device
        self.bias: Tensor | None = None
        if moe.selection_bias and hashed is None:
            self.bias = torch.zeros(moe.num_experts, dtype=torch.float32, device=device)
        self.table = None if hashed is None else hash_table(hashed, moe, key_of(context.seed, f"{name}.table"), device)
        self.aux_loss = moe.aux_loss if hashed is None else 0.0
        self.shares: Tensor | None = None
        if self.aux_loss and moe.aux_loss_scope == "global_batch":
            self.shares = torch.full((moe.num_experts,), 1 / moe.num_experts, dtype=torch.float32, device=device)
        self.load = RouterLoad(moe.num_experts, device)

    @property
    def constants(self) -> dict[str, Tensor]:
        """By name, tensors that belong to the weights but have no gradient."""
        return {name: x for name, x in (("bias", self.bias), ("table", self.table)) if x is not None}

    def forward(
        self, x_nh: Tensor, sequences: int, ids_n: Tensor | None = None, padding_n: Tensor | None = None
    ) -> Routing:
        """`sequences`: number of sequences in x; token i belongs to sequence i mod `sequences`. `ids_n`: of the tokens,
        which the router with a table reads. `padding_n`: bool, tokens that do not count; None: all count."""
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
        tokens_be = _count(experts_nk, sequences, self.moe.num_experts, padding_n)
        routing = Routing(within_capacity(experts_nk, weights_nk, self.moe, padding_n), weights_nk, tokens_be)
        if not torch.is_grad_enabled():
            return routing
        shares_ne = scores_ne if self.aux_loss else scores_ne.detach()
        if self.moe.score != "softmax":
            shares_ne = shares_ne / shares_ne.sum(dim=1, keepdim=True)
        return routing._replace(weights=self._with_losses(routing, logits_ne, shares_ne, padding_n))

    def _with_losses(self, routing: Routing, logits_ne: Tensor, shares_ne: Tensor, padding_n: Tensor | None) -> Tensor:
        """The weights, through which the router's losses reach its gradient."""
        moe, zero = self.moe, logits_ne.new_zeros(())
        dropped_nk = routing.experts == moe.num_experts
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
        """This rank's part of the loss that keeps logits small."""
        squares_n = logits_ne.logsumexp(dim=1).square()
        if padding_n is not None:
            squares_n = squares_n.masked_fill(padding_n, 0.0)
        return squares_n.sum() * (self.moe.z_loss / self.global_tokens)

    def _aux_loss(self, counts_be: Tensor, shares_ne: Tensor) -> Tensor:
        """This rank's part of the load-balancing loss."""
        (b, experts), k = counts_be.shape, self.moe.top_k
        if self.shares is not None:
            return (self.shares * shares_ne.sum(dim=0)).sum() * (self.aux_loss * experts / self.global_tokens)
        counts_be = collectives.all_reduce(counts_be.clone(), self.group)  # other ranks hold slices of the sequences
        s = (counts_be.sum(dim=1, keepdim=True) / k).clamp(min=1)  # all tokens of a sequence may be padding
        mean_be = shares_ne.unflatten(0, (-1, b)).sum(dim=0) / s  # this rank's part of the mean
        return (counts_be * (experts / (k * s)) * mean_be).sum() * (self.aux_loss / self.global_batch)

    @torch.no_grad()
    def update(self, tokens_e: Tensor) -> None:
        """After a step: `tokens_e` of all ranks chose each expert. Moves the selection bias against the load.

        That of a frozen router stays.
        """
        if self.shares is not None:
            self.shares.copy_(tokens_e / tokens_e.sum())
        if self.bias is not None and self.weight.requires_grad:
            self.bias += self.moe.bias_update_rate * (tokens_e.mean() - tokens_e).sign().to(self.bias.dtype)
