"""Kernels of the cross-entropy over a shard of the vocabulary: one pass over the logits each way, no temporaries.

The reference is `megafp8.layers.head.op`. It makes an fp32 copy of the logits, the largest tensor of the model, passes
over it six times, and saves it for backward. Here bf16 logits are read once in forward (2 bytes per element), and read
and written once in backward (4 bytes per element).

Forward computes the maximum online (Milakov and Gimelshein 2018, arXiv:1805.02867): when a larger x appears, the sum of
exp(x - maximum) so far is rescaled. A thread does this once for eight neighboring columns, so that memory is the
bottleneck and not arithmetic. Sums are combined once, at the end. Torch sums in a different order, so sums agree up to
rounding, not bit for bit.

Backward overwrites the logits with the gradient, so nothing may read the logits afterwards.

Between forward and backward, `megafp8.layers.head.fused_op` combines ranks: it takes the maximum of the maxima, then
adds the sums after rescaling them to it. Triton's interpreter reads and rounds bf16 incorrectly, so there kernels
receive fp32, and torch rounds.

Shapes: n tokens, v columns of this rank's shard of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import ceil_div, kernel_input
from megafp8.kernels.launch import TritonKernel

BLOCK = 4096  # columns at a time: 32 per thread in forward, 16 in backward
_WARPS = {"statistics": 4, "gradient": 8}
_NEIGHBOURS = tl.constexpr(8)
"""Number of columns that share a running maximum: a thread loads this many at once in bf16."""
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # not -inf: -inf - -inf is NaN


@triton.jit
def _tanh_of(x, cap):
    """Return tanh(x / cap), with an error of at most about 2^-23."""
    e = tl.exp(tl.abs(x) * (-2.0 / cap))
    return tl.where(x < 0.0, e - 1.0, 1.0 - e) / (1.0 + e)


@TritonKernel
def statistics_kernel(x_nv, labels_n, statistics_3n, n, columns, first, valid, cap, CAPPED: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    """Compute one token's maximum, its sum of exponentials, and its label's logit."""
    token = tl.program_id(0)
    row = x_nv + token.to(tl.int64) * columns
    j = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK // _NEIGHBOURS], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK // _NEIGHBOURS], tl.float32)
    for start in range(0, valid, BLOCK):
        x = tl.load(row + start + j, mask=start + j < valid, other=-float("inf")).to(tl.float32)
        if CAPPED:
            x = tl.where(start + j < valid, cap * _tanh_of(x, cap), x)
        x = x.reshape(BLOCK // _NEIGHBOURS, _NEIGHBOURS)
        before, largest = largest, tl.maximum(largest, tl.max(x, axis=1))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(x - largest[:, None]), axis=1)
    maximum = tl.max(largest, axis=0)
    local = tl.load(labels_n + token) - first
    label_logit = tl.load(row + local, mask=(local >= 0) & (local < valid), other=0.0).to(tl.float32)
    if CAPPED:
        label_logit = cap * _tanh_of(label_logit, cap)
    tl.store(statistics_3n + token, maximum)
    tl.store(statistics_3n + n + token, tl.sum(total * tl.exp(largest - maximum), axis=0))
    tl.store(statistics_3n + 2 * n + token, label_logit)


@TritonKernel
def gradient_kernel(x_nv, labels_n, maximum_n, weight_n, dloss_n, blocks, columns, first, valid, cap,
                    CAPPED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Compute the gradient of a block of columns of one token."""
    token = tl.program_id(0) // blocks
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = x_nv + token.to(tl.int64) * columns
    x = tl.load(row + j, mask=j < valid, other=-float("inf")).to(tl.float32)
    if CAPPED:
        tanh = _tanh_of(x, cap)
        x = tl.where(j < valid, cap * tanh, x)
    dloss = tl.load(dloss_n + token)
    dx = tl.exp(x - tl.load(maximum_n + token)) * (tl.load(weight_n + token) * dloss)
    dx = tl.where(j == tl.load(labels_n + token) - first, dx - dloss, dx)
    if CAPPED:
        dx = dx * (1.0 - tanh * tanh)
    tl.store(row + j, dx.to(x_nv.dtype.element_ty), mask=j < columns)


def _check(x_nv: Tensor, labels_n: Tensor, valid: int) -> None:
    assert x_nv.dtype in (torch.bfloat16, torch.float16, torch.float32)
    assert labels_n.dtype == torch.int64
    assert x_nv.is_contiguous()
    assert labels_n.is_contiguous()
    assert labels_n.shape == x_nv.shape[:1]
    assert 0 <= valid <= x_nv.shape[1]


def statistics(
    x_nv: Tensor, labels_n: Tensor, *, first: int, valid: int, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's maximum, its sum of exp(x - maximum), and its label's logit, all `[n]` fp32.

    `x_nv` is contiguous, of 16 or 32 bits, and holds columns `first` to `first + v` of the vocabulary; columns from
    `valid` on are ignored. `labels_n` is int64. The logit of another rank's label is 0, and the sum is 0 if no column
    is valid. With `softcap`, x is softcap · tanh(logit / softcap).
    """
    _check(x_nv, labels_n, valid)
    n, columns = x_nv.shape
    statistics_3n = torch.empty(3, n, dtype=torch.float32, device=x_nv.device)
    if n:
        kernel = statistics_kernel.bind(
            CAPPED=softcap is not None, BLOCK=BLOCK, num_warps=_WARPS["statistics"], enable_fp_fusion=False
        )
        sizes = (n, columns, first, valid, softcap or 1.0)
        kernel.launch((n, 1), (kernel_input(x_nv), labels_n, statistics_3n), sizes)
    maximum_n, total_n, label_logit_n = statistics_3n.unbind()
    return maximum_n, total_n, label_logit_n


def gradient_(
    x_nv: Tensor, labels_n: Tensor, maximum_n: Tensor, weight_n: Tensor, dloss_n: Tensor, *, first: int, valid: int,
    softcap: float | None = None,
) -> None:  # fmt: skip
    """Overwrite the logits with their gradient: `exp(x - maximum)·weight·dloss`, minus dloss at the label.

    `weight_n` normalizes the softmax and includes the z-loss: (1 + 2·z·log Z) / Σ exp(x - maximum). `weight_n`,
    `maximum_n` and `dloss_n` are contiguous fp32 `[n]`. The other arguments are as in `statistics`. Padding columns
    become 0. Autograd does not notice the change.
    """
    _check(x_nv, labels_n, valid)
    for per_token in (maximum_n, weight_n, dloss_n):
        assert per_token.dtype == torch.float32
        assert per_token.shape == labels_n.shape
        assert per_token.is_contiguous()
    n, columns = x_nv.shape
    if not x_nv.numel():
        return
    blocks = ceil_div(columns, BLOCK)
    target = kernel_input(x_nv)
    kernel = gradient_kernel.bind(
        CAPPED=softcap is not None, BLOCK=BLOCK, num_warps=_WARPS["gradient"], enable_fp_fusion=False
    )
    tensors = (target, labels_n, maximum_n, weight_n, dloss_n)
    kernel.launch((n * blocks, 1), tensors, (blocks, columns, first, valid, softcap or 1.0))
    if target is not x_nv:
        x_nv.copy_(target)
