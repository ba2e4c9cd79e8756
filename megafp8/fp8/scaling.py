"""From the largest magnitude of a tensor to the factor that fits it into FP8. Pure functions, elementwise.

`scale` multiplies before the cast. It is chosen so that the largest value lands on the format's maximum: every format
has the same relative precision over its normal range, so using the whole range costs nothing and loses the fewest small
values. A scale is always finite and positive, so that its inverse, which the GEMM multiplies by, is one too.

"Power of two" clears the mantissa, that is, rounds the scale down: then scaling is exact and only the cast rounds, for
up to one bit of range. `fp8_max · 2^-margin / amax` with its mantissa cleared equals the older
`2^(floor(log2(fp8_max / amax)) - margin)`, without the logarithm's rounding error, so one option serves both.

Delayed scaling takes the amax from a history `[t, l]`: t tensors, l steps. Slot 0 is the step now running, slot i the
step i steps ago.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

AmaxAlgorithm = Literal["max", "most_recent"] | Callable[[Tensor], Tensor]

_FP32_MAX = torch.finfo(torch.float32).max
_FP32_EXPONENT_BITS = 0x7F800000


def scale_from_amax(
    amax: Tensor,
    fp8_max: float | Tensor,
    *,
    margin: int = 0,
    eps: float = 0.0,
    power_of_two: bool = False,
    previous: Tensor | None = None,
) -> Tensor:
    """`fp8_max · 2^-margin / max(amax, eps)`, elementwise: fp32 of any shape to fp32 of that shape.

    Where amax is 0, infinite or NaN the scale is `previous`, or 1 where there is none. A quotient beyond fp32 becomes
    fp32's maximum. `margin`: powers of two left free above amax. `power_of_two`: clear the mantissa (round down).
    """
    assert amax.dtype == torch.float32
    amax = amax.clamp(min=eps)
    # Tensor by tensor: torch computes `number / tensor` as a reciprocal and a product, which rounds twice.
    scale = (torch.ones_like(amax) * (fp8_max * 2.0**-margin) / amax).clamp(max=_FP32_MAX)
    if power_of_two:
        scale = (scale.view(torch.int32) & _FP32_EXPONENT_BITS).view(torch.float32)
    usable = amax.isfinite() & (amax > 0)
    return torch.where(usable, scale, torch.ones_like(amax) if previous is None else previous)


class ScaleRule(NamedTuple):
    """How the scale of a tensor follows from its amax: the arguments of `scale_from_amax`."""

    fp8_max: float
    margin: int = 0
    eps: float = 0.0
    power_of_two: bool = False

    def scale(self, amax: Tensor) -> Tensor:
        """fp32 of any shape -> fp32 of that shape; 1 where amax is 0, infinite or NaN."""
        return scale_from_amax(amax, self.fp8_max, margin=self.margin, eps=self.eps, power_of_two=self.power_of_two)


def amax_of_history(history: Tensor, algorithm: AmaxAlgorithm) -> Tensor:
    """One amax a tensor: history `[t, l]` -> `[t]`.

    `max` is over all slots, `most_recent` is slot 0, and a callable maps `[t, l]` to `[t]` itself (else ValueError).
    """
    if algorithm == "max":
        return history.amax(dim=1)
    if algorithm == "most_recent":
        return history[:, 0]
    assert callable(algorithm)
    amax = algorithm(history)
    if amax.shape != history.shape[:1] or amax.dtype != history.dtype:
        raise ValueError(
            f"amax_compute_algo returned {amax.dtype} {list(amax.shape)} for a history of {history.dtype} "
            f"{list(history.shape)}; it must return one value a row, {history.dtype} {list(history.shape[:1])}, "
            "as `lambda history: history.amax(dim=1)` does"
        )
    return amax


def roll_history(history: Tensor) -> Tensor:
    """The history `[t, l]` of the step that begins: slot i moves to i + 1, the oldest drops out, slot 0 is zero."""
    rolled = history.roll(1, dims=1)
    rolled[:, 0] = 0
    return rolled
