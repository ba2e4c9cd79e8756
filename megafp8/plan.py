"""Plan of each linear layer: an immutable `LinearPlan` that is decided when the model is built.

How a linear layer runs depends on its FP8 recipe, on the operations before and after it, on how weights and tokens are
sharded, and on biases, recomputation, ZeRO or FSDP, and calibration. All of this is known when the layer is
constructed, so one pure function, `plan_linear`, decides it there. Norms, activations, linear layers, the FP8 weight
gather and the memory planner read the plan. `--dry-run` prints it, with the reason wherever the fast path is not taken.

Two events replace a plan: the end of calibration (static scaling), and the start of calibration when a checkpoint is
loaded.

A linear layer y = x wᵀ has three GEMMs: fprop y = x wᵀ, dgrad dx = dy w, and wgrad dw = dyᵀ x.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple


class PerGemm(NamedTuple):
    """Bool for each of the three GEMMs of a linear layer."""

    fprop: bool
    dgrad: bool
    wgrad: bool


@dataclass(frozen=True)
class Neighbor:
    """Operation before or after a linear layer, and the quantization that its kernel can do for the layer.

    Attributes:
        name: Name of the operation in plans and log messages.
        fuses: Scales that the kernel can compute: "any" granularity; "per_tensor or blocks", one scale per tensor or
            per block of 128 elements; "per_tensor" only; or "none".
        reason: Why `fuses` is "none".
    """

    name: str
    fuses: Literal["any", "per_tensor or blocks", "per_tensor", "none"] = "none"
    reason: str = ""


UNKNOWN = Neighbor("", "none", "the neighboring operation is unknown")


class Quantization(NamedTuple):
    """Properties of one operand's quantization that a plan depends on.

    Attributes:
        recipe: Name of the recipe, for messages.
        per_tensor: Whether the whole tensor has one scale.
        shard_alignment: Smallest number of tokens that can be quantized separately: ranks can quantize their slices of
            the tokens if each slice is a multiple of it. None if slices cannot be quantized separately.
        gatherable_weight: Whether data-parallel ranks can quantize any part of a weight separately, so that the weight
            can be gathered in FP8 (`fp8.param_gather`).
        blocks: Whether each block of 128 neighboring elements has one scale.
    """

    recipe: str
    per_tensor: bool
    shard_alignment: int | None
    gatherable_weight: bool
    blocks: bool = False


class LinearPrecision(NamedTuple):
    """Precision of one linear layer in its recipe.

    Attributes:
        input, weight, grad_output: Quantization of each operand.
        high_precision: GEMMs that run in high precision instead of FP8.
        fast_accum: FP8 GEMMs that use fast accumulation.
    """

    input: Quantization
    weight: Quantization
    grad_output: Quantization
    high_precision: PerGemm
    fast_accum: PerGemm


WeightStorage = Literal["resident", "zero", "fsdp"]


@dataclass(frozen=True)
class LinearSite:
    """Linear layer and its place in the model: everything its plan depends on, except the recipe.

    Attributes:
        name: Global name of the layer.
        inputs, outputs: Sizes of this rank's shard of the weight; 0 if no caller needs them.
        parallel: How the weight is sharded over `tensor_parallel` ranks; None if it is not sharded.
        tensor_parallel: Number of tensor-parallel ranks.
        sequence_parallel: Whether tokens are sharded over the tensor-parallel ranks outside the layer.
        tokens: Tokens of a micro-batch on this rank outside the layer; None if the number varies (slices are then
            assumed to be aligned).
        adds_bias: Whether the layer adds its bias itself.
        before, after: Operations before and after the layer.
        recompute_input: Whether the input that wgrad reads is recomputed in backward.
        weight_storage: Where the weight is stored between steps.
        param_gather: Whether the weight may be gathered in FP8.
        keeps_transpose: Whether the transposed FP8 copy of the weight may be kept between micro-batches.
        gathers_values: Reason to gather the weight in high precision even so; empty if there is no such reason.
        expert: Whether this is one expert of a layer. All tokens of an expert are on one rank, however the layer's
            tokens are sharded.
        high_precision: Reason why the layer must not run in FP8; empty if it may.
        shared: Whether several layers of the model run it.
    """

    name: str = ""
    inputs: int = 0
    outputs: int = 0
    parallel: Literal["column", "row"] | None = None
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    tokens: int | None = None
    adds_bias: bool = False
    before: Neighbor = UNKNOWN
    after: Neighbor = UNKNOWN
    recompute_input: bool = False
    weight_storage: WeightStorage = "resident"
    param_gather: bool = False
    keeps_transpose: bool = True
    gathers_values: str = ""
    expert: bool = False
    high_precision: str = ""
    shared: bool = False


@dataclass(frozen=True)
class LinearPlan:
    """Plan of one linear layer: precision of its GEMMs, form of its operands, and storage of its weight.

    Attributes:
        name: Global name of the layer.
        gemms: Precision of fprop, dgrad and wgrad: "fp8", "fp8 fast" (fast accumulation) or "high" (the tensors' own
            precision).
        input: How the input is quantized: by the operation before the layer ("fused"), by the layer ("layer"), or not
            at all ("high").
        gather: Format in which sequence parallelism gathers the input of a column-parallel layer; None if nothing is
            gathered.
        saved: Form of the input that is saved for wgrad: columnwise FP8 data of all tokens ("columnwise") or of this
            rank's tokens ("columnwise shard"), the high-precision values ("high"), or nothing ("recompute").
        grad_output: How the output gradient is quantized: by the operation after the layer in its backward ("fused"),
            by the layer ("layer"), by the layer before tokens are gathered ("layer, then gather"), or not at all
            ("high").
        weight: Storage of the weight: "resident"; "zero fp8" or "fsdp fp8" if FP8 data is gathered; "fsdp" if
            high-precision values are gathered.
        keeps_transpose: Whether the transposed FP8 copy of the weight is kept between micro-batches. Otherwise each
            backward pass transposes the other copy.
        input_neighbor, output_neighbor: Operations that quantize the input and the output gradient; empty if the layer
            does.
        calibrating: Whether the layer runs in high precision and records amaxes.
        batch_invariant: Whether fprop sums in an order that does not depend on the number of rows.
        reasons: Reasons why the fast path is not taken, one string each.
    """

    name: str
    gemms: tuple[str, str, str]
    input: Literal["fused", "layer", "high"]
    gather: Literal["fp8", "high"] | None
    saved: Literal["columnwise", "columnwise shard", "high", "recompute"]
    grad_output: Literal["fused", "layer", "layer, then gather", "high"]
    weight: Literal["resident", "zero fp8", "fsdp fp8", "fsdp"]
    keeps_transpose: bool = True
    input_neighbor: str = ""
    output_neighbor: str = ""
    calibrating: bool = False
    batch_invariant: bool = False
    reasons: tuple[str, ...] = ()

    @cached_property
    def fp8(self) -> bool:
        """Whether any GEMM of the layer runs in FP8."""
        return any(gemm != "high" for gemm in self.gemms)

    @cached_property
    def fp8_only(self) -> bool:
        """Whether all GEMMs run in FP8, and the quantized input and weight are kept unchanged from forward to backward.

        If the layer also does not communicate, it needs none of the steps that other plans may require.
        """
        kept = self.saved == "columnwise" and self.weight in ("resident", "zero fp8")
        return kept and self.gather is None and "high" not in self.gemms and self.grad_output in ("fused", "layer")


def plan_linear(
    site: LinearSite,
    precision: LinearPrecision | None,
    *,
    high_reason: str = "",
    calibrating: bool = False,
    batch_invariant: bool = False,
) -> LinearPlan:
    """Return the plan of the layer at `site`.

    Args:
        site: The layer and its place in the model.
        precision: Precision of the layer in the recipe; None keeps the layer in high precision.
        high_reason: Reason for high precision if `precision` is None.
        calibrating: Run in high precision to calibrate static scales.
        batch_invariant: Sum in an order that does not depend on the number of rows.
    """
    sharded = site.sequence_parallel and site.tensor_parallel > 1
    gathers_input = sharded and site.parallel == "column"
    if precision is None or calibrating:
        why = "static scales are being calibrated" if calibrating else high_reason
        return LinearPlan(
            site.name,
            ("high", "high", "high"),
            "high",
            "high" if gathers_input else None,
            "recompute" if site.recompute_input and not calibrating else "high",
            "high",
            "fsdp" if site.weight_storage == "fsdp" else "resident",
            calibrating=calibrating,
            batch_invariant=batch_invariant,
            reasons=(f"all GEMMs in high precision: {why}",),
        )
    reasons = []
    high = precision.high_precision
    names = [gemm for gemm, is_high in zip(PerGemm._fields, high) if is_high]
    values_needed = (
        f"{' and '.join(names)} in high precision (override_linear_precision) reads unquantized values" if names else ""
    )
    if names:
        reasons.append(f"{', '.join(names)} in high precision: override_linear_precision")

    why_not = values_needed or _cannot_quantize(site.before, precision.input)
    gather: Literal["fp8", "high"] | None = None
    if gathers_input:
        misfit = _not_gatherable(precision.input, site.tokens)
        why_not = why_not or misfit
        gather = "high" if why_not else "fp8"
    if why_not:
        reasons.append(f"input not fused{', and gathered in high precision' if gather else ''}: {why_not}")
    fused_input = not why_not

    grad_why_not = values_needed
    if site.parallel == "row" and not site.expert:
        grad_output: Literal["fused", "layer", "layer, then gather", "high"] = "layer"
        if sharded:
            grad_why_not = grad_why_not or _not_gatherable(precision.grad_output, site.tokens)
            if grad_why_not:
                reasons.append(f"output gradient gathered in high precision: {grad_why_not}")
            else:
                grad_output = "layer, then gather"
    else:
        grad_why_not = (
            grad_why_not
            or ("the bias gradient needs the high-precision values" if site.adds_bias else "")
            or _cannot_quantize(site.after, precision.grad_output)
        )
        grad_output = "layer" if grad_why_not else "fused"
        if grad_why_not:
            reasons.append(f"output gradient not fused: {grad_why_not}")
    if high.dgrad and high.wgrad:
        grad_output = "high"

    saved: Literal["columnwise", "columnwise shard", "high", "recompute"] = "columnwise"
    if site.recompute_input:
        saved = "recompute"
    elif high.wgrad:
        saved = "high"
    elif gather == "fp8" and not precision.input.per_tensor:
        saved = "columnwise shard"

    weight: Literal["resident", "zero fp8", "fsdp fp8", "fsdp"] = "resident"
    if site.weight_storage != "resident":
        weight_why_not = "" if site.param_gather else "fp8.param_gather is off"
        weight_why_not = weight_why_not or not_gatherable_weight(precision) or site.gathers_values
        if not weight_why_not:
            weight = "zero fp8" if site.weight_storage == "zero" else "fsdp fp8"
        else:
            weight = "fsdp" if site.weight_storage == "fsdp" else "resident"
            reasons.append(f"weight gathered in high precision: {weight_why_not}")
    keeps_transpose = site.keeps_transpose
    if not keeps_transpose and not precision.weight.per_tensor:
        keeps_transpose = True
        reasons.append(f"transposed weight kept: {precision.weight.recipe} has other scales for it")
    return LinearPlan(
        site.name,
        tuple("high" if h else "fp8 fast" if f else "fp8" for h, f in zip(high, precision.fast_accum)),  # type: ignore[arg-type]
        "fused" if fused_input else "high" if all(high) else "layer",
        gather,
        saved,
        grad_output,
        weight,
        keeps_transpose,
        site.before.name if fused_input else "",
        site.after.name if grad_output == "fused" else "",
        batch_invariant=batch_invariant,
        reasons=tuple(reasons),
    )


def not_gatherable_weight(precision: LinearPrecision) -> str:
    """Return why data-parallel ranks cannot gather a layer's weight in FP8, or an empty string if they can."""
    if precision.high_precision.fprop or precision.high_precision.dgrad:
        return "fprop or dgrad in high precision needs the high-precision values"
    if not precision.weight.gatherable_weight:
        return f"{precision.weight.recipe} has several scales per weight"
    return ""


