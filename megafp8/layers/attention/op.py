"""Softmax attention that computes only the pairs of tokens that attend to each other.

An `AttentionMask` says which pairs these are: documents packed into a sequence, a causal triangle or all pairs, a
sliding window, a prefix. No mask is ever stored as a matrix. `Scores` says how a score is computed if it is more than
q·k/√d. Forward also returns the log-sum-exp of each query's scores. With it, results over parts of the keys can be
merged, and backward needs only the output and the log-sum-exp (Dao et al. 2022, arXiv:2205.14135; Liu et al. 2023,
arXiv:2310.01889).

*Sinks.* A head may have a learned score that takes part in its softmax but has no value, so that the head can attend to
nothing (Xiao et al. 2023, arXiv:2309.17453; gpt-oss, arXiv:2508.10925). A sink acts like one more key with the value
zero. Its share follows from the log-sum-exp, so backward needs nothing but the output and the log-sum-exp that include
it.

Kernels, among which `choose` selects (docs/decisions/0013-attention.md):

    no documents, no window        torch's cuDNN kernel, twice as fast on Hopper as the flash kernel that torch ships
    documents or a window          cuDNN's variable-length kernel through its front end (`attention.cudnn_kernel`)
    the front end is not installed, or torch.use_deterministic_algorithms is on, or a window without causality
                                   torch's flash kernel: cuDNN adds up dq in the order in which blocks of keys finish
    soft caps, biases, dropout; prefixes, boolean masks, queries that are only some tokens of their sequence; heads
    with a width that is not a multiple of 8
                                   our own Triton kernel (`megafp8.layers.attention.kernel`), which is deterministic
    a CPU, fp32 or fp64, or heads wider than 256
                                   the PyTorch reference, some queries at a time (`layers.attention.reference`)
    a CPU in inference mode        torch's flash kernel where possible (`layers.attention.cpu_kernel`)

*Narrow values.* Values may be narrower than keys (latent attention), and the output is as wide as the values. cuDNN and
the references accept such values (`KernelChoice.narrow_values`). For the other kernels, values are padded with zeros,
and the padding is cut off their results. Padded tensors are not kept for backward.

cuDNN's graphs are cached by the layout of q, k and v, and expect all other tensors in the layout that the forward pass
produces. Therefore all tensors here are dense and sequence-first.

Shapes: s queries, t keys, b micro-batch, a query heads, g key-value heads, d head width; n segments of a sample. In the
shape of values or outputs, `d` is the width of values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megafp8.host.shipped import install_command
from megafp8.kernels.limits import LARGEST_HEAD
from megafp8.layers.attention import cpu_kernel as cpu_attention
from megafp8.layers.attention import cudnn_kernel as cudnn_attention
from megafp8.layers.attention import (
    invariant_reference as invariant_attention_reference,
)
from megafp8.layers.attention import (
    reference as attention_reference,
)
from megafp8.layers.attention.mask import CAUSAL, AttentionMask
from megafp8.layers.attention.scores import PLAIN, Scores
from megafp8.linear.fusion import runs_unfused
from megafp8.linear.grad_sink import deliver, wgrad_dtype
from megafp8.numerics.batch_invariance import sigmoid
from megafp8.numerics.onnx_export import in_onnx_export
from megafp8.parallel.context import one_segment


def attention(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask = CAUSAL, sink_a: Tensor | None = None,
    scores: Scores = PLAIN,
) -> Tensor:  # fmt: skip
    """Return softmax(scores of q·kᵀ)·v over the pairs of `mask`, `[s, b, a, d]`; differentiable.

    Values may be narrower than keys; the output is as wide as the values.

    Args:
        q_sbad: Queries.
        k_tbgd: Keys.
        v_tbgd: Values.
        mask: Pairs of queries and keys that attend to each other.
        sink_a: Sink of each head; None means no sinks.
        scores: Settings that turn q·k into scores.

    Raises:
        ValueError: The bias or dropout of `scores` does not fit the shapes.
    """
    record_largest(q_sbad, k_tbgd, mask, scores)
    if scores.batch_invariant:
        return _Attention.apply(q_sbad, k_tbgd, v_tbgd, sink_a, scores.distance_bias_ar, mask, scores)
    # For wide heads torch has only a kernel that stores the matrix of scores.
    wide = q_sbad.is_cuda and q_sbad.shape[-1] > LARGEST_HEAD
    plain = sink_a is None and scores.only_scales and mask.is_plain(q_sbad.shape[0], k_tbgd.shape[0])
    if wide or not plain or not _torch_takes_values(q_sbad, v_tbgd):
        if in_onnx_export():
            return attention_reference.in_one_block(q_sbad, k_tbgd, v_tbgd, mask, sink_a, scores)
        if runs_unfused(q_sbad) and cpu_attention.computes(mask, scores, sink_a):
            return cpu_attention.attention(q_sbad, k_tbgd, v_tbgd, mask, scores)
        return _Attention.apply(q_sbad, k_tbgd, v_tbgd, sink_a, scores.distance_bias_ar, mask, scores)
    q, k, v = q_sbad.permute(1, 2, 0, 3), k_tbgd.permute(1, 2, 0, 3), v_tbgd.permute(1, 2, 0, 3)
    grouped = q.shape[1] != k.shape[1]
    with nullcontext() if _backends_are_set or not q.is_cuda else sdpa_kernel(sdpa_backends(), set_priority=True):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal, scale=scores.scale, enable_gqa=grouped)
    return y.permute(2, 0, 1, 3)


_backends_are_set = False


@contextmanager
def fastest_backends() -> Iterator[None]:
    """Select torch's attention kernels once for all calls of `attention` in this context.

    Selecting them takes the host 30 µs. A call outside the context, for example one that is recomputed in backward,
    selects them itself.
    """
    global _backends_are_set
    before = _backends_are_set
    with sdpa_kernel(sdpa_backends(), set_priority=True):
        _backends_are_set = True
        try:
            yield
        finally:
            _backends_are_set = before


class CoreAttention(Protocol):
    """Softmax attention of one micro-batch, which any layer can call.

    It maps q `[s, b, a, d]`, k and v `[s, b, g, d]` to outputs `[s, b, a, d]`. Values may be narrower than keys, and
    the output is as wide as the values.
    """

    def __call__(
        self, q_sbad: Tensor, k_sbgd: Tensor, v_sbgd: Tensor, sink_a: Tensor | None = None, scores: Scores = PLAIN, /
    ) -> Tensor:
        """Return the attention output; `sink_a` holds the layer's sinks, and `scores` its score settings."""

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that it reads in addition to its arguments."""
        ...


@dataclass(frozen=True)
class SelfAttention:
    """Attention of tokens to each other with a fixed mask."""

    mask: AttentionMask

    def __call__(
        self, q_sbad: Tensor, k_sbgd: Tensor, v_sbgd: Tensor, sink_a: Tensor | None = None, scores: Scores = PLAIN
    ) -> Tensor:
        """Return the attention output `[s, b, a, d]`."""
        return attention(q_sbad, k_sbgd, v_sbgd, self.mask, sink_a, scores)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors of the mask."""
        return self.mask.tensors


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, sink_a: Tensor | None, bias_ar: Tensor | None,
        mask: AttentionMask, scores: Scores,
    ) -> Tensor:  # fmt: skip
        o, lse = forward(q_sbad.contiguous(), k_tbgd.contiguous(), v_tbgd.contiguous(), mask, scores)
        if sink_a is not None:
            o, lse = with_sink(o, lse, sink_a, batch_invariant=scores.batch_invariant)
        ctx.save_for_backward(q_sbad, k_tbgd, v_tbgd, o, lse, bias_ar)  # q, k, v are views; their base is kept anyway
        ctx.mask, ctx.sink_a, ctx.scores = mask, sink_a, replace(scores, distance_bias_ar=None)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_sbad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, bias_ar = ctx.saved_tensors  # read once: recomputed tensors can be unpacked only once
        do, scores = do_sbad.contiguous(), replace(ctx.scores, distance_bias_ar=bias_ar)
        dsink = None if ctx.sink_a is None else sink_gradient(do, o, lse, ctx.sink_a)
        dq, dk, dv, dbias = backward(
            do, q.contiguous(), k.contiguous(), v.contiguous(), o, lse, ctx.mask, scores,
            bias_grad=ctx.needs_input_grad[4],
        )  # fmt: skip
        return dq, dk, dv, dsink, None if dbias is None else dbias.to(bias_ar.dtype), None, None


