"""Llama's transformer block in plain torch, and the shapes at which layers are measured.

Everything that `bench_layer` measures is held against this: for speed against its compiled form, for gradients against
its eager one. So it has to be plain enough to be seen to be right, and it must not be a straw man: q, k and v are one
product, gate and up are another, attention asks for cuDNN first, and nothing is kept that autograd does not need.
Weights are bf16, gradients are whatever autograd leaves in `.grad`.

Parameters are named, and the rows of their weights stacked, as in the blocks of `megafp8.models.gpt`.

Shapes: s sequence, b micro-batch, h hidden, a query heads, g key-value heads, d head width, f MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

EPSILON, ROTARY_BASE = 1e-5, 10000.0
_ATTENTION_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class Shape:
    """One rank's slice of a transformer block, and the number of tokens by default; the batch is one sample."""

    hidden_size: int
    ffn_hidden_size: int
    heads: int
    groups: int
    head_dim: int
    seq_length: int

    @property
    def qkv_size(self) -> int:
        return (self.heads + 2 * self.groups) * self.head_dim

    @property
    def matmul_parameters(self) -> int:
        """Weights of one block that take part in a matrix product."""
        attention = self.qkv_size + self.heads * self.head_dim
        return self.hidden_size * (attention + 3 * self.ffn_hidden_size)

    def flops(self, layers: int, seq_length: int) -> float:
        """Forward and backward of `layers` blocks on one sample: 6·N·s + 6·s²·a·d each, causal attention as half."""
        per_token = self.matmul_parameters + seq_length * self.heads * self.head_dim
        return 6.0 * layers * seq_length * per_token


#: A rank of a tensor-parallel group holds whole heads and a slice of f, and sees all tokens; collectives are left out.
SHAPES = {
    "llama3-8b": Shape(4096, 14336, heads=32, groups=8, head_dim=128, seq_length=8192),
    "llama3-70b-tp8": Shape(8192, 28672 // 8, heads=64 // 8, groups=8 // 8, head_dim=128, seq_length=8192),
    "small": Shape(2048, 8192, heads=16, groups=8, head_dim=128, seq_length=2048),
    "tiny": Shape(64, 96, heads=4, groups=2, head_dim=16, seq_length=32),
}


class Attention(nn.Module):
    """Causal self-attention with grouped queries and rotary positions: `[s, b, h]` -> the same shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.split, self.d = [shape.heads, shape.groups, shape.groups], shape.head_dim
        self.qkv = nn.Linear(shape.hidden_size, shape.qkv_size, bias=False, dtype=torch.bfloat16)
        self.proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=False, dtype=torch.bfloat16)

    def forward(self, x_sbh: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x_sbh).unflatten(-1, (-1, self.d)).split(self.split, dim=-2)
        q, k, v = (y_sbad.permute(1, 2, 0, 3) for y_sbad in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        y_basd = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.proj(y_basd.permute(2, 0, 1, 3).flatten(-2))


class MLP(nn.Module):
    """SwiGLU: `[s, b, h]` -> the same shape. The rows of `up` are [gate | up]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden_size, 2 * shape.ffn_hidden_size, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False, dtype=torch.bfloat16)

    def forward(self, x_sbh: Tensor) -> Tensor:
        gate, up = self.up(x_sbh).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden_size, EPSILON, dtype=torch.bfloat16)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden_size, EPSILON, dtype=torch.bfloat16)
        self.mlp = MLP(shape)

    def forward(self, x_sbh: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_sbh = x_sbh + self.attention(self.attention_norm(x_sbh), cos, sin)
        return x_sbh + self.mlp(self.mlp_norm(x_sbh))


class ReferenceLayers(nn.Module):
    """`layers` blocks, one after the other, with their table of rotary angles."""

    def __init__(self, shape: Shape, layers: int, seq_length: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(layers))
        frequencies = ROTARY_BASE ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
        angles = torch.arange(seq_length)[:, None, None, None] * frequencies
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x_sbh: Tensor) -> Tensor:
        for block in self.blocks:
            x_sbh = block(x_sbh, self.cos, self.sin)
        return x_sbh

    def run(self, x_sbh: Tensor) -> Tensor:
        """`forward`, compiled if `compile()` was called, with cuDNN attention where there is a choice."""
        with sdpa_kernel(_ATTENTION_BACKENDS, set_priority=True):
            return self(x_sbh)


def rotate(x_sbad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (first half, second half) of every head by their angles `[s, 1, 1, d/2]`, in fp32."""
    first, second = x_sbad.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_sbad.dtype)


def random_weights(shape: Shape, layers: int, device: torch.device) -> dict[str, Tensor]:
    """A weight for every parameter of `ReferenceLayers`, by name, the same at each call.

    Matrices keep the variance of what passes through them, so that every layer has a say in the gradients; the weights
    of norms differ from one, so that leaving them out is seen.
    """
    generator = torch.Generator(device).manual_seed(1)
    with torch.device("meta"):
        parameters = dict(ReferenceLayers(shape, layers, 1).named_parameters())
    weights = {}
    for name, parameter in parameters.items():
        noise = torch.randn(parameter.shape, generator=generator, device=device, dtype=torch.bfloat16)
        weights[name] = noise * parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 1 + 0.1 * noise
    return weights
