"""Flash attention of other projects: FlashAttention-4, and the kernel that torch ships.

FlashAttention-4 (https://github.com/Dao-AILab/flash-attention, flash_attn/cute) is compiled for Hopper when it is first
called, which takes 2 to 3 s for each kind of mask and each width of heads. Its public functions do not accept the
log-sum-exps of another forward pass, which context parallelism needs, so the private ones are called. They may change
with any release, and therefore only `VERSION` is used.

Both kernels compute the segments of an `AttentionMask` from their offsets. Nothing is copied if a micro-batch has one
sample.

Shapes: s queries, t keys, b micro-batch, a query heads, g key-value heads, d head width; n segments of a sample. In the
shape of values or outputs, `d` is the width of values.
"""

from __future__ import annotations

import functools
import gc
import math
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from megafp8.host.shipped import install_command
from megafp8.layers.attention.mask import AttentionMask
from megafp8.parallel.context import one_segment

VERSION = "4.0.0b36"
"""Version of flash-attn-4 that megafp8 calls."""


WIDTHS = (64, 96, 128, 192, 256)
"""Widths of heads for which megafp8 calls FlashAttention-4. With 80 channels, its gradient of queries is wrong."""


@functools.cache
def why_unavailable(device: torch.device) -> str | None:
    """Return why FlashAttention-4 cannot run on a GPU; None if it can."""
    try:
        installed = version("flash-attn-4")
    except PackageNotFoundError:
        return f"FlashAttention-4 is not installed ({install_command('gpu')})"
    if installed != VERSION:
        return f"flash-attn-4 is {installed}, not {VERSION} ({install_command('gpu')})"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "FlashAttention-4 is used on Hopper only"
    try:
        _flash_attention_4()
    except ImportError as error:
        return f"FlashAttention-4 cannot be imported: {error}"
    return None


@functools.cache
def _flash_attention_4() -> Any:
    # A warning about the compiler's arguments, which users cannot change.
    warnings.filterwarnings("ignore", module=r"cutlass\..*", category=UserWarning)
    from flash_attn.cute import interface

    return interface


def _call(kernel: Any, *tensors: Tensor, **options: Any) -> Any:
    """Call a kernel, and collect garbage if it was compiled.

    The compiler leaves cycles of frames. In a backward pass, these hold autograd's graph with all that it has saved.
    """
    compiled = kernel.compile_cache.cache
    before = len(compiled)
    result = kernel(*tensors, **options)
    if len(compiled) > before:
        gc.collect()
    return result


def _packed(x_sbad: Tensor) -> Tensor:
    """Return `[b·s, a, d]`, one sample after the other; a view if b is 1."""
    return x_sbad.transpose(0, 1).flatten(0, 1)


def _unpacked(x_nad: Tensor, b: int) -> Tensor:
    """Return `[s, b, a, d]`, dense."""
    return x_nad.unflatten(0, (b, -1)).transpose(0, 1).contiguous()


def _window(mask: AttentionMask) -> dict[str, int]:
    """Return the options of the window."""
    if mask.window is None:
        return {}
    return {"window_size_left": mask.window - 1, "window_size_right": 0 if mask.causal else mask.window - 1}


