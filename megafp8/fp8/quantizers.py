"""Quantizers: how one operand of a linear layer is cast, and what a recipe's quantizers have in common.

Each recipe's quantizer is in its file in `megafp8.fp8.recipes`. A cast runs as a fused Triton kernel on CUDA and as its
reference in plain PyTorch elsewhere, with the same bits (`casts`, `implementation`).

A tensor whose tokens are sharded over ranks is quantized where its shards are, so that FP8 travels and not bf16
(`megafp8.ops.quantized_gather`); `for_sharded_input` gives the quantizer whose casts of shards are shards of the whole
tensor's cast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import (
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    get_args,
    runtime_checkable,
)

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.fp8 import reference
from megafp8.fp8.formats import Format
from megafp8.fp8.quantize import ScaleRule
from megafp8.fp8.sources import Source
from megafp8.fp8.tensor import TENSOR, Granularity, QuantizedTensor

OperandName = Literal["input", "weight", "grad_output"]
OPERANDS: tuple[OperandName, ...] = get_args(OperandName)

P = ParamSpec("P")
T = TypeVar("T")


class PerOperand(NamedTuple, Generic[T]):
    """A value for each operand of a linear layer."""

    input: T
    weight: T
    grad_output: T


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a recipe can do: the one place that config checks, planner, speed model and tensor parallelism ask.

    `granularity`: which elements of an operand share a scale, rowwise and columnwise. `shard_alignment`: a shard of the
    tokens can be quantized alone, and then gathered in FP8, if its length is a multiple of this; None: only the whole
    tensor can be. `cast_passes`: times a cast on CUDA reads the tensor. `bits`: of an element. `stochastic_rounding`:
    output gradients are rounded with random keys that the host makes, and that a CUDA graph would repeat.
    """

    granularity: PerOperand[Granularity]
    shard_alignment: int | None
    cast_passes: int = 1
    bits: int = 8
    stochastic_rounding: bool = False

    @property
    def per_tensor(self) -> bool:
        """One scale for the whole tensor: columnwise is then the transposed copy of rowwise, and not another cast."""
        return all(granularity is TENSOR for granularity in self.granularity)


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
        """The quantizer of shards, each of a multiple of `shard_alignment` tokens, that the ranks of `group` hold.

        None where shards cannot be quantized alone.
        """
        ...

    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor: ...


@runtime_checkable
class AmaxRecording(Protocol):
    """A quantizer whose casts change its state while `recording`; switched off during evaluation."""

    recording: bool


@runtime_checkable
class Calibrating(Protocol):
    """A quantizer that cannot cast while it is `calibrating`; it is to `record` what it would cast instead."""

    calibrating: bool

    def record(self, x: Tensor) -> None: ...


class RecipeQuantizer(ABC):
    """Base of the recipes' quantizers: what follows from the recipe's capabilities."""

    capabilities: ClassVar[Capabilities]

    @property
    def per_tensor(self) -> bool:
        return self.capabilities.per_tensor

    @property
    def shard_alignment(self) -> int:
        return self.capabilities.shard_alignment or 1

    def for_sharded_input(self, group: ProcessGroup) -> Quantizer | None:
        """This quantizer, whose scales are local to a shard; to be overridden where they depend on other shards."""
        return None if self.capabilities.shard_alignment is None else self

    @abstractmethod
    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor: ...


class PerTensorQuantizer(RecipeQuantizer):
    """Base of quantizers with one scale per tensor, under which weights can be cast in flat shards.

    `newest_amax`, fp32 `[]`: raised to the amax of what is cast; None where nothing remembers it.
    """

    fmt: Format
    newest_amax: Tensor | None = None

    @property
    def rule(self) -> ScaleRule:
        """How the scale follows from an amax."""
        return ScaleRule(self.fmt.max)

    @property
    def known_scale(self) -> tuple[Tensor, Tensor] | None:
        """The scale and its reciprocal, fp32 `[]`; None where they follow from the tensor at hand."""
        return None


def _kernels(source: Source) -> ModuleType | None:
    if source.device.type == "cuda" and source.dtype in (torch.bfloat16, torch.float32):
        from megafp8.kernels import quantize  # needs Triton, which comes with torch's CUDA builds

        return quantize
    return None


def casts(source: Source) -> ModuleType:
    """The implementation for `source`: `megafp8.kernels.quantize`, or `megafp8.fp8.reference`."""
    return _kernels(source) or reference


def implementation(cast: Callable[P, T], source: Source) -> Callable[P, T]:
    """`cast`, which is a reference, or where `source` can be cast by a kernel the one of that name."""
    kernels: Any = _kernels(source)
    return cast if kernels is None else getattr(kernels, cast.__name__)
