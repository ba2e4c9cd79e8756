"""Whether forward passes compute a token's numbers in the same order whatever other tokens are computed with it.

A sum of floating-point numbers depends on its order, and fast kernels choose theirs by the number of rows: GEMMs cut
the summed dim into parts when there are few rows, attention cuts the keys of single queries, and libraries have other
kernels for other shapes. So a token's logits differ in the last bits between a prompt and a decode step, between
batches, and between generation and training. Within `batch_invariant` all of these take one order:

    linear layers    `megafp8.gemm.invariant`: the parts of the summed dim follow from the weight's shape alone
    experts          one tile for all numbers of rows (`megafp8.kernels.grouped_gemm`)
    attention        blocks of keys counted from the first token of the sequence, and parts of so many blocks
                     (`megafp8.numerics.invariant_attention_reference`)
    current scaling  a scale for each token of a layer's input, as one per tensor would depend on the other tokens

Backward passes are as they are otherwise. What depends on one token alone, such as norms, needs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_enabled = False  # of the process: backward passes, which may recompute a forward pass, have threads of their own


def is_batch_invariant() -> bool:
    """Whether forward passes are batch-invariant now."""
    return _enabled


def set_batch_invariant(flag: bool) -> None:
    """Make all forward passes of this process batch-invariant from now on, or not."""
    global _enabled
    _enabled = flag


@contextmanager
def batch_invariant(flag: bool = True) -> Iterator[None]:
    """Within, forward passes are batch-invariant; with False they are as they were before."""
    before = _enabled
    set_batch_invariant(flag or before)
    try:
        yield
    finally:
        set_batch_invariant(before)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x). On a CPU torch's differs where a tensor ends, whose last elements it computes one by one."""
    if _enabled and not x.is_cuda:
        return (1 + (-x).exp()).reciprocal()
    return torch.sigmoid(x)
