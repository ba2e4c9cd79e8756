"""Softmax attention that computes only the pairs of tokens that attend to each other.

An `AttentionMask` says which pairs these are: documents packed into a sequence, a causal triangle or all pairs, a
sliding window, a prefix. No mask is ever stored as a matrix. `Scores` says how a score is computed if it is more than
q·k/√d. Forward also returns the log-sum-exp of each query's scores. With it, results over parts of the keys can be
merged, and backward needs only the output and the log-sum-exp (Dao et al. 2022, arXiv:2205.14135; Liu et al. 2023,
arXiv:2310.01889).

*Sinks* are added to the results of any kernel (`layers.attention.sink_op`).

Kernels, among which `choose` selects (docs/decisions/0013-attention.md):

    Hopper                         FlashAttention-4 (`layers.attention.flash_kernel`)
    other GPUs, or without the package flash-attn-4
                                   torch's flash kernel; for whole sequences `scaled_dot_product_attention`, which runs
                                   cuDNN's kernel unless torch.use_deterministic_algorithms is on
    soft caps, biases, dropout; prefixes, boolean masks, queries that are only some tokens of their sequence; heads
    with a width that is not a multiple of 8
                                   our own Triton kernel (`megafp8.layers.attention.kernel`), which is deterministic
    a CPU, fp32 or fp64, or heads wider than 256
                                   the PyTorch reference, some queries at a time (`layers.attention.reference`)
    a CPU in inference mode        torch's flash kernel where possible (`layers.attention.cpu_kernel`)

*Narrow values.* Values may be narrower than keys (latent attention), and the output is as wide as the values.
FlashAttention-4 and the references accept such values (`KernelChoice.narrow_values`). For the other kernels, values are
padded with zeros, and the padding is cut off their results. Padded tensors are not kept for backward.

Shapes: s queries, t keys, b micro-batch, a query heads, g key-value heads, d head width; n segments of a sample. In the
shape of values or outputs, `d` is the width of values.
"""

from __future__ import annotations

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

from megafp8.kernels.limits import LARGEST_HEAD
from megafp8.layers.attention import cpu_kernel as cpu_attention
from megafp8.layers.attention import flash_kernel as flash_attention
from megafp8.layers.attention import (
    invariant_reference as invariant_attention_reference,
)
from megafp8.layers.attention import (
    reference as attention_reference,
)
from megafp8.layers.attention.mask import CAUSAL, AttentionMask
from megafp8.layers.attention.scores import PLAIN, Scores
from megafp8.layers.attention.sink_op import sink_gradient, with_sink
from megafp8.linear.fusion import runs_unfused
from megafp8.numerics.onnx_export import in_onnx_export


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
    if not _is_torchs(q_sbad, k_tbgd, v_tbgd, mask, sink_a, scores):
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


def _is_torchs(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, sink_a: Tensor | None, scores: Scores
) -> bool:
    """Return whether torch's `scaled_dot_product_attention` computes this attention."""
    plain = sink_a is None and scores.only_scales and mask.is_plain(len(q_sbad), len(k_tbgd))
    if not plain or q_sbad.shape[-1] != v_tbgd.shape[-1]:
        return False
    if not q_sbad.is_cuda or in_onnx_export():
        return True
    # For wide heads torch has only a kernel that stores the matrix of scores.
    return q_sbad.shape[-1] <= LARGEST_HEAD and _choice(q_sbad, k_tbgd, v_tbgd, mask, scores).kernel != "flash"


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
        o, lse = forward(q_sbad, k_tbgd, v_tbgd, mask, scores)
        if sink_a is not None:
            o, lse = with_sink(o, lse, sink_a, batch_invariant=scores.batch_invariant)
        ctx.save_for_backward(q_sbad, k_tbgd, v_tbgd, o, lse, bias_ar)  # q, k, v are views; their base is kept anyway
        ctx.mask, ctx.sink_a, ctx.scores = mask, sink_a, replace(scores, distance_bias_ar=None)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_sbad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, bias_ar = ctx.saved_tensors  # read once: recomputed tensors can be unpacked only once
        scores = replace(ctx.scores, distance_bias_ar=bias_ar)
        dsink = None if ctx.sink_a is None else sink_gradient(do_sbad, o, lse, ctx.sink_a)
        dq, dk, dv, dbias = backward(do_sbad, q, k, v, o, lse, ctx.mask, scores, bias_grad=ctx.needs_input_grad[4])
        return dq, dk, dv, dsink, None if dbias is None else dbias.to(bias_ar.dtype), None, None


