"""How each linear layer will run: one immutable `LinearPlan` per layer, decided when the model is built.

What a linear layer does depends on its FP8 recipe, on the operations before and after it, on how weights and tokens are
sharded, on biases, recompute, ZeRO or FSDP, and on calibration. All of that is known once the layer is constructed, so
it is decided there, by one pure function, `plan_linear`. Norms, activations, linear layers, the FP8 weight gather and
the memory planner read the result; `--dry-run` prints it, with the reason wherever the fast way is not taken.

Two events replace a plan: the end of calibration (static scaling), and its beginning when a checkpoint is loaded.

The three GEMMs of a linear layer, y = x wᵀ:  fprop y = x wᵀ,  dgrad dx = dy w,  wgrad dw = dyᵀ x.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple


class PerGemm(NamedTuple):
    """A yes or no for each of the three GEMMs."""

    fprop: bool
    dgrad: bool
    wgrad: bool


@dataclass(frozen=True)
class Neighbor:
    """The operation before or after a linear layer, and which quantization its kernel can do for the layer.

    `fuses`: "any" granularity; "per_tensor or blocks", one scale per tensor or for 128 neighbours; "per_tensor" only;
    or "none", for the `reason`.
    """

    name: str
    fuses: Literal["any", "per_tensor or blocks", "per_tensor", "none"] = "none"
    reason: str = ""


UNKNOWN = Neighbor("", "none", "nothing is known of its neighbor")


class Quantization(NamedTuple):
    """What a plan needs to know of how one operand is quantized.

    `per_tensor`: with one scale; `blocks`: with one for 128 neighbours.
    `shard_alignment`: ranks that hold slices of the tokens can quantize these alone where each is a multiple of so many
    tokens; None where they cannot. `gatherable_weight`: data-parallel ranks can quantize any part of a weight alone, so
    that it can be gathered in FP8 (`fp8.param_gather`).
    """

    recipe: str
    per_tensor: bool
    shard_alignment: int | None
    gatherable_weight: bool
    blocks: bool = False


class LinearPrecision(NamedTuple):
    """How the recipe has a layer: each operand's quantization, and which GEMMs are FP8 and accumulate fast."""

    input: Quantization
    weight: Quantization
    grad_output: Quantization
    high_precision: PerGemm
    fast_accum: PerGemm


WeightStorage = Literal["resident", "zero", "fsdp"]


@dataclass(frozen=True)
class LinearSite:
    """A linear layer and its place in the model: what its plan depends on besides the recipe.

    `parallel`: how the weight is sharded over `tensor_parallel` ranks; None for a whole one. `tokens`: of a micro-batch
    on this rank outside the layer, None where they vary (then slices are assumed to be aligned). `adds_bias`: the layer
    adds its bias itself. `gathers_output`: a column-parallel layer's output is gathered. `recompute_input`: what wgrad
    needs of the input is recomputed in backward. `weight_storage`: where the weight is between steps; `param_gather`:
    it may be gathered in FP8. `gathers_values`: why it is gathered in high precision nevertheless; empty where it need
    not be. `expert`: one of the experts of a layer, whose tokens are whole on this rank however those of the layer are
    cut. `inputs`, `outputs`: of this rank's part; 0 where nobody asks. `high_precision`: why the layer must not be FP8;
    empty where it may be.
    """

    name: str = ""
    inputs: int = 0
    outputs: int = 0
    parallel: Literal["column", "row"] | None = None
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    tokens: int | None = None
    adds_bias: bool = False
    gathers_output: bool = False
    scatters_input: bool = False
    before: Neighbor = UNKNOWN
    after: Neighbor = UNKNOWN
    recompute_input: bool = False
    weight_storage: WeightStorage = "resident"
    param_gather: bool = False
    gathers_values: str = ""
    expert: bool = False
    high_precision: str = ""


