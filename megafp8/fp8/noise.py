"""Uniform noise for stochastic rounding, a function of (seed, step, name) and the element's place alone.

A stateful generator would make a rounding depend on everything that was drawn before it: a resumed or recomputed step
would round otherwise, and so would the CPU that checks the GPU. Here a value is a word of Philox-4x32-10 (Salmon et al.
2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed by (seed, step, name), whose counter counts groups of four
elements: integer arithmetic, the same on every device, and the generator that Triton has too.

The step must differ wherever the noise should: count micro-batches, not only optimizer steps, and name the rank's slice
where ranks hold different slices of a tensor, or their errors are alike instead of averaging out.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

Key = tuple[int, int]
"""Two 32-bit words."""

_MASK = 0xFFFFFFFF


def noise_key(seed: int, step: int, name: str) -> Key:
    """The key of the noise called `name` in `step` under `seed`."""
    digest = hashlib.sha256(f"{seed}\0{step}\0{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def words(counters: int, key: Key, device: torch.device) -> Tensor:
    """Philox-4x32-10 of the counters 0, 1, ...: int64 `[counters, 4]`, words in [0, 2^32)."""
    counter = torch.arange(counters, device=device)
    x0, x1 = counter & _MASK, counter >> 32
    x2, x3 = torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = key
    for _ in range(10):
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57  # wraps modulo 2^64 as it should; the sign bit is masked off below
        x0, x1, x2, x3 = ((p1 >> 32) & _MASK) ^ x1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ x3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return torch.stack([x0, x1, x2, x3], dim=1)


def uniform(r: int, c: int, key: Key, device: torch.device) -> Tensor:
    """Uniform in [0, 1), fp32 `[r, c]`, multiples of 2^-24. Element i, row by row, is word i mod 4 of counter ⌊i/4⌋."""
    word = words(-(-r * c // 4), key, device).flatten()[: r * c]
    return (word >> 8).float().mul_(2.0**-24).view(r, c)
