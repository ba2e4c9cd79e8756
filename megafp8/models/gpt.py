"""GPT and BERT, one pipeline stage at a time.

A stage is a run of consecutive blocks; the first stage also has the embedding, the last one the final norm, the output
layer and the loss. What flows between stages is the residual stream `[s/t, b, h]`. A model of one stage has it all.

BERT differs in three things: attention is bidirectional, the head transforms hidden states before the output layer and
may have a second loss (`megafp8.layers.head.bert`), and norms may stand after the additions (`norm_position` post).

With tied embeddings and more than one stage, the last stage holds a copy of the embedding: it starts from the same
(seed, name), its gradient is summed with the first stage's, so the copies stay equal bit for bit (`is_copy`). So it
does for multi-token prediction, whose layers are on the last stage.

Shapes: s sequence, b micro-batch, h hidden, v vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.batch import Batch
from megafp8.layers.attention.context_parallel import ContextAttention, plan
from megafp8.layers.attention.mask import AttentionMask, bidirectional_mask, causal_mask, key_ranges
from megafp8.layers.attention.op import CoreAttention, SelfAttention, fastest_backends
from megafp8.layers.context import BuildContext
from megafp8.layers.dropout import op as dropouts
from megafp8.layers.dropout.reference import Dropout, TokenPlaces
from megafp8.layers.embedding.module import Embedding, word_embedding
from megafp8.layers.embedding.vocab_parallel import VocabParallelEmbedding
from megafp8.layers.experts.router import Router
from megafp8.layers.head.module import Head
from megafp8.layers.head.op import LabelLosses
from megafp8.layers.mixer import AttendTo, LayerInputs, Mixer, Tokens, one_of_each
from megafp8.layers.offload import ActivationOffload, Forward
from megafp8.layers.per_layer_embedding.module import PerLayerEmbedding
from megafp8.layers.recompute import KEEP_ALL, BlockMemory, recomputed
from megafp8.layers.recurrent.context_parallel import ContextRecurrence
from megafp8.layers.recurrent.op import Recurrence
from megafp8.models.block import Block, PredictionLayer, block_class
from megafp8.parallel.context import one_segment, place_tokens, rank_rows, shard_positions
from megafp8.parallel.sharding import Init, ParamSpec, set_spec, shard_dim
from megafp8.parallel.tensor.lora import freeze
from megafp8.parallel.tensor.mappings import gather_from_sequence_parallel, scatter_to_sequence_parallel
from megafp8.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class MicroBatchTokens(Tokens):
    """The tokens of a micro-batch. `group`: ranks that share its sequences; None where this rank has whole ones.

    `cu_seqlens_bn`: int32, the first token of each document of the whole sequences, and their length; None: whole
    sequences are one document. `prefix_b`: as in `Batch.prefix`. `cuts_documents`: as in `place_tokens`.
    `later_padding_dbs`: padding at the depths of multi-token prediction from 1 on.
    """

    group: ProcessGroup | None = None
    cu_seqlens_bn: Tensor | None = None
    prefix_b: Tensor | None = None
    cuts_documents: bool = True
    later_padding_dbs: Sequence[Tensor] = ()

    def at_depth(self, depth: int) -> MicroBatchTokens:
        if not depth or not self.later_padding_dbs:
            return self
        return replace(self, padding_bs=self.later_padding_dbs[depth - 1], depth=depth)

    def attention(
        self, layer: int, window: int | None, *, causal: bool, positions: bool, chunk: int | None = None,
        stores: bool = True,
    ) -> CoreAttention:  # fmt: skip
        key = "attention", window, causal, positions, chunk
        return self.once(key, lambda: self._attention(window, causal, positions, chunk))

    def _attention(self, window: int | None, causal: bool, positions: bool, chunk: int | None) -> CoreAttention:
        cu_seqlens_bn, prefix_b, device = self.cu_seqlens_bn, self.prefix_b, self.positions.device
        if self.group is None or self.group.size() == 1:
            if not causal:
                return SelfAttention(bidirectional_mask(cu_seqlens_bn))
            if prefix_b is not None:
                return SelfAttention(AttentionMask(cu_seqlens_bn, cu_seqlens_bn, window=window, prefix_b=prefix_b))
            return SelfAttention(causal_mask(cu_seqlens_bn, window, self.length, device, chunk))
        rank, ranks = self.group.rank(), self.group.size()
        calls = plan(
            self.length, rank, ranks, causal=causal, window=window, cu_seqlens_bm=cu_seqlens_bn, device=device,
            prefix_b=prefix_b, positions=positions, cuts_documents=self.cuts_documents, chunk=chunk,
        )  # fmt: skip
        return ContextAttention(self.group, calls)

    def keys(self, layer: int) -> KeysOfSequences:
        return self.once("keys", self._keys)

    def _keys(self) -> KeysOfSequences:
        cu_seqlens_bn, device, s = self.cu_seqlens_bn, self.positions.device, self.length
        assert self.prefix_b is None, "the config was not checked"
        if self.group is None or self.group.size() == 1:
            mask = AttentionMask(cu_seqlens_bn, cu_seqlens_bn)
            return KeysOfSequences(*key_ranges(mask, s, s, device))
        rank, ranks = self.group.rank(), self.group.size()
        whole = one_segment(s, device) if cu_seqlens_bn is None else cu_seqlens_bn
        positions_bs = shard_positions(cu_seqlens_bn if self.cuts_documents else None, s, rank, ranks, device)
        mask = AttentionMask(cu_seqlens_bn, cu_seqlens_bn, positions_bs=positions_bs)
        placed = place_tokens(whole, 2 * ranks, s, cuts_documents=self.cuts_documents)
        rows_bs = rank_rows(placed.slot_bs, ranks)
        return KeysOfSequences(*key_ranges(mask, s // ranks, s, device), rows_bs, self.group)

    def recurrence(self, layer: int) -> Recurrence:
        starts_sb = self.once("starts", self._starts)
        if self.group is not None and self.group.size() > 1:
            return ContextRecurrence(self.group, starts_sb)
        return lambda rule, xs: rule.advance(xs, rule.zeros(xs[0].shape[1]), starts_sb)[0]

    def _starts(self) -> Tensor | None:
        """Whether a token of this rank is the first of its document, bool `[s, b]`; None without documents."""
        if self.cu_seqlens_bn is None:
            return None
        first_bn = self.cu_seqlens_bn.long()
        starts_bs = torch.zeros(len(first_bn), self.length + 1, dtype=torch.bool, device=first_bn.device)
        starts_bs = starts_bs.scatter_(1, first_bn, True)[:, : self.length]
        if self.group is not None and self.group.size() > 1:
            rank, ranks = self.group.rank(), self.group.size()
            mine = shard_positions(None, self.length, rank, ranks, starts_bs.device)
            starts_bs = starts_bs.gather(1, mine.expand(len(starts_bs), -1))
        return starts_bs.t()


@dataclass(frozen=True)
class KeysOfSequences:
    """`megafp8.layers.mixer.AttendToKeys` of a micro-batch. `first_bs`, `stop_bs`: each token's keys.

    `rows_bs`: where the tokens of whole sequences are among those of the ranks of `group`, which share the sequences.
    """

    first_bs: Tensor
    stop_bs: Tensor
    rows_bs: Tensor | None = None
    group: ProcessGroup | None = None

    def __call__(
        self, attend: AttendTo, queries: tuple[Tensor, ...], keys: tuple[Tensor, Tensor], every: int = 1
    ) -> Tensor:
        first, second = keys
        return attend(queries, (self._whole(first), self._whole(second, every)), self.first_bs, self.stop_bs)

    def _whole(self, x_sb: Tensor, every: int = 1) -> Tensor:
        """A tensor of whole sequences, from those of this rank's tokens; `every`: `one_of_each` of it."""
        if self.rows_bs is None:
            return one_of_each(x_sb, every)
        rows_sb = self.rows_bs.t()
        among = every if len(x_sb) // 2 % every == 0 else 1  # a rank has two parts of a sequence
        gathered = gather_from_sequence_parallel(one_of_each(x_sb, among).contiguous(), self.group)
        whole = gathered[rows_sb[::among] // among, torch.arange(x_sb.shape[1], device=x_sb.device)]
        return whole if among == every else one_of_each(whole, every)

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.first_bs, self.stop_bs, self.rows_bs) if x is not None]


