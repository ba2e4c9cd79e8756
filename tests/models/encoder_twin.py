"""Unsharded float64 twins of BERT and T5 in plain PyTorch, from the formulas, sharing no code with the package."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.config import ModelConfig

Weights = dict[str, Tensor]


def norm(x: Tensor, w: Weights, name: str, config: ModelConfig) -> Tensor:
    if config.normalization == "rmsnorm":
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) * w[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + config.norm_eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    y = torch.einsum("...k,nk->...n", x, w[f"{name}.weight"])
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def gelu(x: Tensor, config: ModelConfig) -> Tensor:
    if config.activation.endswith("tanh"):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float, allowed: Tensor, bias: Tensor | None) -> Tensor:
    """`[b, s, a·d]` from q of s, and k and v of t tokens; `allowed` `[b, s, t]`, `bias` `[a, s, t]`."""
    out = []
    for head, parts in enumerate(zip(*(x.chunk(heads, -1) for x in (q, k, v)), strict=True)):
        scores = scale * parts[0] @ parts[1].mT
        if bias is not None:
            scores = scores + bias[head]
        out.append(scores.masked_fill(~allowed, -math.inf).softmax(-1) @ parts[2])
    return torch.cat(out, -1)


def bert_hidden(w: Weights, config: ModelConfig, tokens: Tensor, types: Tensor, lengths: list[int]) -> Tensor:
    """Hidden states `[b, s, h]`; the first `lengths` tokens of each sample attend to each other, the others too."""
    s = tokens.shape[1]
    post, heads = config.norm_position == "post", config.num_attention_heads
    x = w["embedding.word.weight"][tokens] + w["embedding.position.weight"][:s]
    if config.token_types:
        x = x + w["embedding.token_type.weight"][types]
    if post:
        x = norm(x, w, "embedding_norm", config)
    is_text = torch.arange(s) < torch.tensor(lengths)[:, None]
    allowed = is_text[:, :, None] == is_text[:, None, :]
    for i in range(config.num_layers):
        name = f"layers.{i}"
        y = x if post else norm(x, w, f"{name}.attention_norm", config)
        q, k, v = (linear(y, w, f"{name}.attention.{part}") for part in "qkv")
        y = attend(q, k, v, heads, 1 / math.sqrt(config.channels), allowed, None)
        x = x + linear(y, w, f"{name}.attention.proj")
        if post:
            x = norm(x, w, f"{name}.attention_norm", config)
        y = x if post else norm(x, w, f"{name}.mlp_norm", config)
        x = x + linear(gelu(linear(y, w, f"{name}.mlp.up"), config), w, f"{name}.mlp.down")
        if post:
            x = norm(x, w, f"{name}.mlp_norm", config)
    return x if post else norm(x, w, "final_norm", config)


def bert_loss(
    w: Weights, config: ModelConfig, tokens: Tensor, types: Tensor, lengths: list[int], labels: Tensor, swapped: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss of each token `[b, s]`, and of each sample `[b]`, zero without a binary head."""
    x = bert_hidden(w, config, tokens, types, lengths)
    y = norm(gelu(linear(x, w, "transform"), config), w, "transform_norm", config)
    output = w["embedding.word.weight"] if config.tie_embeddings else w["output.weight"]
    logits = (y @ output.T + w["output.bias"])[..., : config.vocab_size]
    loss = logits.logsumexp(-1) - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if not config.binary_head:
        return loss, torch.zeros(len(tokens), dtype=torch.float64)
    pooled = torch.tanh(linear(x[:, 0], w, "pooler"))
    return loss, F.cross_entropy(linear(pooled, w, "binary_head"), swapped, reduction="none")
