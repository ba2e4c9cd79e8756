"""State of one linear layer: its plan, and in FP8 also its quantizers, GEMM and the FP8 copies of its weight.

`Fp8Manager.linear` makes a layer's state together with the layer, and completes it when the model has been built. The
plan determines what the operations around the layer need: `input_format` for the operation before it, and
`grad_handoff` for the operation after it. Only the state changes its own attributes.

Shapes: n outputs, k inputs of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.gemm.dispatch import Fp8Gemm
from megafp8.linear.packed_weight import PackedWeight
from megafp8.linear.weight_forms import TransientWeight, WeightCopies, WeightForm, stored_copies
from megafp8.numerics.quantizers import AmaxRecording, Calibrating, Observing, Quantizer
from megafp8.numerics.recipes.base import RecipeQuantizer
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import QuantizedTensor, ScaledTensor
from megafp8.plan import LinearPlan, LinearPrecision, LinearSite, PerGemm, plan_linear


class Quantizers(NamedTuple):
    """Quantizer of each operand of a layer."""

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer


class InputFormat(NamedTuple):
    """Format in which a linear layer takes its input from the operation before it.

    Attributes:
        quantizer: Quantizer of the input; None if the layer takes values.
        columnwise: Whether to quantize in both orientations instead of only rowwise.
        alignment: Number that the rows (tokens) must be a multiple of.
        recompute: Whether the layer saves the tensors that the input was computed from instead of the input.
        group: Ranks over which recomputed slices of the tokens are gathered.
    """

    quantizer: Quantizer | None
    columnwise: bool = True
    alignment: int = 1
    recompute: bool = False
    group: ProcessGroup | None = None


class QuantizedGradHandoff:
    """Slot in which the operation after a linear layer leaves the quantized output gradient in its backward."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self.grad: QuantizedTensor | None = None

    def take(self) -> QuantizedTensor | None:
        """Remove and return the gradient, or None if no gradient was left."""
        grad, self.grad = self.grad, None
        return grad


