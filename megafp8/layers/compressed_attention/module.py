"""Compressed attention (DeepSeek-V4) to the latest tokens, and to entries that each summarize several earlier tokens.

    q_down          h -> query latent, its norm; q_up: latent -> queries of the heads, each normalized
    kv              h -> the key of all heads, which is also the value; its norm
    entry_kv, entry_gate    h -> the values from which an entry is computed, and their gates
    output_down     heads of a group -> channels of the group;  proj: all groups' channels -> h

*An entry* of `compress_rate` tokens is the norm of their weighted mean. In each channel, the weights are the softmax of
the gates plus a bias for each place among the tokens. Without an indexer, that is the whole entry (heavily compressed
attention). With an indexer, entries overlap: the mean includes the tokens of the previous entry (compressed sparse
attention). For this, `entry_kv` and `entry_gate` have twice the channels: one half for a token's own entry, the other
half for the next entry. The indexer has its own queries and entries, and chooses for each token the entries to which it
attends. The inputs of the indexer get no gradient from it, and the indexer's only gradient is the gradient of its loss.

*Positions.* The last channels of queries and keys are rotated, with neighboring channels as pairs. An entry is rotated
like its first token. Because keys serve as values and thus carry their position, outputs are rotated back by the
position of the query.

*Layouts.* Heads and groups are divided over tensor-parallel ranks. Keys, entries and the indexer are whole on each
rank, and everything except queries and outputs stays in training.precision. An entry is the output of a recurrence at
its last token, and the output is zero at other tokens. The state of the recurrence is the `entry_kv` and `entry_gate`
of the latest tokens. Context parallelism passes this state from one part of a sequence to the next, and generation
caches it.

Shapes: s sequence, b micro-batch, h hidden; a heads of this rank with d channels, r of them rotated; m tokens of an
entry, e entries; n channels from which entries are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.layers.build import PartBuild
from megafp8.layers.compressed_attention import op as ops
from megafp8.layers.compressed_attention.record import CompressedAttentionConfig
from megafp8.layers.context import BuildContext, new_parameter, replicated_product
from megafp8.layers.costs import AttentionWork, KernelWork, MicroBatch, pairs_of
from megafp8.layers.mixer import AttendToKeys, Mixer, StateCache, TokenCache, Tokens
from megafp8.layers.norm.module import normalized, rms_norm
from megafp8.layers.recompute import recomputed
from megafp8.layers.recurrent.op import Recurrence, State
from megafp8.layers.rotary.module import RotaryEmbedding
from megafp8.layers.rotary.op import rotate_heads, rotated_neighbors
from megafp8.layers.sparse_attention.module import without_padding
from megafp8.layers.sparse_attention.op import BLOCK_BYTES, IndexLoss
from megafp8.layers.sparse_attention.reference import Index, wide
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.parallel.sharding import Init, unsharded
from megafp8.plan import Neighbor
from megafp8.spec import ModelSpec


@dataclass(frozen=True)
class CompressedInputs:
    """Inputs of compressed attention in addition to the residual stream.

    Attributes:
        rotary: Rotary cosines and sines.
        back: Sines of the inverse rotation.
        to_keys: Function that runs attention over the tokens.
        recurrence: Function that runs the recurrence that computes entries.
        positions_sb: Positions of tokens in their documents, int64 `[s, b or 1]`.
        padding_bs: Whether each token is padding, bool; None if no token is padding.
    """

    rotary: tuple[Tensor, Tensor]
    back: Tensor
    to_keys: AttendToKeys
    recurrence: Recurrence
    positions_sb: Tensor
    padding_bs: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors among these inputs."""
        padding = [] if self.padding_bs is None else [self.padding_bs]
        return [*self.rotary, self.back, *self.to_keys.tensors, self.positions_sb, *padding]


class _Entries(nn.Module):
    """Parameters of entries of one kind, for the layer or for its indexer.

    Each tensor-parallel rank computes entries from all tokens. `position` `[m, series · width]` is added to the gates.
    Gradients cover only a rank's heads, or the losses of its queries, and are summed over ranks.
    """

    def __init__(
        self, name: str, width: int, record: CompressedAttentionConfig, model: ModelSpec, context: BuildContext
    ) -> None:
        super().__init__()
        assert record.compress_rate is not None
        self.width, self.series, partial = width, record.series, context.tensor.size() > 1
        shards = unsharded(f"{name}_position.weight", (record.compress_rate, record.series * width))
        spec = {"replicated_over_tp": True, "reduce_over_tp": partial, "weight_decay": False}
        self.position = new_parameter(context, shards, Init("zeros"), **spec)
        self.norm = rms_norm(f"{name}_norm", width, model, context, sees_a_slice=partial)


