"""Softmax attention whose cost is that of the pairs of tokens that attend to each other.

Which pairs these are, an `AttentionMask` says: documents packed one after the other into a sequence, a causal or a full
triangle, a sliding window. No mask is ever made as a matrix. Forward also returns the log-sum-exp of each query's
scores, so that results over parts of the keys merge, and backward needs only the output and that (Dao et al. 2022,
arXiv:2205.14135; Liu et al. 2023, arXiv:2310.01889).

*Sinks.* A head may have a learned score that takes part in its softmax and has no value, so that the head can attend to
nothing (Xiao et al. 2023, arXiv:2309.17453; gpt-oss, arXiv:2508.10925). It is one more key, with the value zero, so
its share follows from the log-sum-exp, and backward needs nothing but the output and the log-sum-exp with it.

Kernels (docs/decisions/0029-attention-of-documents.md has the measurements):

    without documents and window   torch's cuDNN kernel, twice as fast on Hopper as the flash kernel that torch ships
    with                           cuDNN's variable-length kernel through its front end (`ops.cudnn_attention`)
    where that is not installed, or torch.use_deterministic_algorithms is on
                                   torch's flash kernel: cuDNN adds up dq in the order in which blocks of keys come
    on a CPU, or in fp32 or fp64   the reference in PyTorch, some queries at a time

cuDNN's graphs are cached by the layout of q, k and v, and expect all other tensors in the layout that the forward pass
produces. So all tensors here are dense, sequence first.

Shapes: s queries, t keys, b micro-batch, a query heads, g key-value heads, d head width; n segments of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megafp8.ops import cudnn_attention
from megafp8.ops.attention_mask import CAUSAL, AttentionMask, one_segment
from megafp8.ops.wgrad import deliver, wgrad_dtype

_ROWS = 512
"""Queries that the reference computes at once, and so the height of its matrix of scores."""


def attention(
    q_sbad: Tensor, k_sbgd: Tensor, v_sbgd: Tensor, mask: AttentionMask = CAUSAL, sink_a: Tensor | None = None
) -> Tensor:
    """softmax(q·kᵀ/√d)·v over the pairs of `mask`, `[s, b, a, d]`; differentiable. `sink_a`: each head's sink."""
    if mask.cu_seqlens_q is not None or sink_a is not None:
        return _Attention.apply(q_sbad, k_sbgd, v_sbgd, sink_a, mask)
    q, k, v = q_sbad.permute(1, 2, 0, 3), k_sbgd.permute(1, 2, 0, 3), v_sbgd.permute(1, 2, 0, 3)
    with nullcontext() if _backends_are_set or not q.is_cuda else sdpa_kernel(sdpa_backends(), set_priority=True):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal, enable_gqa=q.shape[1] != k.shape[1])
    return y.permute(2, 0, 1, 3)


_backends_are_set = False


@contextmanager
def fastest_backends() -> Iterator[None]:
    """Sets torch's attention kernels once for all calls of `attention` within, as setting them takes the host 30 µs.

    A call outside of it, such as one that is recomputed in backward, sets them itself.
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
    """Attention of a micro-batch, for any layer: from q `[s, b, a, d]`, k and v `[s, b, g, d]` to `[s, b, a, d]`.

    `sink_a`: the layer's sinks, if it has any.
    """

    def __call__(self, q_sbad: Tensor, k_sbgd: Tensor, v_sbgd: Tensor, sink_a: Tensor | None = None, /) -> Tensor: ...

    @property
    def tensors(self) -> list[Tensor]:
        """What it reads besides its arguments."""
        ...


@dataclass(frozen=True)
class SelfAttention:
    """`attention` with this mask."""

    mask: AttentionMask

    def __call__(self, q_sbad: Tensor, k_sbgd: Tensor, v_sbgd: Tensor, sink_a: Tensor | None = None) -> Tensor:
        return attention(q_sbad, k_sbgd, v_sbgd, self.mask, sink_a)

    @property
    def tensors(self) -> list[Tensor]:
        return self.mask.tensors


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, q_sbad: Tensor, k_sbgd: Tensor, v_sbgd: Tensor, sink_a: Tensor | None, mask: AttentionMask
    ) -> Tensor:
        o, lse = forward(q_sbad.contiguous(), k_sbgd.contiguous(), v_sbgd.contiguous(), mask)
        if sink_a is not None:
            o, lse = with_sink(o, lse, sink_a)
        ctx.save_for_backward(q_sbad, k_sbgd, v_sbgd, o, lse)  # views: their base is kept anyway
        ctx.mask, ctx.sink_a = mask, sink_a
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_sbad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors  # once: recomputed tensors can be read a single time
        do = do_sbad.contiguous()
        dsink = None if ctx.sink_a is None else sink_gradient(do, o, lse, ctx.sink_a)
        return *backward(do, q.contiguous(), k.contiguous(), v.contiguous(), o, lse, ctx.mask), dsink, None


def with_sink(o_sbad: Tensor, lse_sba: Tensor, sink_a: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with sinks, from those of the keys alone."""
    sink = sink_a.detach().to(lse_sba.dtype)
    of_keys = torch.sigmoid(lse_sba - sink).unsqueeze(-1)
    return (o_sbad * of_keys).to(o_sbad.dtype), torch.logaddexp(lse_sba, sink)


