"""Quantizers: a recipe's way of casting one operand of a linear layer.

They say where a scale comes from. `CurrentQuantizer` takes it from the tensor at hand: exact, one pass more over the
data, and a reduction over the group wherever ranks hold slices, since a slice has another maximum than the whole.
`DelayedQuantizer` uses a scale made from earlier steps and only notes the amax for later ones: one pass, no
communication in the layer, at the risk of saturating a tensor that grew since. `RowQuantizer` and `BlockQuantizer`
give neighbours a factor of their own, which is local to a rank by construction.

How a cast is computed is chosen here once: by a fused kernel on CUDA, by the plain twin elsewhere.
"""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.collectives import all_reduce
from megafp8.fp8 import plain
from megafp8.fp8.formats import Format
from megafp8.fp8.matrix import Operand
from megafp8.fp8.sources import Source


class Quantizer(Protocol):
    """Casts a source `[r, c]` to FP8: its rows, and its columns (`[c, r]`), whichever are asked for.

    `one_factor`: a tensor has one factor, the same on all ranks that hold slices of it, so slices fit together.
    """

    one_factor: ClassVar[bool]

    def __call__(self, source: Source, *, rows: bool, columns: bool) -> Operand: ...


def casts(source: Source) -> ModuleType:
    """The implementation for `source`: `megafp8.fp8.kernels.quantize`, or `megafp8.fp8.plain`."""
    if source.device.type == "cuda" and source.dtype in (torch.bfloat16, torch.float32):
        from megafp8.fp8.kernels import quantize  # needs Triton, which comes with torch's CUDA builds

        return quantize
    return plain


class CurrentQuantizer:
    """Scales a tensor by its own amax, over `group` where this rank holds only a slice of it."""

    one_factor: ClassVar[bool] = True

    def __init__(self, fmt: Format, group: ProcessGroup | None, *, eps: float, power_of_two: bool) -> None:
        self.fmt, self.group, self.eps, self.power_of_two = fmt, group, eps, power_of_two

    def __call__(self, source: Source, *, rows: bool, columns: bool) -> Operand:
        implementation = casts(source)
        whole_amax = all_reduce(implementation.amax(source), self.group, "max")
        return implementation.cast_current(
            source, whole_amax, self.fmt, rows=rows, columns=columns, power_of_two=self.power_of_two, eps=self.eps
        )


class DelayedQuantizer:
    """Scales by `scale` as it stands (`scale_inv` its reciprocal) and notes the amax in `newest_amax`; all fp32 `[]`,
    views of the shared state.

    Noting is a maximum, so micro-batches add up and a recomputed forward changes nothing. `recording` is switched off
    during evaluation.
    """

    one_factor: ClassVar[bool] = True

    def __init__(self, fmt: Format, scale: Tensor, scale_inv: Tensor, newest_amax: Tensor) -> None:
        self.fmt, self.scale, self.scale_inv, self.newest_amax = fmt, scale, scale_inv, newest_amax
        self.recording = True

    def __call__(self, source: Source, *, rows: bool, columns: bool) -> Operand:
        newest = self.newest_amax if self.recording else None
        return casts(source).cast_tensor(
            source, self.scale, self.scale_inv, self.fmt, rows=rows, columns=columns, newest_amax=newest
        )


class RowQuantizer:
    """A factor for each row, and another for each row of the transposed matrix."""

    one_factor: ClassVar[bool] = False

    def __init__(self, fmt: Format, *, eps: float, power_of_two: bool) -> None:
        self.fmt, self.eps, self.power_of_two = fmt, eps, power_of_two

    def __call__(self, source: Source, *, rows: bool, columns: bool) -> Operand:
        return casts(source).cast_rows(
            source, self.fmt, rows=rows, columns=columns, power_of_two=self.power_of_two, eps=self.eps
        )


class BlockQuantizer:
    """A factor for each 128 neighbours in a row (`square=False`), or for each 128 × 128 elements."""

    one_factor: ClassVar[bool] = False

    def __init__(self, fmt: Format, *, square: bool, eps: float, power_of_two: bool) -> None:
        self.fmt, self.square, self.eps, self.power_of_two = fmt, square, eps, power_of_two

    def __call__(self, source: Source, *, rows: bool, columns: bool) -> Operand:
        implementation = casts(source)
        cast = implementation.cast_128x128 if self.square else implementation.cast_1x128
        return cast(source, self.fmt, rows=rows, columns=columns, power_of_two=self.power_of_two, eps=self.eps)
