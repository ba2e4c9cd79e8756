"""The dynamic loss scale of fp16 training (Micikevicius et al. 2018, arXiv:1710.03740), as Megatron-LM has it.

Below 6e-8 fp16 has no numbers, and most gradients of activations are that small. So the loss is multiplied by a scale
before backward, and the sums of gradients, which are fp32, are divided by it afterwards. With too large a scale a
gradient becomes infinite: the step is skipped and the scale is halved. After many steps without that it is doubled.

Scale and counters are on the device and change in place there, by the norm of the gradients, which is the same on all
ranks: the host need not know them, CUDA graphs read the scale of the step, and all ranks have the same one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GROWTH, _BACKOFF = 2.0, 0.5


class LossScaler:
    """The scale and what it changes by: tensors `[]` on `device`, fp32. Settings: those of `training.loss_scale`.

    `growth_tracker`: finite steps since the scale changed last, or gradients were not finite. `hysteresis_tracker`: so
    many more steps with gradients that are not finite leave the scale as it is, but for the last of them.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        initial_scale: float,
        growth_interval: int,
        hysteresis: int,
        min_loss_scale: float,
    ) -> None:
        self.growth_interval, self.hysteresis, self.min_loss_scale = growth_interval, hysteresis, min_loss_scale
        self.scale = torch.full((), initial_scale, dtype=torch.float32, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.float32, device=device)
        self.hysteresis_tracker = torch.full((), hysteresis, dtype=torch.float32, device=device)

    @torch.no_grad()
    def update(self, finite: Tensor, counts: Tensor | None = None) -> None:
        """After a step whose gradients were `finite`, bool `[]`; nothing changes if `counts` is given and false."""
        counts = torch.ones_like(finite) if counts is None else counts
        overflow, clean = counts & ~finite, counts & finite
        growth = torch.where(overflow, 0, self.growth_tracker + clean)
        hysteresis = self.hysteresis_tracker - overflow.float()
        smaller = (self.scale * _BACKOFF).clamp(min=self.min_loss_scale)
        grows = clean & (growth == self.growth_interval)
        scale = torch.where(overflow & (hysteresis <= 0), smaller, self.scale)
        self.scale.copy_(torch.where(grows, self.scale * _GROWTH, scale))
        self.growth_tracker.copy_(torch.where(grows, 0, growth))
        self.hysteresis_tracker.copy_(torch.where(grows, self.hysteresis, hysteresis))

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors by their names in a checkpoint. Reading into these tensors loads them."""
        return {
            "loss_scale.scale": self.scale,
            "loss_scale.growth_tracker": self.growth_tracker,
            "loss_scale.hysteresis_tracker": self.hysteresis_tracker,
        }
