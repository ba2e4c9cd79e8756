"""The largest of logits / temperature + Gumbel noise, in one pass over the logits.

Reference: the same in PyTorch in `megafp8.inference.sampling`, where Philox alone takes some eighty passes.

Shapes: n sequences, v this rank's slice of the vocabulary, b blocks of it.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div
from megafp8.kernels.launch import Kernel
from megafp8.philox import Key

_BLOCK = 1024


def noisy_best_kernel(
    x_nv, temperature_n, least_n, position_n, stream0_n, stream1_n, value_nb, token_nb, first, columns, key0, key1,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a block of tokens, which begins at a multiple of 4, as four have the words of one Philox."""
    block, row = tl.program_id(0), tl.program_id(1)
    begin = first // 4 * 4 + block * BLOCK
    token = begin + tl.arange(0, BLOCK)
    column = token - first
    inside = (column >= 0) & (column < columns)
    x = tl.load(x_nv + row.to(tl.int64) * columns + column, mask=inside, other=float("-inf"))
    x = tl.div_rn(x, tl.load(temperature_n + row))
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


_noisy_best = Kernel(noisy_best_kernel, do_not_specialize=["key0", "key1"])


def noisy_best(
    x_nv: Tensor, temperature_n: Tensor, least_n: Tensor, position_n: Tensor, stream: tuple[Tensor, Tensor], key: Key,
    first: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of each block of tokens the largest sum, float32, and its token, int64, the lowest of equal ones: `[n, b]`.

    `x_nv`: float32, of tokens from `first` on. `least_n`: tokens with less than this, divided by the temperature, are
    left out. `position_n`, `stream`: int64, words of the counter of each sequence's noise.
    """
    n, columns = x_nv.shape
    blocks = ceil_div(first % 4 + columns, _BLOCK)
    value_nb = torch.empty(n, blocks, device=x_nv.device)
    token_nb = torch.empty(n, blocks, dtype=torch.int64, device=x_nv.device)
    words = [word - (1 << 32) if word >= 1 << 31 else word for word in key]
    bound = _noisy_best.bind(BLOCK=_BLOCK, num_warps=4)
    bound.launch(
        (blocks, n),
        [x.contiguous() for x in (x_nv, temperature_n, least_n, position_n, *stream, value_nb, token_nb)],
        (first, columns, *words),
    )  # fmt: skip
    return value_nb, token_nb