class LinearState:
    """State of the linear layer at `site`.

    The FP8 copies of the weight live from first use to `invalidate_weight`; under FSDP they are made again for
    backward. `frozen_weight` says that no step changes the weight, so steps do not invalidate the copies.

    Args:
        site: The layer and its place in the model.
        precision: Precision of the layer in the recipe; None keeps the layer in high precision.
        high_reason: Reason for high precision if `precision` is None.
        group: Tensor-parallel ranks.
        sharded_group: Ranks that hold the slices of an activation that is sharded over tensor-parallel ranks.
        token_group: Ranks over which the tokens of other activations are split; None if this rank has all tokens.
        watches_weight: The state itself checks whether the weight has changed; no caller calls `invalidate_weight`.
        batch_invariant: Sum in an order that does not depend on the number of rows, as in `LinearPlan`.
    """

    def __init__(
        self,
        site: LinearSite,
        precision: LinearPrecision | None,
        *,
        high_reason: str = "",
        group: ProcessGroup | None = None,
        sharded_group: ProcessGroup | None = None,
        token_group: ProcessGroup | None = None,
        watches_weight: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self.site, self.precision = site, precision
        self._high_reason, self.batch_invariant = high_reason, batch_invariant
        self.group, self.sharded_group, self.token_group = group, sharded_group, token_group
        self.plan = self._planned(calibrating=False)
        self._quantizers: Quantizers | None = None
        self._own_quantizers: Quantizers | None = None  # as the recipe made them, without observers
        self._calibrated: list[Calibrating] = []  # cached, because `isinstance` with a protocol is slow
        self._observing: list[Observing] = []
        self.gemm: Fp8Gemm  # set by `complete`
        self.watches_weight = watches_weight
        self._copies: WeightCopies | None = None
        self._weight_recording: AmaxRecording | None = None
        self.frozen_weight = False
        self._gathered_weight: ScaledTensor | None = None
        self._gathered_part: Callable[[], ScaledTensor] | None = None
        self.input_format: InputFormat | None = None
        self.shard_grad_quantizer: Quantizer | None = None
        self.high_precision = self.fast_accum = PerGemm(False, False, False)
        self.packed_weight: PackedWeight | None = None
        self.transient_weight = False  # the weight exists only while the layer runs, so no copies are kept
        self.keeps_transpose = True
        if precision is None:
            self._follow_plan()

    def complete(self, quantizers: Quantizers, gemm: Fp8Gemm, observed: Quantizers | None) -> None:
        """Set the attributes that are known once the whole model has been built.

        `Fp8Manager.materialize` calls this. `observed` are the same quantizers with an observer.
        """
        self.gemm, self._own_quantizers = gemm, quantizers
        self._weight_recording = quantizers.weight if isinstance(quantizers.weight, AmaxRecording) else None
        self._quantizers = observed or quantizers
        self._calibrated = [quantizer for quantizer in quantizers if isinstance(quantizer, Calibrating)]
        self._observing = [quantizer for quantizer in self._quantizers if isinstance(quantizer, Observing)]
        self.replan()

    def replan(self, *, calibrating: bool = False) -> None:
        """Replace the plan when calibration has started or ended. `calibrating` starts it whatever the recipe says."""
        self.plan = self._planned(calibrating=calibrating or self._calibrating)
        self._follow_plan()

    def replan_if_calibrated(self) -> None:
        """Replace the plan if one of the layer's tensors started or ended its calibration."""
        if self._calibrated and self.plan.calibrating != self._calibrating:
            self.replan()

    @property
    def _calibrating(self) -> bool:
        return any(quantizer.calibrating for quantizer in self._calibrated)

    def _planned(self, *, calibrating: bool) -> LinearPlan:
        return plan_linear(
            self.site, self.precision, high_reason=self._high_reason, calibrating=calibrating,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip

    def _follow_plan(self) -> None:
        """Derive the attributes that the plan determines."""
        plan, group = self.plan, self.group if self.plan.gather else None
        self.high_precision = PerGemm(*(gemm == "high" for gemm in plan.gemms))
        self.fast_accum = PerGemm(*(gemm == "fp8 fast" for gemm in plan.gemms))
        self.transient_weight = plan.weight in ("fsdp", "fsdp fp8")
        self.keeps_transpose = plan.keeps_transpose
        recompute = plan.saved == "recompute"
        self.input_format = InputFormat(None, recompute=recompute, group=group) if recompute else None
        self.shard_grad_quantizer = None
        if plan.input == "fused":
            quantizer: Quantizer | None = self.quantizers.input
            alignment, columnwise = 1, True
            if plan.gather is not None:
                assert self.sharded_group is not None
                quantizer = self.quantizers.input.for_sharded_input(self.sharded_group)
                assert quantizer is not None
                alignment, columnwise = quantizer.shard_alignment, not quantizer.per_tensor
            self.input_format = InputFormat(quantizer, columnwise, alignment, recompute, group)
        if plan.grad_output == "layer, then gather":
            assert self.sharded_group is not None
            self.shard_grad_quantizer = self.quantizers.grad_output.for_sharded_input(self.sharded_group)

    @property
    def quantizers(self) -> Quantizers:
        """Quantizers of the layer, with observers if there is a recorder."""
        assert self._quantizers is not None, "call Fp8Manager.materialize(device) once the model is built"
        return self._quantizers

    @property
    def own_quantizers(self) -> Quantizers:
        """Quantizers as the recipe made them, without observers."""
        assert self._own_quantizers is not None
        return self._own_quantizers

    @property
    def has_observer(self) -> bool:
        """Whether there is a recorder that may sample tensors that the layer quantizes."""
        return self._quantizers is not self._own_quantizers

    @property
    def observed(self) -> bool:
        """Whether the recorder samples the next tensors that the layer quantizes."""
        return any(quantizer.wanted for quantizer in self._observing)

    def record_amax(self, operand: str, x: Tensor) -> None:
        """Record the amax of an operand of any shape for later scales, as calibration does."""
        quantizer = getattr(self.own_quantizers, operand)
        if isinstance(quantizer, RecipeQuantizer):
            quantizer.record(x)

    def skip_grad_output(self) -> None:
        """Advance the noise past a micro-batch without tokens, so that later ones get the same noise in any layout."""
        if self.plan.fp8 and isinstance(self.own_quantizers.grad_output, RecipeQuantizer):
            self.own_quantizers.grad_output.skip()

    def grad_handoff(self) -> QuantizedGradHandoff | None:
        """Return the slot for the next forward's quantized output gradient; None if the layer quantizes it itself."""
        return QuantizedGradHandoff(self.quantizers.grad_output) if self.plan.grad_output == "fused" else None

    # --- Weight -----------------------------------------------------------------------------------------------------

    def freeze_weight(self, *, keep_copies: bool) -> None:
        """Declare that no step changes the weight. With `keep_copies`, steps keep its FP8 copies."""
        self.frozen_weight = keep_copies
        if self._own_quantizers is not None and isinstance(self._own_quantizers.weight, RecipeQuantizer):
            self._own_quantizers.weight.freeze()

    def records_weight(self) -> bool:
        """Return whether a cast of the weight changes the recipe's state now; False in evaluation."""
        return self._weight_recording is not None and self._weight_recording.recording

    def fp8_weight(self, weight: Tensor, *, columnwise: bool) -> WeightForm:
        """Return the form of `weight` that FP8 GEMMs read in this forward and, if `columnwise`, in its backward.

        Raises:
            ValueError: If the weight is stored in FP8 with a different scale granularity than the recipe's.
        """
        stored: ScaledTensor | None = getattr(weight, "scaled", None) if self.watches_weight else None
        if stored is not None:  # an `Fp8Weight`
            self._check_stored(stored)
            return TransientWeight(partial(stored_copies, stored))
        if self.transient_weight or (self.watches_weight and self._gathered_weight is not None):
            return TransientWeight(partial(self.quantize_weight, weight))
        self._copies = WeightCopies.current(self._copies, weight, self, columnwise=columnwise)
        return self._copies

    def take_copies(self, weight: Tensor, quantized: QuantizedTensor, *, recorded: bool) -> WeightCopies:
        """Adopt `quantized` as the FP8 copies of `weight`. `recorded` says whether their cast recorded an amax."""
        self._copies = WeightCopies(weight, self)
        self._copies.take(quantized, recorded=recorded and self.records_weight())
        return self._copies

    def transposed(self, rowwise: ScaledTensor) -> ScaledTensor:
        """Return the columnwise copy of the weight from its rowwise copy, which has one scale."""
        return rowwise.t()

    def quantize_weight(self, weight: Tensor, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        """Return new FP8 copies of `weight`, or of the gathered data if the weight is gathered in FP8."""
        data = self.gathered_weight
        if data is not None:
            return stored_copies(data, rowwise=rowwise, columnwise=columnwise)
        return self.quantizers.weight(Plain(weight.detach()), rowwise=rowwise, columnwise=columnwise)

    def _check_stored(self, data: ScaledTensor) -> None:
        """Raise ValueError unless the stored FP8 weight has the scale granularity of the recipe."""
        wanted = self.own_quantizers.weight
        assert isinstance(wanted, RecipeQuantizer)
        granularity = wanted.recipe.granularity("weight")
        if data.granularity is not granularity:
            raise ValueError(
                f"{self.site.name}: the weight is stored in FP8 with one scale per {data.granularity.name}, but "
                f"{wanted.recipe.name} scaling needs one per {granularity.name}; give fp8.autocast the recipe of "
                "fp8.model_init"
            )

    def set_gathered_weight(self, weight: ScaledTensor) -> None:
        """Compute with `weight` `[n, k]`, gathered in FP8, from now on. The parameter's values are no longer read."""
        self._gathered_weight = weight

    def set_gathered_part(self, part: Callable[[], ScaledTensor]) -> None:
        """Compute with `part()` `[n, k]` from now on: the layer's part of a weight that is gathered in FP8."""
        self._gathered_part = part

    def set_packed_weight(self, weight: PackedWeight | None) -> None:
        """Compute with `weight` in high precision and without gradients from now on. The parameter is no longer read.

        None returns to the parameter.
        """
        assert not self.plan.fp8, "the operation before the layer would quantize its input"
        self.packed_weight = weight

    @property
    def gathered_weight(self) -> ScaledTensor | None:
        """Weight as gathered in FP8, or None."""
        return self._gathered_weight if self._gathered_part is None else self._gathered_part()

    def set_gathered_data(self, data_nk: Tensor) -> None:
        """Set the storage of the gathered weight's data to `data_nk`."""
        assert self._gathered_weight is not None, "gathered before it was quantized"
        self._gathered_weight = self._gathered_weight._replace(data=data_nk)

    def invalidate_weight(self) -> None:
        """Drop the FP8 copies, because the weight has changed."""
        self._copies = None

    def release_weight(self) -> None:
        """Free the FP8 copies, also for graphs that still need them: these graphs quantize the weight again."""
        if self._copies is not None:
            self._copies.release()

    @property
    def weight_copies(self) -> WeightCopies | None:
        """FP8 copies of the current weight, or None if they have not been made."""
        return self._copies if self._copies is not None and self._copies.are_fresh else None
