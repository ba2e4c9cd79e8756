"""Base classes of FP8 recipes: options, capabilities, and quantizers.

A recipe is a frozen dataclass of its options. One file contains everything about a recipe: options, `Capabilities`, the
reference of its cast, and the state that it keeps between steps. To add a recipe, write such a file and add its name to
`megafp8/numerics/recipe_names.py`; its config keys are derived from the dataclass.

All recipes have options for the FP8 format and for the GEMMs that stay in high precision. Some recipes also have
`use_fast_accum`: a Hopper tensor core keeps only about 14 bits of a running sum unless the sum is often promoted to
fp32. This fast accumulation is harmless in the forward pass but measurably harmful in the gradients, so it is on by
default only in the forward pass.

The three GEMMs of a linear layer, y = x wᵀ:  fprop y = x wᵀ,  dgrad dx = dy w,  wgrad dw = dyᵀ x.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import NamedTuple  # generic before Python 3.11, too

from megafp8.numerics.formats import E4M3, E5M2, Format
from megafp8.numerics.quantize import ScaleRule
from megafp8.numerics.quantizers import Cast, Quantizer
from megafp8.numerics.sources import MatrixSource
from megafp8.numerics.step import NewestAmaxes, State
from megafp8.numerics.stochastic_rounding import NoiseClock
from megafp8.numerics.tensor import TENSOR, Granularity, QuantizedTensor, as_cast
from megafp8.plan import PerGemm

OperandName = Literal["input", "weight", "grad_output"]
OPERANDS: tuple[OperandName, ...] = get_args(OperandName)
T = TypeVar("T")

GEMMS: dict[str, tuple[OperandName, OperandName]] = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}
"""Operands of the three GEMMs of a linear layer."""


class PerOperand(NamedTuple, Generic[T]):
    """Values for the three operands of a linear layer."""

    input: T
    weight: T
    grad_output: T


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of a recipe, which config checks, planner, speed model and tensor parallelism depend on.

    Attributes:
        granularity: Elements of each operand that share a scale, rowwise and columnwise.
        shard_alignment: A shard of tokens can be quantized separately, and then gathered in FP8, if its length is a
            multiple of this number. None means that only the whole tensor can be quantized.
        cast_passes: Number of times that a cast on CUDA reads the tensor.
        row_multiple: `nn.Fp8Padding` pads the rows of each expert to a multiple of this number, as Transformer Engine's
            grouped GEMMs need it.
    """

    granularity: PerOperand[Granularity]
    shard_alignment: int | None
    cast_passes: int = 1
    row_multiple: int = 16

    @property
    def per_tensor(self) -> bool:
        """Whether each tensor has one scale; columnwise data is then a transposed copy, and not a separate cast."""
        return all(granularity is TENSOR for granularity in self.granularity)


PER_TENSOR = PerOperand(TENSOR, TENSOR, TENSOR)


def option(
    default: Any,
    rule: str = "",
    holds: Callable[[Any], bool] | None = None,
    *,
    key: str | None = None,
    read: Callable[[Any, Callable[[str], Fp8Recipe]], Any] | None = None,
) -> Any:
    """Declare an option of a recipe.

    Args:
        default: Default value.
        rule: Description of the valid values for the error message, completing "it must be".
        holds: Function that returns whether a value is valid; None accepts every value.
        key: Name in the config section fp8, if it is not the name of the field.
        read: Function `read(value, recipe_of)` that converts a config value of another type to the type of the field;
            `recipe_of` returns the recipe with a given name.
    """
    return field(default=default, metadata={"rule": rule, "holds": holds, "key": key, "read": read})


def config_key(option: Field[Any]) -> str:
    """Return the name of an option in the config section fp8."""
    return option.metadata.get("key") or option.name


def _per_gemm(default: PerGemm, key: str | None = None) -> Any:
    rule = "three booleans (fprop, dgrad, wgrad), e.g. (False, False, True)"
    return option(default, rule, lambda value: len(value) == 3 and all(isinstance(v, bool) for v in value), key=key)


