"""A small Llama with the module names of `transformers.LlamaForCausalLM`, so that the examples need no download.

With transformers installed the same scripts take `LlamaForCausalLM(LlamaConfig(...))` in its place. Here the model
returns the mean cross-entropy itself.

Shapes: b sequences, s positions, h hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of `[b, heads, s, d]` (Su et al. 2021, arXiv:2104.09864)."""
    s, d = x.shape[-2:]
    frequency = 10_000.0 ** (-torch.arange(0, d, 2, device=x.device) / d)
    angle = torch.outer(torch.arange(s, device=x.device), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class LlamaAttention(nn.Module):
    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(h, h, bias=False)
        self.k_proj = nn.Linear(h, h, bias=False)
        self.v_proj = nn.Linear(h, h, bias=False)
        self.o_proj = nn.Linear(h, h, bias=False)

    def forward(self, x_bsh: Tensor) -> Tensor:
        q, k, v = (
            projection(x_bsh).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class LlamaMLP(nn.Module):
    def __init__(self, h: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(h, intermediate, bias=False)
        self.up_proj = nn.Linear(h, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, h, bias=False)

    def forward(self, x_bsh: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_bsh)) * self.up_proj(x_bsh))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, h: int, intermediate: int, heads: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(h), nn.RMSNorm(h)
        self.self_attn, self.mlp = LlamaAttention(h, heads), LlamaMLP(h, intermediate)

    def forward(self, x_bsh: Tensor) -> Tensor:
        x_bsh = x_bsh + self.self_attn(self.input_layernorm(x_bsh))
        return x_bsh + self.mlp(self.post_attention_layernorm(x_bsh))


class LlamaModel(nn.Module):
    def __init__(self, vocab: int, h: int, intermediate: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, h)
        self.layers = nn.ModuleList(LlamaDecoderLayer(h, intermediate, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(h)

    def forward(self, tokens_bs: Tensor) -> Tensor:
        x_bsh = self.embed_tokens(tokens_bs)
        for layer in self.layers:
            x_bsh = layer(x_bsh)
        return self.norm(x_bsh)


class LlamaForCausalLM(nn.Module):
    """Tokens `[b, s + 1]` -> the mean cross-entropy of the last s of each, in nats."""

    def __init__(self, vocab: int = 256, h: int = 64, intermediate: int = 160, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.model = LlamaModel(vocab, h, intermediate, layers, heads)
        self.lm_head = nn.Linear(h, vocab, bias=False)

    def forward(self, tokens_bs: Tensor) -> Tensor:
        logits = self.lm_head(self.model(tokens_bs[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), tokens_bs[:, 1:].flatten())


def counting_batch(vocab: int, b: int, s: int, device: torch.device | str = "cpu") -> Tensor:
    """Something to learn: sequences `[b, s + 1]` that count up from a random start, each by a step of its own."""
    start, step = torch.randint(vocab, (b, 1), device=device), torch.randint(1, 4, (b, 1), device=device)
    return (start + step * torch.arange(s + 1, device=device)) % vocab
