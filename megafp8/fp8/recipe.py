"""What is scaled and how: a recipe is a frozen record of choices and holds no state.

Common to all recipes are the formats, which of a layer's three GEMMs stay in high precision, and where the tensor cores
may accumulate fast. A Hopper tensor core keeps about 14 bits of a running sum unless it is told to promote it to fp32
often; fast accumulation is harmless in the forward pass and measurably not in the gradients, hence the default.

The three GEMMs of a linear layer, y = x wᵀ:  fprop y = x wᵀ,  dgrad dx = dy w,  wgrad dw = dyᵀ x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megafp8.fp8.formats import E4M3, E5M2, Format
from megafp8.fp8.scaling import AmaxAlgorithm

_FORMATS = {"hybrid": (E4M3, E5M2), "e4m3": (E4M3, E4M3)}


class PerGemm(NamedTuple):
    """A yes or no for each of the three GEMMs."""

    fprop: bool
    dgrad: bool
    wgrad: bool


def _require(recipe: object, field: str, value: Any, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{type(recipe).__name__}: {field} is {value!r}; it must be {rule}")


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """What every recipe has.

    `fp8_format`: "hybrid" casts activations and weights to E4M3 and gradients to E5M2; "e4m3" casts all to E4M3.
    `override_linear_precision`: GEMMs that run in the tensors' own precision. `use_fast_accum`: GEMMs that accumulate
    fast. Both are (fprop, dgrad, wgrad).
    """

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


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Fp8Recipe):
    """Per tensor, scaled by the amax of earlier steps.

    `margin`: powers of two left free above the amax. `interval`: steps between two updates of the scales; the history
    advances every step. `amax_history_len`: steps remembered. `amax_compute_algo`: "max" over the history,
    "most_recent", or a callable `[t, l] -> [t]` (t tensors, l steps, newest first). `power_of_two_scale`: round scales
    down to powers of two.
    """

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

    fp8_format: Literal["hybrid", "e4m3"] = "e4m3"
    power_of_two: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "amax_epsilon", self.amax_epsilon, self.amax_epsilon >= 0, "0 or more")


@dataclass(frozen=True, kw_only=True)
class BlockwiseScaling(Fp8Recipe):
    """A factor for each 128 neighbours of x and dy, and for each 128 × 128 elements of w (DeepSeek-V3,
    arXiv:2412.19437).

    Gradients never use square blocks, which is known to diverge. Factors are powers of two unless said otherwise.
    Hopper's block-scaled GEMMs always promote their sums, so `use_fast_accum` has no effect.
    """

    fp8_format: Literal["hybrid", "e4m3"] = "e4m3"
    power_of_two: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "amax_epsilon", self.amax_epsilon, self.amax_epsilon >= 0, "0 or more")
