"""Uniform noise for stochastic rounding, a function of (seed, step, name) and the element's place alone.

A stateful generator would make a rounding depend on everything that was drawn before it: a resumed or recomputed step
would round otherwise, and so would the CPU that checks the GPU. Here a value is a word of Philox (`megafp8.philox`),
keyed by (seed, step, name), whose counter counts groups of four elements.

The step must differ wherever the noise should: count micro-batches, not only optimizer steps, and name the rank's slice
where ranks hold different slices of a tensor, or their errors are alike instead of averaging out.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.philox import Key, key_of, philox


def noise_key(seed: int, step: int, name: str) -> Key:
    """The key of the noise called `name` in `step` under `seed`."""
    return key_of(seed, step, name)


def words(counters: int, key: Key, device: torch.device) -> Tensor:
    """Philox-4x32-10 of the counters 0, 1, ...: int64 `[counters, 4]`, words in [0, 2^32)."""
    return torch.stack(philox(torch.arange(counters, device=device), key), dim=1)


def uniform(r: int, c: int, key: Key, device: torch.device) -> Tensor:
    """Uniform in [0, 1), fp32 `[r, c]`, multiples of 2^-24. Element i, row by row, is word i mod 4 of counter ⌊i/4⌋."""
    word = words(-(-r * c // 4), key, device).flatten()[: r * c]
    return (word >> 8).float().mul_(2.0**-24).view(r, c)
