"""End of a training step: from the gradients of the micro-batches to the updated weights.

    complete shared gradients -> scale (in fp16 also by 1 / loss scale) -> norm -> clip -> update -> multiply rows

*Shared gradients.* Two kinds of parameters are held by several ranks of one model, and each rank has a part of their
gradient. The first kind is norms under sequence parallelism, where each tensor-parallel rank has a slice of the
sequence. The second kind is the shared embedding: the first stage looks up tokens in it, and the last stage multiplies
by it or looks up further tokens. If one rank holds both sides, they are still two parameters, so that their gradients
are summed in the same order under every pipeline schedule. All these gradients are summed once per step.

*The norm* of the whole model's gradient counts each distinct parameter once. Parameters that this rank must not count
are added times zero. Zero times a non-finite number is NaN, so a non-finite gradient on any rank shows on all ranks.
Therefore either all ranks skip the update or none, and one bad batch costs one step, not the run.

If gradients are sharded over data parallelism, all of this applies to the shards that a rank owns. Sums over tensor
parallelism and between stages then combine equal shards (`buckets` ensures it), and the norm is also summed over data
parallelism. The caller gathers the updated weights (`ParamBuffer`), because weights that are gathered in FP8 need the
next step's scales.

*In float64*, which is used to compare layouts, gradients that are zero except for rounding are set to zero.

*Rows of weights* may be multiplied after the update (QK-clip), in the masters, before the moving average.

*Offloaded state* (`optimizer.offload`) starts to arrive before the norm is known, while the device still computes.

*The host waits once*, for the norm, after the whole step is queued. The device clips and skips by the norm that it has
computed, and continues. The host waits for the norm before the update only if the optimizer cannot skip on the device
(`MixedPrecisionOptimizer.skips_on_device`).
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
"""Share of the norm up to which a float64 gradient is considered zero except for rounding."""


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step.

    Args:
        grad_norm: 2-norm of the whole model's gradient before clipping.
        skipped: Whether the step was skipped because the norm was not finite.
        loss_scale: Loss scale of the step; None without loss scaling.
        layer_norms: Norms by kind and layer (`megafp8.optimizer.layer_norms`) if the step was measured. A skipped step
            has norms of gradients only.
    """

    grad_norm: float
    skipped: bool
    loss_scale: float | None = None
    layer_norms: Mapping[str, float] = field(default_factory=dict)


class Gradients(Protocol):
    """Gradients that this rank owns: a `GradBuffer` or a `DataParallelStrategy`."""

    @property
    def shards(self) -> Sequence[FlatShard]:
        """Shards of the parameters."""

    @property
    def owned(self) -> Sequence[Tensor]:
        """Flat fp32 tensors that hold the gradients of `shards`."""


