"""transformers' Llama for benchmarks, with causal attention whether it is compiled or not.

Compiled, transformers passes attention a mask as a matrix, so that torch's kernels compute all pairs of tokens: on an
H200 37 of 120 ms of four layers of Llama-3-8B at 8,192 tokens. Here every variant calls the same causal kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from megafp8.ops.attention import sdpa_backends

SHAPES: dict[str, dict[str, int]] = {
    "llama3-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
}


def _causal(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Of q, k, v `[b, a or g, s, d]`; the output is `[b, s, a, d]`."""
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return y.transpose(1, 2).contiguous(), None


def llama(shape: str, layers: int, s: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """`LlamaModel` of `layers` layers with random weights, for s tokens. Run it within `fastest_kernels`."""
    import transformers

    transformers.AttentionInterface.register("causal", _causal)
    transformers.AttentionMaskInterface.register("causal", lambda *_, **__: None)
    config = transformers.LlamaConfig(
        vocab_size=64, num_hidden_layers=layers, rope_theta=500_000.0, max_position_embeddings=s,
        attn_implementation="causal", **SHAPES[shape],
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        return transformers.LlamaModel(config).to(dtype)


def fastest_kernels() -> Any:
    """Context in which torch's attention runs the fastest kernel there is, as in megafp8's own models."""
    return sdpa_kernel(sdpa_backends(), set_priority=True)
