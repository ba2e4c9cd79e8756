"""Delayed scaling: one scale per tensor, computed from the amaxes of earlier steps.

A cast reads the data once, and a layer does not communicate. The risk is that a tensor that has grown saturates.

All histories are rows of one buffer, and all scales are elements of another, so the end of a step takes one collective
and a few kernels, whatever the number of layers. Quantizers have views: they read their scale and update slot 0 of
their history. Only `end_step` advances the state, so recomputed forwards, several micro-batches or an interleaved
pipeline cannot advance it twice.

A step with an infinite or NaN amax does not change the tensor's scale. The amax is dropped and not rolled into the
history, where the algorithm `max` would freeze the scale for a whole history length. One bad step costs one update.

The first step has no history. With a scale of 1 the step would be lost: the gradients of a mean over tokens are below
E5M2's smallest number, and if one tensor becomes zero, the amaxes of the tensors computed from it are wrong, so it
would take several steps until all amaxes are right. In the first step, every tensor is therefore scaled by its current
amax, which costs one more pass over the data, and a reduction if ranks hold shards. A run that resumes continues with
its history.

Shapes: t tensors, l steps of history; slot 0 is the current step, slot i the step i steps ago.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.numerics import reference
from megafp8.numerics.formats import Format
from megafp8.numerics.implementations import kernels
from megafp8.numerics.quantize import ScaleRule, amax, scale_from_amax
from megafp8.numerics.quantizers import implementation
from megafp8.numerics.recipes.base import (
    PER_TENSOR,
    Built,
    Capabilities,
    Fp8Recipe,
    Fp8Tensor,
    RecipeQuantizer,
    TensorScales,
    fast_accumulation,
    option,
)
from megafp8.numerics.sources import MatrixSource
from megafp8.numerics.step import NewestAmaxes
from megafp8.numerics.stochastic_rounding import NoiseClock
from megafp8.numerics.tensor import QuantizedTensor
from megafp8.parallel.collectives import all_reduce

AmaxAlgorithm = Literal["max", "most_recent"] | Callable[[Tensor], Tensor]


@dataclass(eq=False)
class DelayedQuantizer(RecipeQuantizer):
    """Quantizer of the delayed recipe: it casts with a known scale and records the amax.

    Attributes:
        scale: Scale, fp32 `[]`, a view of the shared state, like the next two.
        scale_inv: Reciprocal of the scale.
        newest_amax: Running maximum of the current step's amaxes. Recomputed forwards do not change it.
        fresh: Whether there is no earlier step. The scale is then computed from the tensor's current amax, over the
            ranks that hold shards.
        recording: Whether casts update `newest_amax`. Evaluation turns it off.
        constant: Whether no step changes the tensor. If it is not cast in a step, its amax is the amax of the step
            before.
    """

    scale: Tensor
    scale_inv: Tensor
    newest_amax: Tensor
    fresh: bool = False
    recording: bool = True
    constant: bool = False

    @property
    def known_scale(self) -> tuple[Tensor, Tensor] | None:
        """Scale and its reciprocal, fp32 `[]`, or None in the first step."""
        return None if self.fresh else (self.scale, self.scale_inv)

    @property
    def settled(self) -> bool:
        """Whether the first step has ended."""
        return not self.fresh

    @property
    def recorded_amax(self) -> Tensor:
        """Running maximum of the current step's amaxes, fp32 `[]`."""
        return self.newest_amax

    def freeze(self) -> None:
        """Declare that no step changes the tensor."""
        self.constant = True

    def record(self, x: Tensor) -> None:
        """Record the amax of x, of any shape."""
        if self.recording:
            torch.maximum(self.newest_amax, amax(x), out=self.newest_amax)

    def for_sharded_input(self, group: ProcessGroup) -> DelayedShardQuantizer:
        """Return the quantizer of shards of the tensor over `group`; it has the same scale."""
        return DelayedShardQuantizer(self.recipe, replace(self.tensor, group=group), self.device, self)

    def __post_init__(self) -> None:
        self._amax = implementation(reference.amax, self.device)
        self._cast_tensor = implementation(reference.cast_tensor, self.device)

    def __call__(self, source: MatrixSource, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        """Cast `source` in the given orientations, and record its amax."""
        if self.fresh:
            return self.cast_by_own_amax(source, self.tensor.group, rowwise=rowwise, columnwise=columnwise)
        newest_amax = self.newest_amax if self.recording else None
        return self._cast_tensor(
            source, self.scale, self.scale_inv, self.fmt, rowwise=rowwise, columnwise=columnwise,
            newest_amax=newest_amax,
        )  # fmt: skip

    def cast_by_own_amax(
        self, source: MatrixSource, group: ProcessGroup | None, *, rowwise: bool, columnwise: bool
    ) -> QuantizedTensor:
        """Cast the tensor, or a shard of it, with a scale computed from the tensor's current amax over `group`."""
        whole_amax = all_reduce(self._amax(source), group, "max")
        if self.recording:
            torch.maximum(self.newest_amax, whole_amax, out=self.newest_amax)
        scale = self.rule.scale(whole_amax)
        return self._cast_tensor(
            source, scale, scale.reciprocal(), self.fmt, rowwise=rowwise, columnwise=columnwise, newest_amax=None
        )


@dataclass(eq=False)
class DelayedShardQuantizer(RecipeQuantizer):
    """Quantizer of a tensor's shards that uses the scale of `whole`, the quantizer of the whole tensor."""

    whole: DelayedQuantizer

    def __post_init__(self) -> None:
        """Do not select a cast function, because `whole` casts."""

    def __call__(self, source: MatrixSource, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        """Cast `source`, a shard of the tensor, in the given orientations."""
        if self.whole.fresh:
            return self.whole.cast_by_own_amax(source, self.tensor.group, rowwise=rowwise, columnwise=columnwise)
        return self.whole(source, rowwise=rowwise, columnwise=columnwise)


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Fp8Recipe):
    """Recipe with one scale per tensor, computed from the amaxes of earlier steps.

    Attributes:
        margin: Powers of two left free above the amax.
        interval: Number of steps between two updates of the scales. The history advances in every step.
        amax_history_len: Number of steps in the history.
        amax_compute_algo: "max" over the history, "most_recent", or a function that maps a history `[t, l]` (t tensors,
            l steps, newest first) to amaxes `[t]`.
        power_of_two_scale: Round scales down to powers of two.
        use_fast_accum: GEMMs (fprop, dgrad, wgrad) that accumulate fast on Hopper.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(granularity=PER_TENSOR, shard_alignment=1)

    margin: int = option(0)
    interval: int = option(1, "at least 1 step", lambda value: value >= 1)
    amax_history_len: int = option(1024, "at least 1 step", lambda value: value >= 1)
    amax_compute_algo: AmaxAlgorithm = option(  # noqa: RUF009
        "max", "'max', 'most_recent' or a callable", lambda value: callable(value) or value in ("max", "most_recent")
    )
    power_of_two_scale: bool = option(False)
    use_fast_accum: tuple[bool, bool, bool] = fast_accumulation()

    @property
    def history_len(self) -> int:
        """Number of amaxes kept for each tensor, fp32."""
        return self.amax_history_len

    def scale_rule(self, fmt: Format) -> ScaleRule:
        """Return the rule that computes a scale from an amax."""
        return ScaleRule(fmt.max, margin=self.margin, power_of_two=self.power_of_two_scale)

    def build(self, tensors: Sequence[Fp8Tensor], device: torch.device, clock: NoiseClock) -> Built:
        """Build the quantizers of `tensors` and their state on `device`."""
        state = DelayedState(self, tensors, device)
        return Built({**state.quantizers}, state)


class DelayedState(TensorScales):
    """State of the delayed recipe: histories `[t, l]` and scales `[t]` of t tensors in their order, fp32."""

    def __init__(self, recipe: DelayedScaling, tensors: Sequence[Fp8Tensor], device: torch.device) -> None:
        super().__init__(recipe, tensors, device)
        self.recipe = recipe
        self.history_tl = torch.zeros(len(tensors), recipe.amax_history_len, device=device)
        self.step = torch.zeros((), dtype=torch.int64)  # on the host: it decides what end_step launches
        views = zip(self.scale_t, self.scale_inv_t, self.history_tl[:, 0])
        self.quantizers = {
            tensor.name: DelayedQuantizer(recipe, tensor, device, *tensor_views, fresh=True)
            for tensor, tensor_views in zip(tensors, views, strict=True)
        }

    def _set_fresh(self, fresh: bool) -> None:
        for quantizer in self.quantizers.values():
            quantizer.fresh = fresh

    def newest_amaxes(self) -> list[NewestAmaxes]:
        """Return the current step's amaxes, which must be reduced."""
        return self.split(self.history_tl[:, 0]) if self.quantizers else []

    @cached_property
    def _constant_t(self) -> Tensor | None:
        """Mask of the tensors that no step changes, bool `[t]`, or None if all may change.

        It is computed when the first step ends.
        """
        constant = [quantizer.constant for quantizer in self.quantizers.values()]
        return torch.tensor(constant, device=self.scale_t.device) if any(constant) else None

    @torch.no_grad()
    def end_step(self, reduced: Sequence[Tensor]) -> None:
        """Put the reduced amaxes into the histories, update the scales if due, and roll the histories.

        Scales are updated after the first step and then every `interval` steps.
        """
        if not self.quantizers:
            return
        newest_t = self.joined(reduced)
        if self._constant_t is not None and self.recipe.amax_history_len > 1:
            newest_t = torch.where(self._constant_t, torch.maximum(newest_t, self.history_tl[:, 1]), newest_t)
        self.history_tl[:, 0] = newest_t
        self._advance(update=self.step.item() % self.recipe.interval == 0)
        self.scale_inv_t.copy_(self.scale_t.reciprocal())
        self.step += 1
        self._set_fresh(False)

    def _advance(self, *, update: bool) -> None:
        """Compute new scales if `update`, and roll the histories so that slot 0 is empty."""
        recipe, algorithm = self.recipe, self.recipe.amax_compute_algo
        options: dict[str, Any] = {"margin": recipe.margin, "power_of_two": recipe.power_of_two_scale}
        if self.history_tl.is_cuda and isinstance(algorithm, str):
            kernels("scales").end_step_(
                self.history_tl, self.scale_t, self.fp8_max_t, algorithm=algorithm, update=update, **options
            )
            return
        if update:
            amax_t = amax_of_history(self.history_tl, algorithm)
            self.scale_t.copy_(scale_from_amax(amax_t, self.fp8_max_t, previous=self.scale_t, **options))
        newest_t = self.history_tl[:, 0]
        newest_t.masked_fill_(~newest_t.isfinite(), 0.0)
        self.history_tl.copy_(self.history_tl.roll(1, dims=1))
        newest_t.zero_()

    def discard_step(self) -> None:
        """Discard the step's amaxes."""
        self.history_tl[:, 0].zero_()

    def refresh(self) -> None:
        """Recompute derived values, after histories and scales have been read from a checkpoint."""
        self.scale_inv_t.copy_(self.scale_t.reciprocal())
        if self.quantizers:
            # Slot 0 belongs to the current step. If it is the first step, no scale is known yet.
            self._set_fresh(not bool((self.history_tl[:, 1:] != 0).any()) and bool((self.scale_t == 1).all()))

    def state_dict(self) -> dict[str, Tensor]:
        """Return `fp8.<tensor>.amax_history`, `[l]`, and `fp8.<tensor>.scale`, `[]`, of each tensor.

        With `interval` > 1, also return `fp8.step`, int64 `[]` on the host. The values are views: to load a state,
        write into them.
        """
        state: dict[str, Tensor] = {}
        for i, name in enumerate(self.quantizers):
            state[f"fp8.{name}.amax_history"] = self.history_tl[i]
            state[f"fp8.{name}.scale"] = self.scale_t[i]
        if self.recipe.interval > 1:
            state["fp8.step"] = self.step
        return state


def amax_of_history(history_tl: Tensor, algorithm: AmaxAlgorithm) -> Tensor:
    """Reduce a history `[t, l]` to one amax per tensor, `[t]`.

    "max" is the maximum over all slots, and "most_recent" is slot 0. A function must map `[t, l]` to `[t]`.

    Raises:
        ValueError: The function returned another shape or dtype.
    """
    if algorithm == "max":
        return history_tl.amax(dim=1)
    if algorithm == "most_recent":
        return history_tl[:, 0]
    assert callable(algorithm)
    amax = algorithm(history_tl)
    if amax.shape != history_tl.shape[:1] or amax.dtype != history_tl.dtype:
        raise ValueError(
            f"amax_compute_algo returned {amax.dtype} {list(amax.shape)} for a history of {history_tl.dtype} "
            f"{list(history_tl.shape)}; it must return one value per row, {history_tl.dtype} "
            f"{list(history_tl.shape[:1])}, as `lambda history: history.amax(dim=1)` does"
        )
    return amax