@dataclass(frozen=True)
class OptimizerStep:
    """Function that ends a training step: it updates the weights from the summed gradients.

    Args:
        buffer: Gradients.
        optimizer: Optimizer of the shards in `buffer`.
        tensor_group: Tensor-parallel ranks.
        model_group: Ranks of pipeline × tensor parallelism.
        embedding_group: Stages that share the tied embedding.
        shared_params: This rank's sides of the tied embedding; empty on ranks without one.
        max_norm: 2-norm to which the gradient is clipped; None for no clipping.
        sharded: Whether each rank of `data_group` (for experts, of `expert_group`) has a shard of the gradients.
            Otherwise every rank has all gradients.
        data_group: Data-parallel ranks.
        expert_group: Ranks that hold the same experts; None if they are the ranks of `data_group`.
        scaler: Loss scaler, if the gradients are multiplied by a loss scale.
        layers: Layers of the whole model; needed only to measure steps.
        row_factors: Function that returns the factors of rows of weights after the update, by global name.
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
        """Update the weights. Call it after gradients are summed over data parallelism.

        A skipped step changes neither the weights nor the optimizer's state. The caller must `clear` the buffer before
        the next backward pass.

        Args:
            lr: Learning rate.
            grad_scale: Factor of the gradients, the same on all ranks: the nominal over the true number of tokens if
                masks made them differ. NaN skips the step without an effect on the loss scale.
            measure: Whether to compute norms by layer. The host then waits for the update.
        """
        self.optimizer.prefetch()
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
        """Return the norms of these kinds, summed over all ranks. Wait for the device."""
        if measured is None:
            return {}
        return measured.by_name(_OnHost(self._sum_over_ranks(measured.sums())).tolist(), kinds)

    def reduce_shared_gradients(self) -> None:
        """Complete, in place, the gradients of parameters that several ranks of one model hold.

        Gradients of parameters with `spec.reduce_over_tp` are summed over `tensor_group`. Gradients of `shared_params`
        are summed over `embedding_group`, or with each other if one rank holds both sides.
        """
        shards = self.buffer.shards
        partial = [gradient_of(shard) for shard in shards if spec_of(shard.param).reduce_over_tp]
        collectives.coalesced_all_reduce(partial, self.tensor_group)
        shared = [gradient_of(shard) for param in self.shared_params for shard in shards if shard.param is param]
        if len(self.shared_params) == 2:  # both sides are sharded in the same way
            sides = len(shared) // 2
            for first, last in zip(shared[:sides], shared[sides:], strict=True):
                last.copy_(first.add_(last))
        else:
            collectives.coalesced_all_reduce(shared, self.embedding_group)

    def global_norm(self, measured: StepNorms | None = None) -> Tensor:
        """Return the 2-norm of the whole model's gradient, a scalar in the gradients' dtype, the same on every rank.

        Squares are summed in float64, so the result depends on the layout only in its last bit. There are two
        all-reduces of eight bytes, because a single one would need a communicator of the whole job. The norms of this
        rank's gradients are added to `measured`.
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
        """Sum `x` in place over all ranks that together hold the model."""
        if self.sharded or self.expert_group is not None:
            collectives.all_reduce(x, self.data_group)
        return collectives.all_reduce(x, self.model_group)

    def _counts(self, spec: ParamSpec) -> bool:
        """Return whether the norm counts this rank's gradient of a parameter.

        Each distinct element counts once. Parameters that are replicated over tensor parallelism count only on its rank
        0, and copies of tied weights never count. With an `expert_group`, the sum runs over all ranks, so a parameter
        that several ranks hold counts on the first of them.
        """
        if spec.expert and self.expert_group is not None:
            return self.sharded or self.expert_group.rank() == 0
        if spec.is_copy or (spec.replicated_over_tp and self.tensor_group is not None and self.tensor_group.rank() > 0):
            return False
        return self.sharded or self.expert_group is None or self.data_group is None or self.data_group.rank() == 0


def _sum_of_squares(values: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares as a float64 scalar on `device`."""
    return torch.stack(values).square().sum() if values else torch.zeros((), dtype=torch.float64, device=device)


class _OnHost:
    """Asynchronous copy of a tensor to the host. Reading it does not wait for work that is queued after the copy."""

    def __init__(self, x: Tensor) -> None:
        self._copy = x.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None

    def item(self) -> float:
        """Wait for the copy and return its only element."""
        return self.tolist()

    def tolist(self) -> Any:
        """Wait for the copy and return it as a list, or as a number for a scalar."""
        if self._copied is not None:
            with activity.waiting_for_device():
                self._copied.synchronize()
        return self._copy.tolist()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return min(1, max_norm / (norm + 1e-6)), as in `torch.nn.utils.clip_grad_norm_`.

    The factor is 1 if the norm is not finite. The step is then skipped, and the gradients still show which of them are
    not finite.
    """
    return torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)


def _zero_rounding_(tensors: Sequence[Tensor], norm: Tensor) -> None:
    """Set gradients that are zero except for rounding to zero, in place; Lion would make full updates of them."""
    for tensor in tensors:
        tensor.masked_fill_(tensor.abs() <= ROUNDING * norm, 0.0)


def multiply_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply fp32 tensors in place. On CUDA this costs nothing if the factor is 1."""
    for x in tensors:
        if x.is_cuda:
            from megafp8.kernels import multiply  # needs Triton, which comes with torch's CUDA builds

            multiply.multiply_(x, factor)
        else:
            x.mul_(factor)
