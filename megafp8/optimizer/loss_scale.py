"""Dynamic loss scale for fp16 training (Micikevicius et al. 2018, arXiv:1710.03740), as in Megatron-LM.

fp16 has no numbers below 6e-8, and most gradients of activations are that small. So the loss is multiplied by a scale
before backward, and the fp32 sums of gradients are divided by it afterwards. If the scale is too large, a gradient
becomes infinite; the step is then skipped and the scale is halved. After many steps without such an overflow, the scale
is doubled.

The scale and its counters are on the device and change in place. They depend on the norm of the gradients, which is the
same on all ranks, so all ranks have the same scale. The host need not know it, and CUDA graphs read the scale of the
step.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GROWTH, _BACKOFF = 2.0, 0.5


class LossScaler:
    """Loss scale and its counters, fp32 scalars on `device`.

    Args:
        device: Device of the tensors.
        initial_scale: Scale of the first step.
        growth_interval: Number of finite steps after which the scale doubles.
        hysteresis: Number of steps with non-finite gradients that halve the scale.
        min_loss_scale: Lower limit of the scale.

    Attributes:
        scale: Current scale.
        growth_tracker: Number of finite steps since the scale grew or gradients were not finite.
        hysteresis_tracker: Number of further non-finite steps until the scale is halved.
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
        """Update the scale after a step.

        Args:
            finite: Whether the gradients of the step were finite, bool `[]`.
            counts: Whether the step counts, bool `[]`. If false, nothing changes. None means that it counts.
        """
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
        """Return the live tensors by their names in a checkpoint. Copying values into them restores the state."""
        return {
            "loss_scale.scale": self.scale,
            "loss_scale.growth_tracker": self.growth_tracker,
            "loss_scale.hysteresis_tracker": self.hysteresis_tracker,
        }
