"""AdamW: our kernel on GPUs, PyTorch's on CPUs, or NVIDIA apex's `FusedAdam` for fp32 state if it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from megafp8.optimizer.base import TensorOptimizer, Update
from megafp8.section import Decay, PositiveFloat

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer


class AdamW(Update):
    """AdamW (Loshchilov & Hutter 2019)."""

    moments: ClassVar[Mapping[str, bool]] = {"exp_avg": True, "exp_avg_sq": False}
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: PositiveFloat = 1e-8

    @property
    def decay_rates(self) -> Mapping[str, float]:
        """Decay rates of both moments, by config key."""
        return {"optimizer.beta1": self.beta1, "optimizer.beta2": self.beta2}

    def updates_stored(self, device: torch.device, *, in_less: bool) -> bool:
        """Return whether `FusedOptimizer` runs: on CUDA, unless apex is installed and all state is fp32."""
        return device.type == "cuda" and (in_less or _apex_fused_adam()[0] is None)

    def make(self, groups: list[dict[str, Any]], device: torch.device, *, stored: bool) -> TensorOptimizer:
        """Build `FusedOptimizer` if `stored`, otherwise the optimizer that `choose_adam` chooses."""
        import torch

        from megafp8.optimizer.fused import FusedOptimizer

        options: dict[str, Any] = {"betas": (self.beta1, self.beta2), "eps": self.eps}
        if stored:
            return FusedOptimizer(groups, tuple(self.moments), lambda table, **step: table.adamw(**options, **step))
        chosen, _ = choose_adam(device)
        options |= {"lr": 0.0, **({"fused": True} if chosen is torch.optim.AdamW else {"adam_w_mode": True})}
        return chosen(groups, **options)

    def describe(self, device: torch.device, *, stored: bool) -> str:
        """Return the implementation and the reason for its choice, for the log."""
        if stored:
            apex_class, reason = _apex_fused_adam()
            return f"AdamW in one pass over memory: {reason if apex_class is None else 'apex requires fp32 state'}"
        return choose_adam(device)[1]


def _apex_fused_adam() -> tuple[type[Optimizer] | None, str]:
    """Return NVIDIA apex's `FusedAdam` if it can run here, otherwise None, and a text about the installation.

    PyPI's `apex` is an unrelated package.
    """
    try:
        from apex.multi_tensor_apply import multi_tensor_applier
        from apex.optimizers import FusedAdam
    except Exception as error:  # an unrelated or broken apex may fail in any way while it is imported
        if isinstance(error, ModuleNotFoundError) and error.name == "apex":
            return None, "NVIDIA apex is not installed"
        return None, f"the installed apex is not a working NVIDIA apex ({type(error).__name__})"
    if not multi_tensor_applier.available:
        return None, "NVIDIA apex was built without its CUDA extensions"
    return FusedAdam, "NVIDIA apex is installed"


def choose_adam(device: torch.device) -> tuple[type[Optimizer], str]:
    """Return the optimizer class for fp32 or float64 state on `device`, and its name and reason for the log."""
    import torch

    if device.type != "cuda":
        return torch.optim.AdamW, f"torch fused AdamW: apex has no kernels for {device.type}"
    apex_class, apex_reason = _apex_fused_adam()
    if apex_class is None:
        return torch.optim.AdamW, f"torch fused AdamW: {apex_reason}"
    return apex_class, f"apex FusedAdam: {apex_reason}"