def sink_gradient(do_sbad: Tensor, o_sbad: Tensor, lse_sba: Tensor, sink_a: Tensor) -> Tensor | None:
    """The gradient of `sink_a`, to its sink of gradients or back; `o_sbad` and `lse_sba` are with it.

    A higher score takes from all keys in proportion: dL/dsink = -Σ exp(sink - lse) · (do · o).
    """
    share_sba = torch.exp(sink_a.detach().to(lse_sba.dtype) - lse_sba)
    dsink_a = -(share_sba * torch.linalg.vecdot(do_sbad.to(lse_sba.dtype), o_sbad.to(lse_sba.dtype))).sum((0, 1))
    return deliver(sink_a, dsink_a.to(wgrad_dtype(sink_a)))


# --- kernels ----------------------------------------------------------------------------------------------------------

_SDPA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def sdpa_backends() -> list[SDPBackend]:
    """Which kernels torch's attention may run, the fastest first; cuDNN's has no order of sums."""
    return _SDPA_BACKENDS[1:] if torch.are_deterministic_algorithms_enabled() else _SDPA_BACKENDS


def forward(q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """The output `[s, b, a, d]`, and the log-sum-exp of each query's scores `[s, b, a]`, fp32 or wider.

    All dense. A query without any key has the output 0 and the log-sum-exp -inf.
    """
    kernel = _kernel(q_sbad, mask)
    if kernel == "cudnn":
        return cudnn_attention.forward(q_sbad, k_tbgd, v_tbgd, mask)
    if kernel == "sdpa":
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_sbad, k_tbgd, v_tbgd))
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, mask.causal)
        return o.permute(2, 0, 1, 3).contiguous(), lse.view(*q.shape[:3]).permute(2, 0, 1).contiguous()
    return (_flash_forward if kernel == "flash" else _reference_forward)(q_sbad, k_tbgd, v_tbgd, mask)


