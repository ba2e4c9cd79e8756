"""State of the same linear layer in each expert of a rank, whose weights are one parameter.

Each expert's layer has a `LinearState` of its own: its plan, scales, histories and name. Where all are alike, kernels
compute them at once with a `GroupQuantizer` for each operand and one FP8 copy of all weights.

Shapes: e experts, n outputs, k inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.fp8.group_quantizer import GroupQuantizer, RowsQuantizer
from megafp8.fp8.groups import RowGroups
from megafp8.fp8.linear_state import InputFormat, LinearState, QuantizedGradHandoff
from megafp8.fp8.sources import Plain
from megafp8.fp8.tensor import QuantizedTensor

_ALIGNMENT = 8  # rows of 16 bytes


def has_kernels(x: Tensor, *widths: int) -> bool:
    """Whether there are kernels that compute all experts at once, for bf16 matrices of these widths."""
    return x.is_cuda and x.dtype == torch.bfloat16 and not any(width % _ALIGNMENT for width in widths)


class GroupQuantizers(NamedTuple):
    """How each operand of all experts is quantized."""

    input: GroupQuantizer
    weight: GroupQuantizer
    grad_output: GroupQuantizer


class GroupState:
    """State of the linear layers `states`, one for each expert; made by `Fp8Manager.group`."""

    def __init__(self, states: Sequence[LinearState]) -> None:
        self.states = tuple(states)
        self._quantizers: GroupQuantizers | None = None
        self._high_precision: bool | None = None  # until the plans have been looked at, once a step
        self._alike = False
        self._weight: QuantizedTensor | None = None
        self._weight_recorded = False  # whether the cast of `_weight` recorded its amaxes

    def _look_at_plans(self) -> None:
        first = self.states[0].plan
        self._high_precision = not any(state.plan.fp8 or state.plan.calibrating for state in self.states)
        self._alike = all(
            state.plan.gemms == first.gemms and state.plan.fp8 and not state.plan.calibrating for state in self.states
        )

    @property
    def high_precision(self) -> bool:
        """Whether no expert quantizes anything, nor calibrates the scale of anything."""
        if self._high_precision is None:
            self._look_at_plans()
        return bool(self._high_precision)

    def joint_quantizers(self, x: Tensor, weight: Tensor) -> GroupQuantizers | None:
        """Quantizers for all experts at once; None where kernels cannot compute them so.

        They can on CUDA in bf16, with one scale per tensor or row or blocks of 128, if all experts' GEMMs have the same
        precision, widths are multiples of the quantizers' `alignment`, and the recorder samples none of their tensors.
        """
        first, widths = self.states[0], (weight.shape[0] // len(self.states), weight.shape[1])
        if self.high_precision or not self._alike or not has_kernels(x, *widths):
            return None
        if first.gathered_weight is not None or (first.has_observer and any(state.observed for state in self.states)):
            return None
        if self._quantizers is None:
            self._quantizers = self._joined(widths)
        return self._quantizers

    def _joined(self, widths: tuple[int, int]) -> GroupQuantizers | None:
        joined = map(GroupQuantizer.join, zip(*(state.own_quantizers for state in self.states), strict=True))
        x_quantizer, w_quantizer, dy_quantizer = joined
        if x_quantizer is None or w_quantizer is None or dy_quantizer is None:
            return None
        quantizers = GroupQuantizers(x_quantizer, w_quantizer, dy_quantizer)
        fits = not any(width % quantizer.alignment for width in widths for quantizer in quantizers)
        return quantizers if fits else None

    def input_format(self, x: Tensor, weight: Tensor, groups: RowGroups) -> InputFormat | None:
        """In which form the layer takes the rows of `groups` from the operation before it; None for values.

        `x`: of the rows' device and dtype.
        """
        quantizers = self.joint_quantizers(x, weight) if self.states[0].plan.input == "fused" else None
        return None if quantizers is None else InputFormat(RowsQuantizer(quantizers.input, groups))

    def grad_handoff(self, x: Tensor, weight: Tensor, groups: RowGroups) -> QuantizedGradHandoff | None:
        """Where the operation after the layer leaves the output's gradient; None where the layer quantizes it."""
        quantizers = self.joint_quantizers(x, weight) if self.states[0].plan.grad_output == "fused" else None
        return None if quantizers is None else QuantizedGradHandoff(RowsQuantizer(quantizers.grad_output, groups))

    def fp8_weight(self, weight: Tensor, *, columnwise: bool) -> QuantizedTensor:
        """The FP8 copies of all weights, made at the first call since the last `invalidate_weight`.

        Rowwise alone until a call that wants `columnwise` too, as the first one that a backward will follow does.
        Copies of an evaluation are made anew in training, which records their amaxes.
        """
        if self.states[0].transient_weight:
            return self.quantize_weight(weight, rowwise=True, columnwise=False)
        made, records = self._weight, self.states[0].records_weight
        if made is None or (columnwise and made.columnwise is None) or (records and not self._weight_recorded):
            made = self._weight = self.quantize_weight(weight, rowwise=True, columnwise=columnwise)
            self._weight_recorded = records
        return made

    def dgrad_weight(self, weight: Tensor) -> QuantizedTensor:
        """All weights columnwise, in backward."""
        if self.states[0].transient_weight:
            return self.quantize_weight(weight, rowwise=False, columnwise=True)
        return self.fp8_weight(weight, columnwise=True)

    def quantize_weight(self, weight: Tensor, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        """Casts of `weight` `[e·n, k]`: `[e·n, k]` and `[k, padded]`."""
        assert self._quantizers is not None
        experts = len(self.states)
        groups = RowGroups.equal(experts, len(weight) // experts, weight.device)
        source = Plain(weight.detach())
        return self._quantizers.weight(source, groups, rowwise=rowwise, columnwise=columnwise)

    def invalidate_weight(self) -> None:
        """Forget the FP8 copies: the weight has changed. Plans may have changed too."""
        self._weight = None
        self.look_at_plans_again()

    def look_at_plans_again(self) -> None:
        """Plans may have changed."""
        self._high_precision = None
