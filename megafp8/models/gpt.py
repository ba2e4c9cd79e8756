"""GPT and BERT, one pipeline stage at a time.

A stage is a run of consecutive blocks. The first stage also has the embedding; the last stage has the final norm, the
output layer and the loss. Stages pass on the residual stream `[s/t, b, h]`. A model with a single stage has all of
these parts.

BERT differs in three ways: attention is bidirectional; the head transforms hidden states before the output layer and
may have a second loss (`megafp8.layers.head.bert`); and norms may come after the additions (`norm_position` post).

With tied embeddings and more than one stage, the last stage holds a copy of the embedding (`is_copy`). The copy starts
from the same (seed, name), and its gradient is summed with the first stage's gradient, so the copies stay bitwise
equal. The last stage also holds a copy for multi-token prediction, because these layers are on the last stage.

Shapes: s sequence, b micro-batch, h hidden, v vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
from megafp8.layers.head.parts import PartLoss, SummedLoss, TokenPart
from megafp8.layers.mixer import AttendTo, LayerInputs, Mixer, Tokens, one_of_each
from megafp8.layers.offload import ActivationOffload, Forward
from megafp8.layers.per_layer_embedding.module import PerLayerEmbedding
from megafp8.layers.recompute import KEEP_ALL, BlockMemory, recomputed
from megafp8.layers.recurrent.context_parallel import ContextRecurrence
from megafp8.layers.recurrent.op import Recurrence
from megafp8.layers.shared_attention.module import SharedAttentionInputs, shared_transformer
from megafp8.models.block import Block, PredictionLayer, block_class
from megafp8.parallel.context import one_segment, place_tokens, rank_order, rank_rows, shard_positions
from megafp8.parallel.placement import Placement
from megafp8.parallel.sharding import Init, ParamSpec, set_spec, shard_dim
from megafp8.parallel.tensor.lora import freeze
from megafp8.parallel.tensor.mappings import gather_from_sequence_parallel, scatter_to_sequence_parallel
from megafp8.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class MicroBatchTokens(Tokens):
    """Tokens of a micro-batch.

    Attributes:
        group: Context-parallel ranks that share the sequences; None if this rank has whole sequences.
        cu_seqlens_bn: int32, first token of each document of the whole sequences, and their length; None if each whole
            sequence is one document.
        placement: Placement of the documents on the ranks of `group`; None if all are cut equally.
        prefix_b: Length of each sample's bidirectional prefix, as in `Batch.prefix`.
        cuts_documents: Whether context parallelism splits each document, as in `place_tokens`.
        later_padding_dbs: Padding at the depths of multi-token prediction, from depth 1 on.
    """

    group: ProcessGroup | None = None
    cu_seqlens_bn: Tensor | None = None
    placement: Placement | None = None
    prefix_b: Tensor | None = None
    cuts_documents: bool = True
    later_padding_dbs: Sequence[Tensor] = ()

    def at_depth(self, depth: int) -> MicroBatchTokens:
        """Return these tokens with the padding of multi-token prediction depth `depth`."""
        if not depth or not self.later_padding_dbs:
            return self
        return replace(self, padding_bs=self.later_padding_dbs[depth - 1], depth=depth)

    def attention(
        self, layer: int, window: int | None, *, causal: bool, positions: bool, chunk: int | None = None,
        stores: bool = True,
    ) -> CoreAttention:  # fmt: skip
        """Return the attention over these tokens. Layers with equal masks share it; see `Tokens.attention`."""
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
            placement=self.placement,
        )  # fmt: skip
        return ContextAttention(self.group, calls)

    def keys(self, layer: int) -> KeysOfSequences:
        """Return the keys that each query attends to, for layers that choose keys with an indexer."""
        return self.once("keys", self._keys)

    def _keys(self) -> KeysOfSequences:
        cu_seqlens_bn, device, s = self.cu_seqlens_bn, self.positions.device, self.length
        assert self.prefix_b is None, "the config was not checked"
        if self.group is None or self.group.size() == 1:
            mask = AttentionMask(cu_seqlens_bn, cu_seqlens_bn)
            return KeysOfSequences(*key_ranges(mask, s, s, device))
        rank, ranks = self.group.rank(), self.group.size()
        whole = one_segment(s, device) if cu_seqlens_bn is None else cu_seqlens_bn
        chunks_bnl = None if self.placement is None else self.placement.chunks_bml
        placed = place_tokens(whole, 2 * ranks, s, cuts_documents=self.cuts_documents, chunks_bml=chunks_bnl)
        positions_bs = rank_order(placed.slot_bs, ranks).chunk(ranks, dim=1)[rank]
        mask = AttentionMask(cu_seqlens_bn, cu_seqlens_bn, positions_bs=positions_bs)
        rows_bs = rank_rows(placed.slot_bs, ranks)
        return KeysOfSequences(*key_ranges(mask, s // ranks, s, device), rows_bs, self.group)

    def recurrence(self, layer: int) -> Recurrence:
        """Return the function that advances a recurrent layer, restarting its state at documents."""
        starts_sb = self.once("starts", self._starts)
        if self.group is not None and self.group.size() > 1:
            return ContextRecurrence(self.group, starts_sb)
        return lambda rule, xs: rule.advance(xs, rule.zeros(xs[0].shape[1]), starts_sb)[0]

    def _starts(self) -> Tensor | None:
        """Return whether each token of this rank starts a document, bool `[s, b]`; None without documents."""
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
    """Keys that the queries of a micro-batch attend to; implements `megafp8.layers.mixer.AttendToKeys`.

    Attributes:
        first_bs, stop_bs: Range of keys of each query.
        rows_bs: Row of each token of the whole sequences in the tensor gathered over `group`.
        group: Context-parallel ranks that share the sequences; None if this rank has whole sequences.
    """

    first_bs: Tensor
    stop_bs: Tensor
    rows_bs: Tensor | None = None
    group: ProcessGroup | None = None

    def __call__(
        self, attend: AttendTo, queries: tuple[Tensor, ...], keys: tuple[Tensor, Tensor], every: int = 1
    ) -> Tensor:
        """Call `attend` with the keys of whole sequences, gathered over the context-parallel ranks."""
        first, second = keys
        return attend(queries, (self._whole(first), self._whole(second, every)), self.first_bs, self.stop_bs)

    def _whole(self, x_sb: Tensor, every: int = 1) -> Tensor:
        """Gather the tensor of whole sequences from this rank's `x_sb`.

        `every` reduces the result to one token of each `every` (`one_of_each`).
        """
        if self.rows_bs is None:
            return one_of_each(x_sb, every)
        rows_sb = self.rows_bs.t()
        among = every if len(x_sb) // 2 % every == 0 else 1  # each rank has two parts of a sequence
        gathered = gather_from_sequence_parallel(one_of_each(x_sb, among).contiguous(), self.group)
        whole = gathered[rows_sb[::among] // among, torch.arange(x_sb.shape[1], device=x_sb.device)]
        return whole if among == every else one_of_each(whole, every)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that the object holds."""
        return [x for x in (self.first_bs, self.stop_bs, self.rows_bs) if x is not None]


