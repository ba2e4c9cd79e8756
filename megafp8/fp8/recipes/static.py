"""The state of static scaling: the amaxes it scales by, and how they are found.

An amax is given in the config, or it is the largest that the tensor had in the first steps of the run. During those its
whole layer runs in high precision, for amaxes that were themselves noted under a bad scale would be wrong; afterwards
nothing of the recipe ever changes.

The ranks that hold the same layers must agree. Their amaxes are reduced in one collective a step, and none once all are
known; a single one at the end would do, but a checkpoint in between would then hold what only one rank had seen. A step
with an infinite or NaN amax does not count for that tensor's amax.

The steps are counted for each tensor, so that a layer that joins on resume is calibrated like any other.

Shapes: t tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import all_reduce
from megafp8.fp8.formats import Format
from megafp8.fp8.quantizers import StaticQuantizer
from megafp8.fp8.recipes.base import StaticScaling
from megafp8.fp8.scaling import scale_from_amax


class StaticState:
    """Amaxes and scales `[t]`, fp32 on `device`, of the tensors `formats` names, in that order."""

    def __init__(self, recipe: StaticScaling, formats: dict[str, Format], device: torch.device) -> None:
        self.recipe = recipe
        given = [recipe.given_amax(name) for name in formats]
        self.amax_t = torch.tensor([amax or 0.0 for amax in given], dtype=torch.float32, device=device)
        self.newest_t = torch.zeros_like(self.amax_t)
        self.scale_t = torch.ones_like(self.amax_t)
        # Four apart: cuBLASLt wants a factor at a multiple of 16 bytes.
        self.scale_inv_t = torch.ones(len(formats), 4, device=device)[:, 0]
        self.fp8_max_t = torch.tensor([fmt.max for fmt in formats.values()], device=device)
        # Of calibration, on the host: they decide what a layer does.
        steps = [0 if amax is None else recipe.calibration_steps for amax in given]
        self.steps_t = torch.tensor(steps, dtype=torch.int64)
        self.calibrated = {name: i for i, (name, amax) in enumerate(zip(formats, given)) if amax is None}
        self.quantizers = {
            name: StaticQuantizer(fmt, self.scale_t[i], self.scale_inv_t[i], self.newest_t[i])
            for i, (name, fmt) in enumerate(formats.items())
        }
        self.refresh()

    @torch.no_grad()
    def end_step(self, group: ProcessGroup | None) -> None:
        """Take the step's amaxes, reduced over `group` (one collective), into those of tensors that calibrate."""
        calibrating_t = self.steps_t < self.recipe.calibration_steps
        if not calibrating_t.any():
            return
        newest_t = all_reduce(self.newest_t, group, "max")
        torch.maximum(self.amax_t, newest_t.masked_fill(~newest_t.isfinite(), 0.0), out=self.amax_t)
        self.newest_t.zero_()
        self.steps_t += calibrating_t
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Renew what follows from the amaxes and steps: to be called when these were read from a checkpoint."""
        recipe = self.recipe
        self.scale_t.copy_(
            scale_from_amax(self.amax_t, self.fp8_max_t, margin=recipe.margin, power_of_two=recipe.power_of_two)
        )
        self.scale_inv_t.copy_(self.scale_t.reciprocal())
        for quantizer, steps in zip(self.quantizers.values(), self.steps_t.tolist(), strict=True):
            quantizer.calibrating = steps < recipe.calibration_steps

    def state_dict(self) -> dict[str, Tensor]:
        """Of each tensor whose amax was not given `fp8.<tensor>.amax` `[]`, and `.calibrated_steps` `[]`, int64 on the
        host. Views: reading into them and `refresh` loads them."""
        state: dict[str, Tensor] = {}
        for name, i in self.calibrated.items():
            state[f"fp8.{name}.amax"] = self.amax_t[i]
            state[f"fp8.{name}.calibrated_steps"] = self.steps_t[i]
        return state
