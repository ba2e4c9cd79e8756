"""Quantizers that cast one operand of all experts at once.

A `GroupQuantizer` computes the same bits as a separate quantizer for each expert, but the host does not need to know
the number of rows per expert. It supports recipes with one scale per tensor or row, or with blocks of 128.

Shapes: e experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.numerics import groups
from megafp8.numerics.groups import RowGroups
from megafp8.numerics.quantizers import AmaxRecording, Quantizer, implementation
from megafp8.numerics.recipes.base import RecipeQuantizer
from megafp8.numerics.sources import MatrixSource
from megafp8.numerics.tensor import BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity, QuantizedTensor
from megafp8.parallel.collectives import all_reduce

ALIGNMENTS: dict[Granularity, int] = {TENSOR: 16, ROW: 16, BLOCK_1X128: 128, BLOCK_128X128: 128}
"""Granularities that kernels support for all experts at once, and the number that widths must be a multiple of."""


def joined_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a view `[e]` of numbers `[]` that are equally spaced in one storage; None if they are not."""
    first = tensors[0]
    offsets = [tensor.storage_offset() for tensor in tensors]
    stride = offsets[1] - offsets[0] if len(tensors) > 1 else 1
    if stride <= 0 or offsets != [offsets[0] + i * stride for i in range(len(tensors))]:
        return None
    if any(tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() for tensor in tensors):
        return None
    return first.as_strided((len(tensors),), (stride,))


def together(tensors: Sequence[Tensor]) -> Tensor:
    """Return a view `[e]` of numbers `[]` that must be equally spaced in one storage."""
    joined = joined_view(tensors)
    assert joined is not None
    return joined


class GroupQuantizer:
    """Quantizer of one operand of all experts.

    `quantizers` are the equal quantizers of the single experts. If their recipe keeps scales and amaxes between steps,
    this quantizer reads and writes them through views.
    """

    def __init__(self, quantizers: Sequence[RecipeQuantizer]) -> None:
        self._first, self._quantizers = quantizers[0], quantizers
        bound = partial(implementation, device=quantizers[0].device, module="grouped_cast")
        self._amax_of_groups, self._cast_groups = bound(groups.amax_of_groups), bound(groups.cast_groups)
        self._cast_rows, self._cast_blocks = bound(groups.cast_groups_rows), bound(groups.cast_groups_1x128)

    @classmethod
    def join(cls, quantizers: Sequence[Quantizer]) -> GroupQuantizer | None:
        """Build one quantizer from `quantizers`; return None if they differ or `ALIGNMENTS` lacks their granularity."""
        ours = [q for q in quantizers if isinstance(q, RecipeQuantizer)]
        alike = len(ours) == len(quantizers) and len({(type(q), q.recipe, q.tensor.group) for q in ours}) == 1
        return cls(ours) if alike and ours[0].granularity in ALIGNMENTS else None

    @property
    def alignment(self) -> int:
        """Number that the rows and columns of weights must be multiples of."""
        return ALIGNMENTS[self._first.granularity]

    @cached_property
    def _known_scales(self) -> tuple[Tensor, Tensor]:
        known = [q.known_scale for q in self._quantizers if q.known_scale is not None]
        return together([scale for scale, _ in known]), together([inverse for _, inverse in known])

    @cached_property
    def _recorded_amaxes(self) -> Tensor:
        return together([q.recorded_amax for q in self._quantizers if q.recorded_amax is not None])

    def __call__(
        self, source: MatrixSource, row_groups: RowGroups, *, rowwise: bool, columnwise: bool
    ) -> QuantizedTensor:
        """Cast the rows of all experts in `source`, divided by `row_groups`."""
        first = self._first
        if first.granularity is BLOCK_128X128:  # only weights, and no block contains rows of two experts
            return first(source, rowwise=rowwise, columnwise=columnwise)
        if first.granularity is not TENSOR:
            cast, rule = self._cast_blocks, first.rule
            if first.granularity is ROW:
                cast = partial(self._cast_rows, token_group=first.tensor.token_group)
            return cast(
                source, first.fmt, row_groups, rowwise=rowwise, columnwise=columnwise, power_of_two=rule.power_of_two,
                eps=rule.eps,
            )  # fmt: skip
        if rowwise and first.known_scale is None and first.tensor.token_scales:
            rule = first.rule  # a scale for each token, as in `CurrentScaling`
            by_token = self._cast_rows(
                source, first.fmt, row_groups, rowwise=True, columnwise=False, power_of_two=rule.power_of_two,
                eps=rule.eps, token_group=None,
            )  # fmt: skip
            if not columnwise:
                return by_token
            by_expert = self(source, row_groups, rowwise=False, columnwise=True)
            return QuantizedTensor(by_token.rowwise, by_expert.columnwise)
        recording = first.recorded_amax is not None and isinstance(first, AmaxRecording) and first.recording
        newest_amax_e = self._recorded_amaxes if recording else None
        if first.known_scale is None:
            amax_e = all_reduce(self._amax_of_groups(source, row_groups), first.tensor.group, "max")
            if newest_amax_e is not None:
                newest_amax_e.copy_(torch.maximum(newest_amax_e, amax_e))
                newest_amax_e = None
            scale_e = first.rule.scale(amax_e)
            scale_inv_e = scale_e.reciprocal()
        else:
            scale_e, scale_inv_e = self._known_scales
        return self._cast_groups(
            source, scale_e, scale_inv_e, first.fmt, row_groups, rowwise=rowwise, columnwise=columnwise,
            newest_amax_e=newest_amax_e,
        )  # fmt: skip


@dataclass(frozen=True)
class RowsQuantizer:
    """`Quantizer` that applies `group_quantizer` to the rows of `row_groups`.

    The operation before or after a layer of experts casts with it.
    """

    group_quantizer: GroupQuantizer
    row_groups: RowGroups
    per_tensor: ClassVar[bool] = False
    shard_alignment: ClassVar[int] = 1

    def for_sharded_input(self, group: ProcessGroup) -> None:
        """Return None: an expert's rows are never sharded."""

    def __call__(self, source: MatrixSource, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        """Cast the rows of all experts in `source`."""
        return self.group_quantizer(source, self.row_groups, rowwise=rowwise, columnwise=columnwise)