def backward(
    do_sbad: Tensor, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, o_sbad: Tensor, lse_sba: Tensor,
    mask: AttentionMask,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The contribution of these keys to dq `[s, b, a, d]`, and of these queries to dk and dv `[t, b, g, d]`.

    `o_sbad` and `lse_sba` are over all keys that the queries attend to. All dense.
    """
    kernel = _kernel(q_sbad, mask)
    tensors = do_sbad, q_sbad, k_tbgd, v_tbgd, o_sbad, lse_sba
    if kernel == "cudnn":
        return cudnn_attention.backward(*tensors, mask)
    if kernel == "sdpa":
        do, q, k, v, o = (x.permute(1, 2, 0, 3) for x in tensors[:5])
        lse = lse_sba.permute(1, 2, 0).contiguous().unsqueeze(-1)
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse, unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, mask.causal
        )
        return tuple(x.permute(2, 0, 1, 3) for x in gradients)
    return (_flash_backward if kernel == "flash" else _reference_backward)(*tensors, mask)


def _kernel(q: Tensor, mask: AttentionMask) -> str:
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        return "reference"
    if torch.are_deterministic_algorithms_enabled():
        return "flash"
    if mask.cu_seqlens_q is None:
        return "sdpa"
    return "cudnn" if cudnn_attention.is_available() else "flash"


def describe(device: torch.device) -> str:
    """Which kernel computes documents and windows in bf16, and why if it is not the fastest: a line for the log."""
    what = "attention of documents and windows:"
    if device.type != "cuda":
        return f"{what} the reference in PyTorch"
    if torch.are_deterministic_algorithms_enabled():
        return f"{what} torch's flash kernel, since deterministic is true"
    if cudnn_attention.is_available():
        return f"{what} cuDNN's variable-length kernel"
    return f"{what} torch's flash kernel; cuDNN's is faster, and needs nvidia-cudnn-frontend (pip install -e '.[gpu]')"


# --- torch's flash kernel ---------------------------------------------------------------------------------------------


def _packed(x_sbad: Tensor) -> Tensor:
    """`[b·s, a, d]`, sample after sample; a view if b is 1."""
    return x_sbad.transpose(0, 1).flatten(0, 1)


def _flash_arguments(q_sbad: Tensor, k_tbgd: Tensor, mask: AttentionMask) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Offsets into packed tensors and greatest lengths; the options of the window."""
    (s, b), t = q_sbad.shape[:2], k_tbgd.shape[0]
    whole_q, whole_k = (one_segment(x, q_sbad.device) for x in (s, t))
    sample = torch.arange(b, dtype=torch.int32, device=q_sbad.device)[:, None]
    # A sample's end is the next one's start: between them is an empty segment.
    offsets_q = ((whole_q if mask.cu_seqlens_q is None else mask.cu_seqlens_q) + sample * s).flatten()
    offsets_k = ((whole_k if mask.cu_seqlens_k is None else mask.cu_seqlens_k) + sample * t).flatten()
    window = {} if mask.window is None else {"window_size_left": mask.window - 1, "window_size_right": 0}
    return (offsets_q, offsets_k, s, t), window


def _flash_forward(q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
    s, b, a, _ = q_sbad.shape
    packed = [_packed(x) for x in (q_sbad, k_tbgd, v_tbgd)]
    offsets, window = _flash_arguments(q_sbad, k_tbgd, mask)
    o, lse, *_ = torch.ops.aten._flash_attention_forward(*packed, *offsets, 0.0, mask.causal, False, **window)
    o_sbad = o.unflatten(0, (b, s)).transpose(0, 1).contiguous()
    lse_sba = lse.view(a, b, s).permute(2, 1, 0).contiguous()
    if mask.cu_seqlens_q is mask.cu_seqlens_k:
        return o_sbad, lse_sba
    empty = torch.isposinf(lse_sba)  # the kernel's value for a query without keys
    return o_sbad.masked_fill(empty[..., None], 0.0), lse_sba.masked_fill(empty, -math.inf)


def _flash_backward(
    do_sbad: Tensor, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, o_sbad: Tensor, lse_sba: Tensor,
    mask: AttentionMask,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (s, b), t = q_sbad.shape[:2], k_tbgd.shape[0]
    do, q, k, v, o = (_packed(x) for x in (do_sbad, q_sbad, k_tbgd, v_tbgd, o_sbad))
    lse = lse_sba.permute(2, 1, 0).flatten(1).contiguous()
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
    offsets, window = _flash_arguments(q_sbad, k_tbgd, mask)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        do, q, k, v, o, lse, *offsets, 0.0, mask.causal, unused, unused, **window
    )
    return tuple(x.unflatten(0, (b, n)).transpose(0, 1) for x, n in ((dq, s), (dk, t), (dv, t)))


# --- reference --------------------------------------------------------------------------------------------------------


class _QueryBlock(NamedTuple):
    """Some queries of a sample, the keys that any of them attends to, and which do: bool `[queries, keys]`."""

    sample: int
    queries: slice
    keys: slice
    visible: Tensor


def _query_blocks(s: int, b: int, t: int, mask: AttentionMask, device: torch.device) -> Iterator[_QueryBlock]:
    """All queries that have keys."""
    ends_q, ends_k = (
        [[0, n]] * b if ends is None else ends.tolist() * (b // ends.shape[0])
        for n, ends in ((s, mask.cu_seqlens_q), (t, mask.cu_seqlens_k))
    )
    for sample in range(b):
        segments = zip(ends_q[sample], ends_q[sample][1:], ends_k[sample], ends_k[sample][1:], strict=False)
        for q_start, q_end, k_start, k_end in segments:
            ahead = (k_end - k_start) - (q_end - q_start)  # of the first query, where the last ones are aligned
            for start in range(q_start, q_end, _ROWS):
                end = min(start + _ROWS, q_end)
                latest = torch.arange(start, end, device=device)[:, None] - q_start + ahead
                first, last = k_start, k_end
                if mask.causal:
                    last = k_start + end - q_start + ahead
                if mask.window is not None:
                    first = max(k_start, k_start + start - q_start + ahead + 1 - mask.window)
                keys = torch.arange(first, last, device=device) - k_start
                visible = torch.ones(end - start, len(keys), dtype=torch.bool, device=device)
                if mask.causal:
                    visible &= keys <= latest
                if mask.window is not None:
                    visible &= keys > latest - mask.window
                if len(keys):
                    yield _QueryBlock(sample, slice(start, end), slice(first, last), visible)


def _heads_first(x_sad: Tensor, groups: int) -> Tensor:
    """`[g, a/g, s, d]`, at least fp32."""
    wide = torch.promote_types(x_sad.dtype, torch.float32)
    return x_sad.to(wide).transpose(0, 1).unflatten(0, (groups, -1))


def _sequence_first(x_gnsd: Tensor) -> Tensor:
    return x_gnsd.flatten(0, 1).transpose(0, 1)


def _scores(q_gnsd: Tensor, k_g1td: Tensor, visible: Tensor) -> Tensor:
    return (q_gnsd @ k_g1td.mT / math.sqrt(q_gnsd.shape[-1])).masked_fill(~visible, -math.inf)


def _reference_forward(q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
    (s, b, a, _), (t, _, groups, _) = q_sbad.shape, k_tbgd.shape
    o_sbad = torch.zeros_like(q_sbad)
    wide = torch.promote_types(q_sbad.dtype, torch.float32)
    lse_sba = torch.full((s, b, a), -math.inf, dtype=wide, device=q_sbad.device)
    for sample, queries, keys, visible in _query_blocks(s, b, t, mask, q_sbad.device):
        q, k, v = (
            _heads_first(x[part, sample], groups) for x, part in ((q_sbad, queries), (k_tbgd, keys), (v_tbgd, keys))
        )
        scores = _scores(q, k, visible)
        lse = scores.logsumexp(-1, keepdim=True)
        o_sbad[queries, sample] = _sequence_first((scores - lse).exp() @ v).to(o_sbad.dtype)
        lse_sba[queries, sample] = lse.flatten(0, 1).squeeze(-1).T
    return o_sbad, lse_sba


def _reference_backward(
    do_sbad: Tensor, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, o_sbad: Tensor, lse_sba: Tensor,
    mask: AttentionMask,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (s, b, _, d), (t, _, groups, _) = q_sbad.shape, k_tbgd.shape
    wide = torch.promote_types(q_sbad.dtype, torch.float32)
    dq_sbad, dk_tbgd, dv_tbgd = (torch.zeros_like(x, dtype=wide) for x in (q_sbad, k_tbgd, v_tbgd))
    for sample, queries, keys, visible in _query_blocks(s, b, t, mask, q_sbad.device):
        do, q, o = (_heads_first(x[queries, sample], groups) for x in (do_sbad, q_sbad, o_sbad))
        k, v = (_heads_first(x[keys, sample], groups) for x in (k_tbgd, v_tbgd))
        lse = lse_sba[queries, sample].T.unflatten(0, (groups, -1)).unsqueeze(-1)
        p = (_scores(q, k, visible) - lse).exp()
        ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) / math.sqrt(d)
        dq_sbad[queries, sample] += _sequence_first(ds @ k)
        dk_tbgd[keys, sample] += _sequence_first((ds.mT @ q).sum(1, keepdim=True))
        dv_tbgd[keys, sample] += _sequence_first((p.mT @ do).sum(1, keepdim=True))
    return dq_sbad.to(q_sbad.dtype), dk_tbgd.to(k_tbgd.dtype), dv_tbgd.to(v_tbgd.dtype)