def _cannot_quantize(neighbor: Neighbor, operand: Quantization) -> str:
    """Return why `neighbor` cannot quantize `operand`, or an empty string if it can."""
    if neighbor.fuses == "none":
        return neighbor.reason or f"{neighbor.name} does not quantize"
    if neighbor.fuses == "per_tensor" and not operand.per_tensor:
        return f"{neighbor.name} supports only one scale per tensor, but {operand.recipe} has finer scales"
    if neighbor.fuses == "per_tensor or blocks" and not (operand.per_tensor or operand.blocks):
        return f"{neighbor.name} supports one scale per tensor or block of 128, but {operand.recipe} has other scales"
    return ""


def _not_gatherable(operand: Quantization, tokens: int | None) -> str:
    """Return why ranks cannot quantize their slices of an operand's tokens, or an empty string if they can."""
    alignment = operand.shard_alignment
    if alignment is None:
        return f"{operand.recipe} cannot quantize slices of the tokens separately"
    if tokens is not None and tokens % alignment:
        return f"{tokens} tokens per rank are not a multiple of {alignment} ({operand.recipe})"
    return ""


def plans_table(plans: Iterable[LinearPlan]) -> str:
    """Return a table of plans, with one line for equal layers of consecutive blocks and the reasons below."""
    groups: dict[tuple[str, LinearPlan], list[str]] = {}
    for plan in plans:
        kind = ".".join(part for part in plan.name.split(".") if not part.isdigit())
        groups.setdefault((kind, replace(plan, name="")), []).append(plan.name)
    header = ("layer", "fprop", "dgrad", "wgrad", "input", "gather", "saved for wgrad", "output gradient", "weight")
    rows, notes = [header], dict[str, int]()
    for (_, plan), names in groups.items():
        marks = [notes.setdefault(reason, len(notes) + 1) for reason in plan.reasons]
        label = _folded(names) + (f" [{', '.join(map(str, marks))}]" if marks else "")
        rows.append((
            label,
            *plan.gemms,
            _fused(plan.input, plan.input_neighbor),
            plan.gather or "-",
            plan.saved,
            _fused(plan.grad_output, plan.output_neighbor),
            plan.weight if plan.keeps_transpose else f"{plan.weight}, transposed in backward",
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"[{number}] {reason}" for reason, number in notes.items())])


def _fused(place: str, neighbor: str) -> str:
    """Return the table cell for `place`, with the name of the neighbor that fuses the quantization."""
    return f"fused: {neighbor}" if place == "fused" else place


def _folded(names: list[str]) -> str:
    """Fold the names of equal layers into one, such as `layers.0-31.attention.qkv`."""
    numbers = zip(*([int(part) for part in name.split(".") if part.isdigit()] for name in names))
    shown = iter([_ranges(sorted(set(numbers_of_key))) for numbers_of_key in numbers])
    return ".".join(next(shown) if part.isdigit() else part for part in names[0].split("."))


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges, such as `0-3,5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
