"""Causal self-attention with grouped queries, its heads cut over the tensor-parallel group.

The core is torch's scaled_dot_product_attention. On CUDA the cuDNN kernel is asked for first: on Hopper it is about
twice as fast as the flash kernel that torch ships, which runs where a run must be deterministic. A plain causal mask is
a flag and costs nothing; a sliding window or document boundaries are an explicit boolean mask, which is right
everywhere and costs s² bytes a sample. Sequences that are cut over ranks have a core of their own
(`megafp8.context_parallel`); which it is, a layer is told.

q, k and v are one column-parallel product; the rows of its weight are [this rank's q heads | k heads | v heads], each
under its own global name.

Shapes: s sequence, b micro-batch, h hidden, a query heads, g key-value heads of this rank, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from megafp8.config import ModelConfig
from megafp8.context_parallel.blocks import visible
from megafp8.distributed.sharding import Init
from megafp8.models.context import BuildContext
from megafp8.models.norms import Norm
from megafp8.models.recompute import KEEP_ALL, BlockMemory
from megafp8.models.rotary import apply_rotary
from megafp8.ops.fusion import LinearInput
from megafp8.ops.rotary import rotate_and_split
from megafp8.plan import Neighbor
from megafp8.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

CoreAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From q `[s, b, a, d]`, k and v `[s, b, g, d]` to what the values come to, `[s, b, a, d]`."""
ATTENTION = Neighbor("attention", "none", "attention kernels read and write bf16")
ROTARY = Neighbor("rotary embedding", "per_tensor")
CUDA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attention_mask(s: int, window: int | None, document_ids_bs: Tensor | None, device: torch.device) -> Tensor | None:
    """Which tokens each token may attend to, bool `[1 or b, 1, s, s]`, or None where plain causal attention will do."""
    if document_ids_bs is None and (window is None or window >= s):
        return None
    return visible(range(s), range(s), window, document_ids_bs, device)


def cuda_backends() -> list[SDPBackend]:
    """Which kernels may run, the fastest first. cuDNN's backward adds up dq in the order in which blocks of keys come;
    the others have an order under torch.use_deterministic_algorithms."""
    if torch.are_deterministic_algorithms_enabled():
        return [backend for backend in CUDA_BACKENDS if backend is not SDPBackend.CUDNN_ATTENTION]
    return CUDA_BACKENDS


def core_attention(q_sbad: Tensor, k_sbgd: Tensor, v_sbgd: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q·kᵀ/√d + mask)·v, causal where `mask` is None: `[s, b, a, d]`."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_sbad, k_sbgd, v_sbgd))
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": q.shape[1] != k.shape[1]}
    if q.is_cuda:
        with sdpa_kernel(cuda_backends(), set_priority=True):
            y = F.scaled_dot_product_attention(q, k, v, **options)
    else:
        y = F.scaled_dot_product_attention(q, k, v, **options)
    return y.permute(2, 0, 1, 3)


class Attention(nn.Module):
    """`[s, b, h]` (or `[s/t, b, h]` sequence-parallel) -> the same shape.

    `input`: the norm before it. `memory`: what is recomputed in backward.
    """

    def __init__(
        self, name: str, config: ModelConfig, context: BuildContext, *, input: Neighbor, memory: BlockMemory = KEEP_ALL
    ) -> None:
        super().__init__()
        self.recompute = memory.attention
        t, d = context.tensor.size(), config.channels
        q_size, kv_size = config.num_attention_heads * d, config.query_groups * d
        self.split = [q_size // t, kv_size // t, kv_size // t]
        self.d = d
        common = context.linear_options()
        rotates = config.position_embedding == "rope" and not config.qk_norm
        self.qkv = ColumnParallelLinear(
            f"{name}.qkv",
            config.hidden_size,
            q_size + 2 * kv_size,
            parts={f"{name}.q": q_size, f"{name}.k": kv_size, f"{name}.v": kv_size},
            bias=config.linear_bias or config.qkv_bias,
            init=Init("normal", config.init_std),
            site=context.site(before=input, after=ROTARY if rotates else ATTENTION, recompute_input=memory.norms),
            **common,
        )
        self.rotates = rotates
        self.proj = RowParallelLinear(
            f"{name}.proj",
            q_size,
            config.hidden_size,
            bias=config.linear_bias,
            init=Init("normal", config.init_std / math.sqrt(2 * config.num_layers)),
            site=context.site(before=ATTENTION),
            **common,
        )
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if config.qk_norm:
            norm: dict[str, Any] = {"kind": "rmsnorm", "eps": config.norm_eps, "sees_a_slice": t > 1}
            self.q_norm = Norm(f"{name}.q_norm", d, context, **norm)
            self.k_norm = Norm(f"{name}.k_norm", d, context, **norm)

    def forward(self, x_sbh: Tensor | LinearInput, rotary: tuple[Tensor, Tensor] | None, core: CoreAttention) -> Tensor:
        if self.rotates:
            assert rotary is not None
            handoff = self.qkv.state.grad_handoff()
            heads, groups, _ = (size // self.d for size in self.split)
            q, k, v = rotate_and_split(self.qkv(x_sbh, handoff), heads, groups, *rotary, handoff)
            return self.proj(self._run(core, q, k, v).flatten(-2))
        return self.proj(self._run(self._attend, self.qkv(x_sbh), rotary, core).flatten(-2))

    def _run(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        if not self.recompute:
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)

    def _attend(self, qkv_sbc: Tensor, rotary: tuple[Tensor, Tensor] | None, core: CoreAttention) -> Tensor:
        """Attention of packed heads [q | k | v], normed and turned where the model has that."""
        q, k, v = (part.unflatten(-1, (-1, self.d)) for part in qkv_sbc.split(self.split, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        return core(q, k, v)
