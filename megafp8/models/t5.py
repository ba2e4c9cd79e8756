"""T5, one pipeline stage at a time: an encoder, and a decoder that attends to the encoder's output.

Layers are numbered consecutively: `layers.0` to `layers.n - 1` belong to the encoder, and layers from n on to the
decoder. Stages, FP8 patterns, recomputation and checkpoints therefore need not know about the two stacks, and a stage
may have layers of both.

*Between stages*, one tensor is sent, whichever stacks the stages belong to: `[decoder | encoder | biases]` along the
sequence. The first stage embeds the tokens of both stacks in one lookup and sends the decoder's embeddings along until
the encoder is done. After the encoder, the encoder part is the encoder's output, which every decoder layer reads. Its
gradient is complete when backward reaches the encoder. The same holds for the tables of relative position biases, which
all layers of a stack share: the first stage owns the tables, and the last rows of the tensor carry their values. So
only a tied embedding is on two stages, the engine sends tensors of one shape, and every schedule works. The cost is
sending the decoder's tokens through the encoder: a fifth more bytes with 512 and 114 tokens.

Under sequence parallelism each part is sharded separately: a rank has [decoder shard | encoder shard | biases].

*Relative positions* (Raffel et al. 2019, arXiv:1910.10683): each score gets a learned bias, selected by head and by
bucket of the distance. The encoder uses distances in both directions, the decoder only backward. Scores are not divided
by the square root of the head width.

Shapes: s, d tokens of the encoder and the decoder; b micro-batch, h hidden, a heads of this rank, t tensor-parallel
size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.batch import Batch
from megafp8.config import AttentionConfig
from megafp8.layers.attention.mask import CAUSAL, AttentionMask
from megafp8.layers.attention.module import Attention, ProbabilityDropout
from megafp8.layers.attention.op import CoreAttention, SelfAttention, fastest_backends
from megafp8.layers.attention.scores import Scores
from megafp8.layers.build import PartBuild
from megafp8.layers.context import BuildContext
from megafp8.layers.costs import AttentionWork, MicroBatch
from megafp8.layers.dropout import op as dropouts
from megafp8.layers.dropout.reference import Dropout, DropoutStream
from megafp8.layers.head.op import LabelLosses
from megafp8.layers.head.parts import PartLoss, SummedLoss, TokenPart
from megafp8.layers.mixer import AttendToKeys, LayerInputs, Tokens
from megafp8.layers.norm.module import Norm, block_norm, normalized
from megafp8.layers.recompute import KEEP_ALL, BlockMemory, recomputed
from megafp8.layers.recurrent.op import Recurrence
from megafp8.linear.fusion import LinearInput
from megafp8.linear.state import InputFormat
from megafp8.models.block import Block, SequentialBlock
from megafp8.models.gpt import GPTStage
from megafp8.parallel.sharding import Init, ParamSpec, set_spec, shard_dim
from megafp8.plan import Neighbor
from megafp8.spec import ModelSpec

ALL_KEYS = AttentionMask(causal=False)
ENCODER = Neighbor("encoder", "none", "all layers of the decoder read the encoder's output")


@dataclass(frozen=True, kw_only=True)
class StackTokens(Tokens):
    """Tokens of the encoder's or the decoder's sequences."""

    def attention(
        self, layer: int, window: int | None, *, causal: bool, positions: bool, chunk: int | None = None,
        stores: bool = True,
    ) -> CoreAttention:  # fmt: skip
        """Return causal attention, or attention to all keys. T5 has no windows or chunks."""
        return SelfAttention(CAUSAL if causal else ALL_KEYS)

    def keys(self, layer: int) -> AttendToKeys:
        """Raise AssertionError: T5 has no layers that choose keys."""
        raise AssertionError("the config was not checked")

    def recurrence(self, layer: int) -> Recurrence:
        """Raise AssertionError: T5 has no recurrent layers."""
        raise AssertionError("the config was not checked")


@dataclass(frozen=True, kw_only=True)
class DecoderInputs(LayerInputs):
    """Inputs of decoder blocks: also the encoder's output `[s/t, b, h]`, and the sample indices for dropout."""

    encoder_sbh: Tensor
    samples_b: Tensor | None