def with_sink(
    o_sbad: Tensor, lse_sba: Tensor, sink_a: Tensor, *, batch_invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp including sinks, from the output and log-sum-exp of the keys alone."""
    sink = sink_a.detach().to(lse_sba.dtype)
    key_share = sigmoid(lse_sba - sink, batch_invariant=batch_invariant).unsqueeze(-1)
    return (o_sbad * key_share).to(o_sbad.dtype), torch.logaddexp(lse_sba, sink)


def sink_gradient(do_sbad: Tensor, o_sbad: Tensor, lse_sba: Tensor, sink_a: Tensor) -> Tensor | None:
    """Deliver the gradient of `sink_a` to its gradient sink, or return it; `o_sbad` and `lse_sba` include the sinks.

    A higher sink score takes from all keys in proportion: dL/dsink = -Σ exp(sink - lse) · (do · o).
    """
    share_sba = torch.exp(sink_a.detach().to(lse_sba.dtype) - lse_sba)
    dsink_a = -(share_sba * torch.linalg.vecdot(do_sbad.to(lse_sba.dtype), o_sbad.to(lse_sba.dtype))).sum((0, 1))
    return deliver(sink_a, dsink_a.to(wgrad_dtype(sink_a)))


# --- kernels ----------------------------------------------------------------------------------------------------------

_WITHOUT_FRONT_END = f"cuDNN's is faster, and needs nvidia-cudnn-frontend ({install_command('gpu')})"
_SDPA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def sdpa_backends() -> list[SDPBackend]:
    """Return the kernels that torch's attention may run, fastest first.

    In deterministic mode cuDNN's kernel is excluded, because the order of its sums is not fixed.
    """
    return _SDPA_BACKENDS[1:] if torch.are_deterministic_algorithms_enabled() else _SDPA_BACKENDS


class KernelChoice(NamedTuple):
    """Selected attention kernel and the reason for the selection.

    Attributes:
        kernel: Name of the kernel: `sdpa`, `cudnn`, `flash`, `triton` or `reference`.
        what: Description of the kernel.
        why: Reason why it is not the fastest kernel; empty if it is the fastest.
        narrow_values: Whether the kernel accepts values that are narrower than keys.
    """

    kernel: str
    what: str
    why: str = ""
    narrow_values: bool = False


def choose(
    mask: AttentionMask, scores: Scores, s: int, t: int, head_dim: int, device_type: str, dtype: torch.dtype,
    *, deterministic: bool, front_end: bool, cudnn_narrow: bool = False,
) -> KernelChoice:  # fmt: skip
    """Select the kernel for s queries and t keys.

    `front_end` says whether cuDNN's front end is installed, and `cudnn_narrow` whether cuDNN accepts values that are
    narrower than keys (`cudnn_takes_narrow`).
    """
    feature = _what_only_ours_computes(mask, scores, s, t)
    if device_type != "cuda":
        return KernelChoice("reference", "the reference in PyTorch", narrow_values=True)
    if dtype not in (torch.bfloat16, torch.float16):
        why = f"kernels take bf16 and fp16, not {dtype}"
        return KernelChoice("reference", "the reference in PyTorch", why, narrow_values=True)
    if head_dim > LARGEST_HEAD:
        why = f"kernels take heads up to {LARGEST_HEAD} wide, not {head_dim}"
        return KernelChoice("reference", "the reference in PyTorch", why, narrow_values=True)
    if feature is None and head_dim % 8:
        feature = f"heads of {head_dim} channels"
    if feature is not None:
        return KernelChoice("triton", "our own kernel", f"no other one computes {feature}")
    if deterministic:
        return KernelChoice("flash", "torch's flash kernel", "deterministic is true")
    if mask.window is not None and not mask.causal:
        return KernelChoice("flash", "torch's flash kernel", "the window is on both sides")
    if mask.cu_seqlens_q is None and mask.window is None:
        return KernelChoice("sdpa", "torch's cuDNN kernel", narrow_values=cudnn_narrow)
    if front_end and mask.cu_seqlens_q is not None:
        return KernelChoice("cudnn", "cuDNN's variable-length kernel", narrow_values=cudnn_narrow)
    return KernelChoice("flash", "torch's flash kernel", _WITHOUT_FRONT_END)


def _what_only_ours_computes(mask: AttentionMask, scores: Scores, s: int, t: int) -> str | None:
    if scores.softcap is not None:
        return "a soft cap"
    if scores.distance_bias_ar is not None:
        return "a bias by distance"
    if scores.dropout is not None:
        return "dropout that is the same under every layout"
    if mask.prefix_b is not None:
        return "a prefix"
    if mask.visible is not None:
        return "a boolean mask in blocks"
    if mask.cu_seqlens_q is not None or mask.window is not None:
        return None if mask.positions_bs is None else "queries that are some tokens of their sequence"
    return None if mask.is_plain(s, t) else "a causal mask of fewer queries than keys"


def _choice(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scores: Scores) -> KernelChoice:
    deterministic, front_end = torch.are_deterministic_algorithms_enabled(), cudnn_attention.is_available()
    s, t, d, w = len(q), len(k), q.shape[-1], v.shape[-1]
    return choose(
        mask, scores, s, t, d, q.device.type, q.dtype, deterministic=deterministic, front_end=front_end,
        cudnn_narrow=w < d and q.is_cuda and cudnn_takes_narrow(d, w, q.dtype, q.device),
    )  # fmt: skip


_NARROW_CUDNN = 91900
"""First cuDNN version with which values narrower than keys were tested, forward and backward, on an H200."""


@functools.cache
def cudnn_takes_narrow(head_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether cuDNN's kernels on `device` accept values of `value_dim` channels, fewer than the keys have."""
    if (torch.backends.cudnn.version() or 0) < _NARROW_CUDNN:
        return False
    q, k, v = (torch.empty(1, 1, 64, d, dtype=dtype, device=device) for d in (head_dim, head_dim, value_dim))
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, False)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.backends.cuda.can_use_cudnn_attention(parameters)


