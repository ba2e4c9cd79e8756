"""GPT and BERT, one pipeline stage at a time.

A stage is a run of consecutive blocks; the first stage also has the embedding, the last one the final norm, the output
layer and the loss. What flows between stages is the residual stream `[s/t, b, h]`. A model of one stage has it all.

BERT differs in three things: attention is bidirectional, the head transforms hidden states before the output layer and
may have a second loss (`megafp8.models.bert`), and norms may stand after the additions (`norm_position` post).

With tied embeddings and more than one stage, the last stage holds a copy of the embedding: it starts from the same
(seed, name), its gradient is summed with the first stage's, so the copies stay equal bit for bit (`is_copy`). So it
does for multi-token prediction, whose layers are on the last stage.

What a block keeps for its backward pass is its `BlockMemory`. Recomputed in full it is wrapped in torch's checkpoint
and only its input is kept. That is safe with FP8 because what a forward pass leaves behind, an amax maximum and a
cached weight, is the same the second time.

Shapes: s sequence, b micro-batch, h hidden, v vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from megafp8.config import ModelConfig
from megafp8.context_parallel.attention import ContextAttention, plan
from megafp8.context_parallel.split import shard_positions
from megafp8.distributed.sharding import Init, ParamSpec, set_spec, shard_dim, unsharded
from megafp8.fp8.linear_state import InputFormat
from megafp8.models.alibi import alibi_bias
from megafp8.models.attention import Attention, CoreAttention
from megafp8.models.bert import BinaryHead, HeadTransform
from megafp8.models.context import BuildContext, replicated_parameter
from megafp8.models.costs import AttentionWork, MicroBatch, Work, column_sums
from megafp8.models.latent_attention import LatentAttention
from megafp8.models.mlp import MLP
from megafp8.models.moe import MoE
from megafp8.models.norms import Norm, block_norm, normalized
from megafp8.models.recompute import KEEP_ALL, BlockMemory, recomputed
from megafp8.models.rotary import inverse_frequencies, rotary_table
from megafp8.models.router import Router
from megafp8.ops import dropout as dropouts
from megafp8.ops.attention import SelfAttention, fastest_backends
from megafp8.ops.attention_mask import AttentionMask, bidirectional_mask, causal_mask
from megafp8.ops.attention_scores import Scores
from megafp8.ops.dropout_reference import Dropout, DropoutStream, TokenPlaces
from megafp8.ops.fusion import LinearInput
from megafp8.ops.linear import linear
from megafp8.ops.offload import ActivationOffload, Forward
from megafp8.plan import LinearSite, Neighbor
from megafp8.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megafp8.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megafp8.tensor_parallel.lora import freeze
from megafp8.tensor_parallel.mappings import scatter_to_sequence_parallel

T = TypeVar("T")

_NO_NORM = Neighbor("residual stream", "none", "no norm is before the layer")
_POST_NORM = "the residual stream is the norm's output, whose values are needed (model.norm_position post)"


@dataclass(frozen=True)
class LayerInputs:
    """What every block of a micro-batch reads besides the residual stream."""

    rotary: Mapping[int | None, tuple[Tensor, Tensor]]  # by sliding window, as is the next; empty without rope
    cores: Mapping[int | None, CoreAttention]
    scores: Scores  # of all layers, without dropout
    samples_b: Tensor | None = None  # indices of the samples in the run; None: no dropout
    places: TokenPlaces | None = None  # of the residual stream's tokens; None: no dropout in it
    layer_cores: Mapping[int, CoreAttention] | None = None  # in place of `cores`: each layer's, with its own cache

    def core(self, layer: int, window: int | None) -> CoreAttention:
        return self.cores[window] if self.layer_cores is None else self.layer_cores[layer]

    @property
    def tensors(self) -> list[Tensor]:
        tables = [x for table in self.rotary.values() for x in table]
        bias = [] if self.scores.distance_bias_ar is None else [self.scores.distance_bias_ar]
        of_dropout = [] if self.samples_b is None else [self.samples_b]
        of_dropout += [] if self.places is None else self.places.tensors
        return [*tables, *(x for core in self.cores.values() for x in core.tensors), *bias, *of_dropout]


def _input(
    norm: Norm | None, x_sbh: Tensor, branch_sbh: Tensor | None, form: InputFormat | None, dropout: Dropout | None
) -> tuple[Tensor, Tensor | LinearInput]:
    """`x + branch`, and what attention or MLP read of it: its norm, or where there is none the sum itself.

    `dropout`: of the branch.
    """
    if norm is not None:
        return norm.residual(x_sbh, branch_sbh, form, dropout)
    total_sbh = x_sbh if branch_sbh is None else dropouts.add(x_sbh, branch_sbh, dropout)
    return total_sbh, total_sbh


class Block(nn.Module):
    """Transformer block; `parallel_block` feeds attention and MLP the same input and adds both.

    `norm_position` says which norms there are: of the inputs of attention and MLP, of their outputs, of both, or of the
    sums after them.
    """

    def __init__(self, index: int, config: ModelConfig, context: BuildContext, memory: BlockMemory = KEEP_ALL) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.index, self.parallel, self.window = index, config.parallel_block, config.window_of(index)
        self.multiplier, self.hidden_size = config.residual_multiplier, config.hidden_size
        self.post_norm = config.norm_position == "post"
        of_inputs, of_outputs = config.norm_position in ("pre", "both"), config.norm_position in ("output", "both")

        def norm(which: str, there: bool) -> Norm | None:
            return block_norm(f"{name}.{which}", config, context) if there else None

        def before(which: str) -> Neighbor:
            if self.post_norm:
                return Neighbor(which, "none", _POST_NORM)
            return Neighbor(which, "any") if of_inputs else _NO_NORM

        if not of_inputs:
            memory = replace(memory, norms=False)
        self.attention_norm = norm("attention_norm", of_inputs or self.post_norm)
        self.attention: Attention | LatentAttention
        if config.latent_attention is None:
            input = before("attention_norm")
            self.attention = Attention(f"{name}.attention", config, context, input=input, memory=memory)
        else:
            self.attention = LatentAttention(f"{name}.attention", config, context, memory)
        self.attention_output_norm = norm("attention_output_norm", of_outputs)
        self.mlp_norm = norm("mlp_norm", of_inputs or self.post_norm)
        self.mlp: MLP | MoE
        if config.moe_of(index) is None:
            self.mlp = MLP(f"{name}.mlp", config, context, input=before("mlp_norm"), memory=memory)
        else:
            self.mlp = MoE(f"{name}.mlp", config, context, memory)
        self.mlp_output_norm = norm("mlp_output_norm", of_outputs)
        self.attention_branch_dropout, self.mlp_branch_dropout = (
            DropoutStream.of(config.hidden_dropout, context.seed, f"{name}.{part}") for part in ("attention", "mlp")
        )

    def _stream(self, batch: MicroBatch) -> int:
        """Bytes of the residual stream."""
        return batch.own_tokens * self.hidden_size * batch.element

    def input_bytes(self, batch: MicroBatch) -> dict[str, int]:
        """Bytes that it keeps for its backward pass where it is recomputed in full."""
        return {"block input": self._stream(batch)}

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Bytes that it keeps for its backward pass, by tensor."""
        of_inputs = [x for x in (self.attention_norm, self.mlp_norm) if x is not None]
        of_outputs = [x for x in (self.attention_output_norm, self.mlp_output_norm) if x is not None]
        # Where attention and MLP read it without a norm between, it is among their inputs.
        sums = 0 if not of_inputs else 1 if self.parallel else 2
        return {
            "residual stream": self._stream(batch) * sums,
            "norm statistics": sum(norm.statistics(batch) for norm in (*of_inputs, *of_outputs)),
            "outputs before their norms": self._stream(batch) * len(of_outputs),
            **self.attention.saved(batch),
            **self.mlp.saved(batch),
        }

    @property
    def num_norms(self) -> int:
        """Norms of the residual stream."""
        norms = (self.attention_norm, self.mlp_norm, self.attention_output_norm, self.mlp_output_norm)
        return sum(norm is not None for norm in norms)

    def work(self, batch: MicroBatch) -> Work:
        """What it computes beside linear layers and attention.

        A norm reads the stream and a branch and writes their sum and its output; backward reads two gradients and the
        input, and writes one.
        """
        moved = 4.0 * self.num_norms * self._stream(batch)
        own = Work(moved, moved, 6 + 2 * self.num_norms, column_sums(self, batch))
        return own + self.attention.work(batch) + self.mlp.work(batch)

    def attentions(self, batch: MicroBatch, *, windows: bool = True) -> list[AttentionWork]:
        """Its attention layers. `windows`: without, as if each token attended to all that its mask allows."""
        return [self.attention.attention(batch, self.window if windows else None)]

    def keys_and_values(self, batch: MicroBatch) -> int:
        """Bytes of keys and values of this rank's tokens, which other context-parallel ranks need."""
        return self.attention.keys_and_values(batch)

    def recomputed_bytes(self, batch: MicroBatch, memory: BlockMemory) -> int:
        """What kernels read and write once more in backward, with selective recompute of `memory`."""
        norms = 4 * self._stream(batch) if memory.norms else 0
        return norms + (self.mlp.activation_bytes(batch) if memory.activation else 0)

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Bytes that its backward needs at most beside what is saved.

        Dropout's mask is not stored, but behind it the gradient of the MLP's output is another tensor than that of the
        residual stream.
        """
        streams = 2 if self.mlp_branch_dropout.p else 1
        return streams * self._stream(batch) + self.mlp.backward_bytes(batch)

    def forward(
        self, x_sbh: Tensor, branch_sbh: Tensor | None, inputs: LayerInputs, dropout: Dropout | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream and what is still to be added to it, in and out: a norm adds both as it reads them.

        `dropout`: of the branch that comes in; that of the branch that goes out is `branch_dropout`.
        """
        own = self.attention_branch_dropout.at(inputs.places)
        if self.post_norm:
            assert branch_sbh is None
            assert self.attention_norm is not None
            assert self.mlp_norm is not None
            x_sbh = normalized(self.attention_norm, x_sbh, self._attention(x_sbh, inputs), own)
            of_mlp = self.mlp_branch_dropout.at(inputs.places)
            return normalized(self.mlp_norm, x_sbh, self._output(self.mlp(x_sbh), None), of_mlp), None
        x_sbh, normed = _input(self.attention_norm, x_sbh, branch_sbh, self.attention.input_format, dropout)
        attention = self._attention(normed, inputs)
        between = None if self.parallel else attention
        total_sbh, normed = _input(self.mlp_norm, x_sbh, between, self.mlp.input_format, own)
        mlp = self._output(self.mlp(normed), self.mlp_output_norm)
        if not self.parallel:
            return total_sbh, mlp
        if own is None:
            return total_sbh, mlp + attention
        return dropouts.add(total_sbh, attention, own), mlp  # each branch has a dropout of its own

    def branch_dropout(self, inputs: LayerInputs) -> Dropout | None:
        """Of the branch that goes out, if there is one."""
        return None if self.post_norm else self.mlp_branch_dropout.at(inputs.places)

    def _attention(self, x_sbh: Tensor | LinearInput, inputs: LayerInputs) -> Tensor:
        """What self-attention adds to the residual stream."""
        rotary, core = inputs.rotary.get(self.window), inputs.core(self.index, self.window)
        attention = self.attention(x_sbh, rotary, core, inputs.scores, inputs.samples_b)
        return self._output(attention, self.attention_output_norm)

    def _output(self, y_sbh: Tensor, norm: Norm | None) -> Tensor:
        """What attention or MLP add to the residual stream."""
        y_sbh = y_sbh if norm is None else normalized(norm, y_sbh)
        return y_sbh if self.multiplier == 1 else y_sbh * self.multiplier


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
        reason = "whole on each rank, it stays in training.precision"
        self.projection_state = context.fp8.linear(LinearSite(f"{name}.projection", 2 * h, h, high_precision=reason))
        self.embedding_norm = block_norm(f"{name}.embedding_norm", config, context)
        self.hidden_norm = block_norm(f"{name}.hidden_norm", config, context)
        self.block = Block(index, config, context, memory)
        self.final_norm = block_norm(f"{name}.final_norm", config, context)
        self.dropout = DropoutStream.of(config.hidden_dropout, context.seed, f"{name}.embedding")

    def input_bytes(self, batch: MicroBatch) -> dict[str, int]:
        """Bytes that it keeps for its backward pass where it is recomputed in full."""
        return {"block input": 2 * self.block.input_bytes(batch)["block input"], **self._tokens(batch)}

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Bytes that it keeps for its backward pass, by tensor."""
        norms = (self.embedding_norm, self.hidden_norm, self.final_norm)
        own = 5 * self.block.input_bytes(batch)["block input"]  # inputs of the norms and of the projection
        own += sum(norm.statistics(batch) for norm in norms)
        return {**self._tokens(batch), "multi-token prediction": own, **self.block.saved(batch)}

    @staticmethod
    def _tokens(batch: MicroBatch) -> dict[str, int]:
        """Those that it embeds, int64."""
        return {"tokens": 8 * batch.tokens}

    def work(self, batch: MicroBatch) -> Work:
        """As for `Block`, without its own norms."""
        return self.block.work(batch)

    def attentions(self, batch: MicroBatch, *, windows: bool = True) -> list[AttentionWork]:
        """As for `Block`."""
        return self.block.attentions(batch, windows=windows)

    def keys_and_values(self, batch: MicroBatch) -> int:
        """As for `Block`."""
        return self.block.keys_and_values(batch)

    def recomputed_bytes(self, batch: MicroBatch, memory: BlockMemory) -> int:
        """As for `Block`."""
        return self.block.recomputed_bytes(batch, memory)

    def backward_bytes(self, batch: MicroBatch) -> int:
        """As for `Block`."""
        return self.block.backward_bytes(batch)

    def forward(self, hidden_sbh: Tensor, embedded_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        embedded_sbh = dropouts.add(None, embedded_sbh, self.dropout.at(inputs.places))
        both = [normalized(self.embedding_norm, embedded_sbh), normalized(self.hidden_norm, hidden_sbh)]
        x_sbh = linear(torch.cat(both, dim=-1), self.projection, self.projection_state)
        x_sbh, branch_sbh = self.block(x_sbh, None, inputs)
        return normalized(self.final_norm, x_sbh, branch_sbh, self.block.branch_dropout(inputs))


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
        multiplier=config.embedding_multiplier,
        weight=weight,
    )


class Embedding(nn.Module):
    """Tokens `[b, s]` -> residual stream `[s, b, h]` (`[s/t, b, h]` sequence-parallel).

    Embeddings of learned positions and token types are added, and the sum is normalized, where the model has that.
    `token_types_bs` is None where all are of type 0.
    `places`: those of the residual stream's tokens; None: no dropout.
    """

    def __init__(self, config: ModelConfig, context: BuildContext, positions: int) -> None:
        super().__init__()
        self.context = context
        self.word = _word_embedding(config, context)
        self.position: nn.Parameter | None = None
        if config.position_embedding == "learned":
            self.position = self._table("position", positions, config)
        self.token_type = self._table("token_type", config.token_types, config) if config.token_types else None
        self.norm = block_norm("embedding_norm", config, context) if config.embedding_norm else None
        self.dropout = DropoutStream.of(config.hidden_dropout, context.seed, "embedding")

    def _table(self, name: str, rows: int, config: ModelConfig) -> nn.Parameter:
        shards = unsharded(f"embedding.{name}.weight", (rows, config.hidden_size))
        return replicated_parameter(self.context, shards, Init("normal", config.init_std))

    def forward(
        self,
        tokens_bs: Tensor,
        position_ids_bs: Tensor | None,
        places: TokenPlaces | None = None,
        token_types_bs: Tensor | None = None,
    ) -> Tensor:
        x_sbh = self.word(tokens_bs)
        if self.position is not None:
            if position_ids_bs is None:
                position_ids_bs = torch.arange(tokens_bs.shape[1], device=tokens_bs.device)[None]
            x_sbh = x_sbh + self._look_up(self.position, position_ids_bs)
        if self.token_type is not None:
            types_bs = torch.zeros_like(tokens_bs) if token_types_bs is None else token_types_bs
            x_sbh = x_sbh + self._look_up(self.token_type, types_bs)
        x_sbh = x_sbh if self.norm is None else normalized(self.norm, x_sbh)
        return dropouts.add(None, x_sbh, self.dropout.at(places))

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
        self.scaling, self.softcap = config.logits_divisor, config.logit_softcap
        if config.architecture == "t5" and config.tie_embeddings:
            self.scaling *= math.sqrt(config.hidden_size)
        self.norm = None if config.norm_position == "post" else block_norm("final_norm", config, context)
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

    def _hidden(self, x_sbh: Tensor, branch_sbh: Tensor | None, dropout: Dropout | None = None) -> Tensor:
        """The model's hidden states."""
        if self.norm is None:
            assert branch_sbh is None
            return x_sbh
        return normalized(self.norm, x_sbh, branch_sbh, dropout)

    def logits(self, x_sbh: Tensor, branch_sbh: Tensor | None) -> Tensor:
        """This rank's logits `[s, b, v/t]`."""
        logits_sbv = self._uncapped(self._hidden(x_sbh, branch_sbh))
        return logits_sbv if self.softcap is None else self.softcap * (logits_sbv / self.softcap).tanh()

    def _uncapped(self, hidden_sbh: Tensor) -> Tensor:
        """Logits before the soft cap. Their input, which is smaller, is scaled in their place."""
        x_sbh = hidden_sbh if self.transform is None else self.transform(hidden_sbh)
        logits_sbv: Tensor = self.output(x_sbh if self.scaling == 1 else x_sbh / self.scaling)
        return logits_sbv

    def forward(
        self,
        x_sbh: Tensor,
        branch_sbh: Tensor | None,
        labels_bs: Tensor | None,
        look_ahead: Callable[[Tensor], Tensor] | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """Loss of each token, `[s, b]` float32; beside it, `[s, 2b]`, that of the binary head in the first row.

        Without labels this rank's logits `[s, b, v/t]`. `look_ahead`: the output layer's input with that of all depths
        of multi-token prediction, from that of the model. `dropout`: of the branch.
        """
        if labels_bs is None:
            return self.logits(x_sbh, branch_sbh)
        assert self.vocab_size is not None
        hidden_sbh = self._hidden(x_sbh, branch_sbh, dropout)
        b = hidden_sbh.shape[1]
        token_labels_bs = labels_bs if self.binary is None else labels_bs[:b]
        loss_sb = vocab_parallel_cross_entropy(
            self._uncapped(hidden_sbh if look_ahead is None else look_ahead(hidden_sbh)),
            token_labels_bs.transpose(0, 1).contiguous(),
            self.context.tensor,
            vocab_size=self.vocab_size,
            z_loss=self.z_loss,
            softcap=self.softcap,
        )
        if self.binary is None:
            return loss_sb
        of_samples_1b = self.binary(hidden_sbh, labels_bs[b:, 0]).to(loss_sb.dtype).unsqueeze(0)
        return torch.cat([loss_sb, nn.functional.pad(of_samples_1b, (0, 0, 0, len(loss_sb) - 1))], dim=1)


class GPTStage(nn.Module):
    """The blocks `layers` of the model, of `config.layers`, and what belongs to the first and last stage.

    `positions` is the number of rows of a learned position table; `memory` is that of each block, by default all keep
    everything. Parameters are allocated, not initialised: `tensor_parallel.random.initialize_parameters` fills them.
    `blocks`: without them only what belongs to the first and last stage is constructed.
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
        blocks: bool = True,
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
        for i, own in zip(layers, self.memory, strict=True) if blocks else ():
            (self.blocks if i < config.num_blocks else self.mtp).append(self.make_layer(i, config, of_blocks, own))
        embeds = config.embeds_on_last_stage and (first or last)
        self.shared_weight = self._shared_weight(first=first, last=last) if embeds else None
        self.mtp_embedding: VocabParallelEmbedding | None = None  # of another last stage
        if len(self.mtp) and not first:
            self.mtp_embedding = _word_embedding(config, context, self.shared_weight)
        tied = self.shared_weight if config.tie_embeddings else None
        self.head = Head(config, context, tied, z_loss) if last else None
        self.offload = ActivationOffload(context.device) if any(own.offload for own in self.memory) else None
        # By the length of the sequence, and whether they are those of layers with a window.
        self._frequencies: dict[tuple[int, bool], Tensor] = {}
        self._alibi: dict[int, Tensor] = {}  # by the length of the sequence
        self._windows = dict.fromkeys(config.window_of(i) for i in layers)
        if context.lora is not None:
            freeze(self)

    @staticmethod
    def make_layer(
        index: int, config: ModelConfig, context: BuildContext, memory: BlockMemory
    ) -> Block | PredictionLayer:
        """Layer `index` of the model."""
        kind = Block if index < config.num_blocks else PredictionLayer
        return kind(index, config, context, memory)

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

    def layer_inputs(
        self,
        s: int,
        position_ids_bs: Tensor | None,
        cu_seqlens_bn: Tensor | None,
        samples_b: Tensor | None = None,
        prefix_b: Tensor | None = None,
    ) -> LayerInputs:
        """What blocks read of a micro-batch, of whose sequences this rank has s tokens.

        `samples_b`: int64, the indices of its samples in the run; None: no dropout. `prefix_b`: as in `Batch.prefix`.
        """
        config, context = self.config, self.context
        length = s if context.context_parallel is None else s * context.context_parallel.size()
        positions = torch.arange(s, device=context.device) if position_ids_bs is None else position_ids_bs
        rotary = self.rotary(positions, length)
        scores = self.scores(length)
        drops = samples_b is not None and config.attention_dropout > 0
        positions_matter = drops or scores.depend_on_positions
        cores = {
            window: self._core(s, window, cu_seqlens_bn, prefix_b, positions=positions_matter)
            for window in self._windows
        }
        return LayerInputs(rotary, cores, scores, samples_b, self._places(s, cu_seqlens_bn, samples_b))

    def rotary(self, positions: Tensor, length: int) -> dict[int | None, tuple[Tensor, Tensor]]:
        """Rotary tables of tokens at `positions`, `[s]` or `[b, s]`, of sequences of `length` tokens, by the layers'
        windows; empty without rope."""
        if self.config.position_embedding != "rope":
            return {}
        kinds = set(map(self._is_local, self._windows))
        tables = {local: self._rotary_table(positions, length, local=local) for local in kinds}
        return {window: tables[self._is_local(window)] for window in self._windows}

    def scores(self, s: int) -> Scores:
        """How attention computes its scores, of whole sequences of s tokens, without dropout."""
        config, context, bias_ar = self.config, self.context, None
        if config.position_embedding == "alibi":
            if s not in self._alibi:
                heads = config.num_attention_heads
                self._alibi[s] = alibi_bias(s, heads, context.tensor, context.dtype, context.device)
            bias_ar = self._alibi[s]
        return Scores(config.without_mup.attention_scale, config.attention_softcap, bias_ar)

    def _is_local(self, window: int | None) -> bool:
        """Whether layers with this window have rotary frequencies of their own."""
        return self.config.rope_local_theta is not None and window is not None

    def _rotary_table(self, positions: Tensor, length: int, *, local: bool) -> tuple[Tensor, Tensor]:
        """`length`: tokens of a whole sequence."""
        config = self.config
        key = length, local
        if key not in self._frequencies:
            theta, scaling = config.rope_theta, config.yarn or config.longrope or config.rope_scaling
            if local:
                assert config.rope_local_theta is not None
                theta, scaling = config.rope_local_theta, None
            width = config.channels if config.latent_attention is None else None
            frequencies = inverse_frequencies(
                config.rotary_channels, theta, scaling, self.context.device, length=length, width=width
            )
            self._frequencies[key] = frequencies if local else frequencies / config.rope_interpolation_factor
        scaled = config.yarn or config.longrope
        factor = 1.0 if scaled is None or local else scaled.rotated_factor
        return rotary_table(positions, self._frequencies[key], self.context.dtype, factor)

    def _places(self, s: int, cu_seqlens_bn: Tensor | None, samples_b: Tensor | None) -> TokenPlaces | None:
        """Of the tokens of this rank's residual stream; None without dropout."""
        if samples_b is None or not self.config.hidden_dropout:
            return None
        context, group = self.context, self.context.context_parallel
        if group is None or group.size() == 1:
            positions_bs = torch.arange(s, device=context.device).unsqueeze(0)
        else:
            ranks = group.size()
            positions_bs = shard_positions(cu_seqlens_bn, s * ranks, group.rank(), ranks, context.device)
        positions_sb = positions_bs.transpose(0, 1)
        if context.sequence_sharded:
            positions_sb = scatter_to_sequence_parallel(positions_sb, context.tensor)
        return TokenPlaces.of(positions_sb, samples_b)

    def _core(
        self, s: int, window: int | None, cu_seqlens_bn: Tensor | None, prefix_b: Tensor | None, *, positions: bool
    ) -> CoreAttention:
        """`positions`: scores depend on them."""
        group, device, causal = self.context.context_parallel, self.context.device, self.config.causal
        if group is None or group.size() == 1:
            if not causal:
                return SelfAttention(bidirectional_mask(cu_seqlens_bn))
            if prefix_b is not None:
                return SelfAttention(AttentionMask(cu_seqlens_bn, cu_seqlens_bn, window=window, prefix_b=prefix_b))
            return SelfAttention(causal_mask(cu_seqlens_bn, window, s, device))
        rank, ranks = group.rank(), group.size()
        calls = plan(
            s * ranks, rank, ranks, causal=causal, window=window, cu_seqlens_bm=cu_seqlens_bn, device=device,
            prefix_b=prefix_b, positions=positions,
        )  # fmt: skip
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
        dropout: Dropout | None = None
        for block, memory in zip(list(self.blocks)[which], self.memory[which]):
            if memory.full and torch.is_grad_enabled() and branch_sbh is not None:
                x_sbh, branch_sbh = dropouts.add(x_sbh, branch_sbh, dropout), None  # one tensor is kept, not two
            x_sbh, branch_sbh = self._run(memory, offload, block, x_sbh, branch_sbh, inputs, dropout)
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
        samples_b: Tensor | None = None,
        token_types_bs: Tensor | None = None,
        prefix_b: Tensor | None = None,
    ) -> Tensor:
        """The stage's output: residual stream `[s/t, b, h]`, or on the last stage the loss of each token `[s, b]`.

        With d depths of multi-token prediction labels are those of `Batch.with_later_labels`, and the losses of all
        depths are side by side, `[s, (1 + d) b]`. So are those of BERT's tokens and of its binary head (`MaskedLM`).

        `x_sbh` is None on the first stage. Where sequences are cut over ranks, tokens and labels are this rank's,
        `position_ids_bs` `[1 or b, s]` says where they stand, and `cu_seqlens_bn` is of the whole sequences.
        `samples_b`: indices of the samples in the run, for dropout; None, as in evaluation: no dropout. `prefix_b`: of
        whole sequences, as in `Batch.prefix`.
        """
        inputs = self.layer_inputs(tokens_bs.shape[1], position_ids_bs, cu_seqlens_bn, samples_b, prefix_b)
        if self.embedding is not None:
            x_sbh = self.embedding(tokens_bs, position_ids_bs, inputs.places, token_types_bs)
        assert x_sbh is not None, "a later stage needs the previous stage's output"
        with fastest_backends():
            offload = self._offload(x_sbh, inputs)
            x_sbh, branch_sbh = self._run_blocks(x_sbh, inputs, offload)
            dropout = self._branch_dropout(inputs)
            if self.head is not None:
                look_ahead = partial(self.look_ahead, labels_bs, inputs, offload) if len(self.mtp) else None
                return self.head(x_sbh, branch_sbh, labels_bs, look_ahead, dropout)
        return x_sbh if branch_sbh is None else dropouts.add(x_sbh, branch_sbh, dropout)
