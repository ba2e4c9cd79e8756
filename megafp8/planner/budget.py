"""Consequences of a predicted speed for a whole run: MFU, tokens per day, time, GPU-hours and cost."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megafp8.host.gpus import Gpu
from megafp8.planner.predict import Prediction

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_HOUR, _DAY = 3600, 86_400


def number_of_tokens(text: str) -> int:
    """Return the number that a text such as 15T, 1.5B, 300M, 2e12 or 1_000 denotes.

    Raises ValueError for other text, and for less than one token.
    """
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+]?[0-9]+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    number = 0 if match is None else round(float(match[1].replace("_", "")) * _SUFFIXES[match[2].upper()])
    if not 0 < number < 2**63:
        raise ValueError(f"{text!r} is not a number of tokens, such as 15T, 300B or 2e12")
    return number


def mfu(prediction: Prediction, flops_per_token: float, gpu: Gpu, precision: str, *, fp8: bool) -> float | None:
    """Return the model FLOPs utilization, or None if the peak of `precision` is not known, as for fp32.

    With `fp8`, layers run in FP8 and utilization refers to the FP8 peak, as in a run's metrics.
    """
    peak = gpu.peaks.get("fp8" if fp8 else precision) if precision in gpu.peaks else None
    return None if peak is None else prediction.tokens_per_second * flops_per_token / peak


def tokens_per_day(prediction: Prediction) -> float:
    """Return the tokens per day of all GPUs together."""
    return prediction.tokens_per_second * prediction.gpus * _DAY


@dataclass(frozen=True)
class Budget:
    """Time and cost of training on `tokens` tokens at a predicted speed, without interruptions.

    `cost` has the unit of the price; None without a price.
    """

    tokens: int
    days: float
    gpu_hours: float
    cost: float | None


def budget(prediction: Prediction, tokens: int, price: float | None) -> Budget:
    """Return the budget of `tokens` tokens; `price` is the price of one GPU-hour, or None."""
    seconds = tokens / (prediction.tokens_per_second * prediction.gpus)
    hours = seconds * prediction.gpus / _HOUR
    return Budget(tokens, seconds / _DAY, hours, None if price is None else hours * price)