# --- kernels ----------------------------------------------------------------------------------------------------------

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
        kernel: Name of the kernel: `flash`, `torch`, `triton` or `reference`.
        what: Description of the kernel.
        why: Reason why it is not the fastest kernel; empty if it is the fastest.
        narrow_values: Whether the kernel accepts values that are narrower than keys.
    """

    kernel: str
    what: str
    why: str = ""
    narrow_values: bool = False


def choose(
    mask: AttentionMask, scores: Scores, s: int, t: int, head_dim: int, value_dim: int, device_type: str,
    dtype: torch.dtype, missing: str | None,
) -> KernelChoice:  # fmt: skip
    """Select the kernel for s queries and t keys.

    `missing` says why FlashAttention-4 cannot run; None if it can (`flash_kernel.why_unavailable`).
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
    if missing is None and head_dim not in flash_attention.WIDTHS:
        missing = f"FlashAttention-4 has other widths than {head_dim}"
    if missing is None:
        return KernelChoice("flash", "FlashAttention-4", narrow_values=value_dim % 64 == 0)
    return KernelChoice("torch", "torch's kernels", missing)


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
    return choose(mask, scores, len(q), len(k), q.shape[-1], v.shape[-1], q.device.type, q.dtype, _missing(q.device))


def _missing(device: torch.device) -> str | None:
    return flash_attention.why_unavailable(device) if device.type == "cuda" else "there is no GPU"


DOCUMENTS = AttentionMask(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32))
"""Mask of documents, for `describe`."""


def describe(device: torch.device, mask: AttentionMask, scores: Scores = PLAIN, head_dim: int = 128) -> str:
    """Return a log line that names the kernel of such attention in bf16, and why."""
    backend = choose(mask, scores, 1, 1, head_dim, head_dim, device.type, torch.bfloat16, _missing(device))
    feature = _what_only_ours_computes(mask, scores, 1, 1)
    parts = " of documents and windows" if mask is DOCUMENTS else ""
    what = f"attention{parts}" if feature is None else f"attention with {feature}"
    return f"{what}: {backend.what}" + (f", since {backend.why}" if backend.why else "")


def forward(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, scores: Scores = PLAIN
) -> tuple[Tensor, Tensor]:
    """Return the output `[s, b, a, d]` and the log-sum-exp of each query's scores `[s, b, a]`, fp32 or wider.

    The output is dense. A query without keys has the output 0 and the log-sum-exp -inf.
    """
    _check_shapes(q_sbad, k_tbgd, mask, scores)
    if scores.batch_invariant:
        return _invariant_forward(q_sbad.contiguous(), k_tbgd.contiguous(), v_tbgd.contiguous(), mask, scores)
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
    if kernel == "flash":
        return flash_attention.forward(q_sbad, k_tbgd, v_tbgd, mask, scores.scale)
    if kernel == "torch":
        return flash_attention.torch_forward(q_sbad, k_tbgd, v_tbgd, mask, scores.scale)
    q_sbad, k_tbgd, v_tbgd = q_sbad.contiguous(), k_tbgd.contiguous(), v_tbgd.contiguous()
    if kernel == "triton":
        from megafp8.layers.attention import kernel as attention  # needs Triton, which comes with torch's CUDA builds

        return attention.forward(q_sbad, k_tbgd, v_tbgd, mask, scores)
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
    `lse_sba` are over all keys to which the queries attend.
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
    if kernel == "flash":
        return *flash_attention.backward(*tensors, mask, scores.scale), None
    if kernel == "torch":
        return *flash_attention.torch_backward(*tensors, mask, scores.scale), None
    tensors = (
        do_sbad.contiguous(), q_sbad.contiguous(), k_tbgd.contiguous(), v_tbgd.contiguous(), o_sbad, lse_sba
    )  # fmt: skip
    if kernel == "triton":
        from megafp8.layers.attention import kernel as attention  # needs Triton, which comes with torch's CUDA builds

        return attention.backward(*tensors, mask, scores, bias_grad)
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
