"""The twin of `megafp8.nn`: its modules in dense float64 PyTorch, from the formulas, sharing no code with the package.

Parameters are read by Transformer Engine's names. Attention loops over samples and heads, and asks a function of the
positions for each pair: slow, and easy to check.

Shapes: s queries, t keys, b micro-batch, a query heads, g key-value heads, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]
Attends = Callable[[int, int, int], bool]
"""Of (sample, query, key)."""


def norm(x: Tensor, p: Params, prefix: str, eps: float, zero_centered: bool) -> Tensor:
    """LayerNorm if there is a bias, else RMSNorm."""
    weight = p[f"{prefix}weight"] + (1 if zero_centered else 0)
    if f"{prefix}bias" not in p:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight + p[f"{prefix}bias"]


def linear(x: Tensor, p: Params, prefix: str) -> Tensor:
    y = torch.einsum("...k,nk->...n", x, p[f"{prefix}weight"])
    return y + p[f"{prefix}bias"] if f"{prefix}bias" in p else y


def of(p: Params, prefix: str) -> Params:
    """The parameters below `prefix`."""
    return {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}


def _gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "relu": _relu,
    "srelu": lambda x: _relu(x) ** 2,
    "qgelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
}
_GATED = {"geglu": "gelu", "reglu": "relu", "sreglu": "srelu", "qgeglu": "qgelu", "swiglu": "silu", "glu": "sigmoid"}


def activation(x: Tensor, name: str) -> Tensor:
    if name not in _GATED and name != "clamped_swiglu":
        return _FUNCTIONS[name](x)
    half = x.shape[-1] // 2
    if name == "clamped_swiglu":
        gate, up = torch.minimum(x[..., :half], torch.tensor(7.0)), x[..., half:].clip(-7.0, 7.0)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    return _FUNCTIONS[_GATED[name]](x[..., :half]) * x[..., half:]


def mlp(x: Tensor, p: Params, name: str, zero_centered: bool = False) -> tuple[Tensor, Tensor]:
    """Output and the norm's output of LayerNormMLP."""
    normed = norm(x, p, "layer_norm_", 1e-5, zero_centered)
    return linear(activation(linear(normed, p, "fc1_"), name), p, "fc2_"), normed


