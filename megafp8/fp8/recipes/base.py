"""What is scaled and how: a recipe is a frozen record of choices and holds no state.

Common to all recipes are the formats, which of a layer's three GEMMs stay in high precision, and where the tensor cores
may accumulate fast. A Hopper tensor core keeps about 14 bits of a running sum unless it is told to promote it to fp32
often; fast accumulation is harmless in the forward pass and measurably not in the gradients, hence the default.

The three GEMMs of a linear layer, y = x wᵀ:  fprop y = x wᵀ,  dgrad dx = dy w,  wgrad dw = dyᵀ x.

`megafp8.fp8.recipes.build` makes quantizers of a recipe; `megafp8.fp8.recipes.custom` has the recipe that is made of
others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from megafp8.fp8.formats import E4M3, E5M2, Format
from megafp8.fp8.patterns import no_match
from megafp8.fp8.scaling import AmaxAlgorithm
from megafp8.fp8.tensor import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_16X16,
    BLOCK_128X128,
    ROW,
    TENSOR,
    Granularity,
)

_FORMATS = {"hybrid": (E4M3, E5M2), "e4m3": (E4M3, E4M3)}

OperandName = Literal["input", "weight", "grad_output"]
OPERANDS: tuple[OperandName, ...] = get_args(OperandName)


class PerGemm(NamedTuple):
    """A yes or no for each of the three GEMMs."""

    fprop: bool
    dgrad: bool
    wgrad: bool


class OperandRecipes(NamedTuple):
    """How each operand of a layer is scaled."""

    input: Fp8Recipe
    weight: Fp8Recipe
    grad_output: Fp8Recipe


def _require(recipe: object, field: str, value: Any, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{type(recipe).__name__}: {field} is {value!r}; it must be {rule}")


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """What every recipe has.

    `fp8_format`: "hybrid" casts activations and weights to E4M3 and gradients to E5M2; "e4m3" casts all to E4M3.
    `override_linear_precision`: GEMMs that run in the tensors' own precision. `use_fast_accum`: GEMMs that accumulate
    fast. Both are (fprop, dgrad, wgrad). `name`: as in configs. `without_effect`: fields that this recipe inherits and
    its GEMMs ignore; a config may not set them.
    """

    name: ClassVar[str]
    without_effect: ClassVar[frozenset[str]] = frozenset()

    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    override_linear_precision: tuple[bool, bool, bool] = PerGemm(False, False, False)
    use_fast_accum: tuple[bool, bool, bool] = PerGemm(True, False, False)

    def __post_init__(self) -> None:
        _require(self, "fp8_format", self.fp8_format, self.fp8_format in _FORMATS, "'hybrid' or 'e4m3'")
        for field in ("override_linear_precision", "use_fast_accum"):
            value = getattr(self, field)
            holds = len(value) == 3 and all(isinstance(v, bool) for v in value)
            _require(self, field, value, holds, "three booleans (fprop, dgrad, wgrad), e.g. (False, False, True)")

    @property
    def forward_format(self) -> Format:
        """Format of inputs and weights."""
        return _FORMATS[self.fp8_format][0]

    @property
    def gradient_format(self) -> Format:
        """Format of output gradients."""
        return _FORMATS[self.fp8_format][1]

    def format_of(self, operand: OperandName) -> Format:
        """Format of an operand."""
        return self.gradient_format if operand == "grad_output" else self.forward_format

    def granularity(self, operand: OperandName) -> Granularity:
        """Which elements of an operand share a factor, in its rows and in its columns."""
        return TENSOR

    def operands(self, layer: str) -> OperandRecipes | None:
        """How the operands of a layer are scaled; None: the layer stays in high precision."""
        return OperandRecipes(self, self, self)

    def check_layers(self, layers: Sequence[str]) -> None:
        """ValueError unless all patterns over layers fit the whole model's."""

    def check_tensors(self, tensors: Sequence[str]) -> None:
        """ValueError unless the recipe can scale these, `<layer>.<operand>`: all that it is to scale in the model."""


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Fp8Recipe):
    """Per tensor, scaled by the amax of earlier steps.

    `margin`: powers of two left free above the amax. `interval`: steps between two updates of the scales; the history
    advances every step. `amax_history_len`: steps remembered. `amax_compute_algo`: "max" over the history,
    "most_recent", or a callable `[t, l] -> [t]` (t tensors, l steps, newest first). `power_of_two_scale`: round scales
    down to powers of two.
    """

    name: ClassVar[str] = "delayed"

    margin: int = 0
    interval: int = 1
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    power_of_two_scale: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "interval", self.interval, self.interval >= 1, "at least 1 step")
        _require(self, "amax_history_len", self.amax_history_len, self.amax_history_len >= 1, "at least 1 step")
        algorithm = self.amax_compute_algo
        known = callable(algorithm) or algorithm in ("max", "most_recent")
        _require(self, "amax_compute_algo", algorithm, known, "'max', 'most_recent' or a callable")


@dataclass(frozen=True, kw_only=True)
class CurrentScaling(Fp8Recipe):
    """Per tensor, scaled by the tensor's own amax.

    `power_of_two`: round scales down to powers of two. `amax_epsilon`: the least amax a scale is made from.
    """

    name: ClassVar[str] = "current"

    power_of_two: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "amax_epsilon", self.amax_epsilon, self.amax_epsilon >= 0, "0 or more")