class CrossAttention(nn.Module):
    """Attention of the decoder's tokens to the encoder's tokens.

    It maps `[d, b, h]` and `[s, b, h]` to `[d, b, h]`. With sequence parallelism, each of them holds one t-th of its
    tokens.
    """

    def __init__(self, build: PartBuild[AttentionConfig]) -> None:
        super().__init__()
        name, record, model, context = build.name, build.record, build.model, build.context
        self.recompute, self.channels = build.memory.attention, record.channels
        self.heads = record.num_attention_heads // context.tensor.size()
        self.scores = Scores(record.attention_scale, record.attention_softcap)
        self.dropout = ProbabilityDropout.build(name, model.attention_dropout, record.num_attention_heads, context)
        q_size, kv_size = record.num_attention_heads * record.channels, record.groups * record.channels
        options: Any = {"heads": {f"{name}.{x}": (record.channels,) for x in "qkv"}, "bias": model.attention_bias}
        self.query = build.column("q", {"q": q_size}, **options)
        encoder_context = replace(context, tokens=context.encoder_tokens)
        encoder = replace(build, context=encoder_context, input=ENCODER, memory=KEEP_ALL)
        self.key_value = encoder.column("kv", {"k": kv_size, "v": kv_size}, **options)
        self.proj = build.row(q_size, bias=model.attention_bias)

    @property
    def input_format(self) -> InputFormat | None:
        """Format in which the preceding norm provides the input."""
        return self.query.state.input_format

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward, by tensor. Each layer counts the shared encoder output."""
        states = [self.query.state, self.key_value.state, self.proj.state]
        encoder_elements = batch.tokens_of(states[1].site) * states[1].site.outputs
        saved = {
            "cross inputs": sum(map(batch.saved_input, states)),
            "cross q, k, v": (batch.tokens * self.heads * self.channels + encoder_elements) * batch.element,
        }
        if not self.recompute:
            shares_output = states[2].plan.saved == "high"
            head_bytes = batch.statistic + (0 if shares_output else self.channels * batch.element)
            saved["cross output and log-sums"] = batch.tokens * self.heads * head_bytes
        return saved

    def attention(self, batch: MicroBatch) -> AttentionWork:
        """Return the attention work: each decoder token attends to all encoder tokens."""
        pairs = float(batch.length * batch.encoder_length)
        return AttentionWork(self.heads, self.channels, self.channels, batch.length, pairs, modified=False)

    def forward(self, x_dbh: Tensor | LinearInput, encoder_sbh: Tensor, samples_b: Tensor | None) -> Tensor:
        """Return the projected attention output `[d, b, h]`.

        `samples_b` holds the indices of the samples in the run; None turns dropout off.
        """
        inputs = self.query(x_dbh), self.key_value(encoder_sbh), self.dropout.added_to(self.scores, samples_b)
        y_dbad = recomputed(self._attend, *inputs) if self.recompute else self._attend(*inputs)
        return self.proj(y_dbad.flatten(-2))

    def _attend(self, q_dbc: Tensor, kv_sbc: Tensor, scores: Scores) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, self.channels)) for x in (q_dbc, *kv_sbc.chunk(2, dim=-1)))
        return SelfAttention(ALL_KEYS)(q, k, v, None, scores)


class DecoderBlock(SequentialBlock):
    """Block that attends to the encoder's output between self-attention and MLP."""

    def __init__(self, index: int, model: ModelSpec, context: BuildContext, memory: BlockMemory = KEEP_ALL) -> None:
        super().__init__(index, model, context, memory)
        assert isinstance(self.mixer, Attention)
        self.mixer.causal = True
        name = f"layers.{index}"
        self.cross_norm = block_norm(f"{name}.cross_norm", model, context)
        norm = self.cross_norm.neighbor()
        name = f"{name}.cross_attention"
        self.cross = CrossAttention(PartBuild(name, self.mixer.record, model, context, norm, memory))
        self.cross_branch_dropout = DropoutStream.from_seed(model.hidden_dropout, context.seed, name)

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward by tensor, including cross-attention."""
        nbytes = {"cross residual stream": self._stream(batch)}
        return {**super().saved(batch), **nbytes, **self.cross.saved(batch)}

    @property
    def _norms(self) -> list[Norm]:
        return [*super()._norms, self.cross_norm]

    def attentions(self, batch: MicroBatch) -> list[AttentionWork]:
        """Return the work of self-attention and cross-attention."""
        return [*super().attentions(batch), self.cross.attention(batch)]

    def forward(
        self, x_sbh: Tensor, branch_sbh: Tensor | None, inputs: LayerInputs, dropout: Dropout | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run self-attention, cross-attention and the feed-forward network; see `Block.forward`."""
        assert isinstance(inputs, DecoderInputs)
        assert self.attention_norm is not None
        assert self.mlp_norm is not None
        x_sbh, normed = self.attention_norm.residual(x_sbh, branch_sbh, self.mixer.input_format, dropout)
        attention = self._output(self.mixer(normed, inputs.mixers[self.index]), self.attention_output_norm)
        branch_dropout = self.attention_branch_dropout.at(inputs.places)
        x_sbh, normed = self.cross_norm.residual(x_sbh, attention, self.cross.input_format, branch_dropout)
        cross = self.cross(normed, inputs.encoder_sbh, inputs.samples_b)
        branch_dropout = self.cross_branch_dropout.at(inputs.places)
        x_sbh, normed = self.mlp_norm.residual(x_sbh, self._output(cross, None), self.ffn.input_format, branch_dropout)
        return x_sbh, self._output(self.ffn(normed, inputs.ffns[self.index]), None)


