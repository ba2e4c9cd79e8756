"""What all recipes have: options, capabilities, and how quantizers are made of them.

A recipe is a frozen dataclass of its options. Its file holds everything about it: options, `Capabilities`, the cast and
its reference, and the state that it remembers. To add a recipe, write such a file and add its name to
`megafp8/numerics/recipe_names.py`; its config keys follow from its dataclass.

Common options are the formats and which of a layer's three GEMMs stay in high precision. Some have `use_fast_accum`
too: a Hopper tensor core keeps about 14 bits of a running sum unless it is told to promote it to fp32 often; fast
accumulation is harmless in the forward pass and measurably not in the gradients, hence the default.

The three GEMMs of a linear layer, y = x wᵀ:  fprop y = x wᵀ,  dgrad dx = dy w,  wgrad dw = dyᵀ x.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

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
"""The operands of each of a layer's GEMMs."""


class PerOperand(NamedTuple, Generic[T]):
    """A value for each operand of a linear layer."""

    input: T
    weight: T
    grad_output: T


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a recipe can do: the one place that config checks, planner, speed model and tensor parallelism ask.

    `granularity`: which elements of an operand share a scale, rowwise and columnwise. `shard_alignment`: a shard of the
    tokens can be quantized alone, and then gathered in FP8, if its length is a multiple of this; None: only the whole
    tensor can be. `cast_passes`: times a cast on CUDA reads the tensor. `row_multiple`: `nn.Fp8Padding` pads the rows
    of each expert to a multiple of this number, as Transformer Engine's grouped GEMMs need it.
    """

    granularity: PerOperand[Granularity]
    shard_alignment: int | None
    cast_passes: int = 1
    row_multiple: int = 16

    @property
    def per_tensor(self) -> bool:
        """One scale for the whole tensor: columnwise is then the transposed copy of rowwise, and not another cast."""
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
    """A field of a recipe that takes values for which `holds`; `rule` completes "it must be".

    `key`: its name in the config's section fp8 if that is another. `read(value, recipe_of)`: of a value there that has
    another type, the field's; `recipe_of` is the recipe of a name.
    """
    return field(default=default, metadata={"rule": rule, "holds": holds, "key": key, "read": read})


def config_key(option: Field[Any]) -> str:
    """The name of an option in the config's section fp8."""
    return option.metadata.get("key") or option.name


def _per_gemm(default: PerGemm, key: str | None = None) -> Any:
    rule = "three booleans (fprop, dgrad, wgrad), e.g. (False, False, True)"
    return option(default, rule, lambda value: len(value) == 3 and all(isinstance(v, bool) for v in value), key=key)


def fast_accumulation() -> Any:
    """The option `use_fast_accum`: GEMMs (fprop, dgrad, wgrad) that accumulate fast on Hopper."""
    return _per_gemm(PerGemm(True, False, False), key="fast_accumulation")


