"""Storage of optimizer state between steps: unchanged, rounded, or as the remainder of a bf16 parameter.

Adam computes in fp32. Its state may be stored with less precision: a step then loads the fp32 values of one batch of
parameters at a time and stores them again. Checkpoints hold the stored values without loss, in dtypes that PyTorch has.
If no live tensor has these values, they are copied to the host, so that saving needs no device memory. Live tensors may
be in host memory between steps (`megafp8.optimizer.offload`); values are computed on the parameter's device.

*Remainders* (`store_param_remainders`) store the fp32 masters of bf16 parameters in two bytes. A bf16 number is the
upper half of an fp32 number, so the parameter already is one half of its master. The other half is the remainder: the
master's bits minus the parameter's bits. It is a signed 16-bit number, because the parameter is rounded, not truncated.
Together they give the exact master. Rounding is to nearest, with ties away from zero: 65,536 masters then round to each
parameter, which equals the number of remainders. With ties to even, PyTorch's rule, 65,537 masters would round to every
even parameter, and two bytes cannot distinguish them. So half of all ties (one master in 2^17), which PyTorch would
round down, are rounded up. This is the only difference from fp32 masters. Transformer Engine (`store_param_remainders`)
also rounds this way.

Shapes: n elements of a shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from megafp8.numerics.dtypes import sum_dtype


class StateStorage(ABC):
    """Tensor of optimizer state as it is stored between steps."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """Live tensors in memory between steps, of any dtype."""

    @property
    def nbytes(self) -> int:
        """Bytes of the live tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of elements that share an entry of each live tensor."""
        return (1,)

    @abstractmethod
    def part(self, start: int, end: int, tensors: Sequence[Tensor]) -> StateStorage:
        """Return the storage of elements `[start, end)`, with `tensors` as live tensors. Copy no values.

        `start` is a multiple of `blocks`.
        """

    @abstractmethod
    def load(self) -> Tensor:
        """Return the values, fp32 `[n]`."""

    @abstractmethod
    def store(self, values: Tensor, step: int) -> None:
        """Store `values`, fp32 `[n]`, after update `step`, counted from 0."""

    @abstractmethod
    def checkpoint_tensor(self) -> Tensor:
        """Return the tensor `[n]` for a checkpoint: the live tensor, or a copy on the host.

        Storing it again changes no value.
        """


class PlainStorage(StateStorage):
    """State stored as one tensor in fp32, float64 or bf16, to which values are rounded.

    Loaded values are the live tensor, except for bf16.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Stored tensor."""
        return (self._tensor,)

    def part(self, start: int, end: int, tensors: Sequence[Tensor]) -> PlainStorage:
        """Return the storage of some elements."""
        return PlainStorage(*tensors)

    def load(self) -> Tensor:
        """Return the values in fp32 or float64; a copy if the tensor is bf16."""
        return self._tensor.to(sum_dtype(self._tensor.dtype))

    def store(self, values: Tensor, step: int) -> None:
        """Round `values` to the dtype of the tensor."""
        if values is not self._tensor:
            self._tensor.copy_(values)

    def checkpoint_tensor(self) -> Tensor:
        """Return the live tensor."""
        return self._tensor


def split_master(master_n: Tensor) -> tuple[Tensor, Tensor]:
    """Split a master, fp32 `[n]`, into the parameter, bf16 `[n]`, and the remainder, int16 `[n]`."""
    bits_n = master_n.view(torch.int32)
    upper_n = (bits_n + (1 << 15)) >> 16  # floats are sign and magnitude, so this rounds ties away from zero
    return upper_n.to(torch.int16).view(torch.bfloat16), (bits_n - (upper_n << 16)).to(torch.int16)


def join_master(param_n: Tensor, remainder_n: Tensor) -> Tensor:
    """Return the master, fp32 `[n]`, from the results of `split_master`."""
    return ((param_n.view(torch.int16).int() << 16) + remainder_n).view(torch.float32)


class RemainderStorage(StateStorage):
    """Master stored as a bf16 parameter and a remainder.

    `param_n`, bf16 `[n]`, is a live view of the parameter, which is one half of the master. `remainder_n`, int16 `[n]`,
    is the other half. By default it is zero, so that the initial master is equal to the parameter.
    """

    def __init__(self, param_n: Tensor, remainder_n: Tensor | None = None) -> None:
        assert param_n.dtype == torch.bfloat16
        self._param_n = param_n
        self._remainder_n = torch.zeros_like(param_n, dtype=torch.int16) if remainder_n is None else remainder_n

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Remainder, int16 `[n]`."""
        return (self._remainder_n,)

    def part(self, start: int, end: int, tensors: Sequence[Tensor]) -> RemainderStorage:
        """Return the storage of some elements."""
        return RemainderStorage(self._param_n[start:end], *tensors)

    def load(self) -> Tensor:
        """Return a copy of the master, fp32 `[n]`."""
        return join_master(self._param_n, self._remainder_n.to(self._param_n.device))

    def store(self, values: Tensor, step: int) -> None:
        """Store a master: round it into the parameter, and store the remainder."""
        for stored, new in zip((self._param_n, self._remainder_n), split_master(values)):
            stored.copy_(new)

    def checkpoint_tensor(self) -> Tensor:
        """Return a copy of the master on the host, fp32 `[n]`."""
        return self.load().cpu()
