"""Philox-4x32-10: random words computed from a key and a counter.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

A word is computed from its key and counter by integer arithmetic, so it is equal on every device. Triton has the same
generator. The products of 32-bit words need 64 bits, and torch has no uint32 arithmetic, so this implementation uses
int64 tensors. It takes about eighty elementwise passes.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

Key = tuple[int, int]
"""Key of a random stream: two 32-bit words."""

_MASK = 0xFFFFFFFF


def key_of(*parts: int | str) -> Key:
    """Return the key of the stream identified by `parts`, such as a seed and a name."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def philox(counter: Tensor, key: Key) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words in [0, 2^32), int64, for each 64-bit counter (int64, non-negative)."""
    zero = torch.zeros_like(counter)
    return philox_of_words(counter & _MASK, counter >> 32, zero, zero, key)


def philox_of_words(
    x0: Tensor, x1: Tensor, x2: Tensor, x3: Tensor, key: Key, *, rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same words as `philox`, given the four 32-bit words of the counter.

    The words are int64 in [0, 2^32) and are broadcast against each other. The standard number of `rounds` is 10; the
    paper finds no flaw with 7 (BigCrush).
    """
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57  # wraps modulo 2^64 as intended; the sign bit is masked off below
        x0, x1, x2, x3 = ((p1 >> 32) & _MASK) ^ x1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ x3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return x0, x1, x2, x3
