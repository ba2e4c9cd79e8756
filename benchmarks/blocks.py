"""Transformer blocks that the benchmarks measure: shapes, a plain PyTorch reference, and megafp8's blocks.

`ReferenceLayers` is Llama's block in plain torch. `bench_layer` compares speed with its compiled form and gradients
with its eager form. The block must therefore be simple enough to be obviously right, and fast: q, k and v are one
product, gate and up are another, attention prefers cuDNN, and nothing is saved that autograd does not need. Weights are
bf16, and autograd leaves gradients in `.grad`. Parameters have the names and row order of `megafp8.models.gpt`.

Shapes: s sequence, b micro-batch, h hidden, a query heads, g key-value heads, d head width, f MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megafp8.config import Config
from megafp8.fp8 import Fp8Manager
from megafp8.fp8.speed_model import LinearSize
from megafp8.layers.context import BuildContext
from megafp8.models.gpt import GPTStage
from megafp8.parallel.parallel_state import ParallelState
from megafp8.training.fp8_config import build_fp8

EPSILON, ROTARY_BASE = 1e-5, 10000.0
ATTENTION_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer block, or of one tensor-parallel rank's part of it, and the default number of tokens."""

    hidden_size: int
    ffn_hidden_size: int
    heads: int
    groups: int
    head_dim: int
    seq_length: int

    @property
    def qkv_size(self) -> int:
        """Number of outputs of the qkv projection."""
        return (self.heads + 2 * self.groups) * self.head_dim

    @property
    def matmul_parameters(self) -> int:
        """Number of weights in the linear layers of one block."""
        return sum(size.k * size.n for size in self.linears(1).values())

    def linears(self, tokens: int) -> dict[str, LinearSize]:
        """Return the sizes of the linear layers of a block, by name."""
        h, f = self.hidden_size, self.ffn_hidden_size
        return {
            "qkv": LinearSize(tokens, h, self.qkv_size),
            "proj": LinearSize(tokens, self.heads * self.head_dim, h),
            "gate_up": LinearSize(tokens, h, 2 * f),
            "down": LinearSize(tokens, f, h),
        }

    def flops(self, layers: int, seq_length: int) -> float:
        """Return the FLOPs of forward and backward of `layers` blocks on one sample.

        They are 6·N·s + 6·s²·a·d per block, with causal attention counted as half.
        """
        per_token = self.matmul_parameters + seq_length * self.heads * self.head_dim
        return 6.0 * layers * seq_length * per_token


