"""State of one linear layer in each expert of a rank, where one parameter holds the weights of all experts.

Each expert's layer has its own `LinearState`, with a plan, scales, histories and a name. If all experts have the same
kind of plan, kernels compute them together, with one `GroupQuantizer` per operand and one FP8 copy of all weights.

Shapes: e experts, n outputs, k inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.linear.state import InputFormat, LinearState, QuantizedGradHandoff, Quantizers
from megafp8.linear.weight_forms import TransientWeight, WeightCopies, WeightForm
from megafp8.numerics.group_quantizer import GroupQuantizer, RowsQuantizer
from megafp8.numerics.groups import RowGroups, stored_groups
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import QuantizedTensor, ScaledTensor
from megafp8.plan import PerGemm

_ALIGNMENT = 8  # rows must be multiples of 16 bytes


def has_kernels(x: Tensor, *widths: int) -> bool:
    """Return whether kernels can compute all experts together, for bf16 matrices of these widths."""
    return x.is_cuda and x.dtype == torch.bfloat16 and not any(width % _ALIGNMENT for width in widths)


class GroupQuantizers(NamedTuple):
    """Quantizer of each operand for all experts."""

    input: GroupQuantizer
    weight: GroupQuantizer
    grad_output: GroupQuantizer


class JointLayer(NamedTuple):
    """All experts as one linear layer, for given rows of each expert; implements `megafp8.linear.gemms.Layer`."""

    state: GroupState
    high_precision: PerGemm
    fast_accum: PerGemm
    batch_invariant: bool
    quantizers: Quantizers

    def fp8_weight(self, weight: Tensor, *, columnwise: bool) -> WeightForm:
        """Return the form of all weights that FP8 GEMMs read; see `GroupState.fp8_weight`."""
        return self.state.fp8_weight(weight, columnwise=columnwise)


class GroupState:
    """State of the linear layers `states`, one for each expert. `Fp8Manager.group` makes it."""

    def __init__(self, states: Sequence[LinearState]) -> None:
        self.states = tuple(states)
        self._quantizers: GroupQuantizers | None = None
        self._high_precision: bool | None = None  # None until the plans are read, once per step
        self._alike = False
        self._copies: WeightCopies | None = None
        self._gathered_weight: ScaledTensor | None = None
        self.watches_weight = self.states[0].watches_weight

    def _look_at_plans(self) -> None:
        """Read from the experts' plans whether all run in high precision, and whether all have the same FP8 GEMMs."""
        first = self.states[0].plan
        self._high_precision = not any(state.plan.fp8 or state.plan.calibrating for state in self.states)
        self._alike = all(
            state.plan.gemms == first.gemms and state.plan.fp8 and not state.plan.calibrating for state in self.states
        )

    @property
    def high_precision(self) -> bool:
        """Whether no expert quantizes an operand or calibrates a scale."""
        if self._high_precision is None:
            self._look_at_plans()
        return bool(self._high_precision)

    def joint_quantizers(self, x: Tensor, weight: Tensor) -> GroupQuantizers | None:
        """Return quantizers for all experts together, or None if kernels cannot compute the experts together.

        This needs CUDA, bf16, and one scale per tensor, row or block of 128. All experts' GEMMs must have the same
        precision, widths must be multiples of the quantizers' `alignment`, and the recorder must not sample any of
        their tensors.
        """
        first, widths = self.states[0], (weight.shape[0] // len(self.states), weight.shape[1])
        if self.high_precision or not self._alike or not has_kernels(x, *widths):
            return None
        if first.has_observer and any(state.observed for state in self.states):
            return None
        if self._quantizers is None:
            self._quantizers = self._join(widths)[0]
        return self._quantizers

    def one_by_one(self) -> str:
        """Return why the host starts the experts' FP8 GEMMs one by one on CUDA, or an empty string if it never does.

        The answer is for bf16 and the sizes in the layers' sites.
        """
        if self.high_precision:
            return ""
        if any(state.plan.calibrating for state in self.states):
            return "static scales are being calibrated"
        if not self._alike:
            return "some experts of a layer are not FP8"
        first = self.states[0]
        if first.has_observer:
            return "a recorder samples the tensors that each expert quantizes"
        return self._join((first.site.outputs, first.site.inputs))[1]

    def _join(self, widths: tuple[int, int]) -> tuple[GroupQuantizers | None, str]:
        """Return the quantizers for all experts together; or None and the reason why they cannot be joined."""
        joined = map(GroupQuantizer.join, zip(*(state.own_quantizers for state in self.states), strict=True))
        x_quantizer, w_quantizer, dy_quantizer = joined
        if x_quantizer is None or w_quantizer is None or dy_quantizer is None:
            return None, "no kernel computes all experts together under this recipe"
        quantizers = GroupQuantizers(x_quantizer, w_quantizer, dy_quantizer)
        alignment = max(quantizer.alignment for quantizer in quantizers)
        misfit = next((width for width in widths if width % alignment), None)
        if misfit is not None:
            return None, f"the recipe needs widths that are multiples of {alignment}, but experts have {misfit}"
        return quantizers, ""

    def as_layer(self, groups: RowGroups) -> JointLayer:
        """Return all experts as one layer with the rows of `groups` as tokens. Requires `joint_quantizers`."""
        assert self._quantizers is not None
        first, (x, w, dy) = self.states[0], (RowsQuantizer(quantizer, groups) for quantizer in self._quantizers)
        quantizers = Quantizers(x, w, dy)
        return JointLayer(self, first.high_precision, first.fast_accum, first.batch_invariant, quantizers)

    def input_format(self, x: Tensor, weight: Tensor, groups: RowGroups) -> InputFormat | None:
        """Return the format in which the layer takes the rows of `groups` from the previous operation; None for values.

        `x` has the device and dtype of the rows.
        """
        quantizers = self.joint_quantizers(x, weight) if self.states[0].plan.input == "fused" else None
        return None if quantizers is None else InputFormat(RowsQuantizer(quantizers.input, groups))

    def grad_handoff(self, x: Tensor, weight: Tensor, groups: RowGroups) -> QuantizedGradHandoff | None:
        """Return the slot for the quantized output gradient of `groups`; None if the layer quantizes it itself."""
        quantizers = self.joint_quantizers(x, weight) if self.states[0].plan.grad_output == "fused" else None
        return None if quantizers is None else QuantizedGradHandoff(RowsQuantizer(quantizers.grad_output, groups))

    def fp8_weight(self, weight: Tensor, *, columnwise: bool) -> WeightForm:
        """Return the form of all weights that FP8 GEMMs read in this forward and, if `columnwise`, in its backward."""
        if self.states[0].transient_weight:
            return TransientWeight(partial(self.quantize_weight, weight))
        self._copies = WeightCopies.current(self._copies, weight, self, columnwise=columnwise)
        return self._copies

    def records_weight(self) -> bool:
        """Return whether a cast of the weights changes the recipe's state now; False in evaluation."""
        return self.states[0].records_weight()

    @property
    def keeps_transpose(self) -> bool:
        """Whether the columnwise copy of the weights is kept between micro-batches."""
        return self.states[0].keeps_transpose

    def transposed(self, rowwise: ScaledTensor) -> ScaledTensor:
        """Return the columnwise copy of all weights from their rowwise copy, which has one scale per expert."""
        return stored_groups(rowwise, len(self.states), rowwise=False, columnwise=True).required_columnwise

    def quantize_weight(self, weight: Tensor, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        """Return new FP8 copies of `weight` `[e·n, k]`, or of the gathered data: `[e·n, k]` and `[k, padded]`."""
        experts = len(self.states)
        if self._gathered_weight is not None:
            return stored_groups(self._gathered_weight, experts, rowwise=rowwise, columnwise=columnwise)
        assert self._quantizers is not None
        groups = RowGroups.equal(experts, len(weight) // experts, weight.device)
        source = Plain(weight.detach())
        return self._quantizers.weight(source, groups, rowwise=rowwise, columnwise=columnwise)

    def set_gathered_weight(self, weight: ScaledTensor) -> None:
        """Compute with `weight` `[e·n, k]`, gathered in FP8 with scales `[e]`, from now on.

        The parameter's values are no longer read.
        """
        if self._gathered_weight is None:
            for e, state in enumerate(self.states):
                state.set_gathered_part(partial(self._gathered_part, e))
        self._gathered_weight = weight

    @property
    def gathered_weight(self) -> ScaledTensor | None:
        """Weights of all experts as gathered in FP8, or None."""
        return self._gathered_weight

    def set_gathered_data(self, data: Tensor) -> None:
        """Set the storage of the gathered weights' data `[e·n, k]` to `data`."""
        assert self._gathered_weight is not None, "gathered before it was quantized"
        self._gathered_weight = self._gathered_weight._replace(data=data)

    def _gathered_part(self, e: int) -> ScaledTensor:
        """Return expert `e`'s part of the gathered weights."""
        assert self._gathered_weight is not None
        data, scale_inv_e = self._gathered_weight.data, self._gathered_weight.scale_inv
        n = len(data) // len(self.states)
        return ScaledTensor(data[e * n : (e + 1) * n], scale_inv_e[e])

    def invalidate_weight(self) -> None:
        """Drop the FP8 copies, because the weight has changed, and read the plans again."""
        self._copies = None
        self.look_at_plans_again()

    def release_weight(self) -> None:
        """Free the FP8 copies, also for graphs that still need them: these graphs quantize the weight again."""
        if self._copies is not None:
            self._copies.release()

    def look_at_plans_again(self) -> None:
        """Read the plans again at the next use, because they may have changed."""
        self._high_precision = None


def states_of(state: LinearState | GroupState) -> Sequence[LinearState]:
    """Return the states of the layers that share one weight parameter."""
    return state.states if isinstance(state, GroupState) else (state,)