def fast_accumulation() -> Any:
    """Declare the option `use_fast_accum`: the GEMMs (fprop, dgrad, wgrad) that accumulate fast on Hopper."""
    return _per_gemm(PerGemm(True, False, False), key="fast_accumulation")


def format_option(default: Literal["hybrid", "e4m3"]) -> Any:
    """Declare the option `fp8_format` with another default."""
    return option(default, "'hybrid' or 'e4m3'", lambda value: value in ("hybrid", "e4m3"), key="format")


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """Base of all FP8 recipes.

    Attributes:
        name: Name in configs, which is also the name of the file that defines the recipe.
        capabilities: Capabilities of the recipe.
        fp8_format: "hybrid" casts activations and weights to E4M3 and gradients to E5M2; "e4m3" casts all to E4M3.
        override_linear_precision: GEMMs (fprop, dgrad, wgrad) that run in the dtype of the unquantized tensors.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    fp8_format: Literal["hybrid", "e4m3"] = format_option("hybrid")
    override_linear_precision: tuple[bool, bool, bool] = _per_gemm(PerGemm(False, False, False))

    def __init_subclass__(cls) -> None:
        cls.name = cls.__module__.rpartition(".")[2]

    def __post_init__(self) -> None:
        for option in fields(self):
            value, holds = getattr(self, option.name), option.metadata.get("holds")
            if holds is not None and not holds(value):
                rule = option.metadata["rule"]
                raise ValueError(f"{type(self).__name__}: {option.name} is {value!r}; it must be {rule}")

    @property
    def use_fast_accum(self) -> tuple[bool, bool, bool]:
        """GEMMs that accumulate fast. It is an option of the recipes for which Hopper offers a choice."""
        return PerGemm(True, False, False)

    def format_of(self, operand: OperandName) -> Format:
        """Return the FP8 format of an operand."""
        return E5M2 if operand == "grad_output" and self.fp8_format == "hybrid" else E4M3

    def granularity(self, operand: OperandName) -> Granularity:
        """Return which elements of an operand share a scale, rowwise and columnwise."""
        return self.capabilities.granularity[OPERANDS.index(operand)]

    @property
    def history_len(self) -> int:
        """Number of amaxes kept for each tensor, fp32."""
        return 0

    @property
    def calibrates(self) -> bool:
        """Whether a layer may run in high precision until its scales are known."""
        return False

    @property
    def combinations(self) -> Sequence[PerOperand[Fp8Recipe]]:
        """Recipes of the three operands of a layer, for each kind of layer that the recipe distinguishes."""
        return (PerOperand(self, self, self),)

    def operands(self, layer: str) -> PerOperand[Fp8Recipe] | None:
        """Return the recipes of a layer's operands, or None if the layer stays in high precision."""
        return self.combinations[0]

    def check_layers(self, layers: Sequence[str]) -> None:
        """Raise ValueError unless every pattern of the recipe matches one of `layers`, all layers of the model."""

    def check_tensors(self, tensors: Sequence[str]) -> None:
        """Raise ValueError unless the recipe can scale all `tensors` of the model, named `<layer>.<operand>`."""

    def build(self, tensors: Sequence[Fp8Tensor], device: torch.device, clock: NoiseClock) -> Built:
        """Build the quantizers of `tensors` and their state on `device`.

        `clock` provides the noise of quantizers that round stochastically.
        """
        return Built({tensor.name: RecipeQuantizer(self, tensor, device) for tensor in tensors})

    def bound_cast(self, tensor: Fp8Tensor, device: torch.device) -> Cast:
        """Return the cast of `tensor` on `device`. Recipes that keep state between steps override `build` instead."""
        raise NotImplementedError(f"{type(self).__name__} does not scale tensors itself")

    def scale_rule(self, fmt: Format) -> ScaleRule:
        """Return the rule that computes a tensor's scale from its amax, for recipes with one scale per tensor."""
        return ScaleRule(fmt.max)


