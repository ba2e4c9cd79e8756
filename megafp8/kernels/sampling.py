"""Sampling kernels: the best token (largest logit, or largest logit / temperature + Gumbel noise), and log-sum-exp.

Each kernel is one pass over the logits, in blocks that fill a GPU even for a single sequence. Reference:
`megafp8.inference.sampling` in PyTorch, where Philox alone takes about eighty passes.

Shapes: n sequences, v tokens in this rank's slice of the vocabulary, b blocks of the slice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div
from megafp8.kernels.launch import TritonKernel
from megafp8.numerics.philox import Key

_BLOCK = 1024


def best_kernel(
    x_nv, temperature_n, least_n, position_n, stream0_n, stream1_n, value_nb, token_nb, first, columns, key0, key1,
    NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the best token of a block. A block begins at a multiple of 4, because four tokens share one Philox call."""
    block, row = tl.program_id(0), tl.program_id(1)
    begin = first // 4 * 4 + block * BLOCK
    token = begin + tl.arange(0, BLOCK)
    column = token - first
    inside = (column >= 0) & (column < columns)
    y = tl.load(x_nv + row.to(tl.int64) * columns + column, mask=inside, other=float("-inf"))
    if NOISE:
        x = tl.div_rn(y, tl.load(temperature_n + row))
        group = (begin // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        zero = group * 0
        w0, w1, w2, w3 = tl.philox_impl(
            group, zero + tl.load(position_n + row).to(tl.uint32), zero + tl.load(stream0_n + row).to(tl.uint32),
            zero + tl.load(stream1_n + row).to(tl.uint32), key0.to(tl.uint32, bitcast=True),
            key1.to(tl.uint32, bitcast=True),
        )  # fmt: skip
        word = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK)
        noise = -tl.log(-tl.log((word.to(tl.float64) + 0.5) / 4294967296.0))
        y = (x.to(tl.float64) + noise).to(tl.float32)
        y = tl.where(inside & (x >= tl.load(least_n + row)), y, float("-inf"))
    best = tl.max(y, axis=0)
    at = row * tl.num_programs(0) + block
    tl.store(value_nb + at, best)
    tl.store(token_nb + at, tl.min(tl.where(y == best, token, 2147483647), axis=0).to(tl.int64))


def log_sum_exp_kernel(x_nv, lse_nb, columns, BLOCK: tl.constexpr):
    """Compute the log-sum-exp of a block of columns."""
    block, row = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_nv + row.to(tl.int64) * columns + column, mask=column < columns, other=float("-inf"))
    largest = tl.max(x, axis=0)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    lse = finite + tl.log(tl.sum(tl.exp(x - finite), axis=0))
    tl.store(lse_nb + row * tl.num_programs(0) + block, lse)


_best = TritonKernel(best_kernel, do_not_specialize=["key0", "key1"])
_log_sum_exp = TritonKernel(log_sum_exp_kernel)


class SamplingNoise(NamedTuple):
    """Temperature and noise of each sequence.

    Attributes:
        temperature_n: Temperature, float32.
        least_n: Smallest logit / temperature of tokens that may be sampled, float32.
        position_n: Position word of the Philox counter, int64.
        stream: The two stream words of the Philox counter, int64 `[n]` each.
        key: Philox key.
    """

    temperature_n: Tensor
    least_n: Tensor
    position_n: Tensor
    stream: tuple[Tensor, Tensor]
    key: Key


def best(x_nv: Tensor, first: int, noise: SamplingNoise | None = None) -> tuple[Tensor, Tensor]:
    """Return the largest value of each block, float32 `[n, b]`, and its token, int64 `[n, b]`.

    Among equal values, the lowest token wins. Without `noise`, the values are the logits.

    Args:
        x_nv: Logits of the tokens from `first` on, float32.
        first: First token of this rank's slice of the vocabulary.
        noise: Temperature and noise, or None for greedy decoding.
    """
    (n, columns), x_nv = x_nv.shape, x_nv.contiguous()
    blocks = ceil_div(first % 4 + columns, _BLOCK)
    value_nb = torch.empty(n, blocks, device=x_nv.device)
    token_nb = torch.empty(n, blocks, dtype=torch.int64, device=x_nv.device)
    inputs, words = [x_nv] * 5, [0, 0]  # placeholders that the kernel does not read
    if noise is not None:
        inputs = [x.contiguous() for x in (noise.temperature_n, noise.least_n, noise.position_n, *noise.stream)]
        words = [word - (1 << 32) if word >= 1 << 31 else word for word in noise.key]
    bound = _best.bind(NOISE=noise is not None, BLOCK=_BLOCK, num_warps=4)
    bound.launch((blocks, n), (x_nv, *inputs, value_nb, token_nb), (first, columns, *words))
    return value_nb, token_nb


def log_sum_exp(x_nv: Tensor) -> Tensor:
    """Return the log-sum-exp of each row of `x_nv`, float32: `[n, v]` to `[n]`."""
    (n, columns), x_nv = x_nv.shape, x_nv.contiguous()
    blocks = ceil_div(columns, _BLOCK)
    lse_nb = torch.empty(n, blocks, device=x_nv.device)
    _log_sum_exp.bind(BLOCK=_BLOCK, num_warps=4).launch((blocks, n), (x_nv, lse_nb), (columns,))
    return lse_nb.logsumexp(1)
