"""Static scaling: one scale per tensor that never changes, so steps neither compute nor communicate amaxes.

The scale is computed from an amax that the config gives, or from the largest amax of the tensor in the first steps of
the run, the calibration. During calibration the whole layer runs in high precision, as its `LinearPlan` says, because
amaxes measured with a bad scale would be wrong. Afterwards nothing changes.

The ranks that run the same layers must agree on the scales. During calibration, their amaxes are reduced in one
collective per step; afterwards there are no collectives. One collective at the end of the calibration would suffice,
but a checkpoint before it would contain values that only one rank has seen. An infinite or NaN amax is ignored. Steps
are counted per tensor, so a layer that is added on resume is calibrated like any other.

Shapes: t tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.numerics import reference
from megafp8.numerics.formats import Format
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
    no_match,
    option,
)
from megafp8.numerics.step import NewestAmaxes
from megafp8.numerics.stochastic_rounding import NoiseClock


@dataclass(eq=False)
class StaticQuantizer(RecipeQuantizer):
    """Quantizer of the static recipe.

    Attributes:
        scale: Scale, fp32 `[]`, a view of the shared state, like the next two.
        scale_inv: Reciprocal of the scale.
        calibration_amax: Largest amax that `record` has seen in the current step.
        calibrating: Whether the scale is still unknown. Call `record` instead of casting then.
        recording: Whether `record` has an effect. Evaluation turns it off.
    """

    scale: Tensor
    scale_inv: Tensor
    calibration_amax: Tensor
    calibrating: bool = False
    recording: bool = True

    @property
    def known_scale(self) -> tuple[Tensor, Tensor]:
        """Scale and its reciprocal, fp32 `[]`."""
        return self.scale, self.scale_inv

    @property
    def settled(self) -> bool:
        """Whether calibration has ended."""
        return not self.calibrating

    def for_sharded_input(self, group: ProcessGroup) -> StaticQuantizer:
        """Return this quantizer: shards have the scale of the whole tensor."""
        return self

    def record(self, x: Tensor) -> None:
        """Record the amax of x, of any shape, while calibrating."""
        if self.calibrating and self.recording:
            torch.maximum(self.calibration_amax, amax(x), out=self.calibration_amax)

    def __post_init__(self) -> None:
        cast = implementation(reference.cast_tensor, self.device)
        self._cast = partial(cast, scale=self.scale, scale_inv=self.scale_inv, fmt=self.fmt, newest_amax=None)


@dataclass(frozen=True, kw_only=True)
class StaticScaling(Fp8Recipe):
    """Recipe with one scale per tensor that never changes.

    Attributes:
        amax: Pairs of a shell-style pattern of tensors (`layers.*.mlp.down.input`) and the largest magnitude that they
            will have. The first pattern that matches a tensor applies.
        calibration_steps: Number of steps in which a layer runs in high precision and records amaxes, if one of its
            tensors matches no pattern. The largest amax then determines the scale.
        margin: Powers of two left free above the amax, for tensors that grow later.
        power_of_two: Round scales down to powers of two.
        use_fast_accum: GEMMs (fprop, dgrad, wgrad) that accumulate fast on Hopper.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(granularity=PER_TENSOR, shard_alignment=1)

    amax: tuple[tuple[str, float], ...] = option(
        (), "pairs of a pattern and an amax that is finite and more than 0",
        lambda pairs: all(math.isfinite(value) and value > 0 for _, value in pairs),
        key="static_amax", read=lambda amaxes, _: tuple(amaxes.items()),
    )  # fmt: skip
    calibration_steps: int = option(0, "0 or more", lambda value: value >= 0)
    margin: int = option(0)
    power_of_two: bool = option(False, key="power_of_two_scale")
    use_fast_accum: tuple[bool, bool, bool] = fast_accumulation()

    @property
    def calibrates(self) -> bool:
        """Whether layers may run in high precision until their scales are known."""
        return self.calibration_steps > 0

    def scale_rule(self, fmt: Format) -> ScaleRule:
        """Return the rule that computes a scale from an amax."""
        return ScaleRule(fmt.max, margin=self.margin, power_of_two=self.power_of_two)

    def given_amax(self, tensor: str) -> float | None:
        """Return the amax that the config gives for a tensor, or None if the tensor needs calibration."""
        return next((value for pattern, value in self.amax if fnmatchcase(tensor, pattern)), None)

    def check_tensors(self, tensors: Sequence[str]) -> None:
        """Raise ValueError if a pattern matches no tensor, or a tensor has neither an amax nor a calibration."""
        for pattern, _ in self.amax:
            if not any(fnmatchcase(tensor, pattern) for tensor in tensors):
                raise ValueError(no_match("static_amax", pattern, tensors, "tensor with a static scale"))
        unknown = [tensor for tensor in tensors if self.given_amax(tensor) is None]
        if unknown and not self.calibration_steps:
            raise ValueError(
                f"static FP8 scaling has no amax for {len(unknown)} of {len(tensors)} tensors, {unknown[0]} the first; "
                "give fp8.static_amax a pattern for it, or set fp8.calibration_steps, 20 for example"
            )

    def build(self, tensors: Sequence[Fp8Tensor], device: torch.device, clock: NoiseClock) -> Built:
        """Build the quantizers of `tensors` and their state on `device`."""
        state = StaticState(self, tensors, device)
        return Built({**state.quantizers}, state)