@dataclass(frozen=True, kw_only=True)
class AmaxOptions(Fp8Recipe):
    """Base of recipes that compute scales from the amax of the current values.

    Attributes:
        power_of_two: Round scales down to powers of two.
        amax_epsilon: Smallest amax that a scale is computed from; a smaller amax counts as this value.
    """

    power_of_two: bool = option(False, key="power_of_two_scale")
    amax_epsilon: float = option(0.0, "0 or more", lambda value: value >= 0)

    def scale_rule(self, fmt: Format) -> ScaleRule:
        """Return the rule that computes a scale from an amax."""
        return ScaleRule(fmt.max, eps=self.amax_epsilon, power_of_two=self.power_of_two)


@dataclass(frozen=True)
class Fp8Tensor:
    """Description of one operand of an FP8 layer.

    Attributes:
        layer: Name of the layer.
        operand: Name of the operand.
        group: Ranks that hold shards of the tensor, or None if each rank has the whole tensor.
        token_group: Ranks over which the tokens are sharded; None if this rank has all tokens, and for weights.
        amax_group: Ranks over which amaxes that are kept between steps are reduced; None means the ranks that run the
            same layers.
        batch_invariant: Whether the model is batch invariant.
    """

    layer: str
    operand: OperandName
    group: ProcessGroup | None
    token_group: ProcessGroup | None
    amax_group: ProcessGroup | None = None
    batch_invariant: bool = False

    @property
    def token_scales(self) -> bool:
        """Whether each token gets a scale where the recipe would otherwise use the amax of the current tensor."""
        return self.batch_invariant and self.operand == "input"

    @property
    def name(self) -> str:
        """Name of the tensor, `<layer>.<operand>`."""
        return f"{self.layer}.{self.operand}"


class TensorScales:
    """Base of the state of recipes that keep one scale per tensor between steps.

    It contains the scales of t tensors in their order, fp32 `[t]` on `device`, and the groups over which their amaxes
    are reduced.
    """

    def __init__(self, recipe: Fp8Recipe, tensors: Sequence[Fp8Tensor], device: torch.device) -> None:
        self.scale_t = torch.ones(len(tensors), device=device)
        # Every fourth element: cuBLASLt needs a scale_inv at a multiple of 16 bytes.
        self.scale_inv_t = torch.ones(len(tensors), 4, device=device)[:, 0]
        self.fp8_max_t = torch.tensor([recipe.format_of(tensor.operand).max for tensor in tensors], device=device)
        rows: dict[ProcessGroup | None, list[int]] = {}
        for i, tensor in enumerate(tensors):
            rows.setdefault(tensor.amax_group, []).append(i)
        self._rows = {group: torch.tensor(rows_of_group, device=device) for group, rows_of_group in rows.items()}

    def split(self, amax_t: Tensor) -> list[NewestAmaxes]:
        """Split `amax_t`, `[t]`, into one part for each process group."""
        if list(self._rows) == [None]:
            return [NewestAmaxes(amax_t)]
        return [NewestAmaxes(amax_t[rows], group) for group, rows in self._rows.items()]

    def joined(self, reduced: Sequence[Tensor]) -> Tensor:
        """Join the parts of `split` to `[t]`."""
        if list(self._rows) == [None]:
            return reduced[0]
        amax_t = reduced[0].new_empty(sum(map(len, reduced)))
        for rows, part in zip(self._rows.values(), reduced, strict=True):
            amax_t[rows] = part
        return amax_t


