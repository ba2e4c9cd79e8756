"""Transpose of FP8 data with 16-byte memory accesses. Reference: `x.t().contiguous()`.

Transposing the bytes of a gathered rowwise copy gives the columnwise copy for wgrad or dgrad. PyTorch copies one byte
at a time, at a ninth of the bandwidth, which takes a tenth of a tensor-parallel step. This kernel reads a matrix as
32-bit words, each with four columns of a row. The words of four rows are a 4×4 block of bytes, which a thread
transposes in registers. The transposed words, each with four rows of a column, then pass through shared memory to the
result.

The weights of several experts are one matrix. The rows of each expert become columns, with columns of zeros after them.

Shapes: r rows, c columns, both multiples of four; w = c/4 words per row, q = r/4 quads of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div
from megafp8.kernels.launch import TritonKernel

_QUADS, _WORDS, _WARPS = 32, 32, 4  # tile of a program: 16 KiB


@triton.jit
def _byte_of_each(a0, a1, a2, a3, k: tl.constexpr):
    """Return byte k of each of four words, packed into one word."""
    first = ((a0 >> (8 * k)) & 0xFF) | (((a1 >> (8 * k)) & 0xFF) << 8)
    second = ((a2 >> (8 * k)) & 0xFF) | (((a3 >> (8 * k)) & 0xFF) << 8)
    return first | (second << 16)


@TritonKernel
def transpose_kernel(x_rw, y_cq, words, quads, padded, all_quads, QUADS: tl.constexpr, WORDS: tl.constexpr):
    """Transpose a tile of QUADS × 4 rows and WORDS × 4 columns.

    Each expert has `quads` quads of rows. In the result it has `padded` quads, and all experts have `all_quads`.
    """
    tiles = tl.cdiv(padded, QUADS)
    expert, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    w0, q0 = tl.program_id(0) * WORDS, tile * QUADS
    w, q = tl.arange(0, WORDS), tl.arange(0, QUADS)
    inside = (q0 + q < quads)[:, None] & (w0 + w < words)[None, :]
    x = x_rw + (expert * quads + q0).to(tl.int64) * 4 * words + w0 + (q[:, None] * (4 * words) + w[None, :])
    a0 = tl.load(x, mask=inside, other=0)
    a1 = tl.load(x + words, mask=inside, other=0)
    a2 = tl.load(x + 2 * words, mask=inside, other=0)
    a3 = tl.load(x + 3 * words, mask=inside, other=0)
    first = w0.to(tl.int64) * 4 * all_quads + expert * padded + q0
    y = y_cq + first + (w[:, None] * (4 * all_quads) + q[None, :])
    transposed = (w0 + w < words)[:, None] & (q0 + q < padded)[None, :]
    for k in tl.static_range(4):
        tl.store(y + k * all_quads, tl.trans(_byte_of_each(a0, a1, a2, a3, k)), mask=transposed)


def transpose(x_rc: Tensor, experts: int = 1, alignment: int = 4) -> Tensor:
    """Return the transpose of `x_rc` as a contiguous tensor, `[c, experts · padded]`.

    The dtype has one byte, and `x_rc` must be contiguous. Each of `experts` has r / experts rows, which become as many
    columns, padded with zeros to a multiple of `alignment`.
    """
    r, c = x_rc.shape
    assert x_rc.itemsize == 1
    assert x_rc.is_contiguous()
    assert r % (4 * experts) == c % 4 == 0, f"{r}×{c} bytes of {experts} experts are not whole words"
    words, quads = c // 4, r // experts // 4
    padded = ceil_div(4 * quads, alignment) * alignment // 4
    y_cr = torch.empty((c, 4 * padded * experts), dtype=x_rc.dtype, device=x_rc.device)
    if x_rc.numel():
        grid = (ceil_div(words, _WORDS), experts * ceil_div(padded, _QUADS))
        kernel = transpose_kernel.bind(QUADS=_QUADS, WORDS=_WORDS, num_warps=_WARPS)
        tensors = x_rc.view(torch.int32), y_cr.view(torch.int32)
        kernel.launch(grid, tensors, (words, quads, padded, padded * experts))
    return y_cr
