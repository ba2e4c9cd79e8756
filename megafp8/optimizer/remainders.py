"""fp32 masters of bf16 parameters in two bytes: what the parameter leaves of them.

A bf16 number is the upper half of an fp32 number. So the model's parameter is one half of its master already, and only
the other need be kept: the remainder, the master's bits minus the parameter's, a signed 16-bit number since the
parameter is rounded and not cut off. Together they are the master, to the last bit.

Which rounding? To nearest, and of two equally near away from zero. 65,536 masters then round to each parameter, as many
as remainders there are. Ties to even, torch's rule, would give 65,537 to every even parameter: no two bytes can tell
these apart. So where a master is exactly in the middle, one in 2^17 that torch would round down is rounded up here; it
is the only difference to fp32 masters. Transformer Engine (`store_param_remainders`) rounds like this too.

Shapes: n elements of a fragment.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = 1 << 15


def split(master_n: Tensor) -> tuple[Tensor, Tensor]:
    """A master, fp32 `[n]`, to the parameter, bf16 `[n]`, and the remainder, int16 `[n]`."""
    bits_n = master_n.view(torch.int32)
    upper_n = (bits_n + _HALF) >> 16  # of sign and magnitude: adding goes away from zero
    return upper_n.to(torch.int16).view(torch.bfloat16), (bits_n - (upper_n << 16)).to(torch.int16)


def join(param_n: Tensor, remainder_n: Tensor) -> Tensor:
    """The master that `split` was given."""
    return ((param_n.view(torch.int16).int() << 16) + remainder_n).view(torch.float32)


class SplitMaster:
    """The master of `param_n`, bf16 `[n]`, a live view of the parameter, which is half of it; at first it is equal."""

    def __init__(self, param_n: Tensor) -> None:
        assert param_n.dtype == torch.bfloat16
        self._param_n = param_n
        self._remainder_n = torch.zeros_like(param_n, dtype=torch.int16)

    @property
    def nbytes(self) -> int:
        return self._remainder_n.nbytes

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._remainder_n,)

    def values(self) -> Tensor:
        return join(self._param_n, self._remainder_n)

    def keep(self, values: Tensor, step: int) -> None:
        for kept, new in zip((self._param_n, self._remainder_n), split(values)):
            kept.copy_(new)

    def saved(self) -> Tensor:
        return self.values().cpu()
