"""How a tensor of optimizer state is kept between steps.

Adam computes in fp32. What it leaves behind may be kept in less: a step then has fp32 values of a batch of parameters
at a time, and gives them back. Checkpoints hold what is kept, in dtypes that torch has and without loss; where that is
no tensor which is there anyway, `saved` makes a copy on the host, so that a save needs no memory of the device.

All tensors are flat, n elements of a fragment.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class StateStorage(Protocol):
    """A tensor of state, `nbytes` on the device between steps."""

    @property
    def nbytes(self) -> int: ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is in memory between steps, live, of any dtypes."""

    def values(self) -> Tensor:
        """fp32 `[n]`."""

    def keep(self, values: Tensor, step: int) -> None:
        """Keep `values`, fp32 `[n]`, from update `step` on, counted from 0."""

    def saved(self) -> Tensor:
        """What a checkpoint holds, `[n]`: the live tensor, or a copy on the host. `keep` of it changes no value."""


class PlainStorage:
    """fp32 or bf16: `tensor`, to which values are rounded. fp32 values are live."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._tensor,)

    def values(self) -> Tensor:
        return self._tensor.float()

    def keep(self, values: Tensor, step: int) -> None:
        if values is not self._tensor:
            self._tensor.copy_(values)

    def saved(self) -> Tensor:
        return self._tensor
