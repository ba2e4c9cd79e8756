"""Quantizers: a recipe's way of casting one operand of a linear layer.

They say where a scale comes from. `CurrentQuantizer` takes it from the tensor at hand: exact, one pass more over the
data, and a reduction over the group wherever ranks hold slices, since a slice has another maximum than the whole.
`DelayedQuantizer` uses a scale made from earlier steps and only notes the amax for later ones: one pass, no
communication in the layer, at the risk of saturating a tensor that grew since. `StaticQuantizer` has one for good.
`RowQuantizer`, `BlockQuantizer` and `MXFP8Quantizer` give neighbours a factor of their own, which is local to a rank by
construction; `NVFP4Quantizer` does too, under one for the tensor.

A tensor whose tokens are cut over ranks is cast where its slices are, so that codes travel and not values
(`megafp8.ops.quantized_gather`). `for_sharded_input` gives the quantizer whose casts of slices are slices of the
whole's cast.

How a cast is computed is chosen here once: by a fused kernel on CUDA, by the plain twin elsewhere. The last two have no
kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import all_reduce
from megafp8.fp8 import reference as plain
from megafp8.fp8.formats import Format
from megafp8.fp8.quantize import amax
from megafp8.fp8.recipes.mxfp8 import quantize_mxfp8
from megafp8.fp8.recipes.nvfp4 import hadamard_transform, quantize_nvfp4
from megafp8.fp8.scaling import ScaleRule
from megafp8.fp8.sources import Source
from megafp8.fp8.stochastic import TensorNoise
from megafp8.fp8.tensor import QuantizedTensor, ScaledTensor
from megafp8.philox import Key


class Quantizer(Protocol):
    """Casts a source `[r, c]` to FP8: its rows, and its columns (`[c, r]`), whichever are asked for.

    `per_tensor`: a tensor has one factor, the same on all ranks that hold slices of it, so slices fit together.
    `shard_alignment`: factors of the columns begin anew at every so many tokens.
    """

    @property
    def per_tensor(self) -> bool: ...

    @property
    def shard_alignment(self) -> int: ...

    def for_sharded_input(self, group: ProcessGroup) -> Quantizer | None:
        """The quantizer of slices, each of a multiple of `shard_alignment` tokens, that the ranks of `group` hold; None
        where slices cannot be cast on their own."""
        ...

    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor: ...


@runtime_checkable
class AmaxRecording(Protocol):
    """A quantizer in which casts leave a trace, while it is `recording`."""

    recording: bool


def casts(source: Source) -> ModuleType:
    """The implementation for `source`: `megafp8.kernels.quantize`, or `megafp8.fp8.reference`."""
    if source.device.type == "cuda" and source.dtype in (torch.bfloat16, torch.float32):
        from megafp8.kernels import quantize  # needs Triton, which comes with torch's CUDA builds

        return quantize
    return plain


class CurrentQuantizer:
    """Scales a tensor by its own amax, over `group` where this rank holds only a slice of it."""

    per_tensor: ClassVar[bool] = True
    shard_alignment: ClassVar[int] = 1

    def __init__(self, fmt: Format, group: ProcessGroup | None, *, eps: float, power_of_two: bool) -> None:
        self.fmt, self.group, self.eps, self.power_of_two = fmt, group, eps, power_of_two

    @property
    def rule(self) -> ScaleRule:
        """How the scale follows from the amax."""
        return ScaleRule(self.fmt.max, eps=self.eps, power_of_two=self.power_of_two)

    def for_sharded_input(self, group: ProcessGroup) -> CurrentQuantizer:
        return CurrentQuantizer(self.fmt, group, eps=self.eps, power_of_two=self.power_of_two)

    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        implementation = casts(source)
        whole_amax = all_reduce(implementation.amax(source), self.group, "max")
        return implementation.cast_current(
            source,
            whole_amax,
            self.fmt,
            rowwise=rowwise,
            columnwise=columnwise,
            power_of_two=self.power_of_two,
            eps=self.eps,
        )


class DelayedQuantizer:
    """Scales by `scale` as it stands (`scale_inv` its reciprocal) and notes the amax in `newest_amax`; all fp32 `[]`,
    views of the shared state.

    While it is `fresh` there is no earlier step to scale by. It then scales by the tensor's own amax, over `group`
    where this rank holds only a slice of it, and by the recipe's `margin` and `power_of_two`, as later steps do. Noting
    is a maximum, so micro-batches add up and a recomputed forward changes nothing. `recording` is switched off during
    evaluation.
    """

    per_tensor: ClassVar[bool] = True
    shard_alignment: ClassVar[int] = 1

    def __init__(
        self,
        fmt: Format,
        scale: Tensor,
        scale_inv: Tensor,
        newest_amax: Tensor,
        group: ProcessGroup | None = None,
        *,
        margin: int = 0,
        power_of_two: bool = False,
    ) -> None:
        self.fmt, self.scale, self.scale_inv, self.newest_amax = fmt, scale, scale_inv, newest_amax
        self.group = group
        self.rule = ScaleRule(fmt.max, margin=margin, power_of_two=power_of_two)
        self.fresh, self.recording = False, True

    def for_sharded_input(self, group: ProcessGroup) -> DelayedShardQuantizer:
        return DelayedShardQuantizer(self, group)

    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        return self.cast(source, self.group, rowwise=rowwise, columnwise=columnwise)

    def cast(self, source: Source, group: ProcessGroup | None, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        """Cast the tensor, or what this rank of `group` holds of it."""
        implementation = casts(source)
        newest = self.newest_amax if self.recording else None
        if not self.fresh:
            return implementation.cast_tensor(
                source, self.scale, self.scale_inv, self.fmt, rowwise=rowwise, columnwise=columnwise, newest_amax=newest
            )
        whole_amax = all_reduce(implementation.amax(source), group, "max")
        if newest is not None:
            torch.maximum(newest, whole_amax, out=newest)
        scale = self.rule.scale(whole_amax)
        return implementation.cast_tensor(
            source, scale, scale.reciprocal(), self.fmt, rowwise=rowwise, columnwise=columnwise, newest_amax=None
        )


@dataclass(frozen=True)
class DelayedShardQuantizer:
    """`whole` for a tensor that the ranks of `group` hold slices of."""

    whole: DelayedQuantizer
    group: ProcessGroup
    per_tensor: ClassVar[bool] = True
    shard_alignment: ClassVar[int] = 1

    def for_sharded_input(self, group: ProcessGroup) -> DelayedShardQuantizer:
        return DelayedShardQuantizer(self.whole, group)

    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        return self.whole.cast(source, self.group, rowwise=rowwise, columnwise=columnwise)


class StaticQuantizer:
    """Scales by `scale`, `scale_inv` its reciprocal. Until these are known, while `calibrating`, it is to `note` what
    it would cast and keeps the largest magnitude in `newest_amax`; all fp32 `[]`, views of the shared state.

    `recording` is switched off during evaluation.
    """

    per_tensor: ClassVar[bool] = True
    shard_alignment: ClassVar[int] = 1

    def __init__(self, fmt: Format, scale: Tensor, scale_inv: Tensor, newest_amax: Tensor) -> None:
        self.fmt, self.scale, self.scale_inv, self.newest_amax = fmt, scale, scale_inv, newest_amax
        self.calibrating, self.recording = False, True

    def note(self, x: Tensor) -> None:
        """Note the amax of x, of any shape."""
        if self.calibrating and self.recording:
            torch.maximum(self.newest_amax, amax(x), out=self.newest_amax)

    def for_sharded_input(self, group: ProcessGroup) -> StaticQuantizer:
        return self

    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        return casts(source).cast_tensor(
            source, self.scale, self.scale_inv, self.fmt, rowwise=rowwise, columnwise=columnwise, newest_amax=None
        )


class RowQuantizer:
    """A factor for each row, and another for each row of the transposed matrix.

    `group`: the ranks whose tokens, the rows, a column goes on over; its amax is theirs.
    """

    per_tensor: ClassVar[bool] = False
    shard_alignment: ClassVar[int] = 1

    def __init__(self, fmt: Format, group: ProcessGroup | None, *, eps: float, power_of_two: bool) -> None:
        self.fmt, self.group, self.eps, self.power_of_two = fmt, group, eps, power_of_two

    def for_sharded_input(self, group: ProcessGroup) -> RowQuantizer:
        return RowQuantizer(self.fmt, group, eps=self.eps, power_of_two=self.power_of_two)

    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        implementation, amaxes = casts(source), None
        if columnwise and self.group is not None:
            amaxes = implementation.amaxes(source)
            all_reduce(amaxes[1], self.group, "max")
        return implementation.cast_rows(
            source,
            self.fmt,
            rowwise=rowwise,
            columnwise=columnwise,
            power_of_two=self.power_of_two,
            eps=self.eps,
            amaxes=amaxes,
        )


class BlockQuantizer:
    """A factor for each 128 neighbours in a row (`square=False`), or for each 128 × 128 elements."""

    per_tensor: ClassVar[bool] = False
    shard_alignment: ClassVar[int] = 128

    def __init__(self, fmt: Format, *, square: bool, eps: float, power_of_two: bool) -> None:
        self.fmt, self.square, self.eps, self.power_of_two = fmt, square, eps, power_of_two

    def for_sharded_input(self, group: ProcessGroup) -> BlockQuantizer:
        return self

    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        implementation = casts(source)
        cast = implementation.cast_128x128 if self.square else implementation.cast_1x128
        return cast(
            source, self.fmt, rowwise=rowwise, columnwise=columnwise, power_of_two=self.power_of_two, eps=self.eps
        )


class MXFP8Quantizer:
    """A power of two for each 32 neighbours in a row of the rows, and of the columns."""

    per_tensor: ClassVar[bool] = False
    shard_alignment: ClassVar[int] = 32

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt

    def for_sharded_input(self, group: ProcessGroup) -> MXFP8Quantizer:
        return self

    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        x_rc = source.values()
        return QuantizedTensor(
            quantize_mxfp8(x_rc, self.fmt) if rowwise else None,
            quantize_mxfp8(x_rc.t().contiguous(), self.fmt) if columnwise else None,
        )


class NVFP4Quantizer:
    """Four bits, a factor for each 16 neighbours (`square=False`) or 16 × 16 elements, under one for the whole tensor,
    which `group` holds slices of.

    `hadamard`: the columns are those of the Hadamard transform along them. `noise`: round stochastically; it counts
    casts while `recording`.
    """

    per_tensor: ClassVar[bool] = False
    shard_alignment: ClassVar[int] = 16

    def __init__(self, group: ProcessGroup | None, *, square: bool, hadamard: bool, noise: TensorNoise | None) -> None:
        self.group, self.square, self.hadamard, self.noise = group, square, hadamard, noise
        self.recording = True

    def for_sharded_input(self, group: ProcessGroup) -> None:
        return None  # noise is that of the whole tensor

    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        x_rc = source.values()
        row_key, column_key = (None, None) if self.noise is None else self.noise.next_keys(advance=self.recording)
        by_rows = self._cast(x_rc, row_key) if rowwise else None
        if not columnwise:
            return QuantizedTensor(by_rows, None)
        x_cr = x_rc.t().contiguous()
        return QuantizedTensor(by_rows, self._cast(hadamard_transform(x_cr) if self.hadamard else x_cr, column_key))

    def _cast(self, x_rc: Tensor, key: Key | None) -> ScaledTensor:
        whole_amax = all_reduce(amax(x_rc), self.group, "max")
        return quantize_nvfp4(x_rc, whole_amax, weight=self.square, stochastic=key)