def distance_buckets(
    queries: int, keys: int, *, buckets: int, max_distance: int, bidirectional: bool, device: torch.device
) -> Tensor:
    """Return the bucket of each distance from -(queries - 1) to keys - 1 between a key and a query, int64.

    Half of a direction's buckets hold a single distance. The other buckets grow with the distance up to `max_distance`;
    all larger distances are in the last bucket. If `bidirectional` is False, later keys are in bucket 0.
    """
    distance = torch.arange(-(queries - 1), keys, device=device)
    start = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        start, distance = (distance > 0) * buckets, distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    grown = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + grown.long()).clamp(max=buckets - 1)
    return start + torch.where(distance < exact, distance, far)


class RelativeBiases(nn.Module):
    """Relative position biases of encoder and decoder by bucket, for this rank's heads: `[2, buckets, a]`."""

    def __init__(self, model: ModelSpec, context: BuildContext) -> None:
        super().__init__()
        self.encoder, self.decoder = (self._table(stack, model, context) for stack in ("encoder", "decoder"))

    @staticmethod
    def _table(stack: str, model: ModelSpec, context: BuildContext) -> nn.Parameter:
        group, shape = context.tensor, (model.stem.relative_buckets, model.layers[0].mixer.num_attention_heads)
        shard = shard_dim(f"{stack}.relative_bias.weight", shape, 1, group.rank(), group.size())
        weight = nn.Parameter(torch.empty(shard.shape, dtype=context.dtype, device=context.device))
        init = Init("normal", model.init_std)
        return set_spec(weight, ParamSpec((shard,), init, replicated_over_tp=False, weight_decay=False))

    def forward(self) -> Tensor:
        """Return both tables, `[2, buckets, a]`."""
        return torch.stack([self.encoder, self.decoder])


class EncoderNorm(nn.Module):
    """Norm after the encoder's last block."""

    def __init__(self, model: ModelSpec, context: BuildContext) -> None:
        super().__init__()
        self.norm = block_norm("encoder_norm", model, context)

    def forward(self, x_sbh: Tensor, branch_sbh: Tensor | None, dropout: Dropout | None) -> Tensor:
        """Add the branch to the stream and normalize the sum. `dropout` is the dropout of the branch."""
        return normalized(self.norm, x_sbh, branch_sbh, dropout)