def format_option(default: Literal["hybrid", "e4m3"]) -> Any:
    """The option `fp8_format` with another default."""
    return option(default, "'hybrid' or 'e4m3'", lambda value: value in ("hybrid", "e4m3"), key="format")


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """What every recipe has.

    `fp8_format`: "hybrid" casts activations and weights to E4M3 and gradients to E5M2; "e4m3" casts all to E4M3.
    `override_linear_precision`: GEMMs (fprop, dgrad, wgrad) that run in the tensors' own precision. `name`: the name in
    configs, which is also the name of the file that defines the recipe.
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
        """GEMMs that accumulate fast, where the hardware has a choice; an option of the recipes for which it has."""
        return PerGemm(True, False, False)

    def format_of(self, operand: OperandName) -> Format:
        """Format of an operand."""
        return E5M2 if operand == "grad_output" and self.fp8_format == "hybrid" else E4M3

    def granularity(self, operand: OperandName) -> Granularity:
        """Which elements of an operand share a scale, rowwise and columnwise."""
        return self.capabilities.granularity[OPERANDS.index(operand)]

    @property
    def history_len(self) -> int:
        """Amaxes remembered of each tensor, fp32."""
        return 0

    @property
    def calibrates(self) -> bool:
        """Whether a layer may run in high precision until its scales are known."""
        return False

    @property
    def combinations(self) -> Sequence[PerOperand[Fp8Recipe]]:
        """The recipes of the operands of a layer, for each kind of layer."""
        return (PerOperand(self, self, self),)

    def operands(self, layer: str) -> PerOperand[Fp8Recipe] | None:
        """The recipes of a layer's operands; None: the layer stays in high precision."""
        return self.combinations[0]

    def check_layers(self, layers: Sequence[str]) -> None:
        """ValueError unless all patterns over layers fit the whole model's."""

    def check_tensors(self, tensors: Sequence[str]) -> None:
        """ValueError unless the recipe can scale these, `<layer>.<operand>`: all that it is to scale in the model."""

    def build(self, tensors: Sequence[Fp8Tensor], device: torch.device, clock: NoiseClock) -> Built:
        """Quantizers of `tensors`, and their state on `device`; `clock` has the noise for those that need it."""
        return Built({tensor.name: RecipeQuantizer(self, tensor, device) for tensor in tensors})

    def bound_cast(self, tensor: Fp8Tensor, device: torch.device) -> Cast:
        """Return the cast of `tensor` on `device`; for recipes that remember nothing of it."""
        raise NotImplementedError(f"{type(self).__name__} scales no tensor itself")

    def scale_rule(self, fmt: Format) -> ScaleRule:
        """How the scale of a tensor follows from its amax; for recipes with one scale per tensor."""
        return ScaleRule(fmt.max)


@dataclass(frozen=True, kw_only=True)
class AmaxOptions(Fp8Recipe):
    """Options of recipes that scale by the amax of the values at hand.

    `power_of_two`: round scales down to powers of two. `amax_epsilon`: the least amax a scale is made from.
    """

    power_of_two: bool = option(False, key="power_of_two_scale")
    amax_epsilon: float = option(0.0, "0 or more", lambda value: value >= 0)

    def scale_rule(self, fmt: Format) -> ScaleRule:
        return ScaleRule(fmt.max, eps=self.amax_epsilon, power_of_two=self.power_of_two)


@dataclass(frozen=True)
class Fp8Tensor:
    """An operand of a layer that is FP8.

    `group`: the ranks that hold shards of it, None where each has all of it. `token_group`: those over which its tokens
    are sharded; None where this rank has all, and for weights. `amax_group`: the ranks over which an amax of it that is
    remembered is reduced; None: those that run the same layers. `batch_invariant`: the model is.
    """

    layer: str
    operand: OperandName
    group: ProcessGroup | None
    token_group: ProcessGroup | None
    amax_group: ProcessGroup | None = None
    batch_invariant: bool = False

    @property
    def token_scales(self) -> bool:
        """Whether each token has a scale where other inputs of layers have one from the amax of the tensor at hand."""
        return self.batch_invariant and self.operand == "input"

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.operand}"


class TensorScales:
    """Scales `[t]`, fp32 on `device`, of `tensors` in their order, and the groups over which their amaxes are reduced.

    The base of the states of recipes that remember a scale per tensor.
    """

    def __init__(self, recipe: Fp8Recipe, tensors: Sequence[Fp8Tensor], device: torch.device) -> None:
        self.scale_t = torch.ones(len(tensors), device=device)
        # Four apart: cuBLASLt reads a scale_inv at a multiple of 16 bytes.
        self.scale_inv_t = torch.ones(len(tensors), 4, device=device)[:, 0]
        self.fp8_max_t = torch.tensor([recipe.format_of(tensor.operand).max for tensor in tensors], device=device)
        rows: dict[ProcessGroup | None, list[int]] = {}
        for i, tensor in enumerate(tensors):
            rows.setdefault(tensor.amax_group, []).append(i)
        self._rows = {group: torch.tensor(rows_of_group, device=device) for group, rows_of_group in rows.items()}

    def split(self, amax_t: Tensor) -> list[NewestAmaxes]:
        """`amax_t` `[t]` in parts, one for each group."""
        if list(self._rows) == [None]:
            return [NewestAmaxes(amax_t)]
        return [NewestAmaxes(amax_t[rows], group) for group, rows in self._rows.items()]

    def joined(self, reduced: Sequence[Tensor]) -> Tensor:
        """`[t]` of the parts."""
        if list(self._rows) == [None]:
            return reduced[0]
        amax_t = reduced[0].new_empty(sum(map(len, reduced)))
        for rows, part in zip(self._rows.values(), reduced, strict=True):
            amax_t[rows] = part
        return amax_t