def _torch_takes_values(q: Tensor, v: Tensor) -> bool:
    """Return whether torch's attention accepts values of this width with its fastest kernel (`sdpa_backends`).

    Otherwise narrow values go to kernels that are slower or store a matrix of scores.
    """
    d, w = q.shape[-1], v.shape[-1]
    if w == d:
        return True
    if not q.is_cuda or torch.are_deterministic_algorithms_enabled():
        return False
    return q.dtype not in (torch.bfloat16, torch.float16) or cudnn_takes_narrow(d, w, q.dtype, q.device)


_DOCUMENTS = AttentionMask(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32))


def describe(device: torch.device, mask: AttentionMask = _DOCUMENTS, scores: Scores = PLAIN) -> str:
    """Return a log line that names the kernel of such attention in bf16, and why; the default mask is documents."""
    backend = choose(
        mask, scores, 1, 1, 128, device.type, torch.bfloat16,
        deterministic=torch.are_deterministic_algorithms_enabled(), front_end=cudnn_attention.is_available(),
    )  # fmt: skip
    feature = _what_only_ours_computes(mask, scores, 1, 1)
    what = f"attention with {feature}" if feature is not None else "attention of documents and windows"
    return f"{what}: {backend.what}" + (f", since {backend.why}" if backend.why else "")


