"""Lion: updates by the sign of a mean of momentum and gradient, with one moment.

With momentum M, gradient G, learning rate η and weight decay λ (Chen et al. 2023, arXiv:2302.06675, algorithm 2):

    W ← (1 - η λ) W - η sign(β1 M + (1 - β1) G)        M ← β2 M + (1 - β2) G

Every element of an update has the size η. This is more than most elements of AdamW's updates, so the paper uses
learning rates 3 to 10 times smaller than AdamW's, and λ larger by the same factor. On CPUs, an update takes 4 extra
bytes per element for the signs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from megafp8.optimizer.base import TensorOptimizer, Update
from megafp8.section import Decay

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Lion(Update):
    """Lion (Chen et al. 2023), which updates every weight by a sign times the learning rate."""

    moments: ClassVar[Mapping[str, bool]] = {"exp_avg": True}
    beta1: Decay = 0.9
    """Weight of the momentum in the mean of momentum and gradient. The sign of the mean is the update."""
    beta2: Decay = 0.99
    """Decay rate of the momentum."""

    @property
    def decay_rates(self) -> Mapping[str, float]:
        """Decay rate of the momentum, by config key."""
        return {"optimizer.lion.beta2": self.beta2}

    def updates_stored(self, device: torch.device, *, in_less: bool) -> bool:
        """Return whether `FusedOptimizer` runs: on CUDA."""
        return device.type == "cuda"

    def make(self, groups: list[dict[str, Any]], device: torch.device, *, stored: bool) -> TensorOptimizer:
        """Build `FusedOptimizer` if `stored`, otherwise `LionOptimizer`."""
        from megafp8.optimizer.fused import FusedOptimizer

        if stored:
            betas = (self.beta1, self.beta2)
            return FusedOptimizer(groups, tuple(self.moments), lambda table, **step: table.lion(betas=betas, **step))
        return LionOptimizer(self, groups)


class LionOptimizer:
    """Lion over flat fp32 tensors, with the interface of PyTorch's optimizers."""

    def __init__(self, options: Lion, groups: list[dict[str, Any]]) -> None:
        self._options, self.param_groups = options, groups
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    def step(self) -> None:
        """Update the weights once."""
        import torch

        with torch.no_grad():
            for group in self.param_groups:
                weights: list[Tensor] = group["params"]
                if not weights:
                    continue
                gradients = [weight.grad for weight in weights if weight.grad is not None]
                momenta = [self.state[weight]["exp_avg"] for weight in weights]
                signs = torch._foreach_lerp(momenta, gradients, 1 - self._options.beta1)
                torch._foreach_sign_(signs)
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, signs, alpha=-group["lr"])
                torch._foreach_lerp_(momenta, gradients, 1 - self._options.beta2)