class StaticState(TensorScales):
    """State of the static recipe: amaxes and scales of t tensors in their order, fp32 `[t]` on `device`."""

    def __init__(self, recipe: StaticScaling, tensors: Sequence[Fp8Tensor], device: torch.device) -> None:
        super().__init__(recipe, tensors, device)
        self.recipe = recipe
        amaxes = [recipe.given_amax(tensor.name) for tensor in tensors]
        self.amax_t = torch.tensor([amax or 0.0 for amax in amaxes], dtype=torch.float32, device=device)
        self.newest_t = torch.zeros_like(self.amax_t)
        # Completed calibration steps, on the host, because they decide what a layer does.
        steps = [0 if amax is None else recipe.calibration_steps for amax in amaxes]
        self.steps_t = torch.tensor(steps, dtype=torch.int64)
        self.calibrated = {tensor.name: i for i, tensor in enumerate(tensors) if amaxes[i] is None}
        views = zip(self.scale_t, self.scale_inv_t, self.newest_t)
        self.quantizers = {
            tensor.name: StaticQuantizer(recipe, tensor, device, *tensor_views)
            for tensor, tensor_views in zip(tensors, views, strict=True)
        }
        self.refresh()

    def newest_amaxes(self) -> list[NewestAmaxes]:
        """Return the amaxes to reduce; empty once all tensors are calibrated."""
        calibrating = bool((self.steps_t < self.recipe.calibration_steps).any())
        return self.split(self.newest_t) if calibrating else []

    @torch.no_grad()
    def end_step(self, reduced: Sequence[Tensor]) -> None:
        """Update the amaxes of tensors that calibrate with the step's reduced amaxes."""
        if not reduced:
            return
        calibrating_t = self.steps_t < self.recipe.calibration_steps
        newest_t = self.joined(reduced)
        torch.maximum(self.amax_t, newest_t.masked_fill(~newest_t.isfinite(), 0.0), out=self.amax_t)
        self.newest_t.zero_()
        self.steps_t += calibrating_t
        self.refresh()

    def discard_step(self) -> None:
        """Discard the step's amaxes."""
        self.newest_t.zero_()

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute scales and calibration flags, after amaxes and steps have been read from a checkpoint."""
        recipe = self.recipe
        self.scale_t.copy_(
            scale_from_amax(self.amax_t, self.fp8_max_t, margin=recipe.margin, power_of_two=recipe.power_of_two)
        )
        self.scale_inv_t.copy_(self.scale_t.reciprocal())
        for quantizer, steps in zip(self.quantizers.values(), self.steps_t.tolist(), strict=True):
            quantizer.calibrating = steps < recipe.calibration_steps

    def state_dict(self) -> dict[str, Tensor]:
        """Return `fp8.<tensor>.amax`, `[]`, and `fp8.<tensor>.calibrated_steps`, int64 `[]` on the host.

        Tensors with an amax in the config have no entries. The values are views: to load a state, write into them and
        call `refresh`.
        """
        state: dict[str, Tensor] = {}
        for name, i in self.calibrated.items():
            state[f"fp8.{name}.amax"] = self.amax_t[i]
            state[f"fp8.{name}.calibrated_steps"] = self.steps_t[i]
        return state
