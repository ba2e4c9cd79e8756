"""Options of generation: sizes of caches and batches, and how tokens are sampled. Imports no torch, for help texts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

CacheDtype = Literal["fp8", "int8"]

_LEAST_TEMPERATURE = 1e-4
"""Logits divided by less may overflow."""
_LARGEST_PENALTY = 1e4
"""Logits times more, or divided by less, may overflow."""
_MOST = 2**31
"""Counts are below this, so that they fit into any integer that they are stored in."""


class CacheOptions(NamedTuple):
    """Sizes of the cache and of batches.

    `page_size`: tokens of a page. `cache_tokens`: tokens in the cache, of all sequences together; None: eight of the
    longest sequences, but at most 65,536 tokens or one sequence. `max_batch_tokens`: tokens of prompts that are read in
    one step. `max_sequences`: those that are continued at once. `dtype`: fp8 (E4M3) or int8 store keys and values in
    half the memory, with a scale for each head of each token; None: as the model computes them.
    """

    page_size: int = 16
    cache_tokens: int | None = None
    max_batch_tokens: int = 8192
    max_sequences: int = 64
    dtype: CacheDtype | None = None


@dataclass(frozen=True)
class SamplingOptions:
    """How a text is continued. ValueError for values out of range.

    `max_tokens`: at most this many. `temperature`: 0 takes the most probable token, and of the rest of the options only
    `repetition_penalty` matters. `top_k`: choose among this many; 0: all. `top_p`: among the most probable tokens whose
    probabilities reach this sum. `min_p`: among those at least this times as probable as the most probable one.
    `repetition_penalty`: divides the logits of tokens of prompt and output if positive, and multiplies them if not.
    `stop`: strings before which the text ends. `seed`: of what is random; None: another one in each call.
    `num_samples`: texts of each prompt. `logprobs`: how many of the most probable tokens are given, with their
    log-probabilities, beside the chosen one's. `tempered_logprobs`: log-probabilities are those of logits divided by
    `temperature`, by which tokens are sampled where nothing else is set; else the model's. `ignore_end`: go on after a
    token that ends a text.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    num_samples: int = 1
    logprobs: int = 0
    tempered_logprobs: bool = False
    ignore_end: bool = False

    def __post_init__(self) -> None:
        least = {"max_tokens": 1, "num_samples": 1, "top_k": 0, "logprobs": 0}
        for name, bound in least.items():
            if not bound <= getattr(self, name) < _MOST:
                raise ValueError(f"{name} = {_short(getattr(self, name))}: must be from {bound} to {_MOST - 1}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed = {_short(self.seed)}: must be a signed integer of 64 bits")
        if not (self.temperature == 0 or _LEAST_TEMPERATURE <= self.temperature < math.inf):
            rule = f"must be 0, which takes the most probable token, or at least {_LEAST_TEMPERATURE}"
            raise ValueError(f"temperature = {self.temperature}: {rule}")
        if self.tempered_logprobs and not self.temperature:
            raise ValueError("tempered_logprobs = True: temperature is 0, by which no logits can be divided")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: must be above 0 and at most 1, which leaves all tokens")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p = {self.min_p}: must be between 0, which leaves all tokens, and 1")
        if not 1 / _LARGEST_PENALTY <= self.repetition_penalty <= _LARGEST_PENALTY:
            rule = f"must be from {1 / _LARGEST_PENALTY:g} to {_LARGEST_PENALTY:g}; 1 changes nothing"
            raise ValueError(f"repetition_penalty = {self.repetition_penalty}: {rule}")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"stop = {self.stop!r}: must be strings that are not empty, such as ('\\n',)")


def _short(number: int) -> str:
    """A number for a message, of which Python prints no more than 4,300 digits."""
    return str(number) if abs(number) < 10**30 else f"a number of {number.bit_length()} bits"