def forward(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, scores: Scores = PLAIN
) -> tuple[Tensor, Tensor]:
    """Return the output `[s, b, a, d]` and the log-sum-exp of each query's scores `[s, b, a]`, fp32 or wider.

    All tensors are dense. A query without keys has the output 0 and the log-sum-exp -inf.
    """
    _check_shapes(q_sbad, k_tbgd, mask, scores)
    if scores.batch_invariant:
        return _invariant_forward(q_sbad, k_tbgd, v_tbgd, mask, scores)
    choice, w = _choice(q_sbad, k_tbgd, v_tbgd, mask, scores), v_tbgd.shape[-1]
    if w == q_sbad.shape[-1] or choice.narrow_values:
        return _forward(choice.kernel, q_sbad, k_tbgd, v_tbgd, mask, scores)
    o_sbad, lse_sba = _forward(choice.kernel, q_sbad, k_tbgd, _padded(v_tbgd, q_sbad), mask, scores)
    return o_sbad[..., :w].contiguous(), lse_sba


def _invariant_forward(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Compute `forward` with an order of sums that does not depend on the other queries."""
    invariant_attention_reference.check(mask, scores)
    if q_sbad.is_cuda and q_sbad.dtype != torch.float64 and q_sbad.shape[-1] <= LARGEST_HEAD:
        from megafp8.layers.attention import (
            invariant_kernel as invariant_attention,
        )  # needs Triton, which comes with torch's CUDA builds

        return invariant_attention.forward(q_sbad, k_tbgd, v_tbgd, mask, scores)
    return invariant_attention_reference.forward(q_sbad, k_tbgd, v_tbgd, mask, scores)


def _padded(x: Tensor, like: Tensor) -> Tensor:
    """Return values or outputs padded with zeros to the width of `like`."""
    return F.pad(x, (0, like.shape[-1] - x.shape[-1]))


def _forward(
    kernel: str, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Compute `forward` with the named kernel."""
    if kernel == "cudnn":
        return cudnn_attention.forward(q_sbad, k_tbgd, v_tbgd, mask, scores.scale)
    if kernel == "flash":
        return _flash_forward(q_sbad, k_tbgd, v_tbgd, mask, scores.scale)
    if kernel == "triton":
        from megafp8.layers.attention import kernel as attention  # needs Triton, which comes with torch's CUDA builds

        return attention.forward(q_sbad, k_tbgd, v_tbgd, mask, scores)
    if kernel == "sdpa":
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_sbad, k_tbgd, v_tbgd))
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, mask.causal, scale=scores.scale
        )
        return o.permute(2, 0, 1, 3).contiguous(), lse.view(*q.shape[:3]).permute(2, 0, 1).contiguous()
    return attention_reference.forward(q_sbad, k_tbgd, v_tbgd, mask, scores)