class CompressedAttention(Mixer):
    """Compressed attention.

    It reads the norm's unquantized output, even if `input` could quantize it.
    """

    def __init__(self, build: PartBuild[CompressedAttentionConfig]) -> None:
        super().__init__()
        name, record, model, context = build.name, build.record, build.model, build.context
        h, d, t = model.hidden_size, record.channels, context.tensor.size()
        heads, groups, rate = record.num_attention_heads, record.output_groups, record.compress_rate
        self.record, self.context, self.recompute, self.eps = record, context, build.memory.attention, model.norm.eps
        self.d, self.r, self.heads = d, record.rotary_channels, heads // t
        self.rope = RotaryEmbedding(record, self.r, None, context)
        self.init = Init("normal", model.hidden_init_std)
        has_entries, has_indexer = rate is not None, record.top_k is not None
        entry_width = record.series * d if has_entries else 0
        entry_parts = {"entry_kv": entry_width, "entry_gate": entry_width} if has_entries else {}
        parts = {"q_down": record.q_rank, "kv": d, **entry_parts}
        reason = "keys, entries and the indexer stay in training.precision"
        product = partial(replicated_product, context, name, init=self.init, reason=reason)
        self.down, self.down_state = product("down", parts, h)
        self.widths = [record.q_rank, d, 2 * entry_width]
        self.q_norm = rms_norm(f"{name}.q_norm", record.q_rank, model, context)
        self.kv_norm = rms_norm(f"{name}.kv_norm", d, model, context)
        norm = Neighbor("q_norm", "none", "the indexer reads its values, too")
        self.q_up = build.column("q_up", {"q_up": heads * d}, before=norm, inputs=record.q_rank)
        self.sink = build.parameter("sink.weight", Init("zeros"), heads)
        width = groups * record.output_rank
        self.output_down = build.parameter("output_down.weight", self.init, width, heads * d // groups, matrix=True)
        self.proj = build.row(width)
        self.entry_kinds = nn.ModuleList()
        if has_entries:
            self.entry_kinds.append(_Entries(f"{name}.entry", d, record, model, context))
        loss = None
        if has_indexer:
            d_index, n = record.index_head_dim, record.index_heads
            self.index_q, self.index_q_state = product("index_q", {"index_q": n * d_index}, record.q_rank)
            width = record.series * d_index
            index_parts = {"index_kv": width, "index_gate": width, "index_weights": n}
            self.index_down, self.index_down_state = product("index_down", index_parts, h)
            self.entry_kinds.append(_Entries(f"{name}.index", d_index, record, model, context))
            self.index_loss = torch.zeros(1, dtype=torch.float64, device=context.buffer_device)
            weight = record.kl_loss / context.global_tokens
            loss = IndexLoss(weight, context.auxiliary_loss_grad, self.index_loss)
        window = record.sliding_window
        assert window is not None, "the config was not checked"
        self.attend = ops.CompressedCoreAttention(window, rate, record.top_k, d**-0.5, context.tensor, loss)

    @property
    def _widths_of_entries(self) -> list[int]:
        """Number of channels of an entry of each kind."""
        return [kind.width for kind in self.entry_kinds if isinstance(kind, _Entries)]

    def inputs(self, layer: int, tokens: Tokens) -> CompressedInputs:
        """Return the rotary tables, positions, and the attention and recurrence functions for these tokens."""
        positions = tokens.positions.unsqueeze(-1) if tokens.positions.dim() == 1 else tokens.positions.t()
        rotary = tokens.rotary(self.rope)
        back = tokens.once(("rotation back", self.rope.key), lambda: -rotary[1])
        keys, recurrence = tokens.keys(layer), tokens.recurrence(layer)
        return CompressedInputs(rotary, back, keys, recurrence, positions, tokens.padding_bs)

    @property
    def cache(self) -> tuple[TokenCache | StateCache, ...]:
        """Layouts of the caches: each token's key with the entry that ends at it, and the state of the next entries."""
        if not self.entry_kinds:  # a paged cache stores two tensors, so the key is split into two halves
            return (TokenCache(1, self.d - self.d // 2, self.d // 2),)
        width = sum(self._widths_of_entries)
        shape = (self.record.tokens_before, 2 * self.record.series * width)
        return TokenCache(1, self.d, width, self.record.compress_rate or 1), StateCache((shape,), (self.context.dtype,))

    def forward(self, x_sbh: Tensor | LinearInput, inputs: CompressedInputs) -> Tensor:
        """Return the attention output after the projection, `[s, b, h]`, for the normalized residual stream `x_sbh`."""
        assert isinstance(x_sbh, Tensor)
        q, kv, entries = linear(x_sbh, self.down, self.down_state).split(self.widths, dim=-1)
        q_latent = normalized(self.q_norm, q.contiguous())
        shared = [torch.cat([normalized(self.kv_norm, kv.contiguous()), entries], dim=-1)]
        if self.record.top_k is not None:
            index_q = linear(q_latent.detach(), self.index_q, self.index_q_state)
            shared.append(torch.cat([index_q, linear(x_sbh.detach(), self.index_down, self.index_down_state)], dim=-1))
        # Gradients are sums over ranks: the heads of every rank use the keys, and each rank computes the indexer's loss
        # for other queries.
        shared = [self.shared(x) for x in shared]
        o_sbad = self._run(self._attend, self.q_up(q_latent), inputs, *shared)
        return self.proj(self._output(o_sbad, inputs))

    def _run(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return recomputed(function, *inputs) if self.recompute else function(*inputs)

    def _attend(self, q_sbc: Tensor, inputs: CompressedInputs, shared_sbc: Tensor, *index_sbc: Tensor) -> Tensor:
        """Return the attention output `[s, b, a, d]`, not yet rotated back."""
        q = F.rms_norm(q_sbc.unflatten(-1, (self.heads, self.d)), (self.d,), eps=self.eps)
        kv, *entry_parts = shared_sbc.split([self.d, shared_sbc.shape[-1] - self.d], dim=-1)
        queries = [_rotated(q, self.r, inputs.rotary)]
        kv = _rotated(kv.unsqueeze(2), self.r, inputs.rotary).squeeze(2)
        if not self.entry_kinds:
            first, second = kv.tensor_split([self.d - self.d // 2], dim=-1)
            return inputs.to_keys(self._attend_to, tuple(queries), (first, second))
        for index in index_sbc:
            heads, d = self.record.index_heads, self.record.index_head_dim
            index_q, index_entries, weights = index.split([heads * d, 2 * self.record.series * d, heads], dim=-1)
            weights = without_padding(weights, inputs.padding_bs)
            queries += [_rotated(index_q.unflatten(-1, (heads, d)), self.r, inputs.rotary), weights]
            entry_parts.append(index_entries)
        xs = torch.cat(entry_parts, dim=-1), inputs.positions_sb.expand(-1, q.shape[1])
        if torch.is_grad_enabled():  # save only xs for backward
            entries = recomputed(lambda *xs: inputs.recurrence(self, xs), *xs)
        else:
            entries = inputs.recurrence(self, xs)
        return inputs.to_keys(self._attend_to, tuple(queries), (kv, entries), every=self.record.compress_rate or 1)

    def _attend_to(
        self, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], first_bs: Tensor, stop_bs: Tensor
    ) -> Tensor:
        """Implement `megafp8.layers.mixer.AttendTo`: attend to a window of tokens and to entries."""
        kv_tbd, entries_ebc = keys
        if not self.entry_kinds:
            return self.attend(queries[0], torch.cat(keys, dim=-1), None, None, self.sink, first_bs, stop_bs)
        entries_ebd, *index_k = entries_ebc.split(self._widths_of_entries, dim=-1)
        index = None
        if index_k:
            scale = (self.record.index_head_dim * self.record.index_heads) ** -0.5
            index = Index(queries[1], index_k[0], queries[2].to(wide(kv_tbd)) * scale)
        return self.attend(queries[0], kv_tbd, entries_ebd, index, self.sink, first_bs, stop_bs)

    def _output(self, o_sbad: Tensor, inputs: CompressedInputs) -> Tensor:
        """Return the channels of all groups of heads, side by side."""
        o, o_rotary = o_sbad.split([self.d - self.r, self.r], dim=-1)
        # As in rotated keys, the first channels of all pairs come first in o_rotary.
        o_rotary = rotate_heads(o_rotary, inputs.rotary[0], inputs.back)
        o_rotary = o_rotary.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        o_sbgc = torch.cat([o, o_rotary], dim=-1).flatten(2).unflatten(-1, (-1, self.output_down.shape[1]))
        weight_grc = self.output_down.unflatten(0, (-1, self.record.output_rank))
        return torch.einsum("sbgc,grc->sbgr", o_sbgc, weight_grc).flatten(2)

    # --- entries, as a `megafp8.layers.recurrent.op.RecurrentRule` --------------------------------------------------

    def zeros(self, b: int) -> State:
        """Return the state before the first token of `b` sequences."""
        size = (b, self.record.tokens_before, 2 * self.record.series * sum(self._widths_of_entries))
        return (torch.zeros(*size, dtype=self.context.dtype, device=self.sink.device),)

    def last_inputs(self, xs: tuple[Tensor, ...], starts_sb: Tensor | None) -> Tensor:
        """Return the inputs that later tokens need, `[b, tokens_before, n]`, from at least `tokens_before` tokens."""
        return xs[0][len(xs[0]) - self.record.tokens_before :].transpose(0, 1)

    def transition(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> None:
        """Return None: only the latest tokens are remembered."""

    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, State]:
        """Return the entries of all kinds side by side, `[s, b, c]`, and the new state.

        An entry stands in the row of its last token; all other rows are zero. `xs` holds the tensor from which entries
        are computed, `[s, b, n]`, and the positions in documents, int64 `[s, b]`.
        """
        (x_sbn, positions_sb), (before_btn,), record = xs, state, self.record
        rate, (s, b, _) = record.compress_rate, x_sbn.shape
        assert rate is not None
        known_tbn = torch.cat([before_btn.transpose(0, 1), x_sbn])
        ends_sb = F.pad((positions_sb + 1) % rate == 0, (0, 0, 0, -s % rate))
        ends_emb = ends_sb.unflatten(0, (-1, rate))  # at most one of `rate` rows
        first_e1 = torch.arange(0, len(ends_sb), rate, device=x_sbn.device).unsqueeze(1)
        last_eb = first_e1 + ends_emb.int().argmax(1)
        end_position_eb = positions_sb.gather(0, last_eb)
        sample_b = torch.arange(b, device=x_sbn.device)
        # Rows in `known_tbn` of the tokens of each entry, preceded by the tokens of the previous entry.
        rows_kmeb = last_eb + torch.arange(record.series * rate, device=x_sbn.device).view(record.series, rate, 1, 1)
        has_earlier_eb = end_position_eb >= 2 * rate - 1
        entries, at = [], 0
        rotary = self.rope.table((end_position_eb - rate + 1).t(), 0)
        for kind in self.entry_kinds:
            assert isinstance(kind, _Entries)
            width = kind.width
            kv, gate = [], []
            for i, rows_meb in enumerate(rows_kmeb):
                kv_at, gate_at = (at + (which * record.series + i) * width for which in (0, 1))
                kv.append(known_tbn[rows_meb, sample_b, kv_at : kv_at + width])
                values = known_tbn[rows_meb, sample_b, gate_at : gate_at + width]
                bias = kind.position[:, i * width : (i + 1) * width].to(wide(x_sbn))
                values = values.to(wide(x_sbn)) + bias.view(rate, 1, 1, width)
                is_earlier = i + 1 < record.series
                gate.append(values.masked_fill(~has_earlier_eb.unsqueeze(-1), -torch.inf) if is_earlier else values)
            weights = torch.cat(gate).softmax(0)
            entry = kind.norm((weights * torch.cat(kv)).sum(0).to(x_sbn.dtype))
            entries.append(_rotated(entry.unsqueeze(2), self.r, rotary).squeeze(2))
            at += 2 * record.series * width
        entries_ebc = torch.cat(entries, dim=-1) * ends_emb.any(1).unsqueeze(-1)
        y_sbc = torch.zeros(s, b, entries_ebc.shape[-1], dtype=x_sbn.dtype, device=x_sbn.device)
        y_sbc = y_sbc.index_put((last_eb, sample_b), entries_ebc)
        return y_sbc, (known_tbn[len(known_tbn) - before_btn.shape[1] :].transpose(0, 1),)

    # --- memory and compute -----------------------------------------------------------------------------------------

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes that the layer saves for backward, by tensor."""
        m, own_tokens, e = batch.tokens, batch.own_tokens, batch.element
        record, widths = self.record, self._widths_of_entries
        whole, queries = batch.sequences * batch.length, m * self.heads * self.d  # keys of all context-parallel ranks
        made_of = 2 * record.series * sum(widths)
        saved = {
            "latents' input": own_tokens * self.down.shape[1] * e,
            "latents before their norms": own_tokens * (record.q_rank + self.d) * e,
            "statistics of norms": 2 * own_tokens * batch.statistic,
            "q_up input": batch.saved_input(self.q_up.state),
            "attention output": queries * e,
            "proj input": batch.saved_input(self.proj.state),
        }
        has_indexer, q_up = record.top_k is not None, self.q_up.state.plan
        if has_indexer and (q_up.saved != "high" or m != own_tokens):
            saved["index_q input"] = own_tokens * record.q_rank * e
        if self.recompute:  # only the inputs of attention
            index_width = self.index_q.shape[0] + record.index_heads if has_indexer else 0
            return saved | {"q": queries * e, "keys, entries and indexer": m * (self.d + made_of + index_width) * e}
        saved["q before and after its norm"] = 2 * queries * e + m * self.heads * batch.statistic
        saved["keys"] = whole * self.d * e
        saved["what entries are made of"] = m * made_of * e
        if record.compress_rate is not None:
            saved["entries"] = batch.sequences * -(-batch.length // record.compress_rate) * sum(widths) * e
        if has_indexer:
            assert record.top_k is not None
            saved["indexer"] = m * (self.index_q.shape[0] * e + record.index_heads * batch.statistic)
            saved["chosen entries"] = m * record.top_k * 4
        return saved

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the traffic of norms and rotations of queries, keys and outputs, of entries, and of index scores."""
        record = self.record
        entry_bytes = 4 * record.series * sum(self._widths_of_entries)
        channels = 8 * self.heads * self.d + 4 * self.d + 4 * entry_bytes
        moved = batch.tokens * channels * batch.element
        scores = 0.0 if record.top_k is None else 6 * self._entries_seen(batch) * batch.tokens * 4
        return KernelWork(moved + scores, 2 * moved)

    def _entries_seen(self, batch: MicroBatch) -> float:
        """Return the mean number of entries to which a query may attend."""
        rate = self.record.compress_rate
        return 0.0 if rate is None else batch.length / rate / 2

    def attention(self, batch: MicroBatch) -> list[AttentionWork]:
        """Return the size of attention to the window of tokens and to entries."""
        pairs = pairs_of(batch.length, self.record.sliding_window, causal=True)
        rate, top_k = self.record.compress_rate, self.record.top_k
        if rate is not None:
            entries = batch.length // rate
            pairs += rate * pairs_of(entries, top_k, causal=True)
        return [AttentionWork(self.heads, self.d, self.d, batch.length, pairs, modified=True)]

    def keys_and_values(self, batch: MicroBatch) -> int:
        """Return the bytes of this rank's keys and entries."""
        return batch.tokens * (self.d + sum(self._widths_of_entries)) * batch.element

    def flops(self, batch: MicroBatch) -> float:
        """Return the FLOPs of the groups' projection, and a third of the index scores' FLOPs.

        Index scores have no backward.
        """
        scores = 0.0
        if self.record.top_k is not None:
            pair_flops = 2.0 * self.record.index_heads * self.record.index_head_dim
            scores = pair_flops * self._entries_seen(batch) / self.context.tensor.size()
        return batch.tokens * (2.0 * self.output_down.numel() + scores / 3)

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Return the bytes of gradients of queries, outputs and keys (fp32), and of tensors of one block of queries."""
        index_width = self.index_q.shape[0] if self.record.top_k is not None else 0
        queries = (2 * self.heads * self.d + index_width) * batch.element
        keys = (self.d + sum(self._widths_of_entries)) * batch.statistic
        whole = batch.sequences * batch.length  # tokens of all context-parallel ranks
        return batch.tokens * queries + whole * keys + BLOCK_BYTES


def _rotated(x_sbad: Tensor, channels: int, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the last `channels` channels, with neighboring channels as pairs.

    In the result, the first channels of all pairs come first.
    """
    passed, rotated = x_sbad.split([x_sbad.shape[-1] - channels, channels], dim=-1)
    return torch.cat([passed, rotated_neighbors(rotated, rotary)], dim=-1)
