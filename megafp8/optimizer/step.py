"""The end of a training step: from the gradients of the micro-batches to the update.

    complete shared gradients -> scale, in fp16 by 1 / loss scale too -> norm -> clip -> update -> multiply rows

*Shared gradients.* Two kinds of parameters are held by several ranks of one model, each of which has a part of their
gradient: norms under sequence parallelism (a tensor-parallel rank has its slice of the sequence) and the shared
embedding (the first stage looks words up in it, the last multiplies by it, or looks up further tokens; where a rank
holds both, still as two parameters, so that their gradients are summed in one order under every pipeline schedule).
Their gradients are summed once a step.

*The norm* of the whole model's gradient counts each distinct parameter once. Parameters that this rank must not count
still enter, times zero: zero times a non-finite number is NaN, so a non-finite gradient on any rank shows on all of
them, and all skip the update or none: one bad batch costs one step, not the run.

Where gradients are sharded over data parallelism, all of this applies to the shards that a rank owns: sums over tensor
parallelism and between stages are of equal shards there (`buckets` ensures it), and the norm is summed over data
parallelism too. The updated weights are gathered by the caller (`ParamBuffer`), since those gathered in FP8 need the
next step's scales.

*In float64*, in which layouts are compared, gradients that are zero but for rounding are set to zero.

*Rows of weights* may be multiplied after the update (QK-clip), in the masters, before these are averaged.

*The host waits once*, for the norm, when all of the step is queued: the device clips and skips by the norm that it has
computed, and goes on. Only before an optimizer that cannot skip on the device
(`MixedPrecisionOptimizer.skips_on_device`) does the host wait for the norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.optimizer.layer_norms import GRADIENT, KINDS, StepNorms, norms
from megafp8.optimizer.loss_scale import LossScaler
from megafp8.optimizer.mixed_precision import MixedPrecisionOptimizer
from megafp8.parallel import activity, collectives
from megafp8.parallel.data.grad_buffer import gradient_of
from megafp8.parallel.sharding import FlatShard, ParamSpec, spec_of

ROUNDING = 1e-12
"""In float64, gradients of at most this share of the norm are zero but for rounding."""


@dataclass(frozen=True)
class StepResult:
    """`grad_norm`: the 2-norm of the whole model's gradient before clipping. `skipped`: it was not finite.

    `loss_scale`: that of this step, if there is one. `layer_norms`: if it was measured, norms by kind and layer
    (`layer_norms`); of gradients only, if it was skipped.
    """

    grad_norm: float
    skipped: bool
    loss_scale: float | None = None
    layer_norms: Mapping[str, float] = field(default_factory=dict)


class Gradients(Protocol):
    """A `GradBuffer` or a `DataParallelStrategy`: the gradients of `shards` are in the fp32 `owned`."""

    @property
    def shards(self) -> Sequence[FlatShard]: ...

    @property
    def owned(self) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class OptimizerStep:
    """What a step needs that stays the same from step to step.

    `model_group`: pipeline × tensor; `embedding_group`: the stages that share the tied weights, and `shared_params`:
    this rank's side of them (empty elsewhere). `max_norm`: clip the gradient to this 2-norm; None does not clip.
    `sharded`: each rank of `data_group` (experts: of `expert_group`) has a shard of the gradients; else all have all of
    them. `expert_group`: the ranks that hold the same experts, where these are not those of `data_group`. `scaler`: the
    gradients are those of the loss times its scale. `layers`: of the whole model, if steps are to be measured.
    `row_factors`: gives, by global name, what the rows of weights are multiplied by after the update.
    """

    buffer: Gradients
    optimizer: MixedPrecisionOptimizer
    tensor_group: ProcessGroup | None
    model_group: ProcessGroup | None
    embedding_group: ProcessGroup | None
    shared_params: Sequence[nn.Parameter]
    max_norm: float | None
    sharded: bool = False
    data_group: ProcessGroup | None = None
    expert_group: ProcessGroup | None = None
    scaler: LossScaler | None = None
    layers: Sequence[str] = ()
    row_factors: Callable[[], Mapping[str, Tensor]] | None = None

    def __call__(self, lr: float, *, grad_scale: Tensor | None = None, measure: bool = False) -> StepResult:
        """Update the weights with learning rate `lr`; call when gradients are summed over data parallelism.

        `grad_scale`, the same on all ranks, multiplies the gradients first: nominal / true number of tokens where
        masks made them differ; NaN for a step to be skipped, which says nothing about the loss scale. The caller must
        `clear` the buffer before the next backward pass. A skipped step changes neither the weights nor the optimizer's
        state. `measure`: compute norms by layer; then the host waits for the update.
        """
        self.reduce_shared_gradients()
        factor, loss_scale = grad_scale, None
        if self.scaler is not None:
            loss_scale = _OnHost(self.scaler.scale.clone())
            factor = self.scaler.scale.reciprocal() * (1.0 if grad_scale is None else grad_scale)
        if factor is not None:
            multiply_(self.buffer.owned, factor)
        measured = StepNorms(self.layers, self._counts, self.buffer.owned[0].device) if measure else None
        norm = self.global_norm(measured)
        on_host = _OnHost(norm)
        if norm.dtype == torch.float64:
            _zero_rounding_(self.buffer.owned, norm)
        if self.scaler is not None:
            self.scaler.update(norm.isfinite(), None if grad_scale is None else ~grad_scale.isnan())
        on_device = self.optimizer.skips_on_device
        if not on_device and not math.isfinite(on_host.item()):
            scale = None if loss_scale is None else loss_scale.item()
            return StepResult(
                on_host.item(), skipped=True, loss_scale=scale, layer_norms=self._by_layer(measured, (GRADIENT,))
            )
        clip = None if self.max_norm is None else clip_factor(norm, self.max_norm)
        if clip is not None and not self.optimizer.takes_factor:
            multiply_(self.buffer.owned, clip)
            clip = None
        watch = None if measured is None else measured.watch
        skip = ~norm.isfinite() if on_device else None
        self.optimizer.step(lr, factor=clip, skip=skip, watch=watch)
        if self.row_factors is not None:
            factors = self.row_factors()
            self.optimizer.multiply_rows(
                factors if skip is None else {name: torch.where(skip, 1.0, x) for name, x in factors.items()}
            )
        grad_norm = on_host.item()
        skipped = not math.isfinite(grad_norm)
        if skipped:
            self.optimizer.forget_step()
        else:
            self.optimizer.average_weights()
        by_layer = self._by_layer(measured, (GRADIENT,) if skipped else KINDS)
        return StepResult(grad_norm, skipped, None if loss_scale is None else loss_scale.item(), by_layer)

    def _by_layer(self, measured: StepNorms | None, kinds: Sequence[str]) -> dict[str, float]:
        """The norms of these kinds that all ranks have measured; waits for them."""
        if measured is None:
            return {}
        return measured.by_name(_OnHost(self._sum_over_ranks(measured.sums())).tolist(), kinds)

    def reduce_shared_gradients(self) -> None:
        """Complete, in place, the gradients of parameters that several ranks of one model hold.

        Sums those with `spec.reduce_over_tp` over `tensor_group`, and those of `shared_params` over `embedding_group`,
        or with each other where one rank holds both sides.
        """
        shards = self.buffer.shards
        partial = [gradient_of(shard) for shard in shards if spec_of(shard.param).reduce_over_tp]
        collectives.coalesced_all_reduce(partial, self.tensor_group)
        shared = [gradient_of(shard) for param in self.shared_params for shard in shards if shard.param is param]
        if len(self.shared_params) == 2:  # sharded alike
            sides = len(shared) // 2
            for first, last in zip(shared[:sides], shared[sides:], strict=True):
                last.copy_(first.add_(last))
        else:
            collectives.coalesced_all_reduce(shared, self.embedding_group)

    def global_norm(self, measured: StepNorms | None = None) -> Tensor:
        """The 2-norm of the whole model's gradient, the same on every rank: scalar of the gradients' dtype and device.

        Squares are summed in float64, so the result depends on the layout only in its last bit. Two all-reduces of
        eight bytes: a single one would need a communicator of the whole job. `measured` gets those of this rank.
        """
        counted: list[FlatShard] = []
        uncounted: list[FlatShard] = []
        for shard in self.buffer.shards:
            (counted if self._counts(spec_of(shard.param)) else uncounted).append(shard)
        device = self.buffer.owned[0].device
        counted_norms, others = (norms([gradient_of(shard) for shard in shards]) for shards in (counted, uncounted))
        if measured is not None:
            measured.add(GRADIENT, counted, counted_norms)
        total = _sum_of_squares(counted_norms, device) + 0 * _sum_of_squares(others, device)
        return self._sum_over_ranks(total).sqrt().to(self.buffer.owned[0].dtype)

    def _sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum over all ranks whose counted parts make up the model, in place."""
        if self.sharded or self.expert_group is not None:
            collectives.all_reduce(x, self.data_group)
        return collectives.all_reduce(x, self.model_group)

    def _counts(self, spec: ParamSpec) -> bool:
        """Whether the norm counts this rank's gradient of a parameter, of which each distinct element counts once.

        Parameters replicated over tensor parallelism count on its rank 0 only, copies of tied weights never. With
        experts of their own ranks, all ranks are summed over, so what several hold counts on the first of them.
        """
        if spec.expert and self.expert_group is not None:
            return self.sharded or self.expert_group.rank() == 0
        if spec.is_copy or (spec.replicated_over_tp and self.tensor_group is not None and self.tensor_group.rank() > 0):
            return False
        return self.sharded or self.expert_group is None or self.data_group is None or self.data_group.rank() == 0


