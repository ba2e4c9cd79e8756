"""Delayed scaling: one scale per tensor, from the amaxes of earlier steps.

One pass over the data and no communication in the layer, at the risk of saturating a tensor that has grown since.

All histories are rows of one buffer and all scales elements of another, so the end of a step is one collective and a
few kernels however many layers there are. Quantizers hold views: they read their scale and raise slot 0 of their
history; only `end_step` moves anything. So a recomputed forward, several micro-batches or an interleaved pipeline
cannot advance the state twice.

A step with an infinite or NaN amax leaves the tensor's scale as it was, and that amax is then dropped rather than
rolled into the history, where `max` would freeze the scale for a whole history length. One bad step costs one update.

In the first step there is no history. A scale of 1 would lose it: the gradients of a mean over tokens lie below E5M2's
least number, and behind a tensor that vanished the next amax is wrong, so several steps would pass until all are right.
In that step every tensor is scaled by its own amax instead, which costs a pass more over the data and a reduction where
ranks hold shards. A run that resumes continues with its history.

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
    """Scales by `scale` as it stands (`scale_inv` its reciprocal) and raises `newest_amax`.

    All are fp32 `[]`, views of the shared state. While it is `fresh` there is no earlier step: it then scales by the
    tensor's own amax, over the ranks that hold shards of it. The amax is a running maximum, so micro-batches add up and
    a recomputed forward changes nothing. `recording` is switched off during evaluation. `constant`: no step changes the
    tensor, so that its amax is that of the step before where it is not cast.
    """

    scale: Tensor
    scale_inv: Tensor
    newest_amax: Tensor
    fresh: bool = False
    recording: bool = True
    constant: bool = False

    @property
    def known_scale(self) -> tuple[Tensor, Tensor] | None:
        return None if self.fresh else (self.scale, self.scale_inv)

    @property
    def settled(self) -> bool:
        return not self.fresh

    @property
    def recorded_amax(self) -> Tensor:
        return self.newest_amax

    def freeze(self) -> None:
        self.constant = True

    def record(self, x: Tensor) -> None:
        if self.recording:
            torch.maximum(self.newest_amax, amax(x), out=self.newest_amax)

    def for_sharded_input(self, group: ProcessGroup) -> DelayedShardQuantizer:
        return DelayedShardQuantizer(self.recipe, replace(self.tensor, group=group), self.device, self)

    def __post_init__(self) -> None:
        self._amax = implementation(reference.amax, self.device)
        self._cast_tensor = implementation(reference.cast_tensor, self.device)

    def __call__(self, source: MatrixSource, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
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
        """Cast the tensor, or the shard of it that this rank of `group` holds, by the amax of the tensor at hand."""
        whole_amax = all_reduce(self._amax(source), group, "max")
        if self.recording:
            torch.maximum(self.newest_amax, whole_amax, out=self.newest_amax)
        scale = self.rule.scale(whole_amax)
        return self._cast_tensor(
            source, scale, scale.reciprocal(), self.fmt, rowwise=rowwise, columnwise=columnwise, newest_amax=None
        )


@dataclass(eq=False)
class DelayedShardQuantizer(RecipeQuantizer):
    """`whole` for a tensor of which ranks hold shards."""

    whole: DelayedQuantizer

    def __post_init__(self) -> None:
        """Bind nothing: `whole` casts."""

    def __call__(self, source: MatrixSource, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        if self.whole.fresh:
            return self.whole.cast_by_own_amax(source, self.tensor.group, rowwise=rowwise, columnwise=columnwise)
        return self.whole(source, rowwise=rowwise, columnwise=columnwise)


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Fp8Recipe):
    """Per tensor, scaled by the amax of earlier steps.

    `margin`: powers of two left free above the amax. `interval`: steps between two updates of the scales; the history
    advances every step. `amax_history_len`: steps remembered. `amax_compute_algo`: "max" over the history,
    "most_recent", or a callable `[t, l] -> [t]` (t tensors, l steps, newest first). `power_of_two_scale`: round scales
    down to powers of two.
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
        return self.amax_history_len

    def scale_rule(self, fmt: Format) -> ScaleRule:
        return ScaleRule(fmt.max, margin=self.margin, power_of_two=self.power_of_two_scale)

    def build(self, tensors: Sequence[Fp8Tensor], device: torch.device, clock: NoiseClock) -> Built:
        state = DelayedState(self, tensors, device)
        return Built({**state.quantizers}, state)


class DelayedState(TensorScales):
    """Histories `[t, l]` and scales `[t]`, fp32 on `device`, of `tensors` in their order."""

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
        return self.split(self.history_tl[:, 0]) if self.quantizers else []

    @cached_property
    def _constant_t(self) -> Tensor | None:
        """Which tensors no step changes; None if each may change. First asked for when a step ends."""
        constant = [quantizer.constant for quantizer in self.quantizers.values()]
        return torch.tensor(constant, device=self.scale_t.device) if any(constant) else None

    @torch.no_grad()
    def end_step(self, reduced: Sequence[Tensor]) -> None:
        """Take the step's amaxes, update the scales where due, roll the histories.

        Scales are updated after the first step and every `interval` steps from there.
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
        """New scales if `update`, and a new slot 0."""
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
        """Forget the step's amaxes."""
        self.history_tl[:, 0].zero_()

    def refresh(self) -> None:
        """Recompute what follows from histories and scales, after these were read from a checkpoint."""
        self.scale_inv_t.copy_(self.scale_t.reciprocal())
        if self.quantizers:
            # Slot 0 is the running step's, which may be the first: then no scale is known yet.
            self._set_fresh(not bool((self.history_tl[:, 1:] != 0).any()) and bool((self.scale_t == 1).all()))

    def state_dict(self) -> dict[str, Tensor]:
        """Views of the buffers by global name: `fp8.<tensor>.amax_history` `[l]` and `fp8.<tensor>.scale` `[]`.

        With `interval` > 1 also `fp8.step` `[]`, int64 on the host. Reading into these tensors loads them.
        """
        state: dict[str, Tensor] = {}
        for i, name in enumerate(self.quantizers):
            state[f"fp8.{name}.amax_history"] = self.history_tl[i]
            state[f"fp8.{name}.scale"] = self.scale_t[i]
        if self.recipe.interval > 1:
            state["fp8.step"] = self.step
        return state


def amax_of_history(history_tl: Tensor, algorithm: AmaxAlgorithm) -> Tensor:
    """One amax per tensor: history `[t, l]` -> `[t]`.

    `max` is over all slots, `most_recent` is slot 0, and a callable maps `[t, l]` to `[t]` itself (else ValueError).
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
            f"{list(history_tl.shape)}; it must return one value a row, {history_tl.dtype} "
            f"{list(history_tl.shape[:1])}, as `lambda history: history.amax(dim=1)` does"
        )
    return amax