@torch.no_grad()
def record_largest(q_sbad: Tensor, k_tbgd: Tensor, mask: AttentionMask, scores: Scores) -> None:
    """Raise `scores.largest_a`, if present, to the largest scores of these queries."""
    if scores.largest_a is not None:
        largest_a = largest(q_sbad.detach(), k_tbgd.detach(), mask, scores)
        torch.maximum(scores.largest_a, largest_a.to(scores.largest_a.dtype), out=scores.largest_a)


def largest(q_sbad: Tensor, k_tbgd: Tensor, mask: AttentionMask, scores: Scores) -> Tensor:
    """Return the largest score of each head, `[a]`, fp32 or wider; -inf if there is no pair.

    `scores` must have no soft cap and no bias. No attention kernel returns this value, so a separate pass computes the
    first of forward's two products.
    """
    assert scores.softcap is None
    assert scores.distance_bias_ar is None
    _check_shapes(q_sbad, k_tbgd, mask, scores)
    if q_sbad.is_cuda and q_sbad.dtype in (torch.bfloat16, torch.float16) and q_sbad.shape[-1] <= LARGEST_HEAD:
        from megafp8.layers.attention import kernel as attention  # needs Triton, which comes with torch's CUDA builds

        return attention.largest(q_sbad.contiguous(), k_tbgd.contiguous(), mask, scores)
    return attention_reference.largest(q_sbad, k_tbgd, mask, scores)


def backward(
    do_sbad: Tensor, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, o_sbad: Tensor, lse_sba: Tensor,
    mask: AttentionMask, scores: Scores = PLAIN, *, bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return these keys' contribution to dq `[s, b, a, d]`, and these queries' to dk and dv `[t, b, g, d]`.

    The fourth value is the gradient of the bias of `scores`, fp32 or wider, or None without `bias_grad`. `o_sbad` and
    `lse_sba` are over all keys to which the queries attend. All tensors are dense.
    """
    choice, w = _choice(q_sbad, k_tbgd, v_tbgd, mask, scores), v_tbgd.shape[-1]
    if w == q_sbad.shape[-1] or choice.narrow_values:
        tensors = do_sbad, q_sbad, k_tbgd, v_tbgd, o_sbad, lse_sba
        return _backward(choice.kernel, *tensors, mask, scores, bias_grad)
    do, v, o = (_padded(x, q_sbad) for x in (do_sbad, v_tbgd, o_sbad))
    dq, dk, dv, dbias = _backward(choice.kernel, do, q_sbad, k_tbgd, v, o, lse_sba, mask, scores, bias_grad)
    return dq, dk, dv[..., :w], dbias


def _backward(
    kernel: str, do_sbad: Tensor, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, o_sbad: Tensor, lse_sba: Tensor,
    mask: AttentionMask, scores: Scores, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute `backward` with the named kernel."""
    tensors = do_sbad, q_sbad, k_tbgd, v_tbgd, o_sbad, lse_sba
    if kernel == "cudnn":
        return *cudnn_attention.backward(*tensors, mask, scores.scale), None
    if kernel == "flash":
        return *_flash_backward(*tensors, mask, scores.scale), None
    if kernel == "triton":
        from megafp8.layers.attention import kernel as attention  # needs Triton, which comes with torch's CUDA builds

        return attention.backward(*tensors, mask, scores, bias_grad)
    if kernel == "sdpa":
        do, q, k, v, o = (x.permute(1, 2, 0, 3) for x in tensors[:5])
        lse = lse_sba.permute(1, 2, 0).contiguous().unsqueeze(-1)
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse, unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, mask.causal,
            scale=scores.scale,
        )  # fmt: skip
        return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3), None
    return attention_reference.backward(*tensors, mask, scores, bias_grad)