def _sum_of_squares(values: list[Tensor], device: torch.device) -> Tensor:
    """Float64 scalar."""
    return torch.stack(values).square().sum() if values else torch.zeros((), dtype=torch.float64, device=device)


class _OnHost:
    """A copy of a tensor to the host, under way. What is queued after it is not waited for."""

    def __init__(self, x: Tensor) -> None:
        self._copy = x.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None

    def item(self) -> float:
        return self.tolist()

    def tolist(self) -> Any:
        if self._copied is not None:
            with activity.waiting_for_device():
                self._copied.synchronize()
        return self._copy.tolist()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` has it.

    1 where the norm is not finite: the step is skipped, and gradients still tell whose were not.
    """
    return torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)


def _zero_rounding_(tensors: Sequence[Tensor], norm: Tensor) -> None:
    """Set what is zero but for rounding to zero, in place: an optimizer may make a whole step of it (Lion)."""
    for tensor in tensors:
        tensor.masked_fill_(tensor.abs() <= ROUNDING * norm, 0.0)


def multiply_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply fp32 tensors in place; on CUDA at no cost where the factor is 1."""
    for x in tensors:
        if x.is_cuda:
            from megafp8.kernels import multiply  # needs Triton, which comes with torch's CUDA builds

            multiply.multiply_(x, factor)
        else:
            x.mul_(factor)
