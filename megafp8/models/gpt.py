"""GPT and BERT, one pipeline stage at a time.

A stage is a run of consecutive blocks; the first stage also has the embedding, the last one the final norm, the output
layer and the loss. What flows between stages is the residual stream `[s/t, b, h]`. A model of one stage has it all.

BERT differs in three things: attention is bidirectional, the head transforms hidden states before the output layer and
may have a second loss (`megafp8.models.bert`), and norms may stand after attention and MLP (`norm_position`).

With tied embeddings and more than one stage, the last stage holds a copy of the embedding: it starts from the same
(seed, name), its gradient is summed with the first stage's, so the copies stay equal bit for bit (`is_copy`). So it
does for multi-token prediction, whose layers are on the last stage.

What a block keeps for its backward pass is its `BlockMemory`. Recomputed in full it is wrapped in torch's checkpoint
and only its input is kept. That is safe with FP8 because what a forward pass leaves behind, an amax maximum and a
cached weight, is the same the second time.

Shapes: s sequence, b micro-batch, h hidden, v vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from megafp8.config import ModelConfig
from megafp8.config.activations import ACTIVATIONS
from megafp8.context_parallel.attention import ContextAttention, plan
from megafp8.distributed.sharding import Init, ParamSpec, set_spec, shard_dim, unsharded
from megafp8.models.attention import Attention, CoreAttention
from megafp8.models.bert import BinaryHead, HeadTransform
from megafp8.models.context import BuildContext, replicated_parameter
from megafp8.models.latent_attention import LatentAttention
from megafp8.models.mlp import MLP
from megafp8.models.moe import MoE
from megafp8.models.norms import block_norm, normalized
from megafp8.models.offload import ActivationOffload, Forward
from megafp8.models.recompute import KEEP_ALL, BlockMemory, recomputed
from megafp8.models.rotary import inverse_frequencies, rotary_table
from megafp8.models.router import Router
from megafp8.ops.attention import SelfAttention, fastest_backends
from megafp8.ops.attention_mask import bidirectional_mask, causal_mask
from megafp8.ops.linear import linear
from megafp8.plan import LinearSite, Neighbor
from megafp8.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megafp8.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megafp8.tensor_parallel.mappings import scatter_to_sequence_parallel

T = TypeVar("T")


@dataclass(frozen=True)
class LayerInputs:
    """What every block of a micro-batch reads besides the residual stream."""

    rotary: tuple[Tensor, Tensor] | None
    cores: Mapping[int | None, CoreAttention]  # by sliding window

    @property
    def tensors(self) -> list[Tensor]:
        return [*(self.rotary or ()), *(x for core in self.cores.values() for x in core.tensors)]


POST_NORM = "the residual stream is the norm's output, whose values are needed (model.norm_position post)"


class Block(nn.Module):
    """Transformer block. Its norms are before attention and MLP, or (`norm_position` post) of the sums after them;
    `parallel_block` feeds attention and MLP the same input and adds both."""

    def __init__(self, index: int, config: ModelConfig, context: BuildContext, memory: BlockMemory = KEEP_ALL) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.parallel, self.window = config.parallel_block, config.window_of(index)
        self.post_norm = config.norm_position == "post"
        fuses: Literal["any", "none"] = "none" if self.post_norm else "any"
        if self.post_norm:
            memory = replace(memory, norms=False)
        self.attention_norm = block_norm(f"{name}.attention_norm", config, context)
        self.attention: Attention | LatentAttention
        if config.latent_attention is None:
            norm = Neighbor("attention_norm", fuses, POST_NORM)
            self.attention = Attention(f"{name}.attention", config, context, input=norm, memory=memory)
        else:
            self.attention = LatentAttention(f"{name}.attention", config, context, memory)
        self.mlp_norm = block_norm(f"{name}.mlp_norm", config, context)
        self.mlp: MLP | MoE
        if config.moe_of(index) is None:
            norm = Neighbor("mlp_norm", fuses, POST_NORM)
            self.mlp = MLP(f"{name}.mlp", config, context, input=norm, memory=memory)
        else:
            self.mlp = MoE(f"{name}.mlp", config, context, memory)

    def forward(self, x_sbh: Tensor, branch_sbh: Tensor | None, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """The residual stream and what is still to be added to it, in and out: a norm adds both as it reads them."""
        if self.post_norm:
            assert branch_sbh is None
            attention = self.attention(x_sbh, inputs.rotary, inputs.cores[self.window])
            x_sbh = normalized(self.attention_norm, x_sbh, attention)
            return normalized(self.mlp_norm, x_sbh, self.mlp(x_sbh)), None
        x_sbh, normed = self.attention_norm.residual(x_sbh, branch_sbh, self.attention.input_format)
        attention = self.attention(normed, inputs.rotary, inputs.cores[self.window])
        between = None if self.parallel else attention
        x_sbh, normed = self.mlp_norm.residual(x_sbh, between, self.mlp.input_format)
        mlp = self.mlp(normed)
        return x_sbh, mlp + attention if self.parallel else mlp


class PredictionLayer(nn.Module):
    """A depth of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2; Megatron-Core's layout).

    From the previous depth's hidden states, as the output layer reads them, and the embeddings of the tokens that many
    places ahead: the hidden states that the output layer predicts the tokens after those from. `[s, b, h]` all (`[s/t,
    b, h]` sequence-parallel).
    """

    def __init__(self, index: int, config: ModelConfig, context: BuildContext, memory: BlockMemory) -> None:
        super().__init__()
        name, h = f"layers.{index}", config.hidden_size
        self.projection = replicated_parameter(
            context, unsharded(f"{name}.projection.weight", (h, 2 * h)), Init("normal", config.init_std)
        )
        self.projection_state = context.fp8.linear(
            LinearSite(f"{name}.projection"), high_precision="whole on each rank, it stays in training.precision"
        )
        self.embedding_norm = block_norm(f"{name}.embedding_norm", config, context)
        self.hidden_norm = block_norm(f"{name}.hidden_norm", config, context)
        self.block = Block(index, config, context, memory)
        self.final_norm = block_norm(f"{name}.final_norm", config, context)

    def forward(self, hidden_sbh: Tensor, embedded_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        both = [normalized(self.embedding_norm, embedded_sbh), normalized(self.hidden_norm, hidden_sbh)]
        x_sbh = linear(torch.cat(both, dim=-1), self.projection, self.projection_state)
        return normalized(self.final_norm, *self.block(x_sbh, None, inputs))


def _word_embedding(
    config: ModelConfig, context: BuildContext, weight: nn.Parameter | None = None
) -> VocabParallelEmbedding:
    return VocabParallelEmbedding(
        "embedding.word",
        config.padded_vocab_size,
        config.hidden_size,
        group=context.tensor,
        init=Init("normal", config.init_std),
        dtype=context.dtype,
        device=context.device,
        sequence_parallel=context.sequence_parallel,
        weight=weight,
    )


class Embedding(nn.Module):
    """Tokens `[b, s]` -> residual stream `[s, b, h]` (`[s/t, b, h]` sequence-parallel).

    Embeddings of learned positions and token types are added; with `norm_position` post the sum is normed.
    """

    def __init__(self, config: ModelConfig, context: BuildContext, positions: int) -> None:
        super().__init__()
        self.context = context
        self.word = _word_embedding(config, context)
        self.position: nn.Parameter | None = None
        if config.position_embedding == "learned":
            self.position = self._table("position", positions, config)
        self.token_type = self._table("token_type", config.token_types, config) if config.token_types else None
        self.norm = block_norm("embedding_norm", config, context) if config.norm_position == "post" else None

    def _table(self, name: str, rows: int, config: ModelConfig) -> nn.Parameter:
        shards = unsharded(f"embedding.{name}.weight", (rows, config.hidden_size))
        return replicated_parameter(self.context, shards, Init("normal", config.init_std))

    def forward(
        self, tokens_bs: Tensor, position_ids_bs: Tensor | None, token_types_bs: Tensor | None = None
    ) -> Tensor:
        """`token_types_bs` is None where all are of type 0."""
        x_sbh = self.word(tokens_bs)
        if self.position is not None:
            if position_ids_bs is None:
                position_ids_bs = torch.arange(tokens_bs.shape[1], device=tokens_bs.device)[None]
            x_sbh = x_sbh + self._look_up(self.position, position_ids_bs)
        if self.token_type is not None:
            types_bs = torch.zeros_like(tokens_bs) if token_types_bs is None else token_types_bs
            x_sbh = x_sbh + self._look_up(self.token_type, types_bs)
        return x_sbh if self.norm is None else normalized(self.norm, x_sbh)

    def _look_up(self, table: nn.Parameter, ids_bs: Tensor) -> Tensor:
        ids_sb = ids_bs.transpose(0, 1)
        if self.context.sequence_sharded:  # the table's gradient is then this rank's share: reduce_over_tp
            ids_sb = scatter_to_sequence_parallel(ids_sb, self.context.tensor)
        return nn.functional.embedding(ids_sb, table)


class Head(nn.Module):
    """Final norm, output layer and loss of the last stage; of BERT with its transform, and perhaps its binary head."""

    def __init__(self, config: ModelConfig, context: BuildContext, tied: nn.Parameter | None, z_loss: float) -> None:
        super().__init__()
        self.context, self.vocab_size, self.z_loss = context, config.vocab_size, z_loss
        self.norm = block_norm("final_norm", config, context) if config.norm_position == "pre" else None
        self.scale = config.hidden_size**-0.5 if config.architecture == "t5" and config.tie_embeddings else None
        of_bert = config.architecture == "bert"
        self.transform = HeadTransform(config, context) if of_bert else None
        self.binary = BinaryHead(config, context) if config.binary_head else None
        self.output = ColumnParallelLinear(
            "output",
            config.hidden_size,
            config.padded_vocab_size,
            init=Init("normal", config.init_std),
            high_precision="the output layer stays in training.precision",
            weight=tied,
            bias=of_bert,
            site=context.site(),
            **context.linear_options(),
        )

    def _hidden(self, x_sbh: Tensor, branch_sbh: Tensor | None) -> Tensor:
        """The model's hidden states."""
        if self.norm is not None:
            hidden_sbh = normalized(self.norm, x_sbh, branch_sbh)
            return hidden_sbh if self.scale is None else hidden_sbh * self.scale
        return x_sbh if branch_sbh is None else x_sbh + branch_sbh

    def _logits(self, hidden_sbh: Tensor) -> Tensor:
        return self.output(hidden_sbh if self.transform is None else self.transform(hidden_sbh))

    def logits(self, x_sbh: Tensor, branch_sbh: Tensor | None) -> Tensor:
        """This rank's logits `[s, b, v/t]`."""
        return self._logits(self._hidden(x_sbh, branch_sbh))

    def forward(
        self,
        x_sbh: Tensor,
        branch_sbh: Tensor | None,
        labels_bs: Tensor,
        look_ahead: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Loss of each token, `[s, b]` float32; beside it, `[s, 2b]`, that of the binary head in the first row.

        `look_ahead`: the output layer's input with that of all depths of multi-token prediction, from that of the
        model.
        """
        assert self.vocab_size is not None
        hidden_sbh = self._hidden(x_sbh, branch_sbh)
        b = hidden_sbh.shape[1]
        token_labels_bs = labels_bs if self.binary is None else labels_bs[:b]
        loss_sb = vocab_parallel_cross_entropy(
            self._logits(hidden_sbh if look_ahead is None else look_ahead(hidden_sbh)),
            token_labels_bs.transpose(0, 1).contiguous(),
            self.context.tensor,
            vocab_size=self.vocab_size,
            z_loss=self.z_loss,
        )
        if self.binary is None:
            return loss_sb
        of_samples_1b = self.binary(hidden_sbh, labels_bs[b:, 0]).to(loss_sb.dtype).unsqueeze(0)
        return torch.cat([loss_sb, nn.functional.pad(of_samples_1b, (0, 0, 0, len(loss_sb) - 1))], dim=1)


class GPTStage(nn.Module):
    """The blocks `layers` of the model, of `config.layers`, and what belongs to the first and last stage.

    `positions` is the number of rows of a learned position table; `memory` is that of each block, by default all keep
    everything. Parameters are allocated, not initialised: `tensor_parallel.random.initialize_parameters` fills them.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: BuildContext,
        *,
        layers: range,
        positions: int,
        memory: Sequence[BlockMemory] | None = None,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.config, self.context, self.layers = config, context, layers
        self.memory = [KEEP_ALL] * len(layers) if memory is None else list(memory)
        first, last = layers.start == 0, layers.stop == config.layers.stop
        self.embedding = Embedding(config, context, positions) if first else None
        of_blocks = context
        if context.blocks_on_meta:
            of_blocks = replace(context, device=torch.device("meta"), real_device=context.device)
        self.blocks, self.mtp = nn.ModuleList(), nn.ModuleList()
        for i, own in zip(layers, self.memory, strict=True):
            if i < config.num_blocks:
                self.blocks.append(self._make_block(i, of_blocks, own))
            else:
                self.mtp.append(PredictionLayer(i, config, of_blocks, own))
        embeds = config.embeds_on_last_stage and (first or last)
        self.shared_weight = self._shared_weight(first=first, last=last) if embeds else None
        self.mtp_embedding: VocabParallelEmbedding | None = None  # of another last stage
        if len(self.mtp) and not first:
            self.mtp_embedding = _word_embedding(config, context, self.shared_weight)
        tied = self.shared_weight if config.tie_embeddings else None
        self.head = Head(config, context, tied, z_loss) if last else None
        self.offload = ActivationOffload(context.device) if any(own.offload for own in self.memory) else None
        self._frequencies: Tensor | None = None
        self._windows = dict.fromkeys(config.window_of(i) for i in layers)

    def _make_block(self, index: int, context: BuildContext, memory: BlockMemory) -> Block:
        return Block(index, self.config, context, memory)

    def stream_rows(self, s: int, b: int, decoder: int) -> int:
        """Rows of the tensor between stages, for s tokens of each of b samples; `decoder`: of T5's decoder."""
        return s // self.context.tensor.size() if self.context.sequence_sharded else s

    def _shared_weight(self, *, first: bool, last: bool) -> nn.Parameter:
        """The embedding's weight, shared by this stage's layers or with another stage; not on the first a copy."""
        config, group = self.config, self.context.tensor
        shape = (config.padded_vocab_size, config.hidden_size)
        piece = shard_dim("embedding.word.weight", shape, 0, group.rank(), group.size())
        if self.embedding is not None:
            weight = self.embedding.word.weight
        else:
            weight = nn.Parameter(torch.empty(piece.shape, dtype=self.context.dtype, device=self.context.device))
        num_uses = first + last * (config.tie_embeddings + (config.mtp_num_layers > 0))
        init = Init("normal", config.init_std)
        spec = ParamSpec((piece,), init, replicated_over_tp=False, is_copy=not first, num_uses=num_uses)
        return set_spec(weight, spec)

    @property
    def routers(self) -> dict[int, Router]:
        """By layer, those of the blocks with experts."""
        blocks = zip(self.layers, [*self.blocks, *(layer.block for layer in self.mtp)], strict=True)
        return {index: block.mlp.router for index, block in blocks if isinstance(block.mlp, MoE)}

    @property
    def constants(self) -> dict[str, Tensor]:
        """By global name, tensors that belong to the weights but have no gradient: fp32."""
        return {f"{r.name}.bias": r.bias for r in self.routers.values() if r.bias is not None}

    @property
    def router_shares(self) -> dict[str, Tensor]:
        """By global name, what routers remember of the step before."""
        return {f"{r.name}.shares": r.shares for r in self.routers.values() if r.shares is not None}

    @property
    def units(self) -> list[nn.Module]:
        """The modules that a forward pass calls one after the other; together they have all parameters."""
        modules = (self.embedding, *self.blocks, self.mtp_embedding, *self.mtp, self.head)
        return [module for module in modules if module is not None]

    def layer_inputs(self, s: int, position_ids_bs: Tensor | None, cu_seqlens_bn: Tensor | None) -> LayerInputs:
        """Rotary table and core attention of a micro-batch, of whose sequences this rank has s tokens."""
        config, device = self.config, self.context.device
        rotary = None
        if config.position_embedding == "rope":
            if self._frequencies is None:
                self._frequencies = inverse_frequencies(
                    config.rotary_channels, config.rope_theta, config.yarn or config.rope_scaling, device
                )
            positions = torch.arange(s, device=device) if position_ids_bs is None else position_ids_bs
            factor = 1.0 if config.yarn is None else config.yarn.rotated_factor
            rotary = rotary_table(positions, self._frequencies, self.context.dtype, factor)
        return LayerInputs(rotary, {window: self._core(s, window, cu_seqlens_bn) for window in self._windows})

    def _core(self, s: int, window: int | None, cu_seqlens_bn: Tensor | None) -> CoreAttention:
        group, device, causal = self.context.context_parallel, self.context.device, self.config.causal
        if group is None or group.size() == 1:
            if not causal:
                return SelfAttention(bidirectional_mask(cu_seqlens_bn))
            return SelfAttention(causal_mask(cu_seqlens_bn, window, s, device))
        rank, ranks = group.rank(), group.size()
        calls = plan(s * ranks, rank, ranks, causal=causal, window=window, cu_seqlens_bm=cu_seqlens_bn, device=device)
        return ContextAttention(group, calls)

    def run_blocks(self, x_sbh: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor | None]:
        """The residual stream after the blocks, and what is still to be added to it."""
        with fastest_backends():
            return self._run_blocks(x_sbh, inputs, self._offload(x_sbh, inputs))

    def _offload(self, x_sbh: Tensor, inputs: LayerInputs) -> Forward | None:
        """Begins a forward pass whose activations are offloaded; None where none are."""
        held = [x_sbh, *inputs.tensors] if x_sbh.is_leaf else inputs.tensors  # a leaf is what the engine received
        return self.offload.forward(held) if self.offload is not None and torch.is_grad_enabled() else None

    def _run_blocks(
        self, x_sbh: Tensor, inputs: LayerInputs, offload: Forward | None, which: slice = slice(None)
    ) -> tuple[Tensor, Tensor | None]:
        branch_sbh: Tensor | None = None
        for block, memory in zip(list(self.blocks)[which], self.memory[which]):
            if memory.full and torch.is_grad_enabled() and branch_sbh is not None:
                x_sbh, branch_sbh = x_sbh + branch_sbh, None  # one tensor is kept for a block, not two
            x_sbh, branch_sbh = self._run(memory, offload, block, x_sbh, branch_sbh, inputs)
        return x_sbh, branch_sbh

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
    def _run(memory: BlockMemory, offload: Forward | None, block: Callable[..., T], *inputs: object) -> T:
        """`block(*inputs)`, recomputed and offloaded as its `memory` says."""
        with offload.block() if offload is not None and memory.offload else nullcontext():
            return recomputed(block, *inputs) if memory.full and torch.is_grad_enabled() else block(*inputs)

    def forward(
        self,
        x_sbh: Tensor | None,
        tokens_bs: Tensor,
        labels_bs: Tensor,
        position_ids_bs: Tensor | None = None,
        cu_seqlens_bn: Tensor | None = None,
        token_types_bs: Tensor | None = None,
    ) -> Tensor:
        """The stage's output: residual stream `[s/t, b, h]`, or on the last stage the loss of each token `[s, b]`.

        With d depths of multi-token prediction labels are those of `Batch.with_later_labels`, and the losses of all
        depths are side by side, `[s, (1 + d) b]`. So are those of BERT's tokens and of its binary head (`MaskedLM`).

        `x_sbh` is None on the first stage. Where sequences are cut over ranks, tokens and labels are this rank's,
        `position_ids_bs` `[1 or b, s]` says where they stand, and `cu_seqlens_bn` is of the whole sequences.
        """
        inputs = self.layer_inputs(tokens_bs.shape[1], position_ids_bs, cu_seqlens_bn)
        if self.embedding is not None:
            x_sbh = self.embedding(tokens_bs, position_ids_bs, token_types_bs)
        assert x_sbh is not None, "a later stage needs the previous stage's output"
        with fastest_backends():
            offload = self._offload(x_sbh, inputs)
            x_sbh, branch_sbh = self._run_blocks(x_sbh, inputs, offload)
            if self.head is not None:
                look_ahead = partial(self.look_ahead, labels_bs, inputs, offload) if len(self.mtp) else None
                return self.head(x_sbh, branch_sbh, labels_bs, look_ahead)
        return x_sbh if branch_sbh is None else x_sbh + branch_sbh


def fp8_layer_names(config: ModelConfig, blocks: range | None = None) -> Iterator[str]:
    """Names of all linear layers of `blocks`, by default the whole model's, that an FP8 pattern can select."""
    for index in config.layers if blocks is None else blocks:
        yield from fp8_layer_sizes(config, 1, range(index, index + 1))
        yield from cross_layer_sizes(config, 1, range(index, index + 1))
        yield from expert_layer_sizes(config, 1, index)


def fp8_layer_sizes(config: ModelConfig, t: int, blocks: range | None = None) -> dict[str, tuple[int, int]]:
    """Inputs k and outputs n of a rank's slice of each layer in `fp8_layer_names`, without those of experts and of
    cross attention.

    t: tensor-parallel size.
    """
    h, heads, groups, d = config.hidden_size, config.num_attention_heads, config.query_groups, config.channels
    kind, sizes = ACTIVATIONS[config.activation], dict[str, tuple[int, int]]()
    for index in config.layers if blocks is None else blocks:
        name, moe = f"layers.{index}", config.moe_of(index)
        if (latent := config.latent_attention) is None:
            sizes[f"{name}.attention.qkv"] = (h, (heads + 2 * groups) * d // t)
        else:
            q = "q" if latent.q_rank is None else "q_up"
            sizes[f"{name}.attention.{q}"] = (latent.q_rank or h, heads * d // t)
            kv_width = latent.nope_head_dim + latent.value_head_dim
            sizes[f"{name}.attention.kv_up"] = (latent.kv_rank, heads * kv_width // t)
        sizes[f"{name}.attention.proj"] = (heads * config.value_channels // t, h)
        f = config.ffn_size if moe is None else moe.shared_ffn_hidden_size
        if f is not None:
            mlp = f"{name}.mlp" if moe is None else f"{name}.mlp.shared"
            sizes[f"{mlp}.{kind.up_layer}"] = (h, kind.up_width(f) // t)
            sizes[f"{mlp}.down"] = (f // t, h)
    return sizes


def cross_layer_sizes(config: ModelConfig, t: int, layers: range) -> dict[str, tuple[int, int]]:
    """Inputs k and outputs n of a rank's slice of the linear layers of cross attention in `layers`, by name."""
    h, d, sizes = config.hidden_size, config.channels, dict[str, tuple[int, int]]()
    for index in layers:
        if config.is_decoder(index):
            name = f"layers.{index}.cross_attention"
            sizes[f"{name}.q"] = (h, config.num_attention_heads * d // t)
            sizes[f"{name}.kv"] = (h, 2 * config.query_groups * d // t)
            sizes[f"{name}.proj"] = (config.num_attention_heads * d // t, h)
    return sizes


def expert_layer_sizes(config: ModelConfig, parts: int, layer: int) -> dict[str, tuple[int, int]]:
    """Inputs k and outputs n of a rank's slice of the linear layers of all experts of `layer`, by name.

    Each is split over `parts` ranks.
    """
    h, f, moe = config.hidden_size, config.expert_size // parts, config.moe_of(layer)
    kind = ACTIVATIONS[config.activation]
    experts = [f"layers.{layer}.mlp.experts.{e}" for e in range(0 if moe is None else moe.num_experts)]
    up = {f"{name}.{kind.up_layer}": (h, kind.up_width(f)) for name in experts}
    return up | {f"{name}.down": (f, h) for name in experts}
