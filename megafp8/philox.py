"""Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): random words by key and counter.

A stateful generator gives what depends on everything that was drawn before. Here a word depends on its key and its
number alone, by integer arithmetic, the same on every device; Triton has the same generator. It is written in int64
tensor operations, because 32×32-bit products need 64 bits and torch has no uint32 arithmetic. That costs some eighty
elementwise passes.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

Key = tuple[int, int]
"""Two 32-bit words."""

_MASK = 0xFFFFFFFF


def key_of(*parts: int | str) -> Key:
    """The key of a stream that `parts`, such as a seed and a name, tell from others."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def philox(counter: Tensor, key: Key) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of 64-bit counters (int64, non-negative): four words in [0, 2^32) each, as int64."""
    x0, x1 = counter & _MASK, counter >> 32
    x2, x3 = torch.zeros_like(counter), torch.zeros_like(counter)
    k0, k1 = key
    for _ in range(10):
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57  # wraps modulo 2^64 as it should; the sign bit is masked off below
        x0, x1, x2, x3 = ((p1 >> 32) & _MASK) ^ x1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ x3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return x0, x1, x2, x3
