"""Options of generation: sizes of caches and batches, and sampling. Imports no torch, so help texts load quickly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

CacheDtype = Literal["fp8", "int8"]

_LEAST_TEMPERATURE = 1e-4
"""Smallest temperature above 0. Dividing logits by less could overflow."""
_LARGEST_PENALTY = 1e4
"""Largest repetition penalty; its inverse is the smallest. Logits beyond these could overflow."""
_MOST = 2**31
"""Upper bound of all counts, so that they fit into every integer type that stores them."""


class CacheOptions(NamedTuple):
    """Sizes of the cache and of batches.

    Attributes:
        page_size: Number of tokens of a page.
        cache_tokens: Number of tokens in the cache, for all sequences together. Default: eight sequences of the largest
            length, but at most 65,536 tokens unless a single sequence needs more.
        max_batch_tokens: Largest number of prompt tokens that are read in one step.
        max_sequences: Largest number of sequences that are generated at once.
        dtype: "fp8" (E4M3) or "int8" stores keys and values in half the memory, with a scale for each head of each
            token. None stores them in the model's dtype.
    """

    page_size: int = 16
    cache_tokens: int | None = None
    max_batch_tokens: int = 8192
    max_sequences: int = 64
    dtype: CacheDtype | None = None


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling. Raises ValueError for values out of range.

    Attributes:
        max_tokens: Largest number of generated tokens.
        temperature: Sampling temperature. 0 takes the most probable token; `top_k`, `top_p`, `min_p` and `seed` then
            have no effect.
        top_k: Sample from this many of the most probable tokens; 0 means all.
        top_p: Sample from the most probable tokens whose probabilities add up to at least this.
        min_p: Sample from tokens at least this times as probable as the most probable token.
        repetition_penalty: Penalty for tokens of prompt and output: their logits are divided by it if positive, and
            multiplied by it if negative.
        stop: Strings that end the text. The text ends before the first of them.
        seed: Seed of the sampling; None draws a new seed in each call.
        num_samples: Number of texts generated for each prompt.
        logprobs: Number of most probable tokens that are returned for each generated token, with their
            log-probabilities.
        tempered_logprobs: Return log-probabilities of the logits divided by `temperature`, from which tokens are
            sampled if no other option is set. By default, log-probabilities are computed from the model's logits.
        ignore_end: Continue after a token that ends a text.
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
            raise ValueError(f"seed = {_short(self.seed)}: must be a signed 64-bit integer")
        if not (self.temperature == 0 or _LEAST_TEMPERATURE <= self.temperature < math.inf):
            rule = f"must be 0, which takes the most probable token, or at least {_LEAST_TEMPERATURE}"
            raise ValueError(f"temperature = {self.temperature}: {rule}")
        if self.tempered_logprobs and not self.temperature:
            raise ValueError("tempered_logprobs = True: logits cannot be divided by the temperature, which is 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: must be above 0 and at most 1, which keeps all tokens")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p = {self.min_p}: must be between 0, which keeps all tokens, and 1")
        if not 1 / _LARGEST_PENALTY <= self.repetition_penalty <= _LARGEST_PENALTY:
            rule = f"must be from {1 / _LARGEST_PENALTY:g} to {_LARGEST_PENALTY:g}; 1 changes nothing"
            raise ValueError(f"repetition_penalty = {self.repetition_penalty}: {rule}")
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"stop = {self.stop!r}: must be non-empty strings, such as ('\\n',)")


def _short(number: int) -> str:
    """Return a number as text for a message. Python refuses to print numbers of more than 4,300 digits."""
    return str(number) if abs(number) < 10**30 else f"a number of {number.bit_length()} bits"
