"""Quantizers of an operand of all experts at once.

A `GroupQuantizer` casts the rows of all experts as each expert's own quantizer would: the same bits, without the host
knowing where they end. It is for recipes with one scale per tensor.

Shapes: e experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megafp8.fp8 import groups
from megafp8.fp8.groups import GroupedTensor, RowGroups
from megafp8.fp8.quantizers import AmaxRecording, Quantizer
from megafp8.fp8.recipes.base import RecipeQuantizer
from megafp8.fp8.sources import Source


def together(tensors: Sequence[Tensor]) -> Tensor:
    """`[e]`: a view of numbers `[]` that lie in one storage, equally far apart."""
    first = tensors[0]
    offsets = [tensor.storage_offset() for tensor in tensors]
    stride = offsets[1] - offsets[0] if len(tensors) > 1 else 1
    assert offsets == [offsets[0] + i * stride for i in range(len(tensors))]
    assert all(tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for tensor in tensors)
    return first.as_strided((len(tensors),), (stride,))


class GroupQuantizer:
    """Casts an operand of all experts, as `quantizers` would those of each; they are alike.

    The scales and amaxes of recipes that remember some are views of the quantizers' own.
    """

    def __init__(self, quantizers: Sequence[RecipeQuantizer]) -> None:
        self._first, self._quantizers = quantizers[0], quantizers

    @classmethod
    def join(cls, quantizers: Sequence[Quantizer]) -> GroupQuantizer | None:
        """None unless they are alike, have one scale per tensor, and this rank has the whole of each tensor."""
        own = [q for q in quantizers if isinstance(q, RecipeQuantizer)]
        alike = len(own) == len(quantizers) and len({(type(q), q.recipe) for q in own}) == 1
        joins = alike and own[0].per_tensor and all(q.tensor.group is None for q in own)
        return cls(own) if joins else None

    @cached_property
    def _known_scales(self) -> tuple[Tensor, Tensor]:
        known = [q.known_scale for q in self._quantizers if q.known_scale is not None]
        return together([scale for scale, _ in known]), together([inverse for _, inverse in known])

    @cached_property
    def _recorded_amaxes(self) -> Tensor:
        return together([q.recorded_amax for q in self._quantizers if q.recorded_amax is not None])

    def __call__(self, source: Source, row_groups: RowGroups, *, rowwise: bool, columnwise: bool) -> GroupedTensor:
        first, module = self._first, _implementation(source)
        recording = first.recorded_amax is not None and isinstance(first, AmaxRecording) and first.recording
        newest_amax_e = self._recorded_amaxes if recording else None
        if first.known_scale is None:
            amax_e = module.amax_of_groups(source, row_groups)
            if newest_amax_e is not None:
                newest_amax_e.copy_(torch.maximum(newest_amax_e, amax_e))
                newest_amax_e = None
            scale_e = first.rule.scale(amax_e)
            scale_inv_e = scale_e.reciprocal()
        else:
            scale_e, scale_inv_e = self._known_scales
        data, transposed = module.cast_groups(
            source, scale_e, first.fmt, row_groups, rowwise=rowwise, columnwise=columnwise, newest_amax_e=newest_amax_e
        )
        return GroupedTensor(data, transposed, scale_inv_e)


def _implementation(source: Source) -> Any:
    if source.device.type != "cuda":
        return groups
    from megafp8.kernels import grouped_cast  # needs Triton, which comes with torch's CUDA builds

    return grouped_cast