def _segments(mask: AttentionMask, s: int, t: int, b: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the offsets of segments into packed queries and keys, int32."""

    def make() -> tuple[Tensor, Tensor]:
        offsets_q = one_segment(s, device) if mask.cu_seqlens_q is None else mask.cu_seqlens_q
        offsets_k = one_segment(t, device) if mask.cu_seqlens_k is None else mask.cu_seqlens_k
        sample = torch.arange(b, dtype=torch.int32, device=device)[:, None]
        # The end of a sample is the start of the next sample, with an empty segment between them.
        return (offsets_q + sample * s).flatten(), (offsets_k + sample * t).flatten()

    return mask.once(("packed segments", s, t, b), make)


# --- FlashAttention-4 -------------------------------------------------------------------------------------------------


def _options(mask: AttentionMask, s: int, t: int, b: int, device: torch.device, scale: float | None) -> dict[str, Any]:
    options = {"softmax_scale": scale, "causal": mask.causal, **_window(mask)}
    if mask.cu_seqlens_q is None:
        return options
    offsets_q, offsets_k = _segments(mask, s, t, b, device)
    return options | {"cu_seqlens_q": offsets_q, "cu_seqlens_k": offsets_k, "max_seqlen_q": s, "max_seqlen_k": t}


def _writes_all(mask: AttentionMask) -> bool:
    """Return whether each row is in a segment with queries and keys; the kernel does not write other rows."""
    return mask.cu_seqlens_q is mask.cu_seqlens_k


def forward(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exps as `layers.attention.op.forward` does, by FlashAttention-4.

    The tensors need no dense layout. The log-sum-exps are a view of `[b, a, s]`.
    """
    (s, b, a, _), t = q_sbad.shape, len(k_tbgd)
    o_sbad = q_sbad.new_empty(s, b, a, v_tbgd.shape[-1])
    lse_bas = q_sbad.new_empty(b, a, s, dtype=torch.float32)
    if not _writes_all(mask):
        o_sbad.zero_()
        lse_bas.fill_(-math.inf)
    options = _options(mask, s, t, b, q_sbad.device, scale)
    kernel = _flash_attention_4()._flash_attn_fwd
    if mask.cu_seqlens_q is None:
        q, k, v, o = (x.transpose(0, 1) for x in (q_sbad, k_tbgd, v_tbgd, o_sbad))
        _call(kernel, q, k, v, out=o, lse=lse_bas, **options)
        return o_sbad, lse_bas.permute(2, 0, 1)
    q, k, v, o = (_packed(x) for x in (q_sbad, k_tbgd, v_tbgd, o_sbad))
    lse_an = lse_bas.transpose(0, 1).flatten(1)
    _call(kernel, q, k, v, out=o, lse=lse_an, **options)
    return _unpacked(o, b), lse_an.unflatten(1, (b, s)).permute(2, 1, 0)


def backward(
    do_sbad: Tensor, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, o_sbad: Tensor, lse_sba: Tensor,
    mask: AttentionMask, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv as `layers.attention.op.backward` does, by FlashAttention-4.

    With torch.use_deterministic_algorithms, blocks of keys add to dq in a fixed order.
    """
    (s, b), t = q_sbad.shape[:2], len(k_tbgd)
    options = _options(mask, s, t, b, q_sbad.device, scale)
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    kernel = _flash_attention_4()._flash_attn_bwd
    if mask.cu_seqlens_q is None:
        q, k, v, o, do = (x.transpose(0, 1) for x in (q_sbad, k_tbgd, v_tbgd, o_sbad, do_sbad))
        dq, dk, dv = _call(kernel, q, k, v, o, do, lse_sba.permute(1, 2, 0).contiguous(), **options)
        return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)
    q, k, v, o, do = (_packed(x) for x in (q_sbad, k_tbgd, v_tbgd, o_sbad, do_sbad))
    if not _writes_all(mask):
        options |= {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    dq, dk, dv = _call(kernel, q, k, v, o, do, lse_sba.permute(2, 1, 0).flatten(1).contiguous(), **options)
    return _unpacked(dq, b), _unpacked(dk, b), _unpacked(dv, b)


# --- the kernel that torch ships --------------------------------------------------------------------------------------


def torch_forward(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exps as `layers.attention.op.forward` does, by torch's kernel."""
    s, b, a, _ = q_sbad.shape
    t = len(k_tbgd)
    packed = [_packed(x) for x in (q_sbad, k_tbgd, v_tbgd)]
    offsets = _segments(mask, s, t, b, q_sbad.device)
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        *packed, *offsets, s, t, 0.0, mask.causal, False, scale=scale, **_window(mask)
    )
    o_sbad, lse_sba = _unpacked(o, b), lse.view(a, b, s).permute(2, 1, 0).contiguous()
    if _writes_all(mask):
        return o_sbad, lse_sba
    empty = torch.isposinf(lse_sba)  # the kernel's value for a query without keys
    return o_sbad.masked_fill(empty[..., None], 0.0), lse_sba.masked_fill(empty, -math.inf)


def torch_backward(
    do_sbad: Tensor, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, o_sbad: Tensor, lse_sba: Tensor,
    mask: AttentionMask, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv as `layers.attention.op.backward` does, by torch's kernel."""
    (s, b), t = q_sbad.shape[:2], len(k_tbgd)
    do, q, k, v, o = (_packed(x) for x in (do_sbad, q_sbad, k_tbgd, v_tbgd, o_sbad))
    lse = lse_sba.permute(2, 1, 0).flatten(1).contiguous()
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
    offsets = _segments(mask, s, t, b, q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        do, q, k, v, o, lse, *offsets, s, t, 0.0, mask.causal, unused, unused, scale=scale, **_window(mask)
    )
    return _unpacked(dq, b), _unpacked(dk, b), _unpacked(dv, b)
