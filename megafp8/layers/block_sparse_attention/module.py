"""Softmax attention with grouped queries to blocks of tokens that an indexer chooses (MiniMax-M3).

For each group of heads that share a key-value head, an indexer scores all earlier tokens, and the group attends to the
blocks with the highest scores. The indexer has these parts:

    index_q    residual stream's norm -> a query for each group, followed by an RMSNorm
    index_k    residual stream's norm -> one key for all groups, followed by an RMSNorm

They are as wide as the heads of attention, and rotated like these. The choice is the choice of `transformers`, except
that the earlier of two blocks with equal scores wins. The indexer's loss is ours, as `transformers` has none: it is the
loss that `layers.sparse_attention.op` describes, for each group. The indexer's products are computed as in
`layers.sparse_attention.module`, but each tensor-parallel rank chooses for its own groups.

`layers.sparse_attention.op` computes attention with these tensors:

- A group is a sample, so that the heads of a sample share one key and one choice.
- A token's row is its value, then its key. The value is the latent of latent attention, of which `identity` makes the
  value of each head. The key is the rotary key, and queries have no channels without positions.
- The score q·k of the indexer is relu(q·k) - relu(-q·k), so it has the heads q and -q with the weights 1 and -1.

Shapes are as in `layers.sparse_attention.op`, with d channels of a head, g groups of this rank, and n = b·g samples.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megafp8.layers.attention.module import Attention
from megafp8.layers.block_sparse_attention.record import BlockSparseAttentionConfig
from megafp8.layers.build import PartBuild
from megafp8.layers.context import replicated_product
from megafp8.layers.costs import AttentionWork, KernelWork, MicroBatch, pairs_of
from megafp8.layers.mixer import TokenCache, Tokens
from megafp8.layers.norm.module import normalized, rms_norm
from megafp8.layers.rotary.op import rotate_and_split, rotate_heads
from megafp8.layers.sparse_attention.module import SparseInputs
from megafp8.layers.sparse_attention.op import BLOCK_BYTES, IndexLoss, SparseAttention
from megafp8.layers.sparse_attention.reference import Index, wide
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.linear.state import QuantizedGradHandoff
from megafp8.parallel.sharding import Init
from megafp8.plan import Neighbor


class BlockSparseAttention(Attention):
    """Softmax attention to chosen blocks of tokens.

    `index_loss` sums the indexer's losses over the backward passes.
    """

    def __init__(self, build: PartBuild[BlockSparseAttentionConfig]) -> None:
        name, record, model, context = build.name, build.record, build.model, build.context
        unfused = Neighbor(build.input.name, "none", "the indexer reads its values, too")
        super().__init__(replace(build, input=unfused))
        self.input_linear = None
        assert self.rotates, "the config was not checked"
        self.sparse, parts = record, {"index_q": record.groups * self.d, "index_k": self.d}
        self.index, self.index_state = replicated_product(
            context, name, "index", parts, model.hidden_size, init=Init("normal", model.hidden_init_std),
            reason="the indexer stays in training.precision",
        )  # fmt: skip
        self.index_q_norm, self.index_k_norm = (rms_norm(f"{name}.{x}_norm", self.d, model, context) for x in parts)
        self.index_loss = torch.zeros(1, dtype=torch.float64, device=context.buffer_device)
        weight = record.kl_loss / (context.global_tokens * record.groups)
        loss = IndexLoss(weight, context.auxiliary_loss_grad, self.index_loss)
        scale = record.attention_scale or self.d**-0.5
        self.attend = SparseAttention(record.top_k, scale, None, loss, record.block_size, record.local_blocks)
        shared = self.heads // self.groups
        identity = torch.eye(self.d, dtype=context.dtype, device=context.buffer_device)
        self.identity = context.constants.setdefault(("identity", self.d, shared), identity.repeat(shared, 1))

    def inputs(self, layer: int, tokens: Tokens) -> Any:
        """Return the rotary tables, attention function and padding mask for these tokens."""
        assert self.rope is not None
        return SparseInputs(tokens.rotary(self.rope), tokens.keys(layer), tokens.padding_bs)

    @property
    def cache(self) -> tuple[TokenCache]:
        """Layout of the cached values and keys of all groups, and of the indexer's cached key."""
        return (TokenCache(1, 2 * self.groups * self.d, self.d),)

    def forward(self, x_sbh: Tensor | LinearInput, inputs: Any) -> Tensor:
        """Return the attention output after the projection, `[s, b, h]`, for the normalized residual stream `x_sbh`."""
        assert isinstance(x_sbh, Tensor)
        index = linear(x_sbh.detach(), self.index, self.index_state).unflatten(-1, (-1, self.d))
        q, k = (x.contiguous() for x in index.split([self.sparse.groups, 1], dim=2))
        index = torch.cat([normalized(self.index_q_norm, q), normalized(self.index_k_norm, k)], dim=2)
        # Gradients are sums over ranks: each rank computes the indexer's loss for other groups.
        index, handoff = self.shared(index), self.qkv.state.grad_handoff()
        y_sbad = self._run(self._choose_and_attend, self.qkv(x_sbh, handoff), index, inputs, handoff)
        return self.proj(y_sbad.flatten(-2))

    def _choose_and_attend(
        self, qkv_sbc: Tensor, index_sbad: Tensor, inputs: SparseInputs, handoff: QuantizedGradHandoff | None
    ) -> Tensor:
        q, k, v = rotate_and_split(qkv_sbc, self.heads, self.groups, *inputs.rotary, handoff, self._norms())
        index = rotate_heads(index_sbad, *inputs.rotary)
        index_q = index.narrow(2, self.context.tensor.rank() * self.groups, self.groups)
        if inputs.padding_bs is not None:  # padding adds nothing to the gradient of the indexer's loss
            index_q = index_q.masked_fill(inputs.padding_bs.t()[..., None, None], 0.0)
        keys = torch.cat([v, k], dim=-1).flatten(2), index[:, :, -1].contiguous()
        return inputs.to_keys(self._attend_to, (q, index_q), keys)

    def _attend_to(
        self, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], first_bs: Tensor, stop_bs: Tensor
    ) -> Tensor:
        """Implement `megafp8.layers.mixer.AttendTo`: attend to the chosen blocks of these keys."""
        (q, index_q), (kv, index_k), (b, g) = queries, keys, (queries[0].shape[1], self.groups)
        q = q.unflatten(2, (g, -1)).flatten(1, 2).contiguous()
        kv, index_q = kv.unflatten(-1, (g, -1)).flatten(1, 2), index_q.flatten(1, 2)
        weight_sn = torch.full_like(index_q[..., 0], self.d**-0.5, dtype=wide(q))
        index = Index(
            torch.stack([index_q, -index_q], dim=2), index_k.unsqueeze(2).expand(-1, -1, g, -1).flatten(1, 2),
            torch.stack([weight_sn, -weight_sn], dim=2),
        )  # fmt: skip
        first_ns, stop_ns = (x.expand(b, -1).unsqueeze(1).expand(-1, g, -1).flatten(0, 1) for x in (first_bs, stop_bs))
        attend = replace(self.attend, top_k=self._chosen_blocks(len(kv)))
        return attend(q, kv, index, None, self.identity, first_ns, stop_ns)[0].unflatten(1, (b, g)).flatten(2, 3)

    def _chosen_blocks(self, length: int) -> int:
        """Return the largest number of blocks that a query chooses among `length` keys."""
        return min(self.sparse.top_k, -(-length // self.sparse.block_size))

    # --- memory and compute -----------------------------------------------------------------------------------------

    def kernels(self, device: torch.device, length: int, *, documents: bool, prefix: bool) -> None:
        """Return None: there is no choice of kernels."""
        return

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes that the layer saves for backward, by tensor."""
        m, own_tokens, e, d, g = batch.tokens, batch.own_tokens, batch.element, self.d, self.groups
        heads = self.sparse.groups + 1
        saved = {
            "qkv input": batch.saved_input(self.qkv.state),
            "index input": batch.saved_input_beside(self.qkv.state, self.index.shape[1]),
            "index heads before their norms": own_tokens * heads * (d * e + batch.statistic),
            "q, k, v": m * sum(self.split.values()) * e,
            "proj input": batch.saved_input(self.proj.state),
        }
        if self.recompute:
            return saved | {"index heads": m * heads * d * e}
        whole = batch.sequences * batch.length  # tokens of all context-parallel ranks
        return saved | {
            "statistics of norms": m * (self.heads + g) * batch.statistic,
            "q by group": m * self.heads * d * e,
            "keys and values": 2 * whole * g * d * e,
            "index keys by group": whole * (g if batch.sequences > 1 else 1) * d * e,
            "index queries": 2 * m * g * (d * e + batch.statistic),
            "chosen blocks": m * g * self._chosen_blocks(batch.length) * 4,
        }

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the traffic of attention's kernels, and of index heads and index scores."""
        attention, moved = super().work(batch), 4 * batch.tokens * (self.groups + 1) * self.d * batch.element
        scores = 4 * self.groups * batch.length * batch.tokens  # of half of all pairs, written and read
        return KernelWork(attention.forward + moved + scores, attention.backward + moved)

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
        return super().keys_and_values(batch) + batch.tokens * self.d * batch.element

    def flops(self, batch: MicroBatch) -> float:
        """Return a third of the FLOPs of index scores, of half of all pairs. They have no backward."""
        return batch.tokens * self.groups * self.d * batch.length / 3

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Return the bytes of the gradients of queries, of keys in fp32, and of the tensors of one block of queries."""
        queries = batch.tokens * (self.heads + 2 * self.groups) * self.d * batch.element
        return queries + 3 * batch.sequences * batch.length * self.groups * self.d * batch.statistic + BLOCK_BYTES
