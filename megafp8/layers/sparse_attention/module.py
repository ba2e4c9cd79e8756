"""Latent attention to chosen tokens (DeepSeek Sparse Attention, DeepSeek-V3.2, arXiv:2512.02556).

For each token, a small indexer scores all earlier tokens, and the token's heads attend to the top_k tokens.
`layers.sparse_attention.op` describes the computation and how the indexer learns. The indexer has these parts:

    index_q          norm of the query latent -> queries of its heads
    index_k          residual stream's norm -> one key for all its heads, followed by a LayerNorm
    index_weights    residual stream's norm -> weights of its heads

The first rope channels of its queries and keys are rotated. The inputs of the indexer get no gradient from it, and the
indexer's only gradient is the gradient of its loss. Its products stay in high precision and are whole on every
tensor-parallel rank; each rank computes them for its own tokens. Scores and choices are divided over the ranks by
queries.

All heads share one key, which consists of the latent and the rotary key. Other latent attention computes keys and
values from the latent with `latent_up`. Here each head's part of `latent_up` is applied to its query and to its output
instead. A chosen key is thus read once for all heads, and generation caches only the latent and the indexer's key of a
token. These products are in high precision.

A layer with a shared indexer has no indexer of its own. It attends to the tokens that the nearest earlier layer with an
indexer chose. `SharedTensors` keeps the choice for a micro-batch.

Shapes are as in `layers.sparse_attention.op`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from megafp8.layers.build import PartBuild
from megafp8.layers.context import replicated_product
from megafp8.layers.costs import AttentionWork, KernelWork, MicroBatch, pairs_of
from megafp8.layers.latent_attention.module import LatentAttention
from megafp8.layers.mixer import AttendToKeys, SharedTensors, TokenCache, Tokens
from megafp8.layers.norm.module import LayerNormPart, normalized
from megafp8.layers.rotary.op import rotate_heads, rotated_neighbors
from megafp8.layers.sparse_attention.op import BLOCK_BYTES, IndexLoss, SparseAttention
from megafp8.layers.sparse_attention.record import SparseLatentMixerConfig
from megafp8.layers.sparse_attention.reference import Index, wide
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.parallel.sharding import Init

_INDEX_NORM_EPS = 1e-6


@dataclass(frozen=True)
class SparseInputs:
    """Inputs of sparse attention in addition to the residual stream.

    Attributes:
        rotary: Rotary cosines and sines.
        to_keys: Function that runs attention over the tokens.
        padding_bs: Whether each token is padding, bool; None if no token is padding.
        shared: Chosen tokens that the layer reads from an earlier layer or provides to later layers, a tensor for each
            call of `to_keys`' function; None if it does neither.
    """

    rotary: tuple[Tensor, Tensor]
    to_keys: AttendToKeys
    padding_bs: Tensor | None = None
    shared: SharedTensors | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors among these inputs."""
        return [*self.rotary, *self.to_keys.tensors, *([] if self.padding_bs is None else [self.padding_bs])]


