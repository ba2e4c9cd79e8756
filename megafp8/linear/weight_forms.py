"""Forms of a linear layer's weight that its GEMMs read.

High-precision products read the parameter; products without gradients may read a weight packed for them
(`megafp8.linear.packed_weight`). FP8 GEMMs read a `WeightForm`, which provides the weight rowwise and columnwise. The
place where the weight is stored decides which form `LinearState.fp8_weight` returns:

    resident, gathered by ZeRO    `WeightCopies`: made at first use, and kept for the micro-batches of a step; the
                                  columnwise copy may be made at each use (`fp8.keep_weight_transposes`)
    FSDP                          `TransientWeight`: made at each use; the weight exists only while the layer runs
    stored or gathered in FP8     either of them, made by `stored_copies`: there are no values to quantize

Shapes: n outputs, k inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from megafp8.gemm.cublaslt_problem import arranged
from megafp8.numerics.tensor import TENSOR, QuantizedTensor, ScaledTensor


class WeightForm(Protocol):
    """Weight `[n, k]` in FP8: `required_rowwise` `[n, k]` for fprop, `required_columnwise` `[k, n]` for dgrad."""

    @property
    def required_rowwise(self) -> ScaledTensor:
        """Rowwise data `[n, k]`."""
        ...

    @property
    def required_columnwise(self) -> ScaledTensor:
        """Columnwise data `[k, n]`."""
        ...


class WeightOwner(Protocol):
    """Layer, or equal layers of several experts, with one weight tensor.

    If `watches_weight` is True, the owner checks itself whether the weight has changed; otherwise a caller tells it.
    """

    watches_weight: bool

    @property
    def keeps_transpose(self) -> bool:
        """Whether the columnwise copy is kept. Otherwise it is the transpose of the rowwise copy, made at each use."""
        ...

    def transposed(self, rowwise: ScaledTensor) -> ScaledTensor:
        """Return the columnwise copy of a weight from its rowwise copy."""
        ...

    def quantize_weight(self, weight: Tensor, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        """Return new FP8 copies of `weight`."""
        ...

    def records_weight(self) -> bool:
        """Return whether a cast of the weight records its amax now."""
        ...


def stored_copies(data: ScaledTensor, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
    """Return the rowwise and columnwise form of a weight that exists only as FP8 data `[n, k]`.

    The data has one scale per tensor or per square block, so the columnwise form is its transpose. Scales may come from
    a buffer or a file, so they are rearranged into the layout that GEMMs read.
    """
    return QuantizedTensor(arranged(data) if rowwise else None, arranged(data.t()) if columnwise else None)


class TransientWeight(NamedTuple):
    """Weight without kept copies: each use makes its own copy."""

    cast: Callable[..., QuantizedTensor]

    @property
    def required_rowwise(self) -> ScaledTensor:
        """New rowwise copy `[n, k]`."""
        return self.cast(rowwise=True, columnwise=False).required_rowwise

    @property
    def required_columnwise(self) -> ScaledTensor:
        """New columnwise copy `[k, n]`."""
        return self.cast(rowwise=False, columnwise=True).required_columnwise


class WeightCopies:
    """FP8 copies of a weight, shared by a layer and the graphs of its forwards while the weight is unchanged.

    When the weight changes, the layer gets new copies, and an older graph keeps the copies that it was computed with.
    `release` frees the copies for both, for example when FSDP2 frees the weight; the next access then casts the current
    weight. `recorded` says whether a cast has recorded the weight's amax, which casts in evaluation do not.
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
        """Return the copies `kept` if they are copies of `weight`, else new ones; rowwise, and columnwise if requested.

        Copies are only rowwise until a forward also requests `columnwise`, as the first forward with a backward does.
        Copies made in evaluation are made again in training, which records their amax.
        """
        unfit = kept is None or (owner.watches_weight and not kept.are_of(weight))
        if kept is None or unfit or (not kept.recorded and owner.records_weight()):
            kept = cls(weight, owner)
        kept.weight = weight  # if the weight was joined from several parameters, the old tensor may hold old values
        kept.make(columnwise=columnwise and owner.keeps_transpose)
        return kept

    def are_of(self, weight: Tensor) -> bool:
        """Return whether `weight` is the same tensor, or a view of the same memory, and unchanged since the cast."""
        return _same_memory(self.weight, weight) and (self.made is None or self.are_fresh)

    @property
    def are_fresh(self) -> bool:
        """Whether the copies have been made from the current weight."""
        return self.made is not None and self._made_from == _stamp(self.weight)

    def make(self, *, columnwise: bool) -> QuantizedTensor:
        """Return the copies: rowwise, and columnwise if requested or already made."""
        quantized = self.made
        if quantized is None or (columnwise and quantized.columnwise is None):
            quantized = self._owner.quantize_weight(self.weight, rowwise=True, columnwise=columnwise)
            if self._owner.watches_weight:  # a step may end between a forward and its backward, and change scales
                quantized = _with_own_scales(quantized)
            self.take(quantized, recorded=self.recorded or self._owner.records_weight())
        return quantized

    def take(self, quantized: QuantizedTensor, *, recorded: bool) -> None:
        """Adopt `quantized` as the copies of the weight."""
        self.made, self.recorded = quantized, recorded
        if self._owner.watches_weight:
            self._made_from = _stamp(self.weight)

    def release(self) -> None:
        """Free the copies."""
        self.made = None

    @property
    def required_rowwise(self) -> ScaledTensor:
        """Rowwise copy `[n, k]`, made if needed."""
        made = self.made
        return self.make(columnwise=False).required_rowwise if made is None or made.rowwise is None else made.rowwise

    @property
    def required_columnwise(self) -> ScaledTensor:
        """Columnwise copy `[k, n]`, made if needed."""
        if not self._owner.keeps_transpose:
            return self._owner.transposed(self.required_rowwise)
        made = self.made
        if made is None or made.columnwise is None:
            return self.make(columnwise=True).required_columnwise
        return made.columnwise


def _with_own_scales(quantized: QuantizedTensor) -> QuantizedTensor:
    """Copy the scales of whole tensors, because a recipe may overwrite its scales when a step ends."""
    rowwise, columnwise = quantized.required_rowwise, quantized.columnwise
    if rowwise.granularity is not TENSOR:
        return quantized
    scale_inv = rowwise.scale_inv.clone()
    return QuantizedTensor(
        rowwise._replace(scale_inv=scale_inv), None if columnwise is None else columnwise._replace(scale_inv=scale_inv)
    )


Stamp = tuple[tuple[int, int], ...]


def parts_of(weight: Tensor) -> tuple[Tensor, ...]:
    """Return the parameters that were joined to `weight` for one forward, or the weight itself."""
    return getattr(weight, "parts", (weight,))


def _stamp(weight: Tensor) -> Stamp:
    """Return a value that changes when the tensor is written to or its memory is replaced."""
    return tuple((part._version, part.data_ptr()) for part in parts_of(weight))


def _same_memory(weight: Tensor, other: Tensor) -> bool:
    """Return whether both weights are the same tensors or views of the same memory."""
    ours, theirs = parts_of(weight), parts_of(other)
    return len(ours) == len(theirs) and all(
        mine is its or (mine.data_ptr() == its.data_ptr() != 0 and mine.shape == its.shape)
        for mine, its in zip(ours, theirs, strict=True)
    )