@dataclass(frozen=True)
class LinearPlan:
    """How one linear layer runs.

    `gemms`: "fp8", "fp8 fast" (fast accumulation) or "high" (the tensors' own precision), for fprop, dgrad, wgrad.
    `input`: quantized by the operation before the layer ("fused"), by the layer ("layer"), or not at all ("high").
    `gather`: what sequence parallelism gathers of a column-parallel layer's input; None where nothing is gathered.
    `saved`: what is kept of the input for wgrad: FP8 "columnwise" of all tokens, or of this rank's ("columnwise
    shard"), the values ("high"), or nothing ("recompute"). `grad_output`: quantized by the operation after the layer in
    its backward ("fused"), by the layer ("layer"), by the layer before tokens are gathered ("layer, then gather"), or
    not ("high"). `weight`: "resident"; "zero fp8" and "fsdp fp8" where FP8 data is gathered; "fsdp" where values are.
    `calibrating`: runs in high precision and records amaxes. `batch_invariant`: fprop sums in an order that does not
    depend on the number of rows. `reasons`: why the fast way is not taken, one each.
    """

    name: str
    gemms: tuple[str, str, str]
    input: Literal["fused", "layer", "high"]
    gather: Literal["fp8", "high"] | None
    saved: Literal["columnwise", "columnwise shard", "high", "recompute"]
    grad_output: Literal["fused", "layer", "layer, then gather", "high"]
    weight: Literal["resident", "zero fp8", "fsdp fp8", "fsdp"]
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
        """All GEMMs run in FP8, and between forward and backward the quantized input and weight are kept as they are.

        Then, where nothing is communicated either, a layer needs none of what the other plans may ask for.
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
    """The plan of the layer at `site`; `precision` None, for `high_reason`, keeps it in high precision."""
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
    values_needed = f"{' and '.join(names)} in high precision (override_linear_precision) needs values" if names else ""
    if names:
        reasons.append(f"{', '.join(names)} in high precision: override_linear_precision")

    why_not = values_needed or _cannot_quantize(site.before, precision.input)
    if site.scatters_input:
        why_not = why_not or "the layer scatters a replicated input"
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
            or ("the bias gradient needs values" if site.adds_bias else "")
            or ("the output is gathered" if site.gathers_output else "")
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
    return LinearPlan(
        site.name,
        tuple("high" if h else "fp8 fast" if f else "fp8" for h, f in zip(high, precision.fast_accum)),  # type: ignore[arg-type]
        "fused" if fused_input else "high" if all(high) else "layer",
        gather,
        saved,
        grad_output,
        weight,
        site.before.name if fused_input else "",
        site.after.name if grad_output == "fused" else "",
        batch_invariant=batch_invariant,
        reasons=tuple(reasons),
    )


def not_gatherable_weight(precision: LinearPrecision) -> str:
    """Why data-parallel ranks cannot gather a layer's weight in FP8; empty where they can."""
    if precision.high_precision.fprop or precision.high_precision.dgrad:
        return "fprop or dgrad in high precision needs the values"
    if not precision.weight.gatherable_weight:
        return f"{precision.weight.recipe} has several scales per weight"
    return ""


def _cannot_quantize(neighbor: Neighbor, operand: Quantization) -> str:
    if neighbor.fuses == "none":
        return neighbor.reason or f"{neighbor.name} does not quantize"
    if neighbor.fuses == "per_tensor" and not operand.per_tensor:
        return f"{neighbor.name} quantizes with one scale per tensor only, and {operand.recipe} has finer ones"
    if neighbor.fuses == "per_tensor or blocks" and not (operand.per_tensor or operand.blocks):
        return f"{neighbor.name} quantizes with one scale per tensor or block of 128, and {operand.recipe} has others"
    return ""


def _not_gatherable(operand: Quantization, tokens: int | None) -> str:
    """Why slices of an operand's tokens are not quantized where they are; empty where they are."""
    alignment = operand.shard_alignment
    if alignment is None:
        return f"{operand.recipe} cannot quantize slices of the tokens alone"
    if tokens is not None and tokens % alignment:
        return f"{tokens} tokens a rank are no multiple of {alignment}, which {operand.recipe} needs"
    return ""


def plans_table(plans: Iterable[LinearPlan]) -> str:
    """A table of plans, one line for equal layers of consecutive blocks, and the reasons below it."""
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
            plan.weight,
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"[{number}] {reason}" for reason, number in notes.items())])


def _fused(place: str, neighbor: str) -> str:
    return f"fused: {neighbor}" if place == "fused" else place


def _folded(names: list[str]) -> str:
    """`layers.0-31.attention.qkv` of the names of one kind."""
    numbers = zip(*([int(part) for part in name.split(".") if part.isdigit()] for name in names))
    shown = iter([_ranges(sorted(set(numbers_of_key))) for numbers_of_key in numbers])
    return ".".join(next(shown) if part.isdigit() else part for part in names[0].split("."))


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,5` of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
