"""The unsharded twin: the same GPT in float64 PyTorch, from the formulas, sharing no code with the package.

It computes the loss from whole weights by their global names; autograd gives the expected gradients. Heads are looped
over, masks are built pair by pair, rotary pairs are complex numbers: slow, and easy to check.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megafp8.config.parts import LayerKind
from megafp8.config.schema import ModelConfig
from megafp8.layers.absent.record import NoFfnConfig, NoMixerConfig
from megafp8.layers.attention.record import AttentionConfig
from megafp8.layers.block_sparse_attention.record import BlockSparseAttentionConfig
from megafp8.layers.compressed_attention.record import CompressedAttentionConfig
from megafp8.layers.experts.record import MoeFfnConfig
from megafp8.layers.gated_delta_net.record import GatedDeltaNetConfig
from megafp8.layers.kimi_delta_attention.record import KimiDeltaAttentionConfig
from megafp8.layers.mamba1.record import Mamba1Config
from megafp8.layers.mamba2.record import Mamba2Config
from megafp8.layers.rg_lru.record import RgLruConfig
from megafp8.layers.rwkv7.record import Rwkv7Config
from megafp8.layers.shared_attention.record import SharedAttentionConfig
from megafp8.layers.short_convolution.record import ShortConvolutionConfig

Weights = dict[str, Tensor]


def _philox(words: list[np.ndarray], name: str) -> list[np.ndarray]:
    """Philox-4x32-10 of the four words of counters, uint64; keyed by a name."""
    digest = hashlib.sha256(name.encode()).digest()
    low = np.uint64(0xFFFFFFFF)
    keys = [np.uint64(int.from_bytes(digest[at : at + 4], "little")) for at in (0, 4)]
    a, b, c, d = np.broadcast_arrays(*words)
    for i in range(10):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        k0, k1 = (key + np.uint64(i * step) & low for key, step in zip(keys, (0x9E3779B9, 0xBB67AE85)))
        a, b, c, d = second >> np.uint64(32) ^ b ^ k0, second & low, first >> np.uint64(32) ^ d ^ k1, first & low
    return [a, b, c, d]


class Dropouts:
    """Of the samples with these indices in a run; none where `samples` is None."""

    def __init__(self, config: ModelConfig, seed: int, samples: list[int] | None) -> None:
        self.config, self.seed, self.samples = config, seed, samples

    def hidden(self, x_bsh: Tensor, name: str) -> Tensor:
        """Word j mod 4 of (channel j // 4, position, index of the sample, its upper 32 bits)."""
        (_, s, h), p = x_bsh.shape, self.config.hidden_dropout
        if self.samples is None or not p:
            return x_bsh
        sample = np.array(self.samples, np.uint64)[:, None, None]
        position, group = np.arange(s, dtype=np.uint64)[:, None], np.arange(-(-h // 4), dtype=np.uint64)
        counter = [group, position, sample & np.uint64(0xFFFFFFFF), sample >> np.uint64(32)]
        return _kept(x_bsh, p, _philox(counter, f"{self.seed}\0{name}\0hidden_dropout"))

    def probabilities(self, p_bst: Tensor, name: str, head: int) -> Tensor:
        """Word j mod 4 of (key j // 4, query, head, index of the sample)."""
        (_, s, t), p = p_bst.shape, self.config.attention_dropout
        if self.samples is None or not p:
            return p_bst
        sample = np.array(self.samples, np.uint64)[:, None, None] & np.uint64(0xFFFFFFFF)
        query, group = np.arange(s, dtype=np.uint64)[:, None], np.arange(-(-t // 4), dtype=np.uint64)
        counter = [group, query, np.array(head, np.uint64), sample]
        return _kept(p_bst, p, _philox(counter, f"{self.seed}\0{name}\0attention_dropout"))


def _kept(x: Tensor, p: float, words: list[np.ndarray]) -> Tensor:
    word = np.stack(words, -1).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
    return x * torch.from_numpy(word >= np.uint64(round(p * 2**32))) / (1 - p)


def _norm(x: Tensor, w: Weights, name: str, config: ModelConfig, kind: str = "rmsnorm") -> Tensor:
    """By default that of latents, or of queries and keys."""
    latent = config.latent_attention
    eps = latent.norm_eps if latent and latent.norm_eps and ".attention." in name else config.norm_eps
    has_weight = config.norm_weights or "attention." in name or "embedding." in name
    weight = w[f"{name}.weight"] + config.zero_centered_gamma if has_weight else 1
    if kind == "rmsnorm":
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + w.get(f"{name}.bias", 0)


def _linear(x: Tensor, w: Weights, name: str) -> Tensor:
    y = torch.einsum("...k,nk->...n", x, w[f"{name}.weight"])
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _yarn_frequency(f: float, pair: int, d: int, config: ModelConfig) -> float:
    y = config.yarn
    assert y is not None
    whole_context = y.original_max_position_embeddings / (2 * math.pi)
    pair_of = [
        math.log(whole_context / rotations, config.rope_theta) * d / 2 for rotations in (y.beta_fast, y.beta_slow)
    ]
    if y.truncate:
        pair_of = [math.floor(pair_of[0]), math.ceil(pair_of[1])]
    low, high = max(pair_of[0], 0), min(pair_of[1], d - 1)
    stretched = min(max((pair - low) / (high - low), 0), 1)
    return f * (1 - stretched) + f / y.factor * stretched


def _frequency(pair: int, d: int, config: ModelConfig, length: int, window: int | None = None) -> float:
    """Of a pair of d rotated channels, or of heads of d channels where rotation is proportional."""
    if window is not None and config.rope_local_theta is not None:
        return config.rope_local_theta ** (-2 * pair / d)
    f = config.rope_theta ** (-2 * pair / d) / config.rope_interpolation_factor
    if config.yarn is not None:
        return _yarn_frequency(f, pair, d, config)
    if config.longrope is not None:
        short = length <= config.longrope.original_max_position_embeddings
        return f / (config.longrope.short_factor if short else config.longrope.long_factor)[pair]
    r = config.rope_scaling
    if r is None:
        return f
    wavelength = 2 * math.pi / f
    if wavelength < r.original_max_position_embeddings / r.high_freq_factor:
        return f
    if wavelength > r.original_max_position_embeddings / r.low_freq_factor:
        return f / r.factor
    smooth = (r.original_max_position_embeddings / wavelength - r.low_freq_factor) / (
        r.high_freq_factor - r.low_freq_factor
    )
    return (1 - smooth) * f / r.factor + smooth * f


def _scaled_factors(config: ModelConfig) -> tuple[float, float]:
    """Of rotated channels, and of latent attention's scores."""
    if config.longrope is not None:
        lengths = config.longrope.factor, config.longrope.original_max_position_embeddings
        return (1 + math.log(lengths[0], lengths[1])) ** 0.5, 1
    if config.yarn is None:
        return 1, 1
    rotated, all_channels = (0.1 * m * math.log(config.yarn.factor) + 1
                             for m in (config.yarn.mscale, config.yarn.mscale_all_dim))  # fmt: skip
    return rotated / all_channels, all_channels**2


def _rotate(x_bsd: Tensor, positions_bs: Tensor, config: ModelConfig, window: int | None) -> Tensor:
    """The halves of a head as complex numbers, the first of them rotated by position × frequency."""
    half = x_bsd.shape[-1] // 2
    pairs = round(half * config.partial_rotary_factor)
    frequencies = torch.tensor(
        [
            _frequency(i, 2 * (half if config.proportional_rope else pairs), config, x_bsd.shape[1], window)
            for i in range(pairs)
        ],
        dtype=torch.float64,
    )
    factor = 1 if window is not None and config.rope_local_theta is not None else _scaled_factors(config)[0]
    rotations = torch.polar(
        torch.tensor(factor, dtype=torch.float64), positions_bs.double().unsqueeze(-1) * frequencies
    )
    x = torch.complex(x_bsd[..., :half], x_bsd[..., half:])
    rotated = torch.cat([x[..., :pairs] * rotations, x[..., pairs:]], dim=-1)
    return torch.cat([rotated.real, rotated.imag], dim=-1)


def _alibi_slope(head: int, heads: int) -> float:
    """2^(-8/n), 2^(-16/n), ... for n heads; beyond the last power of two every second slope of twice that power."""
    power = 2 ** math.floor(math.log2(heads))
    return 2 ** (-8 * (head + 1) / power) if head < power else 2 ** (-8 * (2 * (head - power) + 1) / (2 * power))


def _query_scales(config: ModelConfig, positions: Tensor) -> Tensor | float:
    """What queries are multiplied by, `[b, s, 1]`: a step more after each so many tokens."""
    if config.query_scaling is None:
        return 1.0
    q = config.query_scaling
    steps = torch.div(positions + q.first_position, q.length, rounding_mode="floor").double()
    return (1 + q.factor * torch.log(1 + steps)).unsqueeze(-1)


def _attention(
    x: Tensor,
    w: Weights,
    name: str,
    config: ModelConfig,
    positions: Tensor,
    allowed: Tensor,
    dropouts: Dropouts,
    window: int | None,
    record: AttentionConfig,
    shared: dict[str, Any],
    losses: list[Tensor],
) -> Tensor:
    """`shared`: normed and rotated keys and values of the heads of each layer so far."""
    heads, groups = config.num_attention_heads, config.num_query_groups or config.num_attention_heads
    d = config.head_dim or config.hidden_size // heads
    source = f"layers.{record.kv_layer}.attention"
    q = _linear(x, w, f"{name}.q")
    k = q if record.kv_layer is not None else _linear(x, w, f"{name}.k")
    v = k if record.kv_layer is not None or config.keys_as_values else _linear(x, w, f"{name}.v")
    shared[name] = []
    if config.qk_norm == "projection":
        q, k = (_norm(y, w, f"{name}.{part}_norm", config) for y, part in ((q, "q"), (k, "k")))
    out = []
    blocks = isinstance(record, BlockSparseAttentionConfig)
    index = _scores_of_groups(x.detach(), w, name, config, positions) if blocks else []
    chosen = [_in_chosen_blocks(scores, allowed, positions, record) for scores in index] or [allowed] * groups
    targets = [torch.zeros(())] * groups
    for head in range(heads):
        group = head // (heads // groups)
        qh, kh, vh = q[..., head * d : (head + 1) * d], *(y[..., group * d : (group + 1) * d] for y in (k, v))
        if config.qk_norm is True:
            qh = _norm(qh, w, f"{name}.q_norm", config)
            kh = kh if record.kv_layer is not None else _norm(kh, w, f"{name}.k_norm", config)
        if config.position_embedding == "rope":
            qh, kh = _rotate(qh, positions, config, window), _rotate(kh, positions, config, window)
        if config.qk_norm == "after_rotation":
            qh, kh = _norm(qh, w, f"{name}.q_norm", config), _norm(kh, w, f"{name}.k_norm", config)
        if config.qk_norm == "rotated":
            qh, kh = (y / (y.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() for y in (qh, kh))
        if config.value_norm:
            vh = vh / (vh.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
        if record.kv_layer is not None:
            kh, vh = shared[source][head]
        shared[name].append((kh, vh))
        qh = qh * _query_scales(config, positions)
        widened = config.mup is not None and config.mup.base_head_dim is not None
        usual = math.sqrt(config.mup.base_head_dim) / d if widened else 1 / math.sqrt(d)
        scores = qh @ kh.transpose(-1, -2) * (config.attention_scale or usual)
        if config.attention_softcap is not None:
            scores = config.attention_softcap * torch.tanh(scores / config.attention_softcap)
        if config.position_embedding == "alibi":
            distance = (positions.unsqueeze(-2) - positions.unsqueeze(-1)).double()
            scores = scores + _alibi_slope(head, heads) * distance
        scores = scores.masked_fill(~chosen[group], -math.inf)
        targets[group] = targets[group] + scores.softmax(-1).detach() * groups / heads
        if config.attention_sinks:  # one more key, without a value
            sink = w[f"{name}.sink.weight"][head].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], -1)
        out.append(dropouts.probabilities(scores.softmax(-1)[..., : kh.shape[1]], name, head) @ vh)
    for scores, target, seen in zip(index, targets, chosen):
        log_softmax = scores.masked_fill(~seen, -math.inf).log_softmax(-1).masked_fill(~seen, 0.0)
        divergence = (torch.xlogy(target, target) - target * log_softmax).sum()
        losses.append(record.kl_loss * divergence / (groups * scores.shape[0] * scores.shape[1]))
    y = torch.cat(out, -1)
    if config.output_gate:
        gate = _linear(x, w, f"{name}.gate")
        gate = gate.repeat_interleave(y.shape[-1] // gate.shape[-1], dim=-1)
        y = y / (1 + torch.exp(-gate)) if config.output_gate_function == "sigmoid" else y * torch.log1p(torch.exp(gate))
    return _linear(y, w, f"{name}.proj")


def _interleaved(x_bsd: Tensor, positions_bs: Tensor, config: ModelConfig) -> Tensor:
    """Neighbouring channels as complex numbers, rotated by position × frequency."""
    if config.position_embedding == "none":
        return x_bsd
    d = x_bsd.shape[-1]
    frequencies = torch.tensor([_frequency(i, d, config, x_bsd.shape[1]) for i in range(d // 2)], dtype=torch.float64)
    angles = positions_bs.double().unsqueeze(-1) * frequencies
    rotated = torch.complex(x_bsd[..., 0::2], x_bsd[..., 1::2]) * torch.polar(
        _scaled_factors(config)[0] * torch.ones_like(angles), angles
    )
    return torch.view_as_real(rotated).flatten(-2)


def _latent_attention(
    x: Tensor,
    w: Weights,
    name: str,
    config: ModelConfig,
    positions: Tensor,
    allowed: Tensor,
    dropouts: Dropouts,
    window: int | None,
    losses: list[Tensor] | None = None,
    shared: dict[str, Any] | None = None,
) -> Tensor:
    m, sparse = config.latent_attention, config.sparse_attention
    assert m is not None
    n, r, v = m.nope_head_dim, m.rope_head_dim, m.value_head_dim
    kv_latent, k_rotary = _linear(x, w, f"{name}.kv_down").split([m.kv_rank, r], dim=-1)
    if m.q_rank is None:
        q = _linear(x, w, f"{name}.q")
    else:
        q_latent = _norm(_linear(x, w, f"{name}.q_down"), w, f"{name}.q_norm", config)
        q = _linear(q_latent, w, f"{name}.q_up")
    kv = _linear(_norm(kv_latent, w, f"{name}.kv_norm", config), w, f"{name}.kv_up")
    k_rotary, out = _interleaved(k_rotary, positions, config), []
    index, seen = None, allowed
    if shared is not None and getattr(config, "shared_indexer", False):
        allowed = shared["chosen"]
    elif sparse is not None:
        index = _index_scores(x.detach(), q_latent.detach(), w, name, config, positions)
        allowed = seen if sparse.warmup else _chosen(index, seen, sparse.top_k)
        if shared is not None:
            shared["chosen"] = allowed
    target = torch.zeros(())
    for head in range(config.num_attention_heads):
        qn, qr = q[..., head * (n + r) : (head + 1) * (n + r)].split([n, r], dim=-1)
        kn, vh = kv[..., head * (n + v) : (head + 1) * (n + v)].split([n, v], dim=-1)
        scores = qn @ kn.transpose(-1, -2) + _interleaved(qr, positions, config) @ k_rotary.transpose(-1, -2)
        scores = scores * _scaled_factors(config)[1] * _query_scales(config, positions)
        probabilities = (scores / math.sqrt(n + r)).masked_fill(~allowed, -math.inf).softmax(-1)
        out.append(dropouts.probabilities(probabilities, name, head) @ vh)
        target = target + probabilities.detach() / config.num_attention_heads
    if index is not None and losses is not None:
        b, s, _ = x.shape
        log_softmax = index.masked_fill(~allowed, -math.inf).log_softmax(-1).masked_fill(~allowed, 0.0)
        divergence = (torch.xlogy(target, target) - target * log_softmax).sum()
        losses.append(sparse.kl_loss * divergence / (b * s))
    return _linear(torch.cat(out, -1), w, f"{name}.proj")


def _scores_of_groups(x: Tensor, w: Weights, name: str, config: ModelConfig, positions: Tensor) -> list[Tensor]:
    """The indexer's scores `[b, s, t]` of all pairs, for each group."""
    d = config.head_dim or config.hidden_size // config.num_attention_heads

    def heads(part: str) -> list[Tensor]:
        rows = _linear(x, w, f"{name}.index_{part}").split(d, dim=-1)
        return [_rotate(_norm(y, w, f"{name}.index_{part}_norm", config), positions, config, None) for y in rows]

    (k,) = heads("k")
    return [q @ k.transpose(-1, -2) / math.sqrt(d) for q in heads("q")]


def _in_chosen_blocks(
    scores: Tensor, allowed: Tensor, positions: Tensor, record: BlockSparseAttentionConfig
) -> Tensor:  # fmt: skip
    """Return which keys are in the chosen blocks of each query, one query after the other."""
    chosen = torch.zeros_like(allowed)
    for row, i in np.ndindex(*allowed.shape[:2]):
        blocks: dict[int, list[int]] = {}
        for j in torch.where(allowed[row, i])[0].tolist():
            blocks.setdefault(int(positions[row, j]) // record.block_size, []).append(j)
        latest = [*blocks][-record.local_blocks :]
        best = {block: float(scores[row, i, keys].max()) for block, keys in blocks.items()}
        best |= dict.fromkeys(latest, math.inf)
        for block in sorted(blocks, key=lambda block: (-best[block], block))[: record.top_k]:
            chosen[row, i, blocks[block]] = True
    return chosen


def _index_scores(x: Tensor, q_latent: Tensor, w: Weights, name: str, config: ModelConfig, positions: Tensor) -> Tensor:
    """The indexer's scores `[b, s, t]` of all pairs."""
    sparse, latent = config.sparse_attention, config.latent_attention
    assert sparse is not None
    assert latent is not None
    d, r = sparse.index_head_dim, latent.rope_head_dim

    def rotated(y: Tensor) -> Tensor:
        rotate = _interleaved(y[..., :r], positions, config) if sparse.index_rope == "neighbors" else None
        if rotate is None:
            rotate = _rotate(y[..., :r], positions, config.model_copy(update={"partial_rotary_factor": 1.0}), None)
        return torch.cat([rotate, y[..., r:]], -1)

    q, k, weights = (_linear(y, w, f"{name}.{part}") for y, part in
                     ((q_latent, "index_q"), (x, "index_k"), (x, "index_weights")))  # fmt: skip
    centred = k - k.mean(-1, keepdim=True)
    k = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-6)
    k = rotated(k * w[f"{name}.index_k_norm.weight"] + w[f"{name}.index_k_norm.bias"])
    total = torch.zeros(())
    for head in range(sparse.index_heads):
        scores = (rotated(q[..., head * d : (head + 1) * d]) @ k.transpose(-1, -2) / math.sqrt(d)).clamp(min=0)
        total = total + scores * weights[..., head : head + 1] / math.sqrt(sparse.index_heads)
    return total


def _chosen(index: Tensor, allowed: Tensor, top_k: int) -> Tensor:
    """The keys of the greatest scores among those allowed; of equal scores the first ones."""
    chosen = torch.zeros_like(allowed)
    for row, i in np.ndindex(*allowed.shape[:2]):
        scores = index[row, i].tolist()
        keys = [j for j in range(len(scores)) if allowed[row, i, j]]
        chosen[row, i, sorted(keys, key=lambda j: (-scores[j], j))[:top_k]] = True
    return chosen


def mlp(x: Tensor, w: Weights, name: str, config: ModelConfig) -> Tensor:
    gate, up = (_linear(x, w, f"{name}.{part}") if f"{name}.{part}.weight" in w else None for part in ("gate", "up"))
    z = up if gate is None else gate
    f = _xielu(z, w, name) if config.activation == "xielu" else _activated(z, config.activation)
    assert (gate is None) == (config.activation in ("gelu", "gelu_tanh", "relu", "squared_relu", "xielu"))
    if config.activation == "clamped_swiglu":
        up = up.minimum(torch.tensor(7.0)).maximum(torch.tensor(-7.0)) + 1
    if config.activation == "limited_swiglu":
        up = up.minimum(torch.tensor(10.0)).maximum(torch.tensor(-10.0))
    return _linear(f if gate is None else f * up, w, f"{name}.down")


def _xielu(z: Tensor, w: Weights, name: str) -> Tensor:
    p, n = (torch.log1p(torch.exp(w[f"{name}.alpha_{x}.weight"])) for x in "pn")
    exponential = (0.5 + n) * (torch.exp(z.minimum(torch.tensor(0.0))) - 1 - z)
    return 0.5 * z + torch.where(z > 0, p * z**2, exponential)


def _activated(z: Tensor, activation: str) -> Tensor:
    return {
        "swiglu": lambda: z * torch.sigmoid(z),
        "gelu": lambda: 0.5 * z * (1 + torch.erf(z / math.sqrt(2))),
        "gelu_tanh": lambda: 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
        "relu": lambda: z * (z > 0),
        "squared_relu": lambda: z**2 * (z > 0),
        "clamped_swiglu": lambda: z.minimum(torch.tensor(7.0)) * torch.sigmoid(1.702 * z.minimum(torch.tensor(7.0))),
        "limited_swiglu": lambda: z.minimum(torch.tensor(10.0)) * torch.sigmoid(z.minimum(torch.tensor(10.0))),
    }[activation.replace("geglu", "gelu")]()


def chosen_experts(scores: list[float], config: ModelConfig, bias: list[float]) -> list[int]:
    """A token's experts, the best first; of equal ones the first."""
    m = config.moe
    assert m is not None
    ranked = [score + b for score, b in zip(scores, bias)]
    size, best = len(scores) // m.num_groups, 1 if m.score == "softmax" else 2
    groups = [range(g * size, (g + 1) * size) for g in range(m.num_groups)]
    worth = [sum(sorted((ranked[e] for e in group), reverse=True)[:best]) for group in groups]
    kept = sorted(range(m.num_groups), key=lambda g: -worth[g])[: m.top_groups or m.num_groups]
    return sorted((e for g in kept for e in groups[g]), key=lambda e: (-ranked[e], e))[: m.top_k]


def shares_of_the_step_before(experts: int) -> Tensor:
    """A half, a quarter and so on, the last one twice: exact in any dtype."""
    return 0.5 ** torch.tensor([*range(1, experts), experts - 1], dtype=torch.float64)


def moe(
    x: Tensor, w: Weights, name: str, config: ModelConfig, losses: list[Tensor], ids: Tensor, *, hashed: bool,
    padding: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One expert and one token at a time; appends the router's losses of the batch. `hashed`: experts by the ids."""
    m = config.moe
    assert m is not None
    b, s, experts = *x.shape[:2], m.num_experts + (m.zero_experts or 0)
    routed_x, shared_x = x, x
    if m.separate_norms:
        routed_x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) * w[f"{name}.router.scale"]
        routed_x = routed_x / math.sqrt(config.hidden_size)
        x, shared_x = (_norm(x, w, f"{name}.{which}_norm", config) for which in ("experts", "shared"))
    out = []
    read = x if m.latent_size is None else _linear(x, w, f"{name}.latent_down")
    routed = [torch.zeros_like(token) for token in read.flatten(0, 1)]
    weights: list[list[Tensor]] = []  # of each token by expert, 0 where it was not chosen
    for row in range(b):
        share, mean, log_z = torch.zeros(experts, dtype=torch.float64), [], []
        real = s if padding is None else s - int(padding[row].sum())
        for i in range(s):
            logits = w[f"{name}.router.weight"] @ routed_x[row, i]
            if f"{name}.router.logit_bias" in w:
                logits = logits + w[f"{name}.router.logit_bias"]
            scores = logits.sigmoid() if m.score == "sigmoid" else logits.softmax(0)
            if m.score == "sqrtsoftplus":
                scores = torch.log1p(logits.exp()) ** 0.5
            if hashed:
                chosen = w[f"{name}.router.table"][ids[row, i]].long().tolist()
            else:
                bias = w[f"{name}.router.bias"].tolist() if m.selection_bias else [0.0] * experts
                chosen = chosen_experts(scores.tolist(), config, bias)
            total = sum(scores[e] for e in chosen) if m.normalize else 1.0
            weights.append([scores[e] / total * m.scaling_factor * (e in chosen) for e in range(experts)])
            if m.separate_norms:
                weights[-1] = [y * scale for y, scale in zip(weights[-1], w[f"{name}.router.expert_scale"])]
            y = torch.zeros_like(x[row, i])
            if m.shared_ffn_hidden_size is not None:
                shared = mlp(shared_x[row, i], w, f"{name}.shared", config)
                gate = (w[f"{name}.shared_gate.weight"] @ shared_x[row, i]).sigmoid() if m.shared_gate else 1
                y = y + shared * gate
            out.append(y)
            if padding is not None and padding[row, i]:
                continue
            share[chosen] += 1 / (real * m.top_k)
            mean.append(scores / scores.sum())
            log_z.append(logits.logsumexp(0))
        of = real
        if m.aux_loss_scope == "global_batch":
            share, of = shares_of_the_step_before(experts), s
        losses.append((0 if hashed else m.aux_loss) / b * experts * (share * torch.stack(mean).sum(0) / of).sum())
        losses.append(m.z_loss / b * torch.stack(log_z).square().sum() / s)
    most = math.inf if m.capacity_factor is None else math.ceil(m.capacity_factor * b * s * m.top_k / experts)
    for e in range(m.num_experts):
        first = [padding is not None and bool(x) for x in (ids if padding is None else padding).flatten()]
        largest = sorted(range(b * s), key=lambda token: (first[token], -weights[token][e].item()))
        for place, token in enumerate(largest):
            if place < most and weights[token][e] != 0:
                scale = weights[token][e]
                y = mlp(read.flatten(0, 1)[token] * (scale if m.scale_inputs else 1), w, f"{name}.experts.{e}", config)
                routed[token] = routed[token] + (y if m.scale_inputs else scale * y)
    added, of_shared = torch.stack(routed), torch.stack(out)
    added = added if m.latent_size is None else _linear(added, w, f"{name}.latent_up")
    for expert in range(m.num_experts, experts):
        added = added + torch.stack([of[expert] * y for of, y in zip(weights, x.flatten(0, 1))])
    if m.separate_norms:
        added = _norm(added, w, f"{name}.experts_output_norm", config)
        of_shared = _norm(of_shared, w, f"{name}.shared_output_norm", config)
    return (m.shared_scaling_factor * of_shared + added).view_as(x)


def _allowed(
    tokens: Tensor, documents: Tensor | None, window: int | None, prefix: list[int] | None, chunk: int | None,
    positions: Tensor,
) -> Tensor:  # fmt: skip
    b, s = tokens.shape
    allowed = torch.zeros(b, s, s, dtype=torch.bool)
    for row in range(b):
        for i in range(s):
            for j in range(s):
                near = window is None or i - j < window
                if chunk is not None:
                    near &= bool(positions[row, i] // chunk == positions[row, j] // chunk)
                same = documents is None or documents[row, i] == documents[row, j]
                earlier = j <= i or (prefix is not None and j < prefix[row])
                allowed[row, i, j] = earlier and near and bool(same)
    return allowed


def _convolved(y: Tensor, w: Weights, name: str, kernel: int, row: int, i: int, documents: Tensor | None) -> Tensor:
    """The channels of token `i` of a sample after the convolution and SiLU."""
    total = _convolution(y, w, name, kernel, row, i, documents)
    return total * total.sigmoid()


def _convolution(y: Tensor, w: Weights, name: str, kernel: int, row: int, i: int, documents: Tensor | None) -> Tensor:
    total = w[f"{name}.bias"] if f"{name}.bias" in w else torch.zeros_like(y[row, i])
    for j in range(max(0, i - kernel + 1), i + 1):
        if documents is None or documents[row, j] == documents[row, i]:
            total = total + w[f"{name}.weight"][:, 0, kernel - 1 - (i - j)] * y[row, j]
    return total


def _delta_net(
    x: Tensor, w: Weights, name: str, record: GatedDeltaNetConfig, eps: float, documents: Tensor | None
) -> Tensor:
    """Gated DeltaNet and Gated DeltaProduct of one token and head after the other.

    The key head of value head a is a // (a / k). Each step multiplies the state by I - β k kᵀ.
    """
    (b, s, _), d, width, kernel = x.shape, record.key_head_dim, record.value_head_dim, record.conv_kernel_size
    heads, per_key = record.num_value_heads, record.num_value_heads // record.num_key_heads
    steps = ["", *(str(step) for step in range(2, record.householder_steps + 1))]
    convolved_parts = ["q", *(f"{part}{step}" for step in steps for part in "kv")]
    projected = {
        part: _linear(x, w, f"{name}.{part}")
        for part in (*convolved_parts, "z", "decay", *(f"beta{step}" for step in steps))
    }

    def convolved(y: Tensor, part: str, row: int, i: int) -> Tensor:
        return _convolved(y, w, f"{name}.{part}_conv", kernel, row, i, documents)

    rows = []
    for row in range(b):
        states = [torch.zeros(d, width, dtype=x.dtype)] * heads
        outputs = []
        for i in range(s):
            parts = {part: convolved(projected[part], part, row, i) for part in convolved_parts}
            of_token = []
            for head in range(heads):
                key = slice(head // per_key * d, (head // per_key + 1) * d)
                values = slice(head * width, (head + 1) * width)
                query = parts["q"][key] / (parts["q"][key].pow(2).sum() + 1e-6).sqrt()
                gate = projected["z"][row, i, values]
                rate = w[f"{name}.log_rate.weight"][head].exp()
                forget = torch.exp(-rate * torch.log1p(projected["decay"][row, i, head].exp()))
                begins = i == 0 or (documents is not None and bool(documents[row, i] != documents[row, i - 1]))
                state = torch.zeros_like(states[head]) if begins else states[head] * forget
                most = 2 if record.allow_neg_eigval else 1
                for step in steps:
                    found = parts[f"k{step}"][key] / (parts[f"k{step}"][key].pow(2).sum() + 1e-6).sqrt()
                    beta = most * projected[f"beta{step}"][row, i, head].sigmoid()
                    householder = torch.eye(d) - beta * torch.outer(found, found)
                    state = householder @ state + beta * torch.outer(found, parts[f"v{step}"][values])
                states[head] = state
                y = (query / math.sqrt(d)) @ state
                y = y / (y.pow(2).mean() + eps).sqrt() * w[f"{name}.norm.weight"]
                of_token.append(y * gate * gate.sigmoid())
            outputs.append(torch.cat(of_token))
        rows.append(torch.stack(outputs))
    return _linear(torch.stack(rows), w, f"{name}.proj")


def _short_convolution(
    x: Tensor, w: Weights, name: str, record: ShortConvolutionConfig, documents: Tensor | None
) -> Tensor:
    """A gated short convolution, one token after the other."""
    before, after, values = (_linear(x, w, f"{name}.{part}") for part in "bcx")
    kernel, y = w[f"{name}.x_conv.weight"][:, 0], torch.zeros_like(x)
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            for j in range(max(0, i - record.conv_kernel_size + 1), i + 1):
                if documents is None or documents[row, j] == documents[row, i]:
                    term = kernel[:, record.conv_kernel_size - 1 - (i - j)] * before[row, j] * values[row, j]
                    y[row, i] += after[row, i] * term
    return _linear(y, w, f"{name}.proj")


def _kimi_delta(
    x: Tensor, w: Weights, name: str, record: KimiDeltaAttentionConfig, eps: float, documents: Tensor | None
) -> Tensor:
    """Kimi Delta Attention and Gated DeltaNet-2 of one token and head after the other."""
    (b, s, _), d = x.shape, record.head_dim
    inputs = {part: _linear(x, w, f"{name}.{part}") for part in "qkv"}
    if record.erase_and_write_gates:
        erase, write = (_linear(x, w, f"{name}.{part}").sigmoid() for part in ("erase", "write"))
    else:
        erase = write = _linear(x, w, f"{name}.beta").sigmoid().repeat_interleave(d, dim=-1)
    gate = _linear(_linear(x, w, f"{name}.gate_down"), w, f"{name}.gate_up").sigmoid()
    decay = x @ (w[f"{name}.decay_up.weight"] @ w[f"{name}.decay_down.weight"]).T + w[f"{name}.decay.bias"]
    rows = []
    for row in range(b):
        states, outputs = [torch.zeros(d, d, dtype=x.dtype)] * record.num_heads, []
        for i in range(s):
            q, k, v = (
                _convolved(y, w, f"{name}.{part}_conv", record.conv_kernel_size, row, i, documents)
                for part, y in inputs.items()
            )
            begins = i == 0 or (documents is not None and bool(documents[row, i] != documents[row, i - 1]))
            of_token = []
            for head in range(record.num_heads):
                c = slice(head * d, (head + 1) * d)
                key = k[c] / (k[c].pow(2).sum() + 1e-6).sqrt()
                forget = (1 + decay[row, i, c].exp()) ** -w[f"{name}.log_rate.weight"][head].exp()
                state = torch.zeros_like(states[head]) if begins else torch.diag(forget) @ states[head]
                correction = torch.eye(d) - torch.outer(key, erase[row, i, c] * key)
                states[head] = correction @ state + torch.outer(key, write[row, i, c] * v[c])
                y = states[head].T @ (q[c] / (q[c].pow(2).sum() + 1e-6).sqrt() / math.sqrt(d))
                of_token.append(y / (y.pow(2).mean() + eps).sqrt() * w[f"{name}.norm.weight"] * gate[row, i, c])
            outputs.append(torch.cat(of_token))
        rows.append(torch.stack(outputs))
    return _linear(torch.stack(rows), w, f"{name}.proj")


def _rwkv7(x: Tensor, w: Weights, name: str, record: Rwkv7Config, documents: Tensor | None) -> Tensor:
    """Time mix of RWKV-7 of one token and head after the other, with the paper's S of values × keys."""
    (b, s, _), d, rows = x.shape, record.head_dim, []

    def weight(which: str) -> Tensor:
        return w[f"{name}.{which}.weight"]

    for row in range(b):
        states, outputs = [torch.zeros(d, d, dtype=x.dtype)] * record.num_heads, []
        for i in range(s):
            begins = i == 0 or (documents is not None and bool(documents[row, i] != documents[row, i - 1]))
            before = torch.zeros_like(x[row, i]) if begins else x[row, i - 1]
            x_r, x_k, x_v, x_d, x_a, x_g = ((1 - mu) * x[row, i] + mu * before for mu in weight("shift"))
            r, k, v = weight("r") @ x_r, weight("k") @ x_k, weight("v") @ x_v
            decay = w[f"{name}.decay.bias"] + weight("decay_up") @ torch.tanh(weight("decay_down") @ x_d)
            decay = torch.exp(-math.exp(-0.5) / (1 + torch.exp(-decay)))
            rate = (w[f"{name}.rate.bias"] + weight("rate_up") @ (weight("rate_down") @ x_a)).sigmoid()
            gate = weight("gate_up") @ (weight("gate_down") @ x_g).sigmoid()
            removal, replacement = (
                k * weight("removal"),
                k * torch.lerp(torch.ones_like(rate), rate, weight("replacement")),
            )
            of_token = []
            for head in range(record.num_heads):
                c = slice(head * d, (head + 1) * d)
                unit = removal[c] / removal[c].pow(2).sum().sqrt()
                transition = torch.diag(decay[c]) - torch.outer(unit, rate[c] * unit)
                state = torch.zeros_like(states[head]) if begins else states[head]
                states[head] = state @ transition + torch.outer(v[c], replacement[c])
                y = states[head] @ r[c]
                y = (y - y.mean()) / (y.var(unbiased=False) + record.norm_eps).sqrt()
                y = y * weight("norm")[c] + w[f"{name}.norm.bias"][c]
                of_token.append(y + (r[c] * weight("bonus")[c] * replacement[c]).sum() * v[c])
            outputs.append(torch.cat(of_token) * gate)
        rows.append(torch.stack(outputs))
    return _linear(torch.stack(rows), w, f"{name}.proj")


def _mamba1(x: Tensor, w: Weights, name: str, record: Mamba1Config, documents: Tensor | None) -> Tensor:
    """Mamba-1 of one token after the other, with the state of each channel as a row."""
    (b, s, _), d, rank, rows = x.shape, record.state_size, record.step_rank, []
    values, gate = _linear(x, w, f"{name}.x"), _linear(x, w, f"{name}.z")
    for row in range(b):
        state, outputs = torch.zeros(record.inner_size, d, dtype=x.dtype), []
        for i in range(s):
            value = _convolved(values, w, f"{name}.x_conv", record.conv_kernel_size, row, i, documents)
            selected = (w[f"{name}.selection.weight"] @ value).split([rank, d, d])
            if record.norms != "none":
                selected = [y / (y.pow(2).mean() + record.norm_eps).sqrt() for y in selected]
            if record.norms == "weighted":
                selected = [y * w[f"{name}.{part}_norm.weight"] for part, y in zip(("step", "b", "c"), selected)]
            dt = torch.log1p((w[f"{name}.step.weight"] @ selected[0] + w[f"{name}.step.bias"]).exp())
            if documents is not None and i and bool(documents[row, i] != documents[row, i - 1]):
                state = torch.zeros_like(state)
            forget = torch.exp(-torch.outer(dt, torch.ones(d)) * w[f"{name}.log_rate.weight"].exp())
            state = forget * state + torch.outer(dt * value, selected[1])
            y = state @ selected[2] + w[f"{name}.skip.weight"] * value
            outputs.append(y * gate[row, i] * gate[row, i].sigmoid())
        rows.append(torch.stack(outputs))
    return _linear(torch.stack(rows), w, f"{name}.proj")


def _rg_lru(x: Tensor, w: Weights, name: str, record: RgLruConfig, documents: Tensor | None) -> Tensor:
    """RG-LRU of one token and head after the other."""
    (b, s, _), d, rows = x.shape, record.inner_size // record.num_heads, []
    values, z = _linear(x, w, f"{name}.x"), _linear(x, w, f"{name}.z")
    for row in range(b):
        states, outputs = [torch.zeros(d, dtype=x.dtype)] * record.num_heads, []
        for i in range(s):
            begins = i == 0 or (documents is not None and bool(documents[row, i] != documents[row, i - 1]))
            value = _convolution(values, w, f"{name}.x_conv", record.conv_kernel_size, row, i, documents)
            for head in range(record.num_heads):
                c = slice(head * d, (head + 1) * d)
                weight, bias = w[f"{name}.input_gate.weight"][head], w[f"{name}.input_gate.bias"][head]
                gated = value[c] / (1 + torch.exp(-(value[c] @ weight + bias)))
                weight, bias = w[f"{name}.recurrence_gate.weight"][head], w[f"{name}.recurrence_gate.bias"][head]
                gate = 1 / (1 + torch.exp(-(value[c] @ weight + bias)))
                a = (1 + w[f"{name}.rate.weight"][c].exp()) ** (-8 * gate)
                states[head] = gated if begins else a * states[head] + torch.sqrt(1 - a * a) * gated
            outputs.append(torch.cat(states) * _activated(z[row, i], "gelu_tanh"))
        rows.append(torch.stack(outputs))
    return _linear(torch.stack(rows), w, f"{name}.proj")


def _mamba2(x: Tensor, w: Weights, name: str, record: Mamba2Config, eps: float, documents: Tensor | None) -> Tensor:
    """Mamba-2 of one token, head and channel after the other; the group of head a is a // (a / g)."""
    (b, s, _), d, width, heads = x.shape, record.state_size, record.head_dim, record.num_heads
    gate, *xbc = (torch.einsum("...k,nk->...n", x, w[f"{name}.{part}.weight"]) for part in ("z", "x", "b", "c"))
    step = torch.einsum("...k,nk->...n", x, w[f"{name}.step.weight"]) + w[f"{name}.step.bias"]
    rows = []
    for row in range(b):
        states = [torch.zeros(width, d, dtype=x.dtype)] * heads
        outputs = []
        for i in range(s):
            parts = [
                _convolved(y, w, f"{name}.{part}_conv", record.conv_kernel_size, row, i, documents)
                for part, y in zip("xbc", xbc)
            ]
            of_token = []
            for head in range(heads):
                group = slice(head // (heads // record.num_groups) * d, (head // (heads // record.num_groups) + 1) * d)
                value, into, out_of = parts[0][head * width : (head + 1) * width], parts[1][group], parts[2][group]
                dt = torch.log1p(step[row, i, head].exp())
                dt = dt.clamp(min=record.min_step, max=record.max_step)
                begins = i == 0 or (documents is not None and bool(documents[row, i] != documents[row, i - 1]))
                forget = torch.exp(-dt * w[f"{name}.log_rate.weight"][head].exp())
                state = torch.zeros_like(states[head]) if begins else states[head] * forget
                states[head] = state + torch.outer(value, dt * into)
                of_token.append(states[head] @ out_of + w[f"{name}.skip.weight"][head] * value)
            y = torch.cat(of_token) * gate[row, i] * gate[row, i].sigmoid()
            y = y.view(record.num_groups, -1)
            y = y / (y.pow(2).mean(-1, keepdim=True) + eps).sqrt()
            outputs.append(y.flatten() * w[f"{name}.norm.weight"])
        rows.append(torch.stack(outputs))
    return _linear(torch.stack(rows), w, f"{name}.proj")


def _shared_attention(
    x: Tensor, embedded: Tensor, w: Weights, layer: str, record: SharedAttentionConfig, positions: Tensor,
    allowed: Tensor, dropouts: Dropouts, window: int | None, documents: Tensor | None,
) -> Tensor:  # fmt: skip
    """Mamba-2 after attention and an MLP whose weights are sums: of the first layer of the kind, and of adapters."""
    config = dropouts.config  # whose head_dim is attention's
    name, first = f"{layer}.shared_attention", config.spec.kinds[int(layer.split(".")[1])]
    source, kind = f"layers.{first}.shared_attention.transformer", config.normalization
    number = sum(x.mixer.kind == record.kind for x in config.spec.layers[: int(layer.split(".")[1])])
    adapters = f"layers.{first}.shared_attention.adapters.{number}"
    own, w = w, w | {key.replace(f"{source}.attention", name): x for key, x in w.items() if key.startswith(source)}
    w |= {key.replace(f"{source}.mlp", f"{name}.mlp"): x for key, x in w.items() if key.startswith(source)}
    for part in "qkv" if record.adapt_attention else "":
        down, up = (w[f"{adapters}.{part}.{which}.weight"] for which in ("down", "up"))
        w[f"{name}.{part}.weight"] = w[f"{name}.{part}.weight"] + up @ down
    for part in ("gate", "up"):
        if f"{name}.mlp.{part}.weight" in w:
            product = w[f"{adapters}.gate_up.{part}.weight"] @ w[f"{adapters}.gate_up.down.weight"]
            w[f"{name}.mlp.{part}.weight"] = w[f"{name}.mlp.{part}.weight"] + product
    y = _norm(torch.cat([x, embedded], -1), w, f"{source}.norm", config, kind)
    y = _attention(y, w, name, config, positions, allowed, dropouts, window, AttentionConfig(), {}, [])
    y = mlp(_norm(y, w, f"{source}.mlp_norm", config, kind), w, f"{name}.mlp", config)
    y = _norm(x + _linear(y, own, f"{name}.output"), own, f"{name}.input_norm", config, kind)
    return _mamba2(y, own, name, record, config.norm_eps, documents)


def _stream_weights(x: Tensor, w: Weights, name: str, config: ModelConfig) -> Tensor:
    """Of the streams `[b, s, n, h]` of each token: products of the normalized streams."""
    flat = x.flatten(2)
    normed = flat / torch.sqrt(flat.square().mean(-1, keepdim=True) + config.norm_eps)
    return torch.einsum("bsk,mk->bsm", normed, w[f"{name}.fn"])


def _hyper_connected(x: Tensor, w: Weights, name: str, config: ModelConfig, part: Callable[[Tensor], Any]) -> Tensor:
    """The streams `[b, s, n, h]` after a part; one matrix entry after the other."""
    keys = config.hyper_connections
    assert keys is not None
    n, base, scale = keys.streams, w[f"{name}.base"], w[f"{name}.scale"]
    found = _stream_weights(x, w, name, config)
    pre = [1 / (1 + torch.exp(-(found[..., i] * scale[0] + base[i]))) + keys.eps for i in range(n)]
    post = [2 / (1 + torch.exp(-(found[..., n + i] * scale[1] + base[n + i]))) for i in range(n)]
    cells = range(2 * n, 2 * n + n * n)
    comb = [[found[..., c] * scale[2] + base[c] for c in cells[i * n : (i + 1) * n]] for i in range(n)]
    comb = [[e.exp() / sum(o.exp() for o in row) + keys.eps for e in row] for row in comb]
    for turn in range(2 * keys.sinkhorn_iterations - 1):
        if turn % 2:
            comb = [[e / (sum(row) + keys.eps) for e in row] for row in comb]
        else:
            sums = [sum(comb[i][j] for i in range(n)) + keys.eps for j in range(n)]
            comb = [[e / sums[j] for j, e in enumerate(row)] for row in comb]
    y = part(sum(pre[i].unsqueeze(-1) * x[:, :, i] for i in range(n)))
    rows = [sum(comb[j][k].unsqueeze(-1) * x[:, :, j] for j in range(n)) for k in range(n)]
    return torch.stack([row + post[k].unsqueeze(-1) * y for k, row in enumerate(rows)], 2)


def _collapsed(x: Tensor, w: Weights, config: ModelConfig) -> Tensor:
    """Hidden states of the streams `[b, s, n, h]` after the last layer."""
    keys, name = config.hyper_connections, "final_connection"
    assert keys is not None
    pre = _stream_weights(x, w, name, config) * w[f"{name}.scale"][0] + w[f"{name}.base"]
    return ((1 / (1 + torch.exp(-pre)) + keys.eps).unsqueeze(-1) * x).sum(2)


def _entries(
    x: Tensor, w: Weights, name: str, config: ModelConfig, record: CompressedAttentionConfig, row: int,
    starts: list[int],
) -> list[tuple[int, Tensor]]:  # fmt: skip
    """The compressed entries of a sample: the last token of each, and its channels. `starts`: of tokens' documents."""
    rate, overlaps, entries = record.compress_rate, record.top_k is not None, []
    assert rate is not None
    kv, gate = (_linear(x[row], w, f"{name}_{part}") for part in ("kv", "gate"))
    bias = w[f"{name}_position.weight"]
    width = kv.shape[1] // (1 + overlaps)
    for last, start in enumerate(starts):
        if (last + 1 - start) % rate:
            continue
        places = [(last - rate + 1 + i, i, overlaps * width) for i in range(rate)]
        if overlaps and last - start >= 2 * rate - 1:
            places += [(last - 2 * rate + 1 + i, i, 0) for i in range(rate)]
        values = torch.stack([kv[j, at : at + width] for j, _, at in places])
        gates = torch.stack([gate[j, at : at + width] + bias[i, at : at + width] for j, i, at in places])
        mean = (gates.exp() / gates.exp().sum(0) * values).sum(0)
        normed = _norm(mean, w, f"{name}_norm", config)
        entries.append(
            (last, _rotated_end(normed[None, None], torch.tensor([[last - rate + 1 - start]]), config)[0, 0])
        )
    return entries


def _rotated_end(x_bsd: Tensor, positions_bs: Tensor, config: ModelConfig) -> Tensor:
    """The last channels rotated."""
    r = int((config.head_dim or config.hidden_size // config.num_attention_heads) * config.partial_rotary_factor)
    return torch.cat([x_bsd[..., :-r], _interleaved(x_bsd[..., -r:], positions_bs, config)], dim=-1)


def _compressed_attention(
    x: Tensor, w: Weights, name: str, config: ModelConfig, record: CompressedAttentionConfig, positions: Tensor,
    losses: list[Tensor],
) -> Tensor:  # fmt: skip
    """DeepSeek-V4's attention, one token and head after the other."""
    (b, s, _), d, groups = x.shape, len(w[f"{name}.kv.weight"]), record.output_groups
    config = config.model_copy(update={"head_dim": d, "latent_attention": None})
    q_latent = _norm(_linear(x, w, f"{name}.q_down"), w, f"{name}.q_norm", config)
    q = _linear(q_latent, w, f"{name}.q_up").unflatten(-1, (-1, d))
    heads = q.shape[2]
    q = q / torch.sqrt(q.square().mean(-1, keepdim=True) + config.norm_eps)
    q = torch.stack([_rotated_end(q[:, :, head], positions, config) for head in range(heads)], 2)
    kv = _rotated_end(_norm(_linear(x, w, f"{name}.kv"), w, f"{name}.kv_norm", config), positions, config)
    rows = []
    for row in range(b):
        starts = [i - int(positions[row, i]) for i in range(s)]
        entries, index = [], []
        if record.compress_rate is not None:
            entries = _entries(x, w, f"{name}.entry", config, record, row, starts)
        if record.top_k is not None:
            index = _entries(x.detach(), w, f"{name}.index", config, record, row, starts)
        outputs = []
        for i in range(s):
            near = [j for j in range(starts[i], i + 1) if i - j < config.sliding_window]
            seen = [e for e, (last, _) in enumerate(entries) if starts[i] <= last <= i]
            scores = torch.zeros(0)
            if record.top_k is not None and seen:
                iq = _linear(q_latent[row, i].detach(), w, f"{name}.index_q").view(-1, record.index_head_dim)
                iq = _rotated_end(iq[None].transpose(0, 1), positions[row, i].expand(len(iq), 1), config)[:, 0]
                weights = _linear(x[row, i].detach(), w, f"{name}.index_weights")
                all_scores = {
                    e: ((iq @ index[e][1]).clamp(min=0) * weights).sum() / math.sqrt(iq.numel()) for e in seen
                }
                seen = sorted(sorted(seen, key=lambda e: (-all_scores[e].item(), e))[: record.top_k])
                scores = torch.stack([all_scores[e] for e in seen])
            keys = torch.stack([kv[row, j] for j in near] + [entries[e][1] for e in seen])
            logits = q[row, i] @ keys.T / math.sqrt(d)
            p = torch.cat([logits, w[f"{name}.sink.weight"][:, None]], 1).softmax(1)[:, :-1]
            if len(scores):
                target = p[:, len(near) :].detach().sum(0)
                target = target / target.sum()
                divergence = (target * (target.log() - scores.log_softmax(0))).sum()
                losses.append(record.kl_loss * divergence / (b * s))
            outputs.append(p @ keys)
        rows.append(torch.stack(outputs))
    o = torch.stack(rows)
    o = torch.stack([_rotated_end(o[:, :, head], -positions, config) for head in range(heads)], 2)
    weight = w[f"{name}.output_down.weight"].view(groups, record.output_rank, -1)
    of_groups = o.reshape(b, s, groups, -1)
    down = torch.cat([of_groups[:, :, g] @ weight[g].T for g in range(groups)], -1)
    return _linear(down, w, f"{name}.proj")


def _block(
    x: Tensor, w: Weights, name: str, config: ModelConfig, positions: Tensor, allowed: Tensor, losses: list[Tensor],
    dropouts: Dropouts, kind: LayerKind, ids: Tensor, *, sparse: bool, window: int | None,
    documents: Tensor | None = None, shared: dict[str, Any] | None = None,
    per_layer: tuple[Tensor, str] | None = None, padding: Tensor | None = None, embedded: Tensor | None = None,
) -> Tensor:  # fmt: skip
    def norm(x: Tensor, which: str, there: bool) -> Tensor:
        return _norm(x, w, f"{name}.{which}", config, config.normalization) if there else x

    position = kind.norm_position or config.norm_position
    of_inputs, of_outputs = position in ("pre", "both", "mlp_both"), position in ("output", "both")
    both = not isinstance(kind.mixer, NoMixerConfig) and not isinstance(kind.ffn, NoFfnConfig)
    shared_norm = "shared_norm" if both and config.parallel_block == "shared_norm" else None

    def attention(x: Tensor) -> Tensor | float:
        if isinstance(kind.mixer, NoMixerConfig):
            return 0.0
        own = isinstance(kind.mixer, SharedAttentionConfig)
        normed = norm(x, shared_norm or "attention_norm", of_inputs and not own)
        if isinstance(kind.mixer, GatedDeltaNetConfig):
            eps = kind.mixer.norm_eps or config.norm_eps
            y = _delta_net(normed, w, f"{name}.gated_delta_net", kind.mixer, eps, documents)
        elif isinstance(kind.mixer, ShortConvolutionConfig):
            y = _short_convolution(normed, w, f"{name}.short_convolution", kind.mixer, documents)
        elif isinstance(kind.mixer, KimiDeltaAttentionConfig):
            y = _kimi_delta(normed, w, f"{name}.kimi_delta_attention", kind.mixer, config.norm_eps, documents)
        elif isinstance(kind.mixer, Rwkv7Config):
            y = _rwkv7(normed, w, f"{name}.rwkv7", kind.mixer, documents)
        elif isinstance(kind.mixer, Mamba1Config):
            y = _mamba1(normed, w, f"{name}.mamba1", kind.mixer, documents)
        elif isinstance(kind.mixer, RgLruConfig):
            y = _rg_lru(normed, w, f"{name}.rg_lru", kind.mixer, documents)
        elif isinstance(kind.mixer, SharedAttentionConfig):
            assert embedded is not None
            y = _shared_attention(x, embedded, w, name, kind.mixer, positions, allowed, dropouts, window, documents)
        elif isinstance(kind.mixer, Mamba2Config):
            y = _mamba2(normed, w, f"{name}.mamba2", kind.mixer, config.norm_eps, documents)
        elif isinstance(kind.mixer, CompressedAttentionConfig):
            name_of_mixer, record = f"{name}.compressed_attention", kind.mixer
            y = _compressed_attention(normed, w, name_of_mixer, config, record, positions, losses)
        elif config.latent_attention is not None and not isinstance(kind.mixer, AttentionConfig):
            y = _latent_attention(
                normed, w, f"{name}.attention", config, positions, allowed, dropouts, window, losses, shared
            )
        else:
            record = kind.mixer or AttentionConfig()
            assert isinstance(record, AttentionConfig)
            own = config.model_copy(update={"latent_attention": None})  # whose eps is that of other layers
            y = _attention(
                normed, w, f"{name}.attention", own, positions, allowed, dropouts, window, record,
                {} if shared is None else shared, [] if losses is None else losses,
            )  # fmt: skip
        y = config.residual_multiplier * norm(y, "attention_output_norm", of_outputs)
        return dropouts.hidden(y, f"{name}.attention")

    def feed_forward(x: Tensor) -> Tensor | float:
        if isinstance(kind.ffn, NoFfnConfig):
            return 0.0
        normed = norm(x, shared_norm or "mlp_norm", of_inputs and not (sparse and config.moe.separate_norms))
        if sparse:
            hashed = isinstance(kind.ffn, MoeFfnConfig) and kind.ffn.routing == "hash"
            y = moe(normed, w, f"{name}.mlp", config, losses, ids, hashed=hashed, padding=padding)
        else:
            y = mlp(normed, w, f"{name}.mlp", config)
        y = config.residual_multiplier * norm(y, "mlp_output_norm", of_outputs or position == "mlp_both")
        return dropouts.hidden(y, f"{name}.mlp")

    if config.hyper_connections is not None:
        for which, part, kind_of in (("attention", attention, kind.mixer), ("mlp", feed_forward, kind.ffn)):
            if not isinstance(kind_of, (NoMixerConfig, NoFfnConfig)):
                x = _hyper_connected(x, w, f"{name}.{which}_connection", config, part)
        return x
    if config.parallel_block:
        return x + attention(x) + feed_forward(x)
    x = norm(x + attention(x), "attention_norm", position == "post")
    x = norm(x + feed_forward(x), "mlp_norm", position == "post")
    if per_layer is not None:
        vector, activation = per_layer
        gated = _activated(_linear(x, w, f"{name}.per_layer_gate"), activation) * vector
        x = x + norm(_linear(gated, w, f"{name}.per_layer_projection"), "per_layer_norm", True)
    return x * w[f"{name}.layer_scalar"] if config.layer_scalar else x


def _per_layer(x: Tensor, w: Weights, config: ModelConfig, tokens: Tensor) -> list[tuple[Tensor, str] | None]:
    """Per-layer embeddings of each layer, from the embeddings, and the model's activation."""
    if config.per_layer_embedding is None:
        return [None] * config.num_layers
    p, name, found = config.per_layer_embedding.width, "per_layer_embedding", list[tuple[Tensor, str] | None]()
    projected = _linear(x, w, f"{name}.projection") / math.sqrt(config.hidden_size)
    of_tokens = math.sqrt(p) * w[f"{name}.word.weight"][tokens]
    for layer in range(config.num_layers):
        part = slice(layer * p, (layer + 1) * p)
        normed = _norm(projected[..., part], w, f"{name}.norm", config)
        found.append(((normed + of_tokens[..., part]) / math.sqrt(2), config.activation))
    return found


def _cross_entropy(x: Tensor, w: Weights, config: ModelConfig, labels: Tensor, z_loss: float) -> Tensor:
    output = w["embedding.word.weight"] if config.tie_embeddings else w["output.weight"]
    logits = (x @ output.T)[..., : config.vocab_size] / config.logits_scaling
    if config.mup is not None:
        logits = logits * config.mup.base_hidden_size / config.hidden_size
    if config.output_bias:
        logits = logits + w["output.bias"][: config.vocab_size]
    if config.logit_softcap is not None:
        logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
    log_z = logits.exp().sum(-1).log()
    return log_z - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) + z_loss * log_z**2


def _config_of_kind(config: ModelConfig, kind: LayerKind) -> ModelConfig:
    """Return the config in which the keys of a kind of layer stand where all layers have theirs."""
    update: dict[str, Any] = {}
    for part, sections in ((kind.mixer, ("latent_attention", "sparse_attention")), (kind.ffn, ("moe",))):
        keys = {} if part is None else {key: x for key, x in part.given.items() if key != "norm_eps"}
        for name in sections:
            section = getattr(config, name)
            inside = {
                key: keys.pop(key) for key in [*keys] if section is not None and key in type(section).model_fields
            }
            update |= {name: section.model_copy(update=inside)} if inside else {}
        update |= keys
    return config.model_copy(update=update)


def twin_loss(
    w: Weights,
    config: ModelConfig,
    tokens: Tensor,
    labels: Tensor,
    *,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    z_loss: float = 0.0,
    router_losses: list[Tensor] | None = None,
    seed: int = 0,
    samples: list[int] | None = None,
    prefix: list[int] | None = None,
    padding: Tensor | None = None,
    label_padding: Tensor | None = None,
) -> Tensor:
    """Loss of each token `[b, s]` of the whole model, float64. Appends to `router_losses`.

    `samples`: their indices in the run, for dropout, with its `seed`. `prefix`: of each sample, how many first tokens
    all of its tokens attend to. `padding`, `label_padding`: tokens and labels of no text, which no router counts.

    With multi-token prediction the losses of all depths, one below the other; zero where a token has none to predict.
    """
    kinds = [config.layer_kinds[name] for name in config.pattern] or [LayerKind()]
    kinds = [kinds[i % len(kinds)] for i in range(config.num_layers)]
    configs = [_config_of_kind(config, kind) for kind in kinds]
    windows = [None if i in config.full_attention_layers else x.sliding_window for i, x in enumerate(configs)]
    if positions is None:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    reach = [(window, x.attention_chunk) for window, x in zip(windows, configs)]
    allowed = {
        (window, chunk): _allowed(tokens, documents, window, prefix, chunk, positions) for window, chunk in set(reach)
    }
    x, kind = config.embedding_multiplier * w["embedding.word.weight"][tokens], config.normalization
    if config.position_embedding == "learned":
        x = x + w["embedding.position.weight"][positions]
    if config.embedding_norm:
        x = _norm(x, w, "embedding_norm", config, kind)
    dropouts = Dropouts(config, seed, samples)
    x = dropouts.hidden(x, "embedding")
    losses = [] if router_losses is None else router_losses
    per_layer, embedded = _per_layer(x, w, config, tokens), x
    shared: dict[str, Any] = {}
    if config.hyper_connections is not None:
        x = torch.stack([x] * config.hyper_connections.streams, 2)
    for layer in range(config.num_layers):
        sparse, seen = config.spec.layers[layer].has_experts, allowed[reach[layer]]
        window = windows[layer]
        x = _block(
            x, w, f"layers.{layer}", configs[layer], positions, seen, losses, dropouts, kinds[layer], tokens,
            sparse=sparse, window=window, documents=documents, shared=shared, per_layer=per_layer[layer],
            padding=padding, embedded=embedded,
        )  # fmt: skip
    if config.hyper_connections is not None:
        x = _collapsed(x, w, config)
    if config.norm_position != "post":
        x = _norm(x, w, "final_norm", config, kind)
    found = [_cross_entropy(x, w, config, labels, z_loss)]
    b, s = tokens.shape
    for depth in range(1, config.mtp_num_layers + 1):  # sparse and seen are the last layer's
        name, target, wanted = f"layers.{config.num_layers + depth - 1}", torch.zeros_like(labels), torch.zeros(b, s)
        for row in range(b):
            for i in range(s - depth):
                if documents is None or documents[row, i] == documents[row, i + depth]:
                    target[row, i], wanted[row, i] = labels[row, i + depth], 1
        # What a token sees after the end of its document or sample changes nothing that counts: it is the last one.
        ahead = torch.stack([torch.stack([labels[row, (i + depth - 1) % s] for i in range(s)]) for row in range(b)])
        embedded = config.embedding_multiplier * w["embedding.word.weight"][ahead]
        embedded = _norm(dropouts.hidden(embedded, f"{name}.embedding"), w, f"{name}.embedding_norm", config, kind)
        hidden = _norm(x, w, f"{name}.hidden_norm", config, kind)
        x = _linear(torch.cat([embedded, hidden], -1), w, f"{name}.projection")
        if padding is not None and label_padding is not None:
            padding = padding.clone()
            for row in range(b):
                for i in range(s):
                    padding[row, i] |= label_padding[row, (i + depth - 1) % s]
        x = _block(
            x, w, name, configs[-1], positions, seen, losses, dropouts, kinds[-1], ahead, sparse=sparse,
            window=window, documents=documents, padding=padding,
        )  # fmt: skip
        x = _norm(x, w, f"{name}.final_norm", config, kind)
        found.append(_cross_entropy(x, w, config, target, z_loss) * wanted)
    return torch.cat(found)
