"""The interface of quantizers, which cast one operand of a linear layer, and the choice of a cast's implementation.

A cast runs as a fused Triton kernel on CUDA and as its reference in plain PyTorch elsewhere, with the same bits. A
quantizer is made for a device, and chooses then (`implementation`). How a recipe casts is in its file in
`megafp8.numerics.recipes`.

A tensor whose tokens are sharded over ranks is quantized where its shards are, so that FP8 travels and not bf16
(`megafp8.linear.quantized_gather`).
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
    """Casts a source `[r, c]` to FP8: rowwise, and columnwise (`[c, r]`), whichever are asked for."""

    def __call__(self, source: MatrixSource, *, rowwise: bool, columnwise: bool) -> QuantizedTensor: ...


class Quantizer(Cast, Protocol):
    """Casts a source `[r, c]` to FP8: rowwise, and columnwise (`[c, r]`), whichever are asked for.

    `per_tensor`: one scale for the tensor, the same on all ranks that hold shards of it. `shard_alignment`: columnwise
    scales begin anew at every so many tokens.
    """

    @property
    def per_tensor(self) -> bool: ...

    @property
    def shard_alignment(self) -> int: ...

    def for_sharded_input(self, group: ProcessGroup) -> Quantizer | None:
        """The quantizer of shards that the ranks of `group` hold, whose casts are shards of the whole tensor's cast.

        Each shard has a multiple of `shard_alignment` tokens. None where shards cannot be quantized alone.
        """
        ...


@runtime_checkable
class AmaxRecording(Protocol):
    """A quantizer whose casts change its state while `recording`; switched off during evaluation."""

    recording: bool


@contextmanager
def recording_amaxes(quantizers: Sequence[AmaxRecording], flag: bool) -> Iterator[None]:
    """Within, casts of these quantizers record amaxes (True) or do not (False); before and after, as they did."""
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
    """A quantizer that shows a recorder what it casts; `wanted`: the recorder wants what is cast next."""

    @property
    def wanted(self) -> bool: ...


@runtime_checkable
class Calibrating(Protocol):
    """A quantizer that cannot cast while it is `calibrating`; it is to `record` what it would cast instead."""

    calibrating: bool

    def record(self, x: Tensor) -> None: ...


def casts(source: MatrixSource) -> ModuleType:
    """Return the implementation for `source`: `megafp8.kernels.quantize`, or `megafp8.numerics.reference`."""
    fused = source.device.type == "cuda" and source.dtype != torch.float64
    return kernels("quantize") if fused else reference


@dataclass(frozen=True)
class KernelCast(Generic[T]):
    """A cast by `kernel`; values in float64, which kernels do not take, are cast by `reference`."""

    kernel: Callable[..., T]
    reference: Callable[..., T]

    def __call__(self, source: MatrixSource, *args: Any, **options: Any) -> T:
        cast = self.reference if source.dtype == torch.float64 else self.kernel
        return cast(source, *args, **options)


def implementation(cast: Callable[P, T], device: torch.device, module: str = "quantize") -> Callable[P, T]:
    """Return `cast`, a reference, as it runs on `device`: on CUDA by the kernel of that name in `module`."""
    if device.type != "cuda":
        return cast
    bound: Callable[..., T] = KernelCast(getattr(kernels(module), cast.__name__), cast)
    return bound