# A tensor-parallel rank has whole heads and a slice of f, and processes all tokens.
SHAPES = {
    "llama3-8b": Shape(4096, 14336, heads=32, groups=8, head_dim=128, seq_length=8192),
    "llama3-70b": Shape(8192, 28672, heads=64, groups=8, head_dim=128, seq_length=8192),
    "llama3-70b-tp8": Shape(8192, 28672 // 8, heads=64 // 8, groups=8 // 8, head_dim=128, seq_length=8192),
    "small": Shape(2048, 8192, heads=16, groups=8, head_dim=128, seq_length=2048),
    "tiny": Shape(64, 96, heads=4, groups=2, head_dim=16, seq_length=32),
}


class Attention(nn.Module):
    """Causal self-attention with grouped queries and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.split, self.d = [shape.heads, shape.groups, shape.groups], shape.head_dim
        self.qkv = nn.Linear(shape.hidden_size, shape.qkv_size, bias=False, dtype=torch.bfloat16)
        self.proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=False, dtype=torch.bfloat16)

    def forward(self, x_sbh: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply attention to x, `[s, b, h]`, and return the result in the same shape."""
        q, k, v = self.qkv(x_sbh).unflatten(-1, (-1, self.d)).split(self.split, dim=-2)
        q, k, v = (y_sbad.permute(1, 2, 0, 3) for y_sbad in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        y_basd = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.proj(y_basd.permute(2, 0, 1, 3).flatten(-2))


class MLP(nn.Module):
    """SwiGLU. The rows of `up` are [gate | up]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden_size, 2 * shape.ffn_hidden_size, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=False, dtype=torch.bfloat16)

    def forward(self, x_sbh: Tensor) -> Tensor:
        """Apply the MLP to x, `[s, b, h]`, and return the result in the same shape."""
        gate, up = self.up(x_sbh).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden_size, EPSILON, dtype=torch.bfloat16)
        self.mixer = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden_size, EPSILON, dtype=torch.bfloat16)
        self.ffn = MLP(shape)

    def forward(self, x_sbh: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the block to x, `[s, b, h]`, and return the result in the same shape."""
        x_sbh = x_sbh + self.mixer(self.attention_norm(x_sbh), cos, sin)
        return x_sbh + self.ffn(self.mlp_norm(x_sbh))


class ReferenceLayers(nn.Module):
    """Several blocks with their table of rotary angles."""

    def __init__(self, shape: Shape, layers: int, seq_length: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(layers))
        frequencies = ROTARY_BASE ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
        angles = torch.arange(seq_length)[:, None, None, None] * frequencies
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x_sbh: Tensor) -> Tensor:
        """Apply all blocks to x, `[s, b, h]`, and return the result in the same shape."""
        for block in self.blocks:
            x_sbh = block(x_sbh, self.cos, self.sin)
        return x_sbh

    def run(self, x_sbh: Tensor) -> Tensor:
        """Run `forward`, compiled if `compile()` was called, with cuDNN attention if it is available."""
        with sdpa_kernel(ATTENTION_BACKENDS, set_priority=True):
            return self(x_sbh)


def rotate(x_sbad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (first half, second half) of every head by their angles `[s, 1, 1, d/2]`, in fp32."""
    first, second = x_sbad.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_sbad.dtype)


def random_weights(shape: Shape, layers: int, device: torch.device) -> dict[str, Tensor]:
    """Return a random weight for every parameter of `ReferenceLayers`, by name. Every call returns equal weights.

    Matrices preserve variance, so that every layer affects the gradients. Norm weights differ from one, so that a norm
    without its weight gives other gradients.
    """
    generator = torch.Generator(device).manual_seed(1)
    with torch.device("meta"):
        parameters = dict(ReferenceLayers(shape, layers, 1).named_parameters())
    weights = {}
    for name, parameter in parameters.items():
        noise = torch.randn(parameter.shape, generator=generator, device=device, dtype=torch.bfloat16)
        weights[name] = noise * parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 1 + 0.1 * noise
    return weights


def build_stage(
    shape: Shape, layers: int, seq_length: int, parallel: ParallelState, dtype: torch.dtype, **fp8: Any
) -> tuple[Config, Fp8Manager, GPTStage]:
    """Build `layers` megafp8 blocks as a middle pipeline stage, without embedding and head.

    `fp8` are fields of the config section fp8. The caller sets the weights, then calls `Fp8Manager.materialize`.
    """
    config = Config.model_validate(
        {
            "name": "benchmark",
            "model": {
                "num_layers": layers + 2,
                "hidden_size": shape.hidden_size,
                "ffn_hidden_size": shape.ffn_hidden_size,
                "num_attention_heads": shape.heads,
                "num_query_groups": shape.groups,
                "head_dim": shape.head_dim,
                "norm_eps": EPSILON,
                "rope_theta": ROTARY_BASE,
            },
            "fp8": fp8,
            "training": {"steps": 1, "seq_length": seq_length, "global_batch_size": 1},
            "optimizer": {"learning_rate": 1.0},
            "data": {"train": ["none"]},
        }
    )
    manager = build_fp8(config, parallel)
    context = BuildContext(parallel.tensor.group, manager, dtype, parallel.device, sequence_parallel=True)
    return config, manager, GPTStage(config.spec, context, layers=range(1, layers + 1), positions=0)
