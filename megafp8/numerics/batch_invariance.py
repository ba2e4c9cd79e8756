"""Batch invariance: a token's numbers are summed in the same order whatever other tokens are computed with it.

A sum of floating-point numbers depends on its order, and fast kernels choose theirs by the number of rows: GEMMs cut
the summed dim into parts when there are few rows, attention cuts the keys of single queries, and libraries have other
kernels for other shapes. So a token's logits differ in the last bits between a prompt and a decode step, between
batches, and between generation and training. In a batch-invariant model all of these take one order:

    linear layers    `megafp8.gemm.invariant`: the parts of the summed dim follow from the weight's shape alone
    experts          one tile for all numbers of rows (`megafp8.kernels.grouped_gemm`)
    attention        blocks of keys counted from the first token of the sequence, and parts of so many blocks
                     (`megafp8.layers.attention.invariant_reference`)
    current scaling  a scale for each token of a layer's input, as one per tensor would depend on the other tokens

Backward passes are as they are otherwise. What depends on one token alone, such as norms, needs nothing.

A model is batch-invariant or not from its construction on: `Fp8Manager` puts the value into the plan of each linear
layer and into its quantizers, and `BuildContext` gives it to the other layers. Nothing reads a global.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor, *, batch_invariant: bool) -> Tensor:
    """Return `1 / (1 + e^-x)`.

    On a CPU torch's sigmoid differs where a tensor ends, because it computes the last elements one by one.
    """
    if batch_invariant and not x.is_cuda:
        return (1 + (-x).exp()).reciprocal()
    return torch.sigmoid(x)
