"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) and LayerNorm (Ba et al. 2016, arXiv:1607.06450).

Norm weights are replicated over the tensor-parallel group, but the input may be sharded: by sequence under sequence
parallelism, by heads for query and key norms. Each rank then computes a partial weight gradient, and the group sums
the gradients once per step. A parameter that needs this sum declares it in its spec (`reduce_over_tp`).

`ProjectionNorms` normalizes all query heads together. The group shards the channels of that norm, and so also its
weights. The ranks add up their partial sums of each token with one all-reduce in forward and one in backward. Each
all-reduce carries two numbers per token: one for queries and one for keys.

Shapes: s sequence length, b micro-batch size, a and g query and key heads on this rank, d head width.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megafp8.layers.context import BuildContext, new_parameter, sharded_parameters
from megafp8.layers.costs import MicroBatch
from megafp8.layers.dropout.reference import Dropout
from megafp8.layers.norm.op import norm
from megafp8.layers.rotary.op import QKNorms
from megafp8.linear.fusion import LinearInput
from megafp8.linear.state import InputFormat
from megafp8.numerics.sources import norm_factor
from megafp8.parallel import collectives
from megafp8.parallel.sharding import Init, unsharded
from megafp8.plan import Neighbor
from megafp8.spec import ModelSpec


class Norm(nn.Module):
    """Normalization over the last dim, in the input's dtype with statistics in fp32 or wider.

    `NORMS` has the subclass for each value of `model.normalization`.

    Args:
        name: Name of the norm; its parameters are `<name>.weight` and `<name>.bias`.
        size: Size of the last dim.
        context: Process groups, dtype and device of the model.
        eps: Number added to the variance.
        sees_a_slice: Whether each tensor-parallel rank normalizes a different slice of the input.
        zero_centered: Multiply by `1 + weight` instead of `weight`.
        weighted: Learn a weight. If False, the weight is a constant one.
    """

    #: Whether the next layer can take this norm's output quantized by the same kernel, or recompute it in backward.
    fused: ClassVar[bool] = True
    #: Number of values per token saved for backward, in addition to the input.
    statistics: ClassVar[int]
    #: Bias of the norm; None if the norm does not subtract the mean.
    bias_kind: ClassVar[Literal["learned", "zero"] | None]

    def __init__(
        self,
        name: str,
        size: int,
        context: BuildContext,
        *,
        eps: float,
        sees_a_slice: bool,
        zero_centered: bool = False,
        weighted: bool = True,
    ) -> None:
        super().__init__()
        self.name, self.eps, self.size, self.zero_centered = name, eps, size, zero_centered

        def parameter(part: str, init: Literal["ones", "zeros"]) -> nn.Parameter:
            shards = unsharded(f"{name}.{part}", (size,))
            spec = {"replicated_over_tp": True, "reduce_over_tp": sees_a_slice, "weight_decay": False}
            return new_parameter(context, shards, Init(init), **spec)

        def constant(value: float) -> Tensor:
            key = ("norm", value, size)
            if key not in context.constants:
                options: dict[str, Any] = {"dtype": context.dtype, "device": context.buffer_device}
                context.constants[key] = torch.full((size,), value, **options)
            return context.constants[key]

        self.weight: Tensor = parameter("weight", "zeros" if zero_centered else "ones") if weighted else constant(1.0)
        self.bias: Tensor | None = None
        if self.bias_kind is not None:
            self.bias = parameter("bias", "zeros") if self.bias_kind == "learned" else constant(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` `[..., size]`; the output has the shape and dtype of `x`."""
        return normalized(self, x) if self.zero_centered else self._by_torch(x)

    def _by_torch(self, x: Tensor) -> Tensor:
        """Normalize `x` with PyTorch's kernel. The weight must not be zero-centered."""
        raise NotImplementedError

    def residual(
        self, x: Tensor, branch: Tensor | None, form: InputFormat | None, dropout: Dropout | None = None
    ) -> tuple[Tensor, Tensor | LinearInput]:
        """Add `branch` to `x` and normalize the sum, in one pass in each direction.

        Args:
            x: Residual stream.
            branch: Output of the previous sublayer, in the shape of `x`; None in the first block.
            form: Input format of the next layer; None for values in the dtype of `x`.
            dropout: Dropout applied to `branch` before the addition.

        Returns:
            The new residual stream, and its norm in the format `form`.
        """
        return norm(
            x, branch, self.weight, self.bias, self.eps, form, dropout=dropout, zero_centered=self.zero_centered
        )

    def saved(self, batch: MicroBatch) -> int:
        """Return the bytes of statistics saved per micro-batch for backward, excluding the input."""
        return batch.own_tokens * batch.statistic * self.statistics

    def neighbor(self) -> Neighbor:
        """Describe this norm to the plan of the next linear layer."""
        which = self.name.rpartition(".")[2]
        return Neighbor(which, "any") if self.fused else Neighbor(which, "none", f"{which} has no fused kernel")


class RMSNormPart(Norm):
    """RMSNorm: `x / √(mean of squares + eps) · weight`."""

    statistics = 1
    bias_kind = None

    def _by_torch(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.size,), self.weight, self.eps)


class LayerNormPart(Norm):
    """LayerNorm: `(x - mean) / √(variance + eps) · weight + bias`."""

    statistics = 2
    bias_kind: ClassVar[Literal["learned", "zero"] | None] = "learned"

    def _by_torch(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)


class LayerNormWithoutBias(LayerNormPart):
    """LayerNorm that only learns a weight."""

    bias_kind = "zero"


NORMS: dict[str, type[Norm]] = {
    "rmsnorm": RMSNormPart, "layernorm": LayerNormPart, "layernorm_no_bias": LayerNormWithoutBias,
}  # fmt: skip
"""Norm class for each value of `model.normalization`."""


def block_norm(name: str, model: ModelSpec, context: BuildContext) -> Norm:
    """Build a norm of hidden states with the model's norm settings."""
    return NORMS[model.norm.kind](
        name,
        model.hidden_size,
        context,
        eps=model.norm.eps,
        sees_a_slice=context.sequence_sharded,
        zero_centered=model.norm.zero_centered,
        weighted=model.norm.weighted,
    )


def rms_norm(
    name: str, size: int, model: ModelSpec, context: BuildContext, *, eps: float | None = None,
    sees_a_slice: bool | None = None,
) -> RMSNormPart:  # fmt: skip
    """Build an RMSNorm inside a layer. By default, it has the model's eps, and each rank's slice of the sequence."""
    sees_a_slice = context.sequence_sharded if sees_a_slice is None else sees_a_slice
    eps, zero_centered = model.norm.eps if eps is None else eps, model.norm.zero_centered
    return RMSNormPart(name, size, context, eps=eps, sees_a_slice=sees_a_slice, zero_centered=zero_centered)


def normalized(norm: Norm, x: Tensor, branch: Tensor | None = None, dropout: Dropout | None = None) -> Tensor:
    """Return the norm of `x + branch` in the dtype of `x`, with `dropout` applied to `branch` before the addition."""
    _, normed = norm.residual(x, branch, None, dropout)
    assert isinstance(normed, Tensor)
    return normed


class ProjectionNorms(nn.Module):
    """RMSNorm over all query heads together, and one over all key heads together.

    Args:
        name: Prefix of the names of the two weights, `<name>.q_norm.weight` and `<name>.k_norm.weight`.
        query_size: Channels of all query heads on all ranks of the tensor-parallel group.
        key_size: Channels of all key heads on all ranks of the tensor-parallel group.
        context: Process groups, dtype and device of the model.
        eps: Number added to the mean square.
        zero_centered: Multiply by `1 + weight` instead of `weight`.
    """

    def __init__(
        self, name: str, query_size: int, key_size: int, context: BuildContext, eps: float, *, zero_centered: bool
    ) -> None:
        super().__init__()
        self.eps, self.sizes, self.group = eps, (query_size, key_size), context.tensor
        self.zero_centered = zero_centered
        init, sizes = Init("zeros" if zero_centered else "ones"), {"q_norm": query_size, "k_norm": key_size}
        self.q_weight, self.k_weight = (
            sharded_parameters(context, {f"{name}.{norm}.weight": (size,)}, init, weight_decay=False)
            for norm, size in sizes.items()
        )

    @property
    def both(self) -> QKNorms:
        """Weights of both norms for the kernel that also rotates heads."""
        return QKNorms(self.q_weight, self.k_weight, self.eps, self.zero_centered, self.sizes, self.group)

    def forward(self, q_sbad: Tensor, k_sbgd: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalized queries `[s, b, a, d]` and keys `[s, b, g, d]`. Collective."""
        q_weight, k_weight = (norm_factor(w, True) if self.zero_centered else w for w in (self.q_weight, self.k_weight))
        normed: tuple[Tensor, Tensor] = RMSNorms.apply(
            q_sbad, k_sbgd, q_weight, k_weight, self.sizes, self.eps, self.group
        )
        return normed


class RMSNorms(Function):
    """RMSNorm of q and of k over their last two dims, which `group` shards by heads. Computed in fp32 or wider."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, sizes: tuple[int, int], eps: float,
        group: ProcessGroup,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return both norms; `sizes` are the channels of q and of k on all ranks of `group`."""
        ctx.sizes, ctx.group, ctx.compute = sizes, group, torch.promote_types(q.dtype, torch.float32)
        sums = _sums(ctx, [(x, x) for x in (q, k)])
        inverse_rms = [(total / size + eps).rsqrt() for total, size in zip(sums, sizes, strict=True)]
        ctx.save_for_backward(q, k, q_weight, k_weight, *inverse_rms)
        pairs = ((q, q_weight, inverse_rms[0]), (k, k_weight, inverse_rms[1]))
        return tuple((x.to(ctx.compute) * r * w.view(x.shape[-2:])).to(x.dtype) for x, w, r in pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and this rank's shards of both weights."""
        q, k, q_weight, k_weight, *inverse_rms = ctx.saved_tensors
        xs, weights = (q, k), (q_weight, k_weight)
        # In y = r·x·w, the gradient of r reaches every channel of the token on all ranks.
        dnormed = [g.to(ctx.compute) * w.view(g.shape[-2:]) for g, w in zip(dy, weights, strict=True)]
        sums = _sums(ctx, list(zip(dnormed, xs, strict=True)))
        dx, dw = [], []
        for x, g, dn, r, total, size, w in zip(xs, dy, dnormed, inverse_rms, sums, ctx.sizes, weights, strict=True):
            dx.append((r * dn - r.pow(3) * (total / size) * x).to(x.dtype))
            dw.append((g.to(ctx.compute) * x * r).flatten(0, -3).sum(dim=0).flatten().to(w.dtype))
        return *dx, *dw, None, None, None


def _sums(ctx: Any, factors: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Multiply each pair, sum over the last two dims (kept as size 1) and over all ranks, and stack the sums."""
    sums = [(x.to(ctx.compute) * y.to(ctx.compute)).sum(dim=(-2, -1), keepdim=True) for x, y in factors]
    return collectives.all_reduce(torch.stack(sums), ctx.group)
