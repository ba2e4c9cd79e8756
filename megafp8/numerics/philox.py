"""Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): random words by key and counter.

A word depends on its key and counter alone, by integer arithmetic, so it is the same on every device; Triton has the
same generator. 32×32-bit products need 64 bits and torch has no uint32 arithmetic, hence int64 tensors; this costs some
eighty elementwise passes.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

Key = tuple[int, int]
"""Two 32-bit words."""

_MASK = 0xFFFFFFFF


def key_of(*parts: int | str) -> Key:
    """The key of the stream identified by `parts`, such as a seed and a name."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def philox(counter: Tensor, key: Key) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words in [0, 2^32), as int64, for each 64-bit counter (int64, non-negative)."""
    zero = torch.zeros_like(counter)
    return philox_of_words(counter & _MASK, counter >> 32, zero, zero, key)


def philox_of_words(
    x0: Tensor, x1: Tensor, x2: Tensor, x3: Tensor, key: Key, *, rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `philox`, from the four words of a counter (int64 in [0, 2^32)), which are broadcast against each other.

    `rounds`: of 10; the paper finds no flaw with 7 (BigCrush).
    """
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57  # wraps modulo 2^64 as it should; the sign bit is masked off below
        x0, x1, x2, x3 = ((p1 >> 32) & _MASK) ^ x1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ x3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return x0, x1, x2, x3
