"""Layer of the model: a mixer and a feed-forward network that add their outputs to the residual stream.

Layers pass on the pair (stream, branch): the residual stream, and an output that is not yet added to it. The norm of
the next layer adds the two as it reads them.

A `BlockMemory` says what a block saves for its backward pass. With full recomputation, the block is wrapped in torch's
checkpoint and only its input is saved. This is safe with FP8 because the state that a forward pass leaves behind, an
amax maximum and a cached weight, is the same after the second pass.

Shapes: s sequence, b micro-batch, h hidden, t tensor-parallel size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megafp8.layers.build import PartBuild
from megafp8.layers.context import BuildContext, replicated_product
from megafp8.layers.costs import AttentionWork, KernelWork, MicroBatch, column_sums
from megafp8.layers.dropout import op as dropouts
from megafp8.layers.dropout.reference import Dropout, DropoutStream
from megafp8.layers.hyper_connections.module import HyperConnection
from megafp8.layers.mixer import FeedForward, LayerInputs, Mixer, make_part
from megafp8.layers.norm.module import NORMS, Norm, block_norm, normalized
from megafp8.layers.per_layer_embedding.module import LayerTail
from megafp8.layers.recompute import KEEP_ALL, BlockMemory
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.linear.state import InputFormat
from megafp8.parallel.sharding import Init
from megafp8.plan import Neighbor
from megafp8.spec import ModelSpec, PartRecord

_NO_NORM = Neighbor("residual stream", "none", "the layer has no norm before it")
_POST_NORM = Neighbor(
    "residual stream", "none", "the residual stream is the norm's output and needs its unquantized values "
    "(model.norm_position post)",
)  # fmt: skip
_SHARED_NORM = Neighbor("shared_norm", "none", "attention and MLP both read the norm's output")


class Block(nn.Module):
    """Mixer and feed-forward network around the residual stream; subclasses define their order and the norms.

    The layer's `norm_position` says where the norms are: at the inputs of both parts, at their outputs, at both, at the
    inputs and the output of the feed-forward network, or after the additions. Either part may be absent; its norms are
    then absent too.
    """

    def __init__(self, index: int, model: ModelSpec, context: BuildContext, memory: BlockMemory = KEEP_ALL) -> None:
        super().__init__()
        name, spec = f"layers.{index}", model.layers[index]
        self.index, self.multiplier, self.hidden_size = index, model.residual_multiplier, model.hidden_size
        position = spec.norm_position
        input_norms, output_norms = position in ("pre", "both", "mlp_both"), position in ("output", "both")
        self.mixes, self.feeds = spec.mixer.present, spec.ffn.present
        self.shares_norm = model.parallel_block == "shared_norm" and self.mixes and self.feeds
        if not input_norms or self.shares_norm or not NORMS[model.norm.kind].fused:
            memory = replace(memory, norms=False)

        def norm(which: str, present: bool) -> Norm | None:
            return block_norm(f"{name}.{which}", model, context) if present else None

        def part(record: PartRecord, input_norm: Norm | None) -> Any:
            where = f"{name}.{record.tensor_prefix}"
            before = _POST_NORM if position == "post" else _NO_NORM if input_norm is None else input_norm.neighbor()
            before = _SHARED_NORM if self.shares_norm else before
            return make_part(PartBuild(where, record, model, context, before, memory))

        feeds_normed = self.feeds and not spec.ffn.normalizes_input and not self.shares_norm
        first = "shared_norm" if self.shares_norm else "attention_norm"
        mixes_normed = self.mixes and not spec.mixer.normalizes_input
        self.attention_norm = norm(first, mixes_normed and (input_norms or position == "post"))
        self.mixer: Mixer = part(spec.mixer, self.attention_norm)
        self.attention_output_norm = norm("attention_output_norm", self.mixes and output_norms)
        self.mlp_norm = norm("mlp_norm", feeds_normed and (input_norms or position == "post"))
        self.ffn: FeedForward = part(spec.ffn, self.mlp_norm)
        self.mlp_output_norm = norm("mlp_output_norm", self.feeds and (output_norms or position == "mlp_both"))
        self.tail = LayerTail(index, model, context) if model.has_layer_tail else None
        self.attention_branch_dropout, self.mlp_branch_dropout = (
            DropoutStream.from_seed(model.hidden_dropout, context.seed, f"{name}.{which}")
            for which in ("attention", "mlp")
        )

    def forward(
        self, x_sbh: Tensor, branch_sbh: Tensor | None, inputs: LayerInputs, dropout: Dropout | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer and return the new residual stream and the branch that is still to be added to it.

        Args:
            x_sbh: Residual stream, `[s, b, h]` (`[s/t, b, h]` sequence-parallel).
            branch_sbh: Output of the previous layer that is not yet added to the stream, or None.
            inputs: Inputs of all blocks for this micro-batch.
            dropout: Dropout of the incoming branch. `branch_dropout` returns the dropout of the outgoing branch.
        """
        raise NotImplementedError

    def branch_dropout(self, inputs: LayerInputs) -> Dropout | None:
        """Return the dropout of the outgoing branch."""
        if self.tail is not None:
            return None
        return self._last_dropout(inputs)

    def _last_dropout(self, inputs: LayerInputs) -> Dropout | None:
        """Return the dropout of the output of the layer's last part."""
        return (self.mlp_branch_dropout if self.feeds else self.attention_branch_dropout).at(inputs.places)

    @staticmethod
    def _read(
        norm: Norm | None, x_sbh: Tensor, branch_sbh: Tensor | None, form: InputFormat | None, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor | LinearInput]:
        """Add the branch to the stream, and return the sum and the next part's input.

        The input is the norm of the sum, or the sum itself if `norm` is None. `dropout` is applied to the branch before
        the addition.
        """
        if norm is not None:
            return norm.residual(x_sbh, branch_sbh, form, dropout)
        total_sbh = x_sbh if branch_sbh is None else dropouts.add(x_sbh, branch_sbh, dropout)
        return total_sbh, total_sbh

    def _output(self, y_sbh: Tensor, norm: Norm | None) -> Tensor:
        """Return the term that a part with output `y_sbh` adds to the residual stream: normalized and scaled."""
        y_sbh = y_sbh if norm is None else normalized(norm, y_sbh)
        return y_sbh if self.multiplier == 1 else y_sbh * self.multiplier

    @property
    def block(self) -> Block:
        """Block of this layer: the layer itself. A `PredictionLayer` has the same attribute."""
        return self

    # --- Memory and compute costs -----------------------------------------------------------------------------------

    @property
    def kept_sums(self) -> int:
        """Number of sums of the residual stream and a branch that the norms save for backward."""
        return self._input_norms

    @property
    def _input_norms(self) -> int:
        """Number of norms of the residual stream."""
        return sum(norm is not None for norm in (self.attention_norm, self.mlp_norm))

    @property
    def _norms(self) -> list[Norm]:
        """Norms of the residual stream and of the parts' outputs."""
        norms = (self.attention_norm, self.mlp_norm, self.attention_output_norm, self.mlp_output_norm)
        return [norm for norm in norms if norm is not None]

    def _stream(self, batch: MicroBatch) -> int:
        """Return the bytes of the tensor that flows from layer to layer."""
        return self._hidden(batch)

    def _hidden(self, batch: MicroBatch) -> int:
        """Return the bytes of the input or the output of a part."""
        return batch.own_tokens * self.hidden_size * batch.element

    def input_bytes(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward with full recomputation, by tensor."""
        tail = {} if self.tail is None else self.tail.kept(batch)
        return {"block input": self._stream(batch), **self.mixer.kept(batch), **tail}

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward without full recomputation, by tensor."""
        outputs = sum(norm is not None for norm in (self.attention_output_norm, self.mlp_output_norm))
        # If a part reads the stream without a norm, the part counts the stream among its inputs.
        total = Counter({"residual stream": self._hidden(batch) * self.kept_sums})
        total["norm statistics"] = sum(norm.saved(batch) for norm in self._norms)
        total["outputs before their norms"] = self._hidden(batch) * outputs
        for part in (self.mixer, self.ffn, self.tail):  # parts may use the same tensor names: add the bytes up
            total.update({} if part is None else part.saved(batch))
        return total

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the kernel work outside linear layers and attention.

        A norm reads the stream and a branch, and writes their sum and its output. Its backward reads two gradients and
        the input, and writes one gradient.
        """
        norms = len(self._norms)
        moved = 4.0 * norms * self._hidden(batch)
        norms_work = KernelWork(moved, moved, 6 + 2 * norms, column_sums(self, batch))
        tail = KernelWork() if self.tail is None else self.tail.work(batch)
        return norms_work + self.mixer.work(batch) + self.ffn.work(batch) + tail

    def flops(self, batch: MicroBatch) -> float:
        """Return the model FLOPs of the forward pass outside linear layers and softmax attention."""
        return self.mixer.flops(batch) + self.ffn.flops(batch)

    def attentions(self, batch: MicroBatch) -> list[AttentionWork]:
        """Return the work of the layer's softmax attention."""
        return self.mixer.attention(batch)

    def recomputed_bytes(self, batch: MicroBatch, memory: BlockMemory) -> int:
        """Return the bytes that kernels move again in backward, with the selective recomputation of `memory`."""
        norms = 2 * self._input_norms * self._hidden(batch) if memory.norms else 0
        return norms + (self.ffn.activation_bytes(batch) if memory.activation else 0)

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Return the peak bytes that the backward pass needs, not counting saved tensors.

        Dropout does not store its mask, but with dropout the gradient of the feed-forward network's output is a
        separate tensor from the residual stream's gradient.
        """
        streams = 2 if self.mlp_branch_dropout.p else 1
        return streams * self._stream(batch) + max(self.ffn.backward_bytes(batch), self.mixer.backward_bytes(batch))


class SequentialBlock(Block):
    """Block in which the mixer adds to the stream first: x + f(norm(x)), x + norm(f(x)), or both norms."""

    def forward(
        self, x_sbh: Tensor, branch_sbh: Tensor | None, inputs: LayerInputs, dropout: Dropout | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the mixer, then the feed-forward network; see `Block.forward`."""
        if self.mixes:
            x_sbh, normed = self._read(self.attention_norm, x_sbh, branch_sbh, self.mixer.input_format, dropout)
            y_sbh = self.mixer(normed, inputs.mixers[self.index])
            branch_sbh = self._output(y_sbh, self.attention_output_norm)
            dropout = self.attention_branch_dropout.at(inputs.places)
        if self.feeds:
            x_sbh, normed = self._read(self.mlp_norm, x_sbh, branch_sbh, self.ffn.input_format, dropout)
            branch_sbh = self._output(self.ffn(normed, inputs.ffns[self.index]), self.mlp_output_norm)
        if self.tail is None:
            return x_sbh, branch_sbh
        assert branch_sbh is not None
        return self.tail(dropouts.add(x_sbh, branch_sbh, self._last_dropout(inputs)), inputs), None


class ParallelBlock(Block):
    """Block in which the mixer and the feed-forward network read the same sum and both add to it (GPT-J, PaLM).

    Both parts are present. Each has a norm, or both read the output of `attention_norm`.
    """

    @property
    def kept_sums(self) -> int:
        """Number of sums that the norms save for backward: at most one, because both norms read the same sum."""
        return min(self._input_norms, 1)

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward by tensor. A tensor that both parts save as their input counts once."""
        saved, linears = super().saved(batch), (self.mixer.input_linear, self.ffn.input_linear)
        both = all(linear is None or linear.plan.saved == "high" for linear in linears)
        if self.mlp_norm is None and both and batch.tokens == batch.own_tokens:
            saved["input of both parts"] = -self._hidden(batch)
        return saved

    def forward(
        self, x_sbh: Tensor, branch_sbh: Tensor | None, inputs: LayerInputs, dropout: Dropout | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the mixer and the feed-forward network on the same input; see `Block.forward`."""
        x_sbh, normed = self._read(self.attention_norm, x_sbh, branch_sbh, self.mixer.input_format, dropout)
        mixed = self._output(self.mixer(normed, inputs.mixers[self.index]), self.attention_output_norm)
        attention_dropout = self.attention_branch_dropout.at(inputs.places)
        if not self.shares_norm:
            x_sbh, normed = self._read(self.mlp_norm, x_sbh, None, self.ffn.input_format, None)
        y_sbh = self._output(self.ffn(normed, inputs.ffns[self.index]), self.mlp_output_norm)
        if attention_dropout is None:
            return x_sbh, y_sbh + mixed
        return dropouts.add(x_sbh, mixed, attention_dropout), y_sbh  # the branches have different dropouts


class PostNormBlock(Block):
    """Block that computes norm(x + f(x)) twice (BERT).

    The outgoing stream is a norm's output, and no branch remains to be added.
    """

    def forward(
        self, x_sbh: Tensor, branch_sbh: Tensor | None, inputs: LayerInputs, dropout: Dropout | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the mixer and the feed-forward network, each followed by an addition and a norm; see `Block.forward`."""
        assert branch_sbh is None
        attention_dropout, ffn_dropout = (
            x.at(inputs.places) for x in (self.attention_branch_dropout, self.mlp_branch_dropout)
        )
        if self.attention_norm is not None:
            y_sbh = self._output(self.mixer(x_sbh, inputs.mixers[self.index]), None)
            x_sbh = normalized(self.attention_norm, x_sbh, y_sbh, attention_dropout)
        if self.mlp_norm is not None:
            y_sbh = self._output(self.ffn(x_sbh, inputs.ffns[self.index]), None)
            x_sbh = normalized(self.mlp_norm, x_sbh, y_sbh, ffn_dropout)
        return x_sbh, None

    def branch_dropout(self, inputs: LayerInputs) -> Dropout | None:
        """Return None: no branch remains to be added."""
        return None


class HyperBlock(Block):
    """Block with hyper-connections: the mixer, then the feed-forward network, on residual streams `[s, b, n·h]`.

    No branch remains to be added.
    """

    def __init__(self, index: int, model: ModelSpec, context: BuildContext, memory: BlockMemory = KEEP_ALL) -> None:
        super().__init__(index, model, context, memory)
        name = f"layers.{index}"
        self.attention_connection: HyperConnection | None = None
        self.mlp_connection: HyperConnection | None = None
        if self.mixes:
            self.attention_connection = HyperConnection(f"{name}.attention_connection", model, context)
        if self.feeds:
            self.mlp_connection = HyperConnection(f"{name}.mlp_connection", model, context)

    def forward(
        self, x_sbh: Tensor, branch_sbh: Tensor | None, inputs: LayerInputs, dropout: Dropout | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run each part between the read and the write of its hyper-connection; see `Block.forward`."""
        assert branch_sbh is None
        attention_dropout, ffn_dropout = (
            x.at(inputs.places) for x in (self.attention_branch_dropout, self.mlp_branch_dropout)
        )
        if self.attention_connection is not None:
            y_sbh, kept = self.attention_connection.read(x_sbh)
            _, normed = self._read(self.attention_norm, y_sbh, None, self.mixer.input_format, None)
            y_sbh = self._output(self.mixer(normed, inputs.mixers[self.index]), self.attention_output_norm)
            x_sbh = self.attention_connection.write(dropouts.add(None, y_sbh, attention_dropout), kept)
        if self.mlp_connection is not None:
            y_sbh, kept = self.mlp_connection.read(x_sbh)
            _, normed = self._read(self.mlp_norm, y_sbh, None, self.ffn.input_format, None)
            y_sbh = self._output(self.ffn(normed, inputs.ffns[self.index]), self.mlp_output_norm)
            x_sbh = self.mlp_connection.write(dropouts.add(None, y_sbh, ffn_dropout), kept)
        return x_sbh, None

    def branch_dropout(self, inputs: LayerInputs) -> Dropout | None:
        """Return None: no branch remains to be added."""
        return None

    @property
    def _connections(self) -> list[HyperConnection]:
        return [x for x in (self.attention_connection, self.mlp_connection) if x is not None]

    def _stream(self, batch: MicroBatch) -> int:
        return self._connections[0].rule.streams * self._hidden(batch)

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward by tensor, including the residual streams of the connections."""
        parts = self._connections
        return {
            **super().saved(batch),
            "residual streams": len(parts) * self._stream(batch),
            "outputs of parts": len(parts) * self._hidden(batch),
            "weights of streams": sum(part.saved(batch) for part in parts),
        }

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Return the peak bytes that the backward pass needs, not counting saved tensors.

        A connection passes the streams' gradient on. In addition, either a part's backward runs, with the gradient of
        its output, or the gradient of the streams before the connection is computed.
        """
        parts = max(self.ffn.backward_bytes(batch), self.mixer.backward_bytes(batch))
        return self._stream(batch) + max(self._stream(batch), self._hidden(batch) + parts)

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the kernel work outside linear layers and attention, including the connections."""
        return sum((part.work(self._hidden(batch)) for part in self._connections), super().work(batch))

    def flops(self, batch: MicroBatch) -> float:
        """Return the model FLOPs outside linear layers and softmax attention, including the connections."""
        return super().flops(batch) + sum(part.flops(batch) for part in self._connections)


def block_class(model: ModelSpec, index: int) -> type[Block]:
    """Return the block class of layer `index`, which defines how the layer's parts join the residual stream."""
    if model.hyper_connections is not None:
        return HyperBlock
    spec = model.layers[index]
    if spec.norm_position == "post":
        return PostNormBlock
    both = spec.mixer.present and spec.ffn.present
    return ParallelBlock if model.parallel_block and both else SequentialBlock


class PredictionLayer(nn.Module):
    """Depth of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2; Megatron-Core's layout).

    Depth d reads the hidden states of the previous depth, as the output layer reads them, and the embeddings of the
    tokens d places ahead. It returns the hidden states from which the output layer predicts the tokens one place
    further ahead. All are `[s, b, h]` (`[s/t, b, h]` sequence-parallel).
    """

    def __init__(self, index: int, model: ModelSpec, context: BuildContext, memory: BlockMemory) -> None:
        super().__init__()
        name, h = f"layers.{index}", model.hidden_size
        self.projection, self.projection_state = replicated_product(
            context, name, "projection", {"projection": h}, 2 * h, init=Init("normal", model.init_std),
            reason="the weight is replicated and stays in training.precision",
        )  # fmt: skip
        self.embedding_norm = block_norm(f"{name}.embedding_norm", model, context)
        self.hidden_norm = block_norm(f"{name}.hidden_norm", model, context)
        self.block = block_class(model, index)(index, model, context, memory)
        self.final_norm = block_norm(f"{name}.final_norm", model, context)
        self.dropout = DropoutStream.from_seed(model.hidden_dropout, context.seed, f"{name}.embedding")

    def input_bytes(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward with full recomputation, by tensor."""
        return {"block input": 2 * self.block.input_bytes(batch)["block input"], **self._tokens(batch)}

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward without full recomputation, by tensor."""
        norms = (self.embedding_norm, self.hidden_norm, self.final_norm)
        nbytes = 5 * self.block.input_bytes(batch)["block input"]  # inputs of the norms and of the projection
        nbytes += sum(norm.saved(batch) for norm in norms)
        return {**self._tokens(batch), "multi-token prediction": nbytes, **self.block.saved(batch)}

    @staticmethod
    def _tokens(batch: MicroBatch) -> dict[str, int]:
        """Return the bytes of the int64 token ids that the layer embeds."""
        return {"tokens": 8 * batch.tokens}

    def forward(self, hidden_sbh: Tensor, embedded_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        """Return the hidden states of this depth, normalized for the output layer.

        Args:
            hidden_sbh: Hidden states of the previous depth, as the output layer reads them.
            embedded_sbh: Embeddings of the tokens that this depth reads.
            inputs: Inputs of all blocks for this micro-batch.
        """
        embedded_sbh = dropouts.add(None, embedded_sbh, self.dropout.at(inputs.places))
        both = [normalized(self.embedding_norm, embedded_sbh), normalized(self.hidden_norm, hidden_sbh)]
        x_sbh = linear(torch.cat(both, dim=-1), self.projection, self.projection_state)
        x_sbh, branch_sbh = self.block(x_sbh, None, inputs)
        return normalized(self.final_norm, x_sbh, branch_sbh, self.block.branch_dropout(inputs))