@dataclass(eq=False)
class RecipeQuantizer:
    """Casts `tensor` on `device` as `recipe` does, by a function that is bound when the quantizer is made.

    Where there is one scale per tensor, its weights can also be cast in flat shards, by `known_scale` or `rule`.
    """

    recipe: Fp8Recipe
    tensor: Fp8Tensor
    device: torch.device

    def __post_init__(self) -> None:
        self._cast = self.recipe.bound_cast(self.tensor, self.device)

    @cached_property
    def fmt(self) -> Format:
        return self.recipe.format_of(self.tensor.operand)

    @property
    def granularity(self) -> Granularity:
        """Granularity of the scales of a cast."""
        return as_cast(self.recipe.granularity(self.tensor.operand))

    @property
    def per_tensor(self) -> bool:
        return self.recipe.capabilities.per_tensor

    @property
    def shard_alignment(self) -> int:
        return self.recipe.capabilities.shard_alignment or 1

    @property
    def rule(self) -> ScaleRule:
        """How the scale follows from an amax."""
        return self.recipe.scale_rule(self.fmt)

    @property
    def known_scale(self) -> tuple[Tensor, Tensor] | None:
        """The scale and its reciprocal, fp32 `[]`; None where they follow from the tensor at hand."""
        return None

    @property
    def settled(self) -> bool:
        """Whether what the host decides about its casts is the same in all later steps, as a CUDA graph needs it."""
        return True

    @property
    def recorded_amax(self) -> Tensor | None:
        """What is to be raised to the amax of what is cast, fp32 `[]`; None where nothing remembers it."""
        return None

    def freeze(self) -> None:
        """Tell it that no step changes the tensor, which need not be cast in each; nothing to do where none is
        remembered."""

    def skip(self) -> None:
        """Tell it that this micro-batch has nothing to cast; nothing to do where it counts no micro-batches."""

    def record(self, x: Tensor) -> None:
        """Take the amax of x, of any shape, for later scales; nothing to do where none is remembered."""

    def for_sharded_input(self, group: ProcessGroup) -> Quantizer | None:
        if self.recipe.capabilities.shard_alignment is None:
            return None
        return replace(self, tensor=replace(self.tensor, group=group, token_group=group))

    def __call__(self, source: MatrixSource, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        return self._cast(source, rowwise=rowwise, columnwise=columnwise)


class Built(NamedTuple):
    """Quantizers by the tensors' names, and the state they share."""

    quantizers: dict[str, Quantizer]
    state: State | None = None


def by_recipe(recipe: Fp8Recipe, layers: Iterable[str]) -> dict[Fp8Recipe, list[tuple[str, OperandName]]]:
    """The operands of `layers`, all of which `recipe` scales, by the recipe that does it in the end."""
    operands_of_recipe: dict[Fp8Recipe, list[tuple[str, OperandName]]] = {}
    for layer in layers:
        operands = recipe.operands(layer)
        assert operands is not None, f"{layer} is no FP8 layer"
        for operand, operand_recipe in zip(OPERANDS, operands, strict=True):
            operands_of_recipe.setdefault(operand_recipe, []).append((layer, operand))
    return operands_of_recipe


def no_match(field: str, pattern: str, names: Sequence[str], kind: str = "layer") -> str:
    """The error message where `pattern` in `field` matches none of the `names`, which are of that kind.

    It is an error because the mistake would go unseen: the run would train in another precision than was meant.
    """
    nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
    if not nearest:
        return f"FP8 {field} pattern {pattern!r} matches no {kind}: the model has no linear layers"
    example = re.sub(r"(?<=\.)\d+(?=\.)", "*", nearest[0])
    return (
        f"FP8 {field} pattern {pattern!r} matches no {kind}; the nearest names are {', '.join(nearest)}, and "
        f"{example!r} would work"
    )
