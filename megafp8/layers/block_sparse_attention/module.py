"""Softmax attention with grouped queries to blocks of tokens that an indexer chooses (MiniMax-M3).

For each group of heads that share a key-value head, an indexer chooses blocks of tokens. `block_sparse_attention.op`
describes the choice and how the indexer learns. Everything else is as in `layers.attention`. The indexer has these
parts:

    index_q, index_q_norm    residual stream's norm -> a query for each group, its RMSNorm
    index_k, index_k_norm    residual stream's norm -> one key for all groups, its RMSNorm

The first channels of its queries and keys are rotated, as many as in a head of attention. The inputs of the indexer get
no gradient from it, and its only gradient is the gradient of its loss. Its products stay in high precision and are
whole on every tensor-parallel rank; each rank computes them for its own tokens, and chooses for its own groups.

Shapes are as in `block_sparse_attention.op`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megafp8.layers.attention.module import Attention, AttentionInputs, query_scale
from megafp8.layers.attention.scores import PLAIN, Scores
from megafp8.layers.block_sparse_attention.op import BlockSparseCoreAttention
from megafp8.layers.block_sparse_attention.record import BlockSparseAttentionConfig
from megafp8.layers.context import BuildContext, replicated_parameter
from megafp8.layers.costs import AttentionWork, KernelWork, MicroBatch, pairs_of
from megafp8.layers.mixer import AttendToKeys, TokenCache, Tokens
from megafp8.layers.norm.module import RMSNormPart, normalized
from megafp8.layers.recompute import KEEP_ALL, BlockMemory
from megafp8.layers.rotary.op import rotate_heads
from megafp8.layers.sparse_attention.op import BLOCK_BYTES, IndexLoss
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.parallel.sharding import Init, unsharded
from megafp8.parallel.tensor.mappings import copy_to_tensor_parallel, gather_from_sequence_parallel
from megafp8.plan import LinearSite, Neighbor
from megafp8.spec import ModelSpec


@dataclass(frozen=True)
class _Core:
    """Core of one layer's attention over the tokens; implements `megafp8.layers.attention.op.CoreAttention`.

    Attributes:
        attend: Attention to chosen blocks.
        to_keys: Function that runs attention over the tokens.
        rotary: Rotary cosines and sines of the indexer's rotated channels.
        padding_bs: Whether each token is padding, bool; None if no token is padding.
        index_sbji: Queries of the indexer, and its key as the last head, before their rotation; None until the layer
            has computed them.
    """

    attend: BlockSparseCoreAttention
    to_keys: AttendToKeys
    rotary: tuple[Tensor, ...]
    padding_bs: Tensor | None
    index_sbji: Tensor | None = None

    def __call__(
        self, q_sbad: Tensor, k_sbgd: Tensor, v_sbgd: Tensor, sink_a: Tensor | None = None, scores: Scores = PLAIN
    ) -> Tensor:
        """Return the attention output `[s, b, a, d]`."""
        assert self.index_sbji is not None
        assert sink_a is None
        r = 2 * self.rotary[0].shape[-1]
        rotated = rotate_heads(self.index_sbji[..., :r], *self.rotary)
        index = torch.cat([rotated, self.index_sbji[..., r:]], dim=-1)
        index_q, index_k = index[:, :, :-1], index[:, :, -1]
        if self.padding_bs is not None:  # padding adds nothing to the gradient of the indexer's loss
            index_q = index_q.masked_fill(self.padding_bs.t()[..., None, None], 0.0)
        keys = torch.cat([k_sbgd.flatten(2), index_k], dim=-1), v_sbgd.flatten(2)
        scale = scores.scale_of(q_sbad.shape[-1])
        return self.to_keys(partial(self._attend_to, scale, v_sbgd.shape[2:]), (q_sbad, index_q), keys)

    def _attend_to(
        self, scale: float, heads: torch.Size, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], first_bs: Tensor,
        stop_bs: Tensor,
    ) -> Tensor:  # fmt: skip
        """Implement `megafp8.layers.mixer.AttendTo` for keys and values of these `heads`."""
        k, index_k = keys[0].split([heads.numel(), keys[0].shape[-1] - heads.numel()], dim=-1)
        k, v = (x.unflatten(-1, heads) for x in (k, keys[1]))
        return self.attend(queries[0], k, v, queries[1], index_k, first_bs, stop_bs, scale)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that it reads in addition to its arguments."""
        return [*self.rotary, *self.to_keys.tensors, *([] if self.padding_bs is None else [self.padding_bs])]