@dataclass(frozen=True, kw_only=True)
class RowwiseScaling(Fp8Recipe):
    """A factor for each row of each GEMM operand, that is for each token, input or output channel.

    All in E4M3 by default: with a row's own factor, gradients have no need of E5M2's range. Both copies of a tensor are
    cast from its values, so outliers cost the row they are in and no other. `power_of_two`, `amax_epsilon`: as for
    current scaling. To keep the weight gradient, which sums over tokens, in high precision:
    `override_linear_precision`.
    """

    name: ClassVar[str] = "rowwise"

    fp8_format: Literal["hybrid", "e4m3"] = "e4m3"
    power_of_two: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "amax_epsilon", self.amax_epsilon, self.amax_epsilon >= 0, "0 or more")

    def granularity(self, operand: OperandName) -> Granularity:
        return ROW


@dataclass(frozen=True, kw_only=True)
class BlockwiseScaling(Fp8Recipe):
    """A factor for each 128 neighbours of x and dy, and for each 128 × 128 elements of w (DeepSeek-V3,
    arXiv:2412.19437).

    Gradients never use square blocks, which is known to diverge. Factors are powers of two unless said otherwise.
    Hopper's block-scaled GEMMs always promote their sums, so `use_fast_accum` has no effect.
    """

    name: ClassVar[str] = "blockwise"
    without_effect: ClassVar[frozenset[str]] = frozenset({"use_fast_accum"})

    fp8_format: Literal["hybrid", "e4m3"] = "e4m3"
    power_of_two: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "amax_epsilon", self.amax_epsilon, self.amax_epsilon >= 0, "0 or more")

    def granularity(self, operand: OperandName) -> Granularity:
        return BLOCK_128X128 if operand == "weight" else BLOCK_1X128


@dataclass(frozen=True, kw_only=True)
class StaticScaling(Fp8Recipe):
    """Per tensor, by a scale that never changes: nothing to compute, nothing to remember, nothing to communicate.

    `amax`: pairs of a shell-style pattern over tensors (`layers.*.mlp.down.input`) and the largest magnitude they will
    have; the first that matches counts. `calibration_steps`: for as many steps a layer that has a tensor without runs
    in high precision and notes its amaxes, then it keeps the largest. `margin`: powers of two left free above the amax,
    for tensors that grow later. `power_of_two`: round scales down to powers of two.
    """

    name: ClassVar[str] = "static"

    amax: tuple[tuple[str, float], ...] = ()
    calibration_steps: int = 0
    margin: int = 0
    power_of_two: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for pattern, value in self.amax:
            holds = math.isfinite(value) and value > 0
            _require(self, f"amax of {pattern!r}", value, holds, "finite and more than 0")
        _require(self, "calibration_steps", self.calibration_steps, self.calibration_steps >= 0, "0 or more")

    def given_amax(self, tensor: str) -> float | None:
        """The amax of a tensor that needs no calibration."""
        return next((value for pattern, value in self.amax if fnmatchcase(tensor, pattern)), None)

    def check_tensors(self, tensors: Sequence[str]) -> None:
        for pattern, _ in self.amax:
            if not any(fnmatchcase(tensor, pattern) for tensor in tensors):
                raise ValueError(no_match("static_amax", pattern, tensors, "tensor with a static scale"))
        unknown = [tensor for tensor in tensors if self.given_amax(tensor) is None]
        if unknown and not self.calibration_steps:
            raise ValueError(
                f"static FP8 scaling has no amax for {len(unknown)} of {len(tensors)} tensors, {unknown[0]} the first; "
                "give fp8.static_amax a pattern for it, or set fp8.calibration_steps, 20 for example"
            )


@dataclass(frozen=True, kw_only=True)
class MXFP8Scaling(Fp8Recipe):
    """A power of two for each 32 neighbours (OCP microscaling formats 1.0), rounded so that nothing saturates.

    For Blackwell's tensor cores; elsewhere its GEMMs are emulated in fp32. `use_fast_accum` has no effect on either.
    """

    name: ClassVar[str] = "mxfp8"
    without_effect: ClassVar[frozenset[str]] = frozenset({"use_fast_accum"})

    fp8_format: Literal["hybrid", "e4m3"] = "e4m3"

    def granularity(self, operand: OperandName) -> Granularity:
        return BLOCK_1X32


@dataclass(frozen=True, kw_only=True)
class NVFP4Scaling(Fp8Recipe):
    """Four bits, a factor for each 16 neighbours and for each 16 × 16 weights (NVIDIA 2025, arXiv:2509.25149).

    Output gradients are rounded stochastically, and both operands of wgrad are Hadamard transforms. For Blackwell's
    tensor cores; elsewhere its GEMMs are emulated in fp32. `use_fast_accum` has no effect on either.
    """

    name: ClassVar[str] = "nvfp4"
    without_effect: ClassVar[frozenset[str]] = frozenset({"use_fast_accum"})

    fp8_format: Literal["hybrid", "e4m3"] = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "'e4m3', which holds its four-bit values"
        _require(self, "fp8_format", self.fp8_format, self.fp8_format == "e4m3", rule)

    def granularity(self, operand: OperandName) -> Granularity:
        return BLOCK_16X16 if operand == "weight" else BLOCK_1X16
