"""Modules with the names, arguments and meaning of Transformer Engine, built on megafp8's ops.

`docs/from-transformer-engine.md` lists every argument, and says whether it is supported, how it differs, or why it is
refused.
"""

from megafp8.nn.attention import DotProductAttention
from megafp8.nn.cpu_offload import get_cpu_offload_context
from megafp8.nn.graphs import make_graphed_callables
from megafp8.nn.grouped_linear import Fp8Padding, Fp8Unpadding, GroupedLinear
from megafp8.nn.layernorm_mlp import LayerNormMLP
from megafp8.nn.linear import LayerNormLinear, Linear
from megafp8.nn.multi_head_attention import MultiheadAttention
from megafp8.nn.norm import LayerNorm, RMSNorm
from megafp8.nn.recompute import CudaRNGStatesTracker, checkpoint
from megafp8.nn.rotary import RotaryPositionEmbedding
from megafp8.nn.transformer import TransformerLayer

__all__ = [
    "CudaRNGStatesTracker",
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "checkpoint",
    "get_cpu_offload_context",
    "make_graphed_callables",
]