def attention(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, attends: Attends, *, scale: float | None = None,
    softcap: float = 0.0, sink_a: Tensor | None = None, slopes: list[float] | None = None, shift: int = 0,
) -> Tensor:  # fmt: skip
    """`[s, b, a, d]`; 0 for queries without keys. ALiBi's bias is -slope·|j - i - shift|."""
    (s, b, a, d), (t, _, g, _) = q_sbad.shape, k_tbgd.shape
    out = []
    for sample in range(b):
        mask = torch.tensor([[attends(sample, i, j) for j in range(t)] for i in range(s)])
        distance = torch.tensor([[float(abs(j - i - shift)) for j in range(t)] for i in range(s)])
        for head in range(a):
            q, k, v = q_sbad[:, sample, head], k_tbgd[:, sample, head * g // a], v_tbgd[:, sample, head * g // a]
            scores = q @ k.T * (d**-0.5 if scale is None else scale)
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if slopes is not None:
                scores = scores - slopes[head] * distance
            weights = scores.exp() * mask
            total = weights.sum(-1, keepdim=True) + (0 if sink_a is None else sink_a[head].exp())
            out.append(weights / torch.where(total > 0, total, torch.ones_like(total)) @ v)
    return torch.stack([torch.stack(out[i * a : (i + 1) * a], 1) for i in range(b)], 1)


def rotate(x_sbad: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Pairs of the first channels as complex numbers; `angles` `[s, 1, 1, r]`."""
    r = angles.shape[-1]
    first, second = (x_sbad[..., :r:2], x_sbad[..., 1:r:2]) if interleaved else x_sbad[..., :r].chunk(2, -1)
    half = (angles[..., ::2] if interleaved else angles[..., : r // 2]).double()
    z = torch.complex(first, second) * torch.polar(torch.ones_like(half), half)
    rotated = torch.stack([z.real, z.imag], -1).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)
    return torch.cat([rotated, x_sbad[..., r:]], -1)


def multi_head_attention(
    x: Tensor, p: Params, attends: Attends, heads: int, groups: int, *, encoder_output: Tensor | None = None,
    interleaved: bool = False, zero_centered: bool = False, angles: Tensor | None = None,
    pairs_interleaved: bool = False, qk_norm: str | None = None, before_rope: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and what the projections read, of MultiheadAttention on sbhd; a norm at the input if it has one."""
    kind = "qkv" if encoder_output is None else "query"
    of_norm = of(p, f"layernorm_{kind}.")
    normed = norm(x, of_norm, "layer_norm_", 1e-5, zero_centered) if of_norm else x
    first = of_norm or of(p, "qkv." if kind == "qkv" else "query_layer.")
    if encoder_output is None:
        q, k, v = _projected(normed, first, ("query", "key", "value"), heads, groups, interleaved)
    else:
        q = linear(normed, first, "query_" if "query_weight" in first else "")
        k, v = _projected(encoder_output, of(p, "key_value."), ("key", "value"), heads, groups, interleaved)
    q, k, v = q.unflatten(-1, (heads, -1)), k.unflatten(-1, (groups, -1)), v.unflatten(-1, (groups, -1))

    def normed_heads(y: Tensor, name: str) -> Tensor:
        if qk_norm == "L2Normalization":
            return y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return norm(y, of(p, f"{name}_norm."), "", 1e-6, False) if qk_norm else y

    if before_rope:
        q, k = normed_heads(q, "q"), normed_heads(k, "k")
    if angles is not None:
        q, k = rotate(q, angles, pairs_interleaved), rotate(k, angles, pairs_interleaved)
    if not before_rope:
        q, k = normed_heads(q, "q"), normed_heads(k, "k")
    return linear(attention(q, k, v, attends).flatten(-2), of(p, "proj."), ""), normed


def _projected(
    x: Tensor, p: Params, parts: tuple[str, ...], heads: int, groups: int, interleaved: bool
) -> tuple[Tensor, ...]:
    """q, k, v, or k and v: of a parameter each, or of one, whose rows may be those of one group after the other."""
    if "weight" not in p:
        return tuple(linear(x, p, f"{part}_") for part in parts)
    packed = linear(x, p, "")
    queries = [heads // groups] * (len(parts) == 3)
    d = packed.shape[-1] // (groups * (sum(queries) + 2))
    if not interleaved:
        return packed.split([n * groups * d for n in (*queries, 1, 1)], -1)
    of_groups = packed.unflatten(-1, (groups, -1)).split([n * d for n in (*queries, 1, 1)], -1)
    return tuple(y.flatten(-2) for y in of_groups)


def transformer_layer(
    x: Tensor, p: Params, attends: Attends, heads: int, groups: int, *, activation: str = "gelu",
    encoder_output: Tensor | None = None, cross_attends: Attends | None = None, output_layernorm: bool = False,
    post_norm_residual: bool = False, parallel: bool = False, zero_centered: bool = False, **attention: Any,
) -> Tensor:  # fmt: skip
    """TransformerLayer on sbhd, without dropout."""
    own = of(p, "self_attention.")
    attended, normed = multi_head_attention(x, own, attends, heads, groups, zero_centered=zero_centered, **attention)
    if parallel:
        return x + attended + mlp(x, of(p, "layernorm_mlp."), activation, zero_centered)[0]
    x = (normed if post_norm_residual and not output_layernorm else x) + attended
    if encoder_output is not None:
        assert cross_attends is not None
        attended, normed = multi_head_attention(
            x, of(p, "inter_attention."), cross_attends, heads, groups, encoder_output=encoder_output,
            zero_centered=zero_centered, **attention,
        )  # fmt: skip
        x = (normed if post_norm_residual else x) + attended
    y, normed = mlp(x, of(p, "layernorm_mlp."), activation, zero_centered)
    x = (normed if post_norm_residual else x) + y
    return norm(x, of(p, "layernorm."), "", 1e-5, zero_centered) if output_layernorm else x
