"""The interface of quantizers, which cast one operand of a linear layer, and the choice of a cast's implementation.

A cast runs as a fused Triton kernel on CUDA and as its reference in plain PyTorch elsewhere, with the same bits. How a
recipe casts is in its file in `megafp8.numerics.recipes`.

A tensor whose tokens are sharded over ranks is quantized where its shards are, so that FP8 travels and not bf16
(`megafp8.linear.quantized_gather`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.numerics import reference
from megafp8.numerics.implementations import kernels
from megafp8.numerics.sources import Source
from megafp8.numerics.tensor import QuantizedTensor

P = ParamSpec("P")
T = TypeVar("T")


class Quantizer(Protocol):
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

    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor: ...


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


def _kernels(source: Source, module: str = "quantize") -> ModuleType | None:
    fused = source.device.type == "cuda" and source.dtype != torch.float64
    return kernels(module) if fused else None


def casts(source: Source) -> ModuleType:
    """The implementation for `source`: `megafp8.kernels.quantize`, or `megafp8.numerics.reference`."""
    return _kernels(source) or reference


def implementation(cast: Callable[P, T], source: Source, module: str = "quantize") -> Callable[P, T]:
    """`cast`, which is a reference, or where a kernel can cast `source` the one of that name in `module`."""
    fused: Any = _kernels(source, module)
    return cast if fused is None else getattr(fused, cast.__name__)