class BlockSparseAttention(Attention):
    """Softmax attention to chosen blocks of tokens.

    `index_loss` sums the indexer's losses over the backward passes.
    """

    def __init__(
        self,
        name: str,
        record: BlockSparseAttentionConfig,
        model: ModelSpec,
        context: BuildContext,
        *,
        input: Neighbor,
        memory: BlockMemory = KEEP_ALL,
    ) -> None:
        unfused = Neighbor(input.name, "none", "the indexer reads its values, too")
        super().__init__(name, record, model, context, input=unfused, memory=replace(memory, norms=False))
        assert self.rotates, "the config was not checked"
        self.sparse, h, d = record, model.hidden_size, record.index_head_dim
        parts = {"index_q": record.groups * d, "index_k": d}
        shards = [x for part, n in parts.items() for x in unsharded(f"{name}.{part}.weight", (n, h))]
        reason = "the indexer stays in training.precision"
        site = LinearSite(f"{name}.index", h, sum(parts.values()), high_precision=reason)
        self.index = replicated_parameter(context, shards, Init("normal", model.hidden_init_std), matrix=True)
        self.index_state = context.fp8.linear(site)
        self.index_q_norm, self.index_k_norm = (
            RMSNormPart(
                f"{name}.{part}_norm", d, context, eps=model.norm.eps, sees_a_slice=context.sequence_sharded,
                zero_centered=model.norm.zero_centered,
            )
            for part in parts
        )  # fmt: skip
        self.index_loss = torch.zeros(1, dtype=torch.float64, device=context.buffer_device)
        weight = record.kl_loss / (context.global_tokens * record.groups)
        loss = IndexLoss(weight, context.auxiliary_loss_grad, self.index_loss)
        self.attend = BlockSparseCoreAttention(record.block_size, record.top_k, record.local_blocks, loss)

    @property
    def input_linear(self) -> None:
        """State of the product that alone reads the input; None, because the indexer reads it, too."""
        return

    def inputs(self, layer: int, tokens: Tokens) -> AttentionInputs:
        """Return the rotary tables, attention core and score settings for these tokens."""
        assert self.rope is not None
        rotary, pairs = tokens.rotary(self.rope), self.record.rotary_channels // 2
        index_rotary = tokens.once(
            ("index rotation", self.rope.key), lambda: tuple(x[..., :pairs].contiguous() for x in rotary)
        )
        core = _Core(self.attend, tokens.keys(layer), index_rotary, tokens.padding_bs)
        scale = query_scale(self.record.query_scaling, tokens, self.context.dtype)
        return AttentionInputs(rotary, core, self.scores(tokens.length), scale)

    @property
    def cache(self) -> tuple[TokenCache]:
        """Layout of the cached keys, followed by the indexer's key, and of the cached values."""
        width = self.groups * self.d
        return (TokenCache(1, width + self.sparse.index_head_dim, width),)

    def forward(self, x_sbh: Tensor | LinearInput, inputs: AttentionInputs) -> Tensor:
        """Return the attention output after the projection, `[s, b, h]`, for the normalized residual stream `x_sbh`."""
        assert isinstance(x_sbh, Tensor)
        assert isinstance(inputs.core, _Core)
        index = linear(x_sbh.detach(), self.index, self.index_state).unflatten(-1, (-1, self.sparse.index_head_dim))
        q, k = (x.contiguous() for x in index.split([self.sparse.groups, 1], dim=2))
        index = torch.cat([normalized(self.index_q_norm, q), normalized(self.index_k_norm, k)], dim=2)
        # Gradients are sums over ranks: each rank computes the indexer's loss for other groups.
        share = gather_from_sequence_parallel if self.context.sequence_sharded else copy_to_tensor_parallel
        index = share(index, self.context.tensor)
        own_q = index.narrow(2, self.context.tensor.rank() * self.groups, self.groups)
        core = replace(inputs.core, index_sbji=torch.cat([own_q, index[:, :, -1:]], dim=2))
        return super().forward(x_sbh, replace(inputs, core=core))

    # --- memory and compute -----------------------------------------------------------------------------------------

    def kernels(self, device: torch.device, length: int, *, documents: bool, prefix: bool) -> None:
        """Return None: there is no choice of kernels."""
        return

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes that the layer saves for backward, by tensor."""
        d, e, qkv = self.sparse.index_head_dim, batch.element, self.qkv.state.plan
        heads, own_tokens = self.sparse.groups + 1, batch.own_tokens
        shares_input = qkv.saved == "high" and batch.tokens == own_tokens
        saved = super().saved(batch) | {
            "index input": 0 if shares_input else own_tokens * self.index.shape[1] * e,
            "index heads before their norms": own_tokens * heads * d * e,
            "statistics of the norms of index heads": own_tokens * heads * batch.statistic,
            "index heads": batch.tokens * (self.groups + 1) * d * e,
        }
        if self.recompute:
            return saved
        chosen = batch.tokens * self.groups * self.attend.blocks_of(batch.length) * 4
        whole = batch.sequences * batch.length  # tokens of all context-parallel ranks
        values = 0 if whole == batch.tokens else self.groups * self.d
        keys = self.groups * self.d + d + values
        return saved | {"chosen blocks": chosen, "keys with index keys": whole * keys * e}

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the traffic of attention's kernels, and of index heads and index scores."""
        attention, heads = super().work(batch), batch.tokens * (self.groups + 1) * self.sparse.index_head_dim
        moved = 4 * heads * batch.element
        scores = 8 * self.groups * self._scored(batch) * batch.tokens
        return KernelWork(attention.forward + moved + scores, attention.backward + moved)

    def _scored(self, batch: MicroBatch) -> float:
        """Return the mean number of keys that the indexer scores for a query and group."""
        return pairs_of(batch.length, None, causal=True) / batch.length

    def attention(self, batch: MicroBatch) -> list[AttentionWork]:
        """Return the size of attention to chosen blocks.

        A query sees the keys of a window of as many tokens, except on average half of its own block.
        """
        window = self.sparse.top_k * self.sparse.block_size
        pairs = pairs_of(batch.length, window, causal=True)
        pairs -= max(batch.length - window, 0) * (self.sparse.block_size - 1) / 2
        return [AttentionWork(self.heads, self.d, self.d, batch.length, pairs, modified=False)]

    def keys_and_values(self, batch: MicroBatch) -> int:
        """Return the bytes of this rank's keys, values and index keys."""
        return super().keys_and_values(batch) + batch.tokens * self.sparse.index_head_dim * batch.element

    def flops(self, batch: MicroBatch) -> float:
        """Return a third of the index scores' FLOPs, which have no backward."""
        return batch.tokens * 2.0 * self.groups * self.sparse.index_head_dim * self._scored(batch) / 3

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Return the bytes of the gradients of queries, of keys in fp32, and of the tensors of one part of queries."""
        d, whole = self.sparse.index_head_dim, batch.sequences * batch.length
        queries = batch.tokens * (self.heads * self.d + 2 * self.groups * d) * batch.element
        return queries + whole * self.groups * (2 * self.d + d) * batch.statistic + BLOCK_BYTES
