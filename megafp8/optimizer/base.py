"""What an optimizer is to everything else: its options, the state that it keeps, what it costs, and how it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megafp8.section import Decay, Section

if TYPE_CHECKING:  # configs are read without torch
    import torch
    from torch import Tensor

    from megafp8.parallel.sharding import Shape


class TensorOptimizer(Protocol):
    """An optimizer of flat fp32 tensors with the interface of torch's, as far as it is used here."""

    param_groups: list[dict[str, Any]]
    state: Any

    @property
    def step(self) -> Callable[..., object]: ...


class Update(Section):
    """Options of an update of weights, which describes itself. One file each, named in `OptimizerConfig`.

    `moments`: names of the fp32 tensors of a weight's size that are its state, each with whether it has signs.
    """

    moments: ClassVar[Mapping[str, bool]]

    def updates_stored(self, device: torch.device) -> bool:
        """Whether it has an optimizer for `device` that updates weights and state as they are stored between steps:
        fp32 masters or remainders, moments in fp32 or bf16 (`FusedAdamW`)."""
        return False

    def make(self, groups: list[dict[str, Any]], device: torch.device, *, stored: bool) -> TensorOptimizer:
        """An optimizer of parameter groups, each with its `weight_decay`; `lr` and state are set by the caller.

        `stored`: one that updates weights and state as they are stored, else all that it is given is fp32 or float64.
        """
        raise NotImplementedError

    def describe(self, device: torch.device, *, stored: bool) -> str:
        """The implementation and why it was chosen, for the log."""
        return type(self).__name__

    @property
    def decay_rates(self) -> Mapping[str, float]:
        """Decay rates of the moments that may be stored in less than fp32, by key of the config."""
        return {}

    def flops(self, shape: Shape) -> int:
        """FLOPs of matrix products in the update of a matrix of `shape`."""
        return 0

    def hidden_learning_rate_scale(self, learning_rate: float, width: float) -> float:
        """What `learning_rate` is multiplied by for hidden matrices of a model `width` times as wide as muP's base.

        Under muP updates must have a spectral norm that does not depend on the width (Yang et al. 2023,
        arXiv:2310.17813). That of updates whose elements have the same size in any width grows with it.
        """
        return 1 / width


class MatrixUpdate(Update):
    """An update of whole hidden matrices by a function of their momentum (`matrices`), with fp32 state.

    AdamW updates all other weights, what is no hidden matrix (`param_groups.is_hidden_matrix`).
    """

    moments: ClassVar[Mapping[str, bool]] = {"momentum_buffer": True}
    momentum: Decay = 0.95
    """Decay rate of the momentum."""

    def exchange_dtype(self, master: torch.dtype) -> torch.dtype:
        """The dtype in which momentum and result travel between ranks, given that of the masters."""
        raise NotImplementedError

    def accumulate(
        self, momentum_n: Tensor, gradient_n: Tensor, direction_n: Tensor | None, skip: Tensor | None
    ) -> None:
        """Update the momentum, flat and in place, and write what is transformed, elementwise, into `direction_n`.

        Where `skip`, a bool scalar on the device, is true, the momentum stays as it is.
        """
        raise NotImplementedError

    def transform(self, x_bnm: Tensor) -> Tensor:
        """The updates of whole matrices but for their scale, from their directions, in the same dtype.

        A matrix has the same bits alone and among others.
        """
        raise NotImplementedError

    def scale(self, shape: Shape) -> float:
        """Factor of the update of a matrix of `shape`."""
        raise NotImplementedError
