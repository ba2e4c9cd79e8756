"""Forms of a linear layer's weight: what its GEMMs read of it.

Products in high precision read the parameter, and those without gradients may read a weight packed for them
(`megafp8.linear.packed_weight`). GEMMs in FP8 read a `WeightForm`, which gives the weight rowwise and columnwise. Where
the weight is decides which one `LinearState.fp8_weight` returns:

    resident, gathered by ZeRO    `WeightCopies`: made when first read, and kept for the micro-batches of a step
    FSDP                          `TransientWeight`: made at each use; the weight exists only while the layer runs
    stored or gathered in FP8     either of them, of `stored_copies`: there are no values to quantize

Shapes: n outputs, k inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from megafp8.gemm.cublaslt_problem import arranged
from megafp8.numerics.tensor import TENSOR, QuantizedTensor, ScaledTensor


class WeightForm(Protocol):
    """A weight `[n, k]` in FP8: `required_rowwise` `[n, k]` for fprop, `required_columnwise` `[k, n]` for dgrad."""

    @property
    def required_rowwise(self) -> ScaledTensor: ...

    @property
    def required_columnwise(self) -> ScaledTensor: ...


class WeightOwner(Protocol):
    """A layer, or equal layers of several experts, whose weight is one tensor.

    `watches_weight`: it sees for itself whether the weight has changed, instead of being told.
    """

    watches_weight: bool

    def quantize_weight(self, weight: Tensor, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        """New FP8 copies of `weight`."""
        ...

    def records_weight(self) -> bool:
        """Whether a cast of the weight records its amax now."""
        ...


def stored_copies(data: ScaledTensor, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
    """FP8 data `[n, k]` that is all there is of a weight, and its transpose: one scale per tensor or square block.

    Its scales may come from a buffer or a file, so GEMMs get them as they read them.
    """
    return QuantizedTensor(arranged(data) if rowwise else None, arranged(data.t()) if columnwise else None)


class TransientWeight(NamedTuple):
    """A weight of which no copy is kept: each use makes its own."""

    cast: Callable[..., QuantizedTensor]

    @property
    def required_rowwise(self) -> ScaledTensor:
        return self.cast(rowwise=True, columnwise=False).required_rowwise

    @property
    def required_columnwise(self) -> ScaledTensor:
        return self.cast(rowwise=False, columnwise=True).required_columnwise


class WeightCopies:
    """FP8 copies of a weight, shared by a layer and the graphs of its forwards while the weight is unchanged.

    When the weight changes, the layer gets new ones, and an older graph keeps what it was computed with. `release`
    frees them for both, as when FSDP2 frees the weight; the next access casts the weight as it is by then. `recorded`:
    a cast has recorded the weight's amax, as those of an evaluation do not.
    """

    def __init__(self, weight: Tensor, owner: WeightOwner) -> None:
        self.weight, self.recorded = weight, False
        self.made: QuantizedTensor | None = None
        self._owner = owner
        self._made_from: Stamp | None = None

    @classmethod
    def current(
        cls, kept: WeightCopies | None, weight: Tensor, owner: WeightOwner, *, columnwise: bool
    ) -> WeightCopies:
        """The copies `kept` if they are of `weight`, else new ones; made rowwise, and columnwise if wanted.

        Rowwise alone until a forward wants `columnwise` too, as the first one that a backward will follow does. Copies
        of an evaluation are made anew in training, which records their amax.
        """
        unfit = kept is None or (owner.watches_weight and not kept.are_of(weight))
        if kept is None or unfit or (not kept.recorded and owner.records_weight()):
            kept = cls(weight, owner)
        kept.weight = weight  # where it was joined of others, the older tensor may be a copy of older values
        kept.make(columnwise=columnwise)
        return kept

    def are_of(self, weight: Tensor) -> bool:
        """Whether `weight` is the tensor, or another view of its memory, and has not been written to since the cast."""
        return _same_memory(self.weight, weight) and (self.made is None or self.are_fresh)

    @property
    def are_fresh(self) -> bool:
        """Whether the copies have been made, of the weight as it is."""
        return self.made is not None and self._made_from == _stamp(self.weight)

    def make(self, *, columnwise: bool) -> QuantizedTensor:
        """The copies: rowwise, and columnwise if wanted or made already."""
        quantized = self.made
        if quantized is None or (columnwise and quantized.columnwise is None):
            quantized = self._owner.quantize_weight(self.weight, rowwise=True, columnwise=columnwise)
            if self._owner.watches_weight:  # a step may end between a forward and its backward
                quantized = _with_own_scales(quantized)
            self.take(quantized, recorded=self.recorded or self._owner.records_weight())
        return quantized

    def take(self, quantized: QuantizedTensor, *, recorded: bool) -> None:
        """Take `quantized` as the copies of the weight."""
        self.made, self.recorded = quantized, recorded
        if self._owner.watches_weight:
            self._made_from = _stamp(self.weight)

    def release(self) -> None:
        """Free the copies."""
        self.made = None

    @property
    def required_rowwise(self) -> ScaledTensor:
        made = self.made
        return self.make(columnwise=False).required_rowwise if made is None or made.rowwise is None else made.rowwise

    @property
    def required_columnwise(self) -> ScaledTensor:
        made = self.made
        if made is None or made.columnwise is None:
            return self.make(columnwise=True).required_columnwise
        return made.columnwise


def _with_own_scales(quantized: QuantizedTensor) -> QuantizedTensor:
    """`quantized` with copies of scales of whole tensors, as a recipe may write to its own when a step ends."""
    rowwise, columnwise = quantized.required_rowwise, quantized.columnwise
    if rowwise.granularity is not TENSOR:
        return quantized
    scale_inv = rowwise.scale_inv.clone()
    return QuantizedTensor(
        rowwise._replace(scale_inv=scale_inv), None if columnwise is None else columnwise._replace(scale_inv=scale_inv)
    )


Stamp = tuple[tuple[int, int], ...]


def parts_of(weight: Tensor) -> tuple[Tensor, ...]:
    """The weight; or the parameters that were joined to it for one forward, as it says itself."""
    return getattr(weight, "parts", (weight,))


def _stamp(weight: Tensor) -> Stamp:
    """A value that changes when the tensor is written to or its memory is replaced."""
    return tuple((part._version, part.data_ptr()) for part in parts_of(weight))


def _same_memory(weight: Tensor, other: Tensor) -> bool:
    ours, theirs = parts_of(weight), parts_of(other)
    return len(ours) == len(theirs) and all(
        mine is its or (mine.data_ptr() == its.data_ptr() != 0 and mine.shape == its.shape)
        for mine, its in zip(ours, theirs, strict=True)
    )
