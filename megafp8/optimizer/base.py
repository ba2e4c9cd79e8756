"""Interface of optimizers: their options, their state, their cost, and how to build them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megafp8.section import Decay, Section

if TYPE_CHECKING:  # configs are read without torch
    import torch
    from torch import Tensor

    from megafp8.parallel.sharding import Shape


class TensorOptimizer(Protocol):
    """Optimizer of flat fp32 tensors, with the part of PyTorch's optimizer interface that is used here."""

    param_groups: list[dict[str, Any]]
    state: Any

    @property
    def step(self) -> Callable[..., object]:
        """Function that updates the weights once."""


class Update(Section):
    """Options of an update rule, with methods that describe and build its optimizer.

    Each rule has one file and is a key of `OptimizerConfig`.
    """

    moments: ClassVar[Mapping[str, bool]]
    """Names of the state tensors, which have the size of a weight, each with whether its values are signed."""

    def updates_stored(self, device: torch.device, *, in_less: bool) -> bool:
        """Return whether an optimizer for `device` updates weights and state in their stored form (`FusedOptimizer`).

        `in_less` says whether any of the state is stored in less than fp32.
        """
        return False

    def make(self, groups: list[dict[str, Any]], device: torch.device, *, stored: bool) -> TensorOptimizer:
        """Build an optimizer of parameter groups.

        Args:
            groups: PyTorch parameter groups, each with a `weight_decay`. The caller sets `lr` and the state.
            device: Device of the parameters.
            stored: Whether the optimizer updates weights and state in their stored form. Otherwise all tensors are fp32
                or float64.
        """
        raise NotImplementedError

    def describe(self, device: torch.device, *, stored: bool) -> str:
        """Return the implementation and the reason for its choice, for the log."""
        return type(self).__name__

    @property
    def decay_rates(self) -> Mapping[str, float]:
        """Decay rates of the moments that may be stored with less precision than fp32, by config key."""
        return {}

    def flops(self, shape: Shape) -> int:
        """Return the FLOPs of matrix products in the update of a matrix of `shape`."""
        return 0

    def hidden_learning_rate_scale(self, learning_rate: float, width: float) -> float:
        """Return the factor of `learning_rate` for hidden matrices of a model `width` times as wide as muP's base.

        Under muP, the spectral norm of updates must not depend on the width (Yang et al. 2023, arXiv:2310.17813). If
        the elements of an update have the same size at any width, its spectral norm grows with the width.
        """
        return 1 / width


class MatrixUpdate(Update):
    """Update of whole hidden matrices by a function of their momentum (`matrices`), which is fp32 or bf16.

    AdamW updates all weights that are not hidden matrices (`param_groups.is_hidden_matrix`).
    """

    moments: ClassVar[Mapping[str, bool]] = {"momentum_buffer": True}
    momentum: Decay = 0.95
    """Decay rate of the momentum."""
    per_head: bool = False
    """Update the query, key and value weights of each head of softmax or latent attention as separate matrices (Muon
    Split of GLM-5, arXiv:2602.15763). Otherwise a matrix has the rows of all heads."""

    def exchange_dtype(self, master: torch.dtype) -> torch.dtype:
        """Return the dtype of momentum and results in communication, given the dtype of the masters."""
        raise NotImplementedError

    def accumulate(
        self, momentum_n: Tensor, gradient_n: Tensor, direction_n: Tensor | None, skip: Tensor | None
    ) -> None:
        """Update the momentum in place, and write the direction of the update.

        Args:
            momentum_n: Flat momentum. The update computes in the gradient's dtype.
            gradient_n: Flat gradient.
            direction_n: Output for the elementwise direction that `transform` takes; None if it is not needed.
            skip: Bool scalar on the device. If true, the momentum does not change.
        """
        raise NotImplementedError

    def transform(self, x_bnm: Tensor) -> Tensor:
        """Return the unscaled updates of whole matrices from their directions, in the same dtype.

        The result of a matrix is bitwise the same alone and in a batch.
        """
        raise NotImplementedError

    def scale(self, shape: Shape) -> float:
        """Return the factor of the update of a matrix of `shape`."""
        raise NotImplementedError