class SparseLatentAttention(LatentAttention):
    """Latent attention to the tokens that its indexer, or the indexer of an earlier layer, chooses.

    `index_loss` sums the indexer's losses over the backward passes.
    """

    reads_latents: ClassVar[str] = "the indexer and attention to chosen tokens read the latents' values"

    def __init__(self, build: PartBuild[SparseLatentMixerConfig]) -> None:
        super().__init__(build)
        name, record, model, context = build.name, build.record, build.model, build.context
        assert record.q_rank is not None, "the config was not checked"
        index = int(name.split(".")[1])
        self.source, self.is_read = model.sources.get(index), model.layers[index].is_read
        self.sparse: SparseLatentMixerConfig = record if self.source is None else model.layers[self.source].mixer
        loss: IndexLoss | None = None
        init, rows = Init("normal", model.hidden_init_std), record.num_attention_heads * (self.n + self.v)
        self.latent_up = build.parameter("kv_up.weight", init, rows, record.kv_rank, matrix=True)

        if self.source is None:
            reason = "the indexer stays in training.precision"
            product = partial(replicated_product, context, name, init=init, reason=reason)
            self.index_q, self.index_q_state = product(
                "index_q", {"index_q": record.index_heads * record.index_head_dim}, record.q_rank
            )
            parts = {"index_k": record.index_head_dim, "index_weights": record.index_heads}
            self.index_kw, self.index_kw_state = product("index_down", parts, model.hidden_size)
            self.index_k_norm = LayerNormPart(
                f"{name}.index_k_norm", record.index_head_dim, context, eps=_INDEX_NORM_EPS,
                sees_a_slice=context.sequence_sharded,
            )  # fmt: skip
            self.index_loss = torch.zeros(1, dtype=torch.float64, device=context.buffer_device)
            loss = IndexLoss(record.kl_loss / context.global_tokens, context.auxiliary_loss_grad, self.index_loss)
        scale = self.score_factor * (self.n + self.r) ** -0.5
        top_k = None if self.sparse.warmup else self.sparse.top_k
        self.attend = SparseAttention(top_k, scale, context.tensor, loss)

    def inputs(self, layer: int, tokens: Tokens) -> Any:
        """Return the rotary tables, attention function, padding mask and shared choice for these tokens."""
        assert self.rope is not None
        source = layer if self.source is None else self.source
        shares = self.source is not None or self.is_read
        shared = tokens.once(("chosen tokens", source), SharedTensors) if shares else None
        return SparseInputs(tokens.rotary(self.rope), tokens.keys(layer), tokens.padding_bs, shared)

    @property
    def cache(self) -> tuple[TokenCache]:
        """Layout of the cached latent with its rotary key, and of the indexer's cached key.

        Without an indexer, the rotary key is separate from the latent.
        """
        if self.source is not None:
            return (TokenCache(1, self.ranks[1], self.r),)
        return (TokenCache(1, self.ranks[1] + self.r, self.sparse.index_head_dim),)

    def forward(self, x_sbh: Tensor | LinearInput, inputs: Any) -> Tensor:
        """Return the attention output after the projection, `[s, b, h]`, for the normalized residual stream `x_sbh`."""
        assert isinstance(x_sbh, Tensor)
        q, kv, k_rotary = linear(x_sbh, self.down, self.down_state).split(self.ranks, dim=-1)
        assert self.q_norm is not None
        q_latent = normalized(self.q_norm, q.contiguous())
        shared = [torch.cat([normalized(self.kv_norm, kv.contiguous()), k_rotary], dim=-1)]
        if self.source is None:
            index_q = linear(q_latent.detach(), self.index_q, self.index_q_state)
            index_kw = linear(x_sbh.detach(), self.index_kw, self.index_kw_state)
            index_k, index_weights = index_kw.split([self.sparse.index_head_dim, self.sparse.index_heads], dim=-1)
            shared.append(torch.cat([index_q, self.index_k_norm(index_k), index_weights], dim=-1))
        # Gradients are sums over ranks: the heads of every rank use the latents, and each rank computes the indexer's
        # loss for other queries.
        shared = [self.shared(x) for x in shared]
        return self.proj(self._run(self._choose_and_attend, self.q_up(q_latent), inputs, *shared).flatten(-2))

    def _choose_and_attend(self, q_sbc: Tensor, inputs: SparseInputs, latent_sbc: Tensor, *index_sbc: Tensor) -> Tensor:
        """Return the attention output `[s, b, a, v]`."""
        rotary, (heads, d) = inputs.rotary, (self.sparse.index_heads, self.sparse.index_head_dim)
        q, q_rotary = q_sbc.unflatten(-1, (self.heads, -1)).split([self.n, self.r], dim=-1)
        latent, k_rotary = latent_sbc.split([self.ranks[1], self.r], dim=-1)
        q = torch.cat([q, rotated_neighbors(q_rotary, rotary)], dim=-1)
        k_rotary = rotated_neighbors(k_rotary.unsqueeze(2), rotary).squeeze(2)
        if self.source is not None:
            assert inputs.shared is not None
            return inputs.to_keys(partial(self._attend_to, [*inputs.shared.read()]), (q,), (latent, k_rotary))
        index, weights = index_sbc[0].split([(heads + 1) * d, heads], dim=-1)
        weights = without_padding(weights, inputs.padding_bs)
        index, index_pass = index.unflatten(-1, (heads + 1, d)).split([self.r, d - self.r], dim=-1)
        rotate = rotated_neighbors if self.sparse.index_rope == "neighbors" else _rotated_halves
        index = torch.cat([rotate(index, rotary), index_pass], dim=-1)
        keys = torch.cat([latent, k_rotary], dim=-1), index[:, :, -1]
        chosen: list[Tensor] = []
        y = inputs.to_keys(partial(self._attend_to, chosen), (q, index[:, :, :-1], weights), keys)
        if inputs.shared is not None:
            inputs.shared.fill(*chosen)
        return y

    def _attend_to(
        self, chosen: list[Tensor], queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], first_bs: Tensor,
        stop_bs: Tensor,
    ) -> Tensor:  # fmt: skip
        """Implement `megafp8.layers.mixer.AttendTo`: attend to the chosen keys among these keys.

        The choice is appended to `chosen`. Without an indexer, it is the first element of `chosen` and is removed;
        `chosen` is empty if all keys are chosen.
        """
        if self.source is not None:
            shared_bsk = chosen.pop(0) if chosen else None
            return self.attend(
                queries[0], torch.cat(keys, dim=-1), None, shared_bsk, self.latent_up, first_bs, stop_bs
            )[0]
        (q, index_q, weights), (kv, index_k) = queries, keys
        weights = weights.to(wide(weights)) * (self.sparse.index_head_dim * self.sparse.index_heads) ** -0.5
        index = Index(index_q, index_k, weights)
        y, chosen_bsk = self.attend(q, kv, index, None, self.latent_up, first_bs, stop_bs)
        chosen += [] if chosen_bsk is None else [chosen_bsk]
        return y

    # --- memory and compute -----------------------------------------------------------------------------------------

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes that the layer saves for backward, by tensor."""
        m, own_tokens, e, q_up = batch.tokens, batch.own_tokens, batch.element, self.q_up.state
        heads, d = self._index_size
        saved = {
            "latents' input": own_tokens * self.down_state.site.inputs * e,
            "latents": own_tokens * sum(self._latents) * e,
            "statistics of norms": 2 * own_tokens * batch.statistic,
            "q_up input": batch.saved_input(q_up),
            "q": m * self.heads * (self.n + self.r) * e,
            "latents and rotary keys": m * (self.ranks[1] + self.r) * e,
            "proj input": batch.saved_input(self.proj.state),
        }
        if self.source is not None:
            return saved
        chosen = {} if self.recompute else {"chosen tokens": self._chosen_bytes(batch)}
        return saved | self.kept(batch) | chosen | {
            "index keys before their norm": own_tokens * (d + heads) * e,
            "statistics of the norm of index keys": 2 * own_tokens * batch.statistic,
            "index_q input": batch.saved_input_beside(q_up, self.ranks[0]),
            "index queries and keys": m * (heads + 1) * d * e,
            "index weights": m * heads * (e if self.recompute else batch.statistic),
        }  # fmt: skip

    def kept(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes of the chosen tokens that later layers read."""
        return {"chosen tokens": self._chosen_bytes(batch) * self.is_read}

    def _chosen_bytes(self, batch: MicroBatch) -> int:
        return batch.tokens * (self.attend.top_k or 0) * 4

    @property
    def _index_size(self) -> tuple[int, int]:
        """Number of the indexer's heads, and channels of its keys; zeros without an indexer."""
        return (0, 0) if self.source is not None else (self.sparse.index_heads, self.sparse.index_head_dim)

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the traffic of rotating queries and keys, and of writing and reading index scores."""
        heads, d = self._index_size
        channels = self.heads * (self.n + self.r) + (heads + 1) * d
        moved = 4 * batch.tokens * channels * batch.element
        scores = 0.0 if self.sparse.warmup or not heads else 6 * self._scored(batch) * batch.tokens * 4
        return KernelWork(moved + scores, moved)

    def _scored(self, batch: MicroBatch) -> float:
        """Return the mean number of keys that this rank scores per query."""
        return pairs_of(batch.length, None, causal=True) / batch.length / self.context.tensor.size()

    def attention(self, batch: MicroBatch) -> list[AttentionWork]:
        """Return the size of attention to chosen keys, which are as wide as the latent.

        A query sees the same number of keys as with a window of top_k tokens.
        """
        pairs = pairs_of(batch.length, self.attend.top_k, causal=True)
        latent = self.ranks[1]
        return [AttentionWork(self.heads, latent + self.r, latent, batch.length, pairs, modified=False)]

    def keys_and_values(self, batch: MicroBatch) -> int:
        """Return the bytes of this rank's latents, rotary keys and index keys, if any."""
        return batch.tokens * (self.ranks[1] + self.r + self._index_size[1]) * batch.element

    def flops(self, batch: MicroBatch) -> float:
        """Return the FLOPs of products with `latent_up`, and a third of the index scores' FLOPs.

        Index scores have no backward.
        """
        heads, d = self._index_size
        scores = 2.0 * heads * d * self._scored(batch)
        return batch.tokens * (2.0 * self.latent_up.numel() + scores / 3)

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Return the bytes of the gradients of queries, of keys in fp32, and of the tensors of one block of queries."""
        heads, d = self._index_size
        queries = (self.heads * (self.n + self.r) + heads * d) * batch.element
        keys = (self.ranks[1] + self.r + d) * batch.statistic
        whole = batch.sequences * batch.length  # tokens of all context-parallel ranks
        return batch.tokens * queries + whole * keys + BLOCK_BYTES


def without_padding(weights_sbi: Tensor, padding_bs: Tensor | None) -> Tensor:
    """Return the weights of the indexer's heads with zeros for padding queries.

    Padding then adds nothing to the gradient of the indexer's loss.
    """
    return weights_sbi if padding_bs is None else weights_sbi.masked_fill(padding_bs.t().unsqueeze(-1), 0.0)


def _rotated_halves(x_sbad: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of channels from the two halves."""
    return rotate_heads(x_sbad, *rotary)
