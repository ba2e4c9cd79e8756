"""Static scaling: one scale per tensor that never changes. Nothing to compute, to remember or to communicate.

The amax it follows from is given in the config, or is the largest that the tensor had in the first steps of the run,
its calibration. During these the whole layer runs in high precision (its `LinearPlan` says so), for amaxes measured
under a bad scale would be wrong; afterwards nothing changes.

The ranks that hold the same layers must agree. Their amaxes are reduced in one collective a step, and none once all are
known. One at the end would do, but a checkpoint in between would then hold what only one rank had seen. A step with an
infinite or NaN amax does not count for that tensor's amax. Steps are counted per tensor, so a layer that joins on
resume is calibrated like any other.

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
    """Scales by `scale`, `scale_inv` its reciprocal.

    Until these are known, while `calibrating`, it is to `record` what it would cast and keeps the largest magnitude in
    `calibration_amax`. All are fp32 `[]`, views of the shared state. `recording` is switched off during evaluation.
    """

    scale: Tensor
    scale_inv: Tensor
    calibration_amax: Tensor
    calibrating: bool = False
    recording: bool = True

    @property
    def known_scale(self) -> tuple[Tensor, Tensor]:
        return self.scale, self.scale_inv

    @property
    def settled(self) -> bool:
        return not self.calibrating

    def for_sharded_input(self, group: ProcessGroup) -> StaticQuantizer:
        return self

    def record(self, x: Tensor) -> None:
        """Record the amax of x, of any shape."""
        if self.calibrating and self.recording:
            torch.maximum(self.calibration_amax, amax(x), out=self.calibration_amax)

    def __post_init__(self) -> None:
        cast = implementation(reference.cast_tensor, self.device)
        self._cast = partial(cast, scale=self.scale, scale_inv=self.scale_inv, fmt=self.fmt, newest_amax=None)


@dataclass(frozen=True, kw_only=True)
class StaticScaling(Fp8Recipe):
    """Per tensor, by a scale that never changes.

    `amax`: pairs of a shell-style pattern over tensors (`layers.*.mlp.down.input`) and the largest magnitude they will
    have; the first that matches counts. `calibration_steps`: for this many steps a layer that has a tensor without runs
    in high precision and records its amaxes, then it keeps the largest. `margin`: powers of two left free above the
    amax, for tensors that grow later. `power_of_two`: round scales down to powers of two.
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
        return self.calibration_steps > 0

    def scale_rule(self, fmt: Format) -> ScaleRule:
        return ScaleRule(fmt.max, margin=self.margin, power_of_two=self.power_of_two)

    def given_amax(self, tensor: str) -> float | None:
        """The amax of a tensor that needs no calibration."""
        return next((value for pattern, value in self.amax if fnmatchcase(tensor, pattern)), None)

    def check_tensors(self, tensors: Sequence[str]) -> None:
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
        state = StaticState(self, tensors, device)
        return Built({**state.quantizers}, state)


class StaticState(TensorScales):
    """Amaxes and scales `[t]`, fp32 on `device`, of `tensors` in their order."""

    def __init__(self, recipe: StaticScaling, tensors: Sequence[Fp8Tensor], device: torch.device) -> None:
        super().__init__(recipe, tensors, device)
        self.recipe = recipe
        amaxes = [recipe.given_amax(tensor.name) for tensor in tensors]
        self.amax_t = torch.tensor([amax or 0.0 for amax in amaxes], dtype=torch.float32, device=device)
        self.newest_t = torch.zeros_like(self.amax_t)
        # Of calibration, on the host: they decide what a layer does.
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
        calibrating = bool((self.steps_t < self.recipe.calibration_steps).any())
        return self.split(self.newest_t) if calibrating else []

    @torch.no_grad()
    def end_step(self, reduced: Sequence[Tensor]) -> None:
        """Take the step's amaxes into those of tensors that calibrate."""
        if not reduced:
            return
        calibrating_t = self.steps_t < self.recipe.calibration_steps
        newest_t = self.joined(reduced)
        torch.maximum(self.amax_t, newest_t.masked_fill(~newest_t.isfinite(), 0.0), out=self.amax_t)
        self.newest_t.zero_()
        self.steps_t += calibrating_t
        self.refresh()

    def discard_step(self) -> None:
        """Forget the step's amaxes."""
        self.newest_t.zero_()

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute what follows from the amaxes and steps, after these were read from a checkpoint."""
        recipe = self.recipe
        self.scale_t.copy_(
            scale_from_amax(self.amax_t, self.fp8_max_t, margin=recipe.margin, power_of_two=recipe.power_of_two)
        )
        self.scale_inv_t.copy_(self.scale_t.reciprocal())
        for quantizer, steps in zip(self.quantizers.values(), self.steps_t.tolist(), strict=True):
            quantizer.calibrating = steps < recipe.calibration_steps

    def state_dict(self) -> dict[str, Tensor]:
        """`fp8.<tensor>.amax` and `.calibrated_steps`, both `[]`, of each tensor whose amax was not given.

        The latter is int64 on the host. Views: reading into them and `refresh` loads them.
        """
        state: dict[str, Tensor] = {}
        for name, i in self.calibrated.items():
            state[f"fp8.{name}.amax"] = self.amax_t[i]
            state[f"fp8.{name}.calibrated_steps"] = self.steps_t[i]
        return state
