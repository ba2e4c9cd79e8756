"""How optimizer state is stored between steps: as it is, rounded, or as the remainder of a bf16 parameter.

Adam computes in fp32. Its state may be stored in less: a step then loads fp32 values of a batch of parameters at a time
and stores them again. Checkpoints hold what is stored, without loss, in dtypes that torch has; where no live tensor
has these values, a copy is made on the host, so that saving needs no device memory.

*Remainders* (`store_param_remainders`): fp32 masters of bf16 parameters in two bytes. A bf16 number is the upper half
of an fp32 number, so the parameter is one half of its master already. The other half is the remainder: the master's
bits minus the parameter's, a signed 16-bit number since the parameter is rounded, not truncated. Together they are the
exact master. Rounding is to nearest, ties away from zero: 65,536 masters then round to each parameter, as many as there
are remainders. Ties to even, torch's rule, would give 65,537 to every even parameter, which two bytes cannot
distinguish. So one tie in two (one master in 2^17) that torch would round down is rounded up, the only difference to
fp32 masters. Transformer Engine (`store_param_remainders`) rounds like this too.

Shapes: n elements of a shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from megafp8.numerics.dtypes import sum_dtype


class StateStorage(ABC):
    """A tensor of optimizer state between steps."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The live tensors in memory between steps, of any dtypes."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @abstractmethod
    def load(self) -> Tensor:
        """The values, fp32 `[n]`."""

    @abstractmethod
    def store(self, values: Tensor, step: int) -> None:
        """Store `values`, fp32 `[n]`, after update `step`, counted from 0."""

    @abstractmethod
    def checkpoint_tensor(self) -> Tensor:
        """What a checkpoint holds, `[n]`: the live tensor, or a copy on the host. Storing it changes no value."""


class PlainStorage(StateStorage):
    """A tensor in fp32, float64 or bf16, to which values are rounded. Loaded values are live, but for those of bf16."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._tensor,)

    def load(self) -> Tensor:
        return self._tensor.to(sum_dtype(self._tensor.dtype))

    def store(self, values: Tensor, step: int) -> None:
        if values is not self._tensor:
            self._tensor.copy_(values)

    def checkpoint_tensor(self) -> Tensor:
        return self._tensor


def split_master(master_n: Tensor) -> tuple[Tensor, Tensor]:
    """A master, fp32 `[n]`, to the parameter, bf16 `[n]`, and the remainder, int16 `[n]`."""
    bits_n = master_n.view(torch.int32)
    upper_n = (bits_n + (1 << 15)) >> 16  # of sign and magnitude: adding rounds away from zero
    return upper_n.to(torch.int16).view(torch.bfloat16), (bits_n - (upper_n << 16)).to(torch.int16)


def join_master(param_n: Tensor, remainder_n: Tensor) -> Tensor:
    """The master that `split_master` was given."""
    return ((param_n.view(torch.int16).int() << 16) + remainder_n).view(torch.float32)


class RemainderStorage(StateStorage):
    """The master of `param_n`, bf16 `[n]`, a live view of the parameter, which is half of it; initially equal to it."""

    def __init__(self, param_n: Tensor) -> None:
        assert param_n.dtype == torch.bfloat16
        self._param_n = param_n
        self._remainder_n = torch.zeros_like(param_n, dtype=torch.int16)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._remainder_n,)

    def load(self) -> Tensor:
        return join_master(self._param_n, self._remainder_n)

    def store(self, values: Tensor, step: int) -> None:
        for stored, new in zip((self._param_n, self._remainder_n), split_master(values)):
            stored.copy_(new)

    def checkpoint_tensor(self) -> Tensor:
        return self.load().cpu()