class T5Stage(GPTStage):
    """Blocks `layers` of encoder and decoder, and the embedding or head if this is the first or last stage."""

    def __init__(self, model: ModelSpec, context: BuildContext, **options: Any) -> None:
        super().__init__(model, context, **options)
        encoder = range(self.layers.start, min(self.layers.stop, model.num_layers))
        self.encoder_blocks = len(encoder)
        ends = model.num_layers - 1 in self.layers
        self.encoder_norm = EncoderNorm(model, context) if ends else None
        self.biases = RelativeBiases(model, context) if self.embedding is not None else None
        self.encoder_dropout, self.decoder_dropout = (
            DropoutStream.from_seed(model.hidden_dropout, context.seed, f"{stack}.embedding")
            for stack in ("encoder", "decoder")
        )

    @property
    def units(self) -> list[nn.Module]:
        """Modules in the order in which a forward pass calls them; together they have all parameters."""
        blocks, k = list(self.blocks), self.encoder_blocks
        modules = (self.embedding, self.biases, *blocks[:k], self.encoder_norm, *blocks[k:], self.head)
        return [module for module in modules if module is not None]

    @staticmethod
    def make_layer(index: int, model: ModelSpec, context: BuildContext, memory: BlockMemory) -> Block:
        """Construct layer `index` of the model."""
        if index < model.num_layers:
            return SequentialBlock(index, model, replace(context, tokens=context.encoder_tokens), memory)
        return DecoderBlock(index, model, context, memory)

    def stream_rows(self, s: int, b: int, decoder: int) -> int:
        """Return the rows of the tensor passed between stages, for s encoder and `decoder` decoder tokens."""
        t = self.context.tensor.size() if self.context.sequence_sharded else 1
        return s // t + decoder // t + self._bias_rows(b)

    @property
    def _biases_shape(self) -> tuple[int, int, int]:
        """Shape of both bias tables: `[2, buckets, a]`."""
        heads = self.model.layers[0].mixer.num_attention_heads // self.context.tensor.size()
        return 2, self.model.stem.relative_buckets, heads

    def _bias_rows(self, b: int) -> int:
        """Return the number of rows of the stream that hold the bias tables."""
        return -(-math.prod(self._biases_shape) // (b * self.model.hidden_size))

    def forward(
        self,
        x_sbh: Tensor | None,
        batch: Batch,
        *,
        loss: PartLoss | None = None,
        read: Callable[[Tensor, TokenPart], Tensor] | None = None,
    ) -> Tensor | LabelLosses | SummedLoss:
        """Return the tensor for the next stage; on the last stage, the head's result for the decoder's tokens."""
        assert all(x is None for x in (batch.position_ids, batch.cu_seqlens, batch.token_types, batch.prefix))
        assert batch.decoder_tokens is not None
        tokens_bs, decoder_tokens_bd, samples_b = batch.tokens, batch.decoder_tokens, batch.samples
        t = self.context.tensor.size() if self.context.sequence_sharded else 1
        (b, s), d = tokens_bs.shape, decoder_tokens_bd.shape[1]
        if self.embedding is not None:
            assert self.biases is not None
            # Interleave the shards, so that a rank's shard of the result is its shards of both.
            parts = zip(decoder_tokens_bd.chunk(t, 1), tokens_bs.chunk(t, 1), strict=True)
            stream_sbh = self.embedding(torch.cat([part for pair in parts for part in pair], 1), None)
            biases = self.biases()
        else:
            assert x_sbh is not None, "a later stage needs the previous stage's output"
            stream_sbh, rows_sbh = x_sbh.split([s // t + d // t, self._bias_rows(b)])
            biases = rows_sbh.flatten()[: math.prod(self._biases_shape)].view(self._biases_shape)
        x_dbh, encoder_sbh = stream_sbh.split([d // t, s // t])
        encoder_places, decoder_places = (self._places(length, samples_b) for length in (s, d))
        if self.embedding is not None:
            x_dbh = dropouts.add(None, x_dbh, self.decoder_dropout.at(decoder_places))
            encoder_sbh = dropouts.add(None, encoder_sbh, self.encoder_dropout.at(encoder_places))
        branch_dbh: Tensor | None = None
        dropout: Dropout | None = None
        encoder, decoder = slice(self.encoder_blocks), slice(self.encoder_blocks, None)
        with fastest_backends():
            if self.encoder_blocks:
                tokens = self._tokens(biases[0], s, samples_b, bidirectional=True)
                encoder_sbh = self._encode(encoder_sbh, self.inputs_of(tokens, encoder_places, encoder))
            if self.encoder_blocks < len(self.blocks):
                tokens = self._tokens(biases[1], d, samples_b, bidirectional=False)
                decoder_inputs = self.inputs_of(tokens, decoder_places, decoder)
                inputs = DecoderInputs(
                    decoder_inputs.mixers,
                    decoder_inputs.ffns,
                    decoder_places,
                    encoder_sbh=encoder_sbh,
                    samples_b=samples_b,
                )
                x_dbh, branch_dbh = self._run_blocks(x_dbh, inputs, None, decoder)
                dropout = self._branch_dropout(inputs)
            if self.head is not None:
                return self.head(x_dbh, branch_dbh, batch.labels, None, dropout, loss=loss, read=read)
        if branch_dbh is not None:
            x_dbh = dropouts.add(x_dbh, branch_dbh, dropout)
        numbers = self._bias_rows(b) * b * self.model.hidden_size
        rows_sbh = F.pad(biases.flatten(), (0, numbers - biases.numel())).view(-1, b, self.model.hidden_size)
        return torch.cat([x_dbh, encoder_sbh, rows_sbh])

    def _encode(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        """Run this stage's encoder blocks and return the encoder's stream, normalized after the last encoder block."""
        x_sbh, branch_sbh = self._run_blocks(x_sbh, inputs, None, slice(self.encoder_blocks))
        dropout = self._branch_dropout(inputs, self.encoder_blocks - 1)
        if self.encoder_norm is not None:
            return self.encoder_norm(x_sbh, branch_sbh, dropout)
        return x_sbh if branch_sbh is None else dropouts.add(x_sbh, branch_sbh, dropout)

    def _tokens(self, table: Tensor, s: int, samples_b: Tensor | None, *, bidirectional: bool) -> StackTokens:
        """Return the tokens of a stack with sequence length s, with the relative biases of `table`."""
        buckets_r = distance_buckets(
            s,
            s,
            buckets=self.model.stem.relative_buckets,
            max_distance=self.model.stem.relative_distance,
            bidirectional=bidirectional,
            device=table.device,
        )
        bias_ar = F.embedding(buckets_r, table).T.contiguous()
        positions = torch.arange(s, device=table.device)
        return StackTokens(positions, s, samples_b=samples_b, distance_bias_ar=bias_ar)