@dataclass(eq=False)
class RecipeQuantizer:
    """Quantizer of `tensor` on `device` under `recipe`. The cast function is selected at construction.

    With one scale per tensor, weights can also be cast in flat shards, using `known_scale` or `rule`.
    """

    recipe: Fp8Recipe
    tensor: Fp8Tensor
    device: torch.device

    def __post_init__(self) -> None:
        self._cast = self.recipe.bound_cast(self.tensor, self.device)

    @cached_property
    def fmt(self) -> Format:
        """FP8 format of the tensor."""
        return self.recipe.format_of(self.tensor.operand)

    @property
    def granularity(self) -> Granularity:
        """Granularity of the scales after the cast."""
        return as_cast(self.recipe.granularity(self.tensor.operand))

    @property
    def per_tensor(self) -> bool:
        """Whether the tensor has one scale."""
        return self.recipe.capabilities.per_tensor

    @property
    def shard_alignment(self) -> int:
        """Smallest number of tokens that can be quantized separately."""
        return self.recipe.capabilities.shard_alignment or 1

    @property
    def rule(self) -> ScaleRule:
        """Rule that computes the scale from an amax."""
        return self.recipe.scale_rule(self.fmt)

    @property
    def known_scale(self) -> tuple[Tensor, Tensor] | None:
        """Scale and its reciprocal, fp32 `[]`, or None if they are computed from the current tensor."""
        return None

    @property
    def settled(self) -> bool:
        """Whether the host makes the same decisions about casts in all later steps, as CUDA graphs require."""
        return True

    @property
    def recorded_amax(self) -> Tensor | None:
        """Running maximum that casts update with the tensor's amax, fp32 `[]`, or None if no amax is kept."""
        return None

    def freeze(self) -> None:
        """Declare that no step changes the tensor, so that it may not be cast in every step.

        Quantizers that keep no amaxes ignore this.
        """

    def skip(self) -> None:
        """Skip a micro-batch that has nothing to cast. Quantizers that do not count micro-batches ignore this."""

    def record(self, x: Tensor) -> None:
        """Record the amax of x, of any shape, for later scales. Quantizers that keep no amaxes ignore this."""

    def for_sharded_input(self, group: ProcessGroup) -> Quantizer | None:
        """Return the quantizer of shards over `group`, or None if shards cannot be quantized separately."""
        if self.recipe.capabilities.shard_alignment is None:
            return None
        return replace(self, tensor=replace(self.tensor, group=group, token_group=group))

    def __call__(self, source: MatrixSource, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        """Cast `source` in the given orientations."""
        return self._cast(source, rowwise=rowwise, columnwise=columnwise)


class Built(NamedTuple):
    """Quantizers by tensor name, and the state that they share."""

    quantizers: dict[str, Quantizer]
    state: State | None = None


def by_recipe(recipe: Fp8Recipe, layers: Iterable[str]) -> dict[Fp8Recipe, list[tuple[str, OperandName]]]:
    """Group the operands of `layers` by the recipe that finally scales them. All layers must be FP8 under `recipe`."""
    operands_of_recipe: dict[Fp8Recipe, list[tuple[str, OperandName]]] = {}
    for layer in layers:
        operands = recipe.operands(layer)
        assert operands is not None, f"{layer} is not an FP8 layer"
        for operand, operand_recipe in zip(OPERANDS, operands, strict=True):
            operands_of_recipe.setdefault(operand_recipe, []).append((layer, operand))
    return operands_of_recipe


def no_match(field: str, pattern: str, names: Sequence[str], kind: str = "layer") -> str:
    """Return the error message for a `pattern` in `field` that matches none of `names`; `kind` is a noun for a name.

    A pattern without a match is an error because it would go unnoticed: the run would train in the wrong precision.
    """
    nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
    if not nearest:
        return f"FP8 {field} pattern {pattern!r} matches no {kind}: the model has no linear layers"
    example = re.sub(r"(?<=\.)\d+(?=\.)", "*", nearest[0])
    return (
        f"FP8 {field} pattern {pattern!r} matches no {kind}; the nearest names are {', '.join(nearest)}, and "
        f"{example!r} would work"
    )
