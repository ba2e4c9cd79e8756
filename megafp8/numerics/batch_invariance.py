"""Batch invariance: the sums for a token are computed in one order, whatever other tokens are in the batch.

A floating-point sum depends on its order, and fast kernels choose the order by the number of rows: GEMMs split the
summed dim if there are few rows, attention splits the keys of single queries, and libraries select other kernels for
other shapes. A token's logits therefore differ in the last bits between a prompt and a decode step, between batches,
and between generation and training. In a batch-invariant model, all of these use one order:

    linear layers    `megafp8.gemm.invariant`: the split of the summed dim depends only on the weight's shape
    experts          one tile size for all numbers of rows (`megafp8.kernels.grouped_gemm`)
    attention        key blocks counted from the first token of the sequence, in parts with a fixed number of blocks
                     (`megafp8.layers.attention.invariant_reference`)
    current scaling  a scale for each token of a layer's input; one scale per tensor would depend on the other tokens

Backward passes do not change. Operations that depend on one token alone, such as norms, do not change either.

Batch invariance is fixed when a model is constructed: `Fp8Manager` puts the value into the plan and the quantizers of
each linear layer, and `BuildContext` passes it to the other layers. No code reads a global.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def sigmoid(x: Tensor, *, batch_invariant: bool) -> Tensor:
    """Return `1 / (1 + e^-x)`.

    On a CPU, torch's sigmoid computes the last elements of a tensor one by one, with different rounding. With
    `batch_invariant`, all elements are computed alike.
    """
    if batch_invariant and not x.is_cuda:
        return (1 + (-x).exp()).reciprocal()
    return torch.sigmoid(x)


def softplus(x: Tensor, *, batch_invariant: bool) -> Tensor:
    """Return `ln(1 + e^x)`. `batch_invariant` has the same meaning as for `sigmoid`."""
    if batch_invariant and not x.is_cuda:
        return x.clamp(min=0) + (1 + (-x.abs()).exp()).log()
    return F.softplus(x)
