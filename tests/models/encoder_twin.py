"""Unsharded float64 twins of BERT and T5 in plain PyTorch, from the formulas, sharing no code with the package.

`dropouts`: of a micro-batch (`tests.models.twin`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.config.schema import ModelConfig
from tests.models.twin import Dropouts

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


def gelu(x: Tensor, kind: str) -> Tensor:
    if kind.endswith("tanh"):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def attend(
    q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float, allowed: Tensor, bias: Tensor | None,
    dropouts: Dropouts, name: str,
) -> Tensor:  # fmt: skip
    """`[b, s, a·d]` from q of s, and k and v of t tokens; `allowed` `[b, s, t]`, `bias` `[a, s, t]`."""
    out = []
    for head, parts in enumerate(zip(*(x.chunk(heads, -1) for x in (q, k, v)), strict=True)):
        scores = scale * parts[0] @ parts[1].mT
        if bias is not None:
            scores = scores + bias[head]
        probabilities = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        out.append(dropouts.probabilities(probabilities, name, head) @ parts[2])
    return torch.cat(out, -1)


def bert_hidden(
    w: Weights, config: ModelConfig, tokens: Tensor, types: Tensor, lengths: list[int], dropouts: Dropouts
) -> Tensor:
    """Hidden states `[b, s, h]`; the first `lengths` tokens of each sample attend to each other, the others too."""
    s = tokens.shape[1]
    post, heads = config.norm_position == "post", config.num_attention_heads
    x = w["embedding.word.weight"][tokens] + w["embedding.position.weight"][:s]
    if config.token_types:
        x = x + w["embedding.token_type.weight"][types]
    if config.embedding_norm:
        x = norm(x, w, "embedding_norm", config)
    x = dropouts.hidden(x, "embedding")
    is_text = torch.arange(s) < torch.tensor(lengths)[:, None]
    allowed = is_text[:, :, None] == is_text[:, None, :]
    for i in range(config.num_layers):
        name, scale = f"layers.{i}", 1 / math.sqrt(config.hidden_size // config.num_attention_heads)
        y = x if post else norm(x, w, f"{name}.attention_norm", config)
        q, k, v = (linear(y, w, f"{name}.attention.{part}") for part in "qkv")
        y = attend(
            q,
            k,
            v,
            heads,
            scale,
            allowed,
            None,
            dropouts,
            f"{name}.attention",
        )
        x = x + dropouts.hidden(linear(y, w, f"{name}.attention.proj"), f"{name}.attention")
        if post:
            x = norm(x, w, f"{name}.attention_norm", config)
        y = x if post else norm(x, w, f"{name}.mlp_norm", config)
        y = linear(gelu(linear(y, w, f"{name}.mlp.up"), config.activation), w, f"{name}.mlp.down")
        x = x + dropouts.hidden(y, f"{name}.mlp")
        if post:
            x = norm(x, w, f"{name}.mlp_norm", config)
    return x if post else norm(x, w, "final_norm", config)


def bert_loss(
    w: Weights, config: ModelConfig, tokens: Tensor, types: Tensor, lengths: list[int], labels: Tensor,
    swapped: Tensor, dropouts: Dropouts,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss of each token `[b, s]`, and of each sample `[b]`, zero without a binary head."""
    x = bert_hidden(w, config, tokens, types, lengths, dropouts)
    y = gelu(linear(x, w, "transform"), config.transform_activation or config.activation)
    y = norm(y, w, "transform_norm", config)
    output = w["embedding.word.weight"] if config.tie_embeddings else w["output.weight"]
    logits = (y @ output.T + w["output.bias"])[..., : config.vocab_size]
    loss = logits.logsumexp(-1) - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if not config.binary_head:
        return loss, torch.zeros(len(tokens), dtype=torch.float64)
    pooled = torch.tanh(linear(x[:, 0], w, "pooler"))
    return loss, F.cross_entropy(linear(pooled, w, "binary_head"), swapped, reduction="none")


def _bucket(distance: int, config: ModelConfig, *, bidirectional: bool) -> int:
    """Of a key that is `distance` after its query (Raffel et al. 2019; Mesh TensorFlow's definition)."""
    count, start = config.relative_attention_num_buckets, 0
    if bidirectional:
        count //= 2
        start, distance = (count if distance > 0 else 0), abs(distance)
    else:
        distance = max(-distance, 0)
    exact = count // 2
    if distance < exact:
        return start + distance
    far = math.log(distance / exact) / math.log(config.relative_attention_max_distance / exact) * (count - exact)
    return start + min(exact + int(far), count - 1)


def _t5_mlp(x: Tensor, w: Weights, name: str, config: ModelConfig) -> Tensor:
    up = linear(x, w, f"{name}.up")
    inner = gelu(linear(x, w, f"{name}.gate"), config.activation) * up if f"{name}.gate.weight" in w else up.relu()
    return linear(inner, w, f"{name}.down")


def t5_logits(w: Weights, config: ModelConfig, tokens: Tensor, decoder_tokens: Tensor, dropouts: Dropouts) -> Tensor:
    """`[b, d, v]`."""
    (b, s), d, heads = tokens.shape, decoder_tokens.shape[1], config.num_attention_heads

    def bias(n: int, stack: str, *, bidirectional: bool) -> Tensor:
        found = [[_bucket(j - i, config, bidirectional=bidirectional) for j in range(n)] for i in range(n)]
        return w[f"{stack}.relative_bias.weight"][torch.tensor(found)].permute(2, 0, 1)

    def attention(x: Tensor, of: Tensor, name: str, allowed: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = linear(x, w, f"{name}.q"), linear(of, w, f"{name}.k"), linear(of, w, f"{name}.v")
        y = attend(q, k, v, heads, 1.0, allowed.expand(b, -1, -1), bias, dropouts, name)
        return dropouts.hidden(linear(y, w, f"{name}.proj"), name)

    def mlp(x: Tensor, name: str) -> Tensor:
        return dropouts.hidden(_t5_mlp(norm(x, w, f"{name}_norm", config), w, name, config), name)

    def embedded(tokens: Tensor, stack: str) -> Tensor:
        return dropouts.hidden(w["embedding.word.weight"][tokens], f"{stack}.embedding")

    x, everything = embedded(tokens, "encoder"), torch.ones(1, s, s, dtype=torch.bool)
    of_encoder = bias(s, "encoder", bidirectional=True)
    for i in range(config.num_layers):
        y = norm(x, w, f"layers.{i}.attention_norm", config)
        x = x + attention(y, y, f"layers.{i}.attention", everything, of_encoder)
        x = x + mlp(x, f"layers.{i}.mlp")
    encoded = norm(x, w, "encoder_norm", config)
    x, earlier = embedded(decoder_tokens, "decoder"), torch.ones(1, d, d, dtype=torch.bool).tril()
    of_decoder = bias(d, "decoder", bidirectional=False)
    for i in range(config.num_layers, config.num_layers + (config.num_decoder_layers or config.num_layers)):
        y = norm(x, w, f"layers.{i}.attention_norm", config)
        x = x + attention(y, y, f"layers.{i}.attention", earlier, of_decoder)
        y = norm(x, w, f"layers.{i}.cross_norm", config)
        x = x + attention(y, encoded, f"layers.{i}.cross_attention", torch.ones(1, d, s, dtype=torch.bool), None)
        x = x + mlp(x, f"layers.{i}.mlp")
    x = norm(x, w, "final_norm", config)
    if config.tie_embeddings:
        return x / math.sqrt(config.hidden_size) @ w["embedding.word.weight"].T
    return x @ w["output.weight"].T