class GPTStage(nn.Module):
    """Blocks `layers` of the model, and the embedding or head if this is the first or last stage.

    Parameters are allocated but not initialized: `parallel.tensor.random.initialize_parameters` fills them.

    Args:
        model: Resolved model.
        context: Parallel groups, dtype, device and FP8 state that layers are built with.
        layers: Indices of this stage's layers in `model.layers`.
        positions: Number of rows of a learned position table.
        memory: Memory saving of each block; by default every block saves all activations.
        z_loss: Weight of the z-loss of the output layer.
        tokens_at_once: About the largest number of tokens of a micro-batch that have logits at the same time.
        blocks: If False, construct only the parts that belong to the first and last stage.
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
        tokens_at_once: int = sys.maxsize,
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
        if context.weight_storage == "fsdp":  # FSDP allocates this rank's rows itself
            block_context = replace(context, device=torch.device("meta"), real_device=context.device)
        shared = dict.fromkeys(model.kinds[i] for i in layers if model.layers[i].mixer.shares_weights)
        self.shared = nn.ModuleList(shared_transformer(first, model, context) for first in shared)
        self.blocks, self.mtp = nn.ModuleList(), nn.ModuleList()
        for i, block_memory in zip(layers, self.memory, strict=True) if blocks else ():
            (self.blocks if i < model.num_blocks else self.mtp).append(
                self.make_layer(i, model, block_context, block_memory)
            )
        embeds = model.embeds_on_last_stage and (first or last)
        self.shared_weight = self._shared_weight(first=first, last=last) if embeds else None
        self.mtp_embedding: VocabParallelEmbedding | None = None  # if the last stage is not the first
        if len(self.mtp) and not first:
            self.mtp_embedding = word_embedding(model, context, self.shared_weight)
        tied = self.shared_weight if model.head.tied else None
        self.head = Head(model, context, tied, z_loss=z_loss, tokens_at_once=tokens_at_once) if last else None
        self.offload = (
            ActivationOffload(context.device) if any(block_memory.offload for block_memory in self.memory) else None
        )
        if context.lora is not None:
            freeze(self)

    @staticmethod
    def make_layer(index: int, model: ModelSpec, context: BuildContext, memory: BlockMemory) -> Block | PredictionLayer:
        """Construct layer `index` of the model."""
        kind = block_class(model, index) if index < model.num_blocks else PredictionLayer
        return kind(index, model, context, memory)

    def stream_rows(self, s: int, b: int, decoder: int) -> int:
        """Return the rows of the tensor passed between stages, for s tokens in each of b samples.

        `decoder` is the number of tokens of T5's decoder.
        """
        return s // self.context.tensor.size() if self.context.sequence_sharded else s

    def _shared_weight(self, *, first: bool, last: bool) -> nn.Parameter:
        """Return the embedding weight that this stage shares between its layers or with another stage.

        On every stage except the first, the weight is a copy.
        """
        model, group = self.model, self.context.tensor
        shape = (model.stem.rows, model.hidden_size)
        shard = shard_dim("embedding.word.weight", shape, 0, group.rank(), group.size())
        if self.embedding is not None:
            weight = self.embedding.word.weight
        else:
            weight = nn.Parameter(torch.empty(shard.shape, dtype=self.context.dtype, device=self.context.device))
        num_uses = first + last * (model.head.tied + (model.num_prediction_layers > 0))
        init = Init("normal", model.init_std)
        spec = ParamSpec((shard,), init, replicated_over_tp=False, is_copy=not first, num_uses=num_uses)
        return set_spec(weight, spec)

    @property
    def routers(self) -> dict[int, Router]:
        """Routers of the blocks with experts, by layer."""
        return {block.index: router for block in self.all_blocks for router in block.ffn.routers}

    @property
    def index_losses(self) -> dict[int, Tensor]:
        """Indexer losses accumulated by backward passes, by layer, float64 `[1]`."""
        return {block.index: block.mixer.index_loss for block in self.all_blocks if block.mixer.index_loss is not None}

    @property
    def recording_mixers(self) -> list[Mixer]:
        """Mixers that record their largest attention logits."""
        return [block.mixer for block in self.all_blocks if block.mixer.largest_logits_a is not None]

    @property
    def all_blocks(self) -> list[Block]:
        """All blocks, including the blocks of multi-token prediction."""
        return [*self.blocks, *(layer.block for layer in self.mtp)]

    @property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that belong to the weights but have no gradient, by global name; fp32 or int64."""
        router_constants = {f"{r.name}.{name}": x for r in self.routers.values() for name, x in r.constants.items()}
        tails = {x.index: x.tail.scalar for x in self.all_blocks if x.tail is not None}
        return router_constants | {f"layers.{index}.layer_scalar": x for index, x in tails.items() if x is not None}

    @property
    def router_shares(self) -> dict[str, Tensor]:
        """State that routers keep from the previous step, by global name."""
        return {f"{r.name}.shares": r.shares for r in self.routers.values() if r.shares is not None}

    @property
    def units(self) -> list[nn.Module]:
        """Modules in the order in which a forward pass calls them; together they have all parameters."""
        before = (self.embedding, self.per_layer_embedding, *self.shared)
        modules = (*before, *self.blocks, self.mtp_embedding, *self.mtp, self.head)
        return [module for module in modules if module is not None]

    def layer_inputs(self, batch: Batch) -> LayerInputs:
        """Return the inputs of all blocks for a micro-batch of this rank's tokens."""
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
            placement=batch.placement,
            prefix_b=batch.prefix,
            cuts_documents=self.model.cuts_documents,
        )
        return self.inputs_of(tokens, self._places(s, batch.samples, batch.cu_seqlens, batch.chunks))

    def inputs_of(self, tokens: Tokens, places: TokenPlaces | None = None, which: slice = slice(None)) -> LayerInputs:
        """Return the inputs of the blocks `which` for these tokens, in addition to the residual stream.

        `places` has the same meaning as in `LayerInputs`.
        """
        blocks = [(x, tokens.at_depth(max(0, x.index + 1 - self.model.num_blocks))) for x in self.all_blocks[which]]
        mixers = {block.index: block.mixer.inputs(block.index, read) for block, read in blocks}
        return LayerInputs(mixers, {block.index: block.ffn.inputs(block.index, read) for block, read in blocks}, places)

    def with_embeddings(self, inputs: LayerInputs, tokens_bs: Tensor, x_sbh: Tensor) -> LayerInputs:
        """Add embeddings `x_sbh` of tokens, and their per-layer embeddings, to the inputs of layers that read them."""
        reading = {i: x for i, x in inputs.mixers.items() if isinstance(x, SharedAttentionInputs)}
        mixers = {**inputs.mixers, **{i: replace(x, embedded_sbh=x_sbh) for i, x in reading.items()}}
        inputs = replace(inputs, mixers=mixers)
        if self.per_layer_embedding is None:
            return inputs
        return replace(inputs, per_layer_sblp=self.per_layer_embedding(tokens_bs, x_sbh))

    def _places(
        self, s: int, samples_b: Tensor | None, cu_seqlens_bn: Tensor | None = None, chunks_bnl: Tensor | None = None
    ) -> TokenPlaces | None:
        """Return the places of the tokens of this rank's residual stream; None without dropout."""
        if samples_b is None or not self.model.hidden_dropout:
            return None
        context, group = self.context, self.context.context_parallel
        if group is None or group.size() == 1:
            positions_bs = torch.arange(s, device=context.device).unsqueeze(0)
        else:
            ranks = group.size()
            documents = cu_seqlens_bn if self.model.cuts_documents else None
            positions_bs = shard_positions(documents, s * ranks, group.rank(), ranks, context.device, chunks_bnl)
        positions_sb = positions_bs.transpose(0, 1)
        if context.sequence_sharded:
            positions_sb = scatter_to_sequence_parallel(positions_sb, context.tensor)
        return TokenPlaces.from_positions(positions_sb, samples_b)

    def run_blocks(self, x_sbh: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """Run the blocks and return the residual stream and the branch that is still to be added to it."""
        with fastest_backends():
            return self._run_blocks(x_sbh, inputs, self._offload(x_sbh, inputs))

    def _offload(self, x_sbh: Tensor, inputs: LayerInputs) -> Forward | None:
        """Begin a forward pass that offloads activations; return None if none are offloaded."""
        tensors = [x_sbh, *inputs.tensors] if x_sbh.is_leaf else inputs.tensors  # a leaf: the engine received it
        return self.offload.forward(tensors) if self.offload is not None and torch.is_grad_enabled() else None

    def _run_blocks(
        self, x_sbh: Tensor, inputs: LayerInputs, offload: Forward | None, which: slice = slice(None)
    ) -> tuple[Tensor, Tensor | None]:
        branch_sbh: Tensor | None = None
        dropout: Dropout | None = None
        for block, memory in zip(list(self.blocks)[which], self.memory[which]):
            if memory.full and torch.is_grad_enabled() and branch_sbh is not None:
                x_sbh, branch_sbh = dropouts.add(x_sbh, branch_sbh, dropout), None  # save one tensor instead of two
            if memory.full or memory.offload:
                x_sbh, branch_sbh = self._run(memory, offload, block, x_sbh, branch_sbh, inputs, dropout)
            else:
                x_sbh, branch_sbh = block(x_sbh, branch_sbh, inputs, dropout)
            assert isinstance(block, Block)
            dropout = block.branch_dropout(inputs)
        return x_sbh, branch_sbh

    def _branch_dropout(self, inputs: LayerInputs, last: int = -1) -> Dropout | None:
        """Return the dropout of the branch that leaves this stage's block `last`."""
        block = self.blocks[last]
        assert isinstance(block, Block)
        return block.branch_dropout(inputs)

    def look_ahead(self, labels_bs: Tensor, inputs: LayerInputs, offload: Forward | None, normed_sbh: Tensor) -> Tensor:
        """Return the output layer's input at all depths of multi-token prediction, concatenated along b.

        Each depth embeds the labels of the previous depth.
        """
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
        """Return `block(*inputs)`, recomputed and offloaded as `memory` says."""
        with offload.block(block) if offload is not None and memory.offload else nullcontext():
            return recomputed(block, *inputs) if memory.full and torch.is_grad_enabled() else block(*inputs)

    def forward(
        self,
        x_sbh: Tensor | None,
        batch: Batch,
        *,
        loss: PartLoss | None = None,
        read: Callable[[Tensor, TokenPart], Tensor] | None = None,
    ) -> Tensor | LabelLosses | SummedLoss:
        """Return the residual stream `[s/t, b, h]`; on the last stage, the result of the head (`Head.forward`).

        The head returns the losses of each token, `loss`, or what `read` returns for this rank's logits; logits if
        `batch` has no labels.

        With d depths of multi-token prediction, labels must come from `Batch.with_later_labels`, and the losses of all
        depths are concatenated, `[s, (1 + d) b]`. The losses of BERT's binary head follow the losses of its tokens
        (`MaskedLM`).

        Args:
            x_sbh: Output of the previous stage; None on the first stage.
            batch: Micro-batch; with context parallelism, this rank's `Batch.shard`.
            loss: Loss of the micro-batch.
            read: Function of the logits of a part of the tokens.
        """
        inputs = self.layer_inputs(batch)
        if self.embedding is not None:
            x_sbh = self.embedding(batch.tokens, batch.position_ids, inputs.places, batch.token_types)
            inputs = self.with_embeddings(inputs, batch.tokens, x_sbh)
        assert x_sbh is not None, "a later stage needs the previous stage's output"
        with fastest_backends():
            offload = self._offload(x_sbh, inputs)
            x_sbh, branch_sbh = self._run_blocks(x_sbh, inputs, offload)
            dropout = self._branch_dropout(inputs)
            if self.head is not None:
                look_ahead = partial(self.look_ahead, batch.labels, inputs, offload) if len(self.mtp) else None
                return self.head(x_sbh, branch_sbh, batch.labels, look_ahead, dropout, loss=loss, read=read)
        return x_sbh if branch_sbh is None else dropouts.add(x_sbh, branch_sbh, dropout)