def _check_shapes(q_sbad: Tensor, k_tbgd: Tensor, mask: AttentionMask, scores: Scores) -> None:
    """Raise ValueError if the mask or the scores do not fit the shapes of q and k."""
    (s, b, a, _), t = q_sbad.shape, len(k_tbgd)
    scores.check(a, b, s if mask.positions_bs is None else t, t)
    if mask.visible is not None:
        mask_shape, ours = mask.visible.shape, (b, a, s, t)
        if (
            len(mask_shape) != 4
            or mask_shape[2:] != ours[2:]
            or any(n not in (1, m) for n, m in zip(mask_shape, ours, strict=True))
        ):
            raise ValueError(f"visible: {list(mask_shape)} is not [1 or {b}, 1 or {a}, {s}, {t}]")
        if mask.visible.dtype != torch.bool:
            raise ValueError(f"visible: {mask.visible.dtype} is not torch.bool")
    if mask.prefix_b is not None and mask.prefix_b.shape != (b,):
        raise ValueError(f"prefix_b: {list(mask.prefix_b.shape)} is not [{b}], one length per sequence")


# --- torch's flash kernel ---------------------------------------------------------------------------------------------


def _packed(x_sbad: Tensor) -> Tensor:
    """Return `[b·s, a, d]`, one sample after the other; a view if b is 1."""
    return x_sbad.transpose(0, 1).flatten(0, 1)


def _flash_arguments(q_sbad: Tensor, k_tbgd: Tensor, mask: AttentionMask) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the offsets into packed tensors with the greatest lengths, and the options of the window."""
    (s, b), t = q_sbad.shape[:2], k_tbgd.shape[0]
    whole_q, whole_k = (one_segment(x, q_sbad.device) for x in (s, t))
    sample = torch.arange(b, dtype=torch.int32, device=q_sbad.device)[:, None]
    # The end of a sample is the start of the next sample, with an empty segment between them.
    offsets_q = ((whole_q if mask.cu_seqlens_q is None else mask.cu_seqlens_q) + sample * s).flatten()
    offsets_k = ((whole_k if mask.cu_seqlens_k is None else mask.cu_seqlens_k) + sample * t).flatten()
    window = {}
    if mask.window is not None:
        window = {"window_size_left": mask.window - 1, "window_size_right": 0 if mask.causal else mask.window - 1}
    return (offsets_q, offsets_k, s, t), window


def _flash_forward(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, scale: float | None
) -> tuple[Tensor, Tensor]:
    s, b, a, _ = q_sbad.shape
    packed = [_packed(x) for x in (q_sbad, k_tbgd, v_tbgd)]
    offsets, window = _flash_arguments(q_sbad, k_tbgd, mask)
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        *packed, *offsets, 0.0, mask.causal, False, scale=scale, **window
    )
    o_sbad = o.unflatten(0, (b, s)).transpose(0, 1).contiguous()
    lse_sba = lse.view(a, b, s).permute(2, 1, 0).contiguous()
    if mask.cu_seqlens_q is mask.cu_seqlens_k:
        return o_sbad, lse_sba
    empty = torch.isposinf(lse_sba)  # the kernel's value for a query without keys
    return o_sbad.masked_fill(empty[..., None], 0.0), lse_sba.masked_fill(empty, -math.inf)


def _flash_backward(
    do_sbad: Tensor, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, o_sbad: Tensor, lse_sba: Tensor,
    mask: AttentionMask, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (s, b), t = q_sbad.shape[:2], k_tbgd.shape[0]
    do, q, k, v, o = (_packed(x) for x in (do_sbad, q_sbad, k_tbgd, v_tbgd, o_sbad))
    lse = lse_sba.permute(2, 1, 0).flatten(1).contiguous()
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
    offsets, window = _flash_arguments(q_sbad, k_tbgd, mask)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        do, q, k, v, o, lse, *offsets, 0.0, mask.causal, unused, unused, scale=scale, **window
    )
    return tuple(x.unflatten(0, (b, n)).transpose(0, 1) for x, n in ((dq, s), (dk, t), (dv, t)))
