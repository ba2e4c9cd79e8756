"""Interface of quantizers, which cast one operand of a linear layer, and selection of a cast's implementation.

A cast runs as a fused Triton kernel on CUDA, and as its reference in plain PyTorch elsewhere, with equal bits. A
quantizer is constructed for a device and selects the implementation then (`implementation`). The casts of each recipe
are in its file in `megafp8.numerics.recipes`.

If the tokens of a tensor are sharded over ranks, each rank quantizes its shard, so that FP8 data is gathered instead of
bf16 (`megafp8.linear.quantized_gather`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.numerics import reference
from megafp8.numerics.implementations import kernels
from megafp8.numerics.sources import MatrixSource
from megafp8.numerics.tensor import QuantizedTensor

P = ParamSpec("P")
T = TypeVar("T")


class Cast(Protocol):
    """Function that casts a source `[r, c]` to FP8 rowwise, columnwise (`[c, r]`), or both, as asked for."""

    def __call__(self, source: MatrixSource, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        """Cast `source` in the given orientations."""
        ...


class Quantizer(Cast, Protocol):
    """Object that casts one operand of a linear layer to FP8."""

    @property
    def per_tensor(self) -> bool:
        """Whether the tensor has one scale, equal on all ranks that hold shards of it."""
        ...

    @property
    def shard_alignment(self) -> int:
        """Smallest number of tokens that can be quantized separately: columnwise blocks end at its multiples."""
        ...

    def for_sharded_input(self, group: ProcessGroup) -> Quantizer | None:
        """Return the quantizer of the shards that the ranks of `group` hold, or None if shards cannot be quantized.

        The casts of the shards are shards of the whole tensor's cast. Each shard must have a multiple of
        `shard_alignment` tokens.
        """
        ...


@runtime_checkable
class AmaxRecording(Protocol):
    """Quantizer that records amaxes in its casts while `recording` is True. Evaluation turns it off."""

    recording: bool


@contextmanager
def recording_amaxes(quantizers: Sequence[AmaxRecording], flag: bool) -> Iterator[None]:
    """Turn the recording of amaxes by these quantizers on (True) or off (False) within the context."""
    before = [quantizer.recording for quantizer in quantizers]
    for quantizer in quantizers:
        quantizer.recording = flag
    try:
        yield
    finally:
        for quantizer, value in zip(quantizers, before, strict=True):
            quantizer.recording = value


@runtime_checkable
class Observing(Protocol):
    """Quantizer that passes its casts to a recorder."""

    @property
    def wanted(self) -> bool:
        """Whether the recorder wants the next cast."""
        ...


@runtime_checkable
class Calibrating(Protocol):
    """Quantizer that cannot cast while it is `calibrating`. Call `record` instead of casting."""

    calibrating: bool

    def record(self, x: Tensor) -> None:
        """Record the amax of x, of any shape."""
        ...


def casts(source: MatrixSource) -> ModuleType:
    """Return the implementation for `source`: `megafp8.kernels.quantize`, or `megafp8.numerics.reference`."""
    fused = source.device.type == "cuda" and source.dtype != torch.float64
    return kernels("quantize") if fused else reference


@dataclass(frozen=True)
class KernelCast(Generic[T]):
    """Cast that runs `kernel`, or `reference` for float64 values, which kernels do not support."""

    kernel: Callable[..., T]
    reference: Callable[..., T]

    def __call__(self, source: MatrixSource, *args: Any, **options: Any) -> T:
        """Cast `source` with the kernel or the reference."""
        cast = self.reference if source.dtype == torch.float64 else self.kernel
        return cast(source, *args, **options)


def implementation(cast: Callable[P, T], device: torch.device, module: str = "quantize") -> Callable[P, T]:
    """Return the implementation of the reference `cast` on `device`: on CUDA, the kernel of that name in `module`."""
    if device.type != "cuda":
        return cast
    bound: Callable[..., T] = KernelCast(getattr(kernels(module), cast.__name__), cast)
    return bound