class GPTStage(nn.Module):
    """The blocks `layers` of the model, of `model.layers`, and what belongs to the first and last stage.

    `positions` is the number of rows of a learned position table; `memory` is that of each block, by default all keep
    everything. Parameters are allocated, not initialised: `parallel.tensor.random.initialize_parameters` fills them.
    `blocks`: without them only what belongs to the first and last stage is constructed.
    """

    def __init__(
        self,
        model: ModelSpec,
        context: BuildContext,
        *,
        layers: range,
        positions: int,
        memory: Sequence[BlockMemory] | None = None,
        z_loss: float = 0.0,
        blocks: bool = True,
    ) -> None:
        super().__init__()
        self.model, self.context, self.layers = model, context, layers
        self.memory = [KEEP_ALL] * len(layers) if memory is None else list(memory)
        first, last = layers.start == 0, layers.stop == len(model.layers)
        self.embedding = Embedding(model, context, positions) if first else None
        self.per_layer_embedding: PerLayerEmbedding | None = None
        if model.stem.per_layer_width:
            assert first, "per-layer embeddings need the embedding: the config was not checked"
            self.per_layer_embedding = PerLayerEmbedding(model, context)
        block_context = context
        if context.weight_storage == "fsdp":  # which allocates a rank's rows alone
            block_context = replace(context, device=torch.device("meta"), real_device=context.device)
        self.blocks, self.mtp = nn.ModuleList(), nn.ModuleList()
        for i, block_memory in zip(layers, self.memory, strict=True) if blocks else ():
            (self.blocks if i < model.num_blocks else self.mtp).append(
                self.make_layer(i, model, block_context, block_memory)
            )
        embeds = model.embeds_on_last_stage and (first or last)
        self.shared_weight = self._shared_weight(first=first, last=last) if embeds else None
        self.mtp_embedding: VocabParallelEmbedding | None = None  # of another last stage
        if len(self.mtp) and not first:
            self.mtp_embedding = word_embedding(model, context, self.shared_weight)
        tied = self.shared_weight if model.head.tied else None
        self.head = Head(model, context, tied, z_loss) if last else None
        self.offload = (
            ActivationOffload(context.device) if any(block_memory.offload for block_memory in self.memory) else None
        )
        if context.lora is not None:
            freeze(self)

    @staticmethod
    def make_layer(index: int, model: ModelSpec, context: BuildContext, memory: BlockMemory) -> Block | PredictionLayer:
        """Layer `index` of the model."""
        kind = block_class(model, index) if index < model.num_blocks else PredictionLayer
        return kind(index, model, context, memory)

    def stream_rows(self, s: int, b: int, decoder: int) -> int:
        """Rows of the tensor between stages, for s tokens of each of b samples; `decoder`: of T5's decoder."""
        return s // self.context.tensor.size() if self.context.sequence_sharded else s

    def _shared_weight(self, *, first: bool, last: bool) -> nn.Parameter:
        """The embedding's weight, shared by this stage's layers or with another stage; not on the first a copy."""
        model, group = self.model, self.context.tensor
        shape = (model.stem.rows, model.hidden_size)
        piece = shard_dim("embedding.word.weight", shape, 0, group.rank(), group.size())
        if self.embedding is not None:
            weight = self.embedding.word.weight
        else:
            weight = nn.Parameter(torch.empty(piece.shape, dtype=self.context.dtype, device=self.context.device))
        num_uses = first + last * (model.head.tied + (model.num_prediction_layers > 0))
        init = Init("normal", model.init_std)
        spec = ParamSpec((piece,), init, replicated_over_tp=False, is_copy=not first, num_uses=num_uses)
        return set_spec(weight, spec)

    @property
    def routers(self) -> dict[int, Router]:
        """By layer, those of the blocks with experts."""
        return {block.index: router for block in self.all_blocks for router in block.ffn.routers}

    @property
    def index_losses(self) -> dict[int, Tensor]:
        """By layer, what backward passes have added up of the losses of indexers, float64 `[1]`."""
        return {block.index: block.mixer.index_loss for block in self.all_blocks if block.mixer.index_loss is not None}

    @property
    def recording_mixers(self) -> list[Mixer]:
        """The mixers that record their largest attention logits."""
        return [block.mixer for block in self.all_blocks if block.mixer.largest_logits_a is not None]

    @property
    def all_blocks(self) -> list[Block]:
        """The blocks, with those of multi-token prediction."""
        return [*self.blocks, *(layer.block for layer in self.mtp)]

    @property
    def constants(self) -> dict[str, Tensor]:
        """By global name, tensors that belong to the weights but have no gradient: fp32, or int64."""
        router_constants = {f"{r.name}.{name}": x for r in self.routers.values() for name, x in r.constants.items()}
        tails = {x.index: x.tail.scalar for x in self.all_blocks if x.tail is not None}
        return router_constants | {f"layers.{index}.layer_scalar": x for index, x in tails.items() if x is not None}

    @property
    def router_shares(self) -> dict[str, Tensor]:
        """By global name, what routers remember of the step before."""
        return {f"{r.name}.shares": r.shares for r in self.routers.values() if r.shares is not None}

    @property
    def units(self) -> list[nn.Module]:
        """The modules that a forward pass calls one after the other; together they have all parameters."""
        modules = (self.embedding, self.per_layer_embedding, *self.blocks, self.mtp_embedding, *self.mtp, self.head)
        return [module for module in modules if module is not None]

    def layer_inputs(self, batch: Batch) -> LayerInputs:
        """Return what blocks read of a micro-batch, of this rank's tokens."""
        context, (b, s) = self.context, batch.tokens.shape
        paddings: Sequence[Tensor] = () if batch.padding is None else batch.padding.split(b)
        tokens = MicroBatchTokens(
            torch.arange(s, device=context.device) if batch.position_ids is None else batch.position_ids,
            s if context.context_parallel is None else s * context.context_parallel.size(),
            batch.tokens,
            batch.samples,
            padding_bs=paddings[0] if paddings else None,
            later_padding_dbs=paddings[1:],
            group=context.context_parallel,
            cu_seqlens_bn=batch.cu_seqlens,
            prefix_b=batch.prefix,
            cuts_documents=self.model.cuts_documents,
        )
        return self.inputs_of(tokens, self._places(s, batch.cu_seqlens, batch.samples))

    def inputs_of(self, tokens: Tokens, places: TokenPlaces | None = None, which: slice = slice(None)) -> LayerInputs:
        """Return what the blocks `which` read of these tokens besides the residual stream.

        `places`: as in `LayerInputs`.
        """
        blocks = [(x, tokens.at_depth(max(0, x.index + 1 - self.model.num_blocks))) for x in self.all_blocks[which]]
        mixers = {block.index: block.mixer.inputs(block.index, read) for block, read in blocks}
        return LayerInputs(mixers, {block.index: block.ffn.inputs(block.index, read) for block, read in blocks}, places)

    def with_per_layer(self, inputs: LayerInputs, tokens_bs: Tensor, x_sbh: Tensor) -> LayerInputs:
        """`inputs` with the per-layer embeddings of tokens whose embeddings are `x_sbh`, where the model has any."""
        if self.per_layer_embedding is None:
            return inputs
        return replace(inputs, per_layer_sblp=self.per_layer_embedding(tokens_bs, x_sbh))

    def _places(self, s: int, cu_seqlens_bn: Tensor | None, samples_b: Tensor | None) -> TokenPlaces | None:
        """Of the tokens of this rank's residual stream; None without dropout."""
        if samples_b is None or not self.model.hidden_dropout:
            return None
        context, group = self.context, self.context.context_parallel
        if group is None or group.size() == 1:
            positions_bs = torch.arange(s, device=context.device).unsqueeze(0)
        else:
            ranks = group.size()
            documents = cu_seqlens_bn if self.model.cuts_documents else None
            positions_bs = shard_positions(documents, s * ranks, group.rank(), ranks, context.device)
        positions_sb = positions_bs.transpose(0, 1)
        if context.sequence_sharded:
            positions_sb = scatter_to_sequence_parallel(positions_sb, context.tensor)
        return TokenPlaces.from_positions(positions_sb, samples_b)

    def run_blocks(self, x_sbh: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """The residual stream after the blocks, and what is still to be added to it."""
        with fastest_backends():
            return self._run_blocks(x_sbh, inputs, self._offload(x_sbh, inputs))

    def _offload(self, x_sbh: Tensor, inputs: LayerInputs) -> Forward | None:
        """Begins a forward pass whose activations are offloaded; None where none are."""
        tensors = [x_sbh, *inputs.tensors] if x_sbh.is_leaf else inputs.tensors  # a leaf is what the engine received
        return self.offload.forward(tensors) if self.offload is not None and torch.is_grad_enabled() else None

    def _run_blocks(
        self, x_sbh: Tensor, inputs: LayerInputs, offload: Forward | None, which: slice = slice(None)
    ) -> tuple[Tensor, Tensor | None]:
        branch_sbh: Tensor | None = None
        dropout: Dropout | None = None
        for block, memory in zip(list(self.blocks)[which], self.memory[which]):
            if memory.full and torch.is_grad_enabled() and branch_sbh is not None:
                x_sbh, branch_sbh = dropouts.add(x_sbh, branch_sbh, dropout), None  # one tensor is kept, not two
            if memory.full or memory.offload:
                x_sbh, branch_sbh = self._run(memory, offload, block, x_sbh, branch_sbh, inputs, dropout)
            else:
                x_sbh, branch_sbh = block(x_sbh, branch_sbh, inputs, dropout)
            assert isinstance(block, Block)
            dropout = block.branch_dropout(inputs)
        return x_sbh, branch_sbh

    def _branch_dropout(self, inputs: LayerInputs, last: int = -1) -> Dropout | None:
        """Of what is still to be added to the residual stream after this stage's block `last`."""
        block = self.blocks[last]
        assert isinstance(block, Block)
        return block.branch_dropout(inputs)

    def look_ahead(self, labels_bs: Tensor, inputs: LayerInputs, offload: Forward | None, normed_sbh: Tensor) -> Tensor:
        """The output layer's input at all depths, one below the other along b. Each embeds the labels of the one
        before."""
        b = normed_sbh.shape[1]
        embedding = self.embedding.word if self.embedding is not None else self.mtp_embedding
        assert embedding is not None
        hidden = [normed_sbh]
        embedded = embedding(labels_bs[:-b]).split(b, dim=1)
        for layer, memory, x_sbh in zip(self.mtp, self.memory[len(self.blocks) :], embedded, strict=True):
            hidden.append(self._run(memory, offload, layer, hidden[-1], x_sbh, inputs))
        return torch.cat(hidden, dim=1)

    @staticmethod
    def _run(memory: BlockMemory, offload: Forward | None, block: nn.Module, *inputs: object) -> Any:
        """`block(*inputs)`, recomputed and offloaded as its `memory` says."""
        with offload.block(block) if offload is not None and memory.offload else nullcontext():
            return recomputed(block, *inputs) if memory.full and torch.is_grad_enabled() else block(*inputs)

    def forward(self, x_sbh: Tensor | None, batch: Batch, *, logits: bool = False) -> Tensor | LabelLosses:
        """Return the residual stream `[s/t, b, h]`; on the last stage the losses of each token, or this rank's logits.

        With d depths of multi-token prediction, labels are those of `Batch.with_later_labels`, and the losses of all
        depths are side by side, `[s, (1 + d) b]`. The losses of BERT's binary head are next to the losses of its tokens
        (`MaskedLM`).

        Args:
            x_sbh: Output of the stage before; None on the first stage.
            batch: Micro-batch; with context parallelism this rank's `Batch.shard`.
            logits: Return logits `[s, b, v/t]` in place of losses `[s, b]`.
        """
        inputs = self.layer_inputs(batch)
        if self.embedding is not None:
            x_sbh = self.embedding(batch.tokens, batch.position_ids, inputs.places, batch.token_types)
            inputs = self.with_per_layer(inputs, batch.tokens, x_sbh)
        assert x_sbh is not None, "a later stage needs the previous stage's output"
        with fastest_backends():
            offload = self._offload(x_sbh, inputs)
            x_sbh, branch_sbh = self._run_blocks(x_sbh, inputs, offload)
            dropout = self._branch_dropout(inputs)
            if self.head is not None:
                look_ahead = partial(self.look_ahead, batch.labels, inputs, offload) if len(self.mtp) else None
                return self.head(x_sbh, branch_sbh, None if logits else batch.labels, look_ahead, dropout)
        return x_sbh if branch_sbh is None else dropouts.add(x_sbh, branch_sbh, dropout)
