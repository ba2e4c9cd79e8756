"""What a layer does to the residual stream after its mixer and feed-forward network, and per-layer embeddings.

With per-layer embeddings (Gemma 3n and 4) each token has a vector for each layer: that of a second table of tokens, and
a projection of its embedding, normed. A layer multiplies its part by a gate that it computes from the residual stream,
and adds a projection of that to the stream, normed. The vectors are narrow, so projections are whole on each
tensor-parallel rank, for its own tokens.

Shapes: s sequence, b micro-batch, h hidden, l layers, p width of a token's vector for a layer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megafp8.layers.activation.op import activation
from megafp8.layers.activation.record import ACTIVATIONS
from megafp8.layers.context import BuildContext, replicated_parameter
from megafp8.layers.costs import KernelWork, MicroBatch
from megafp8.layers.embedding.vocab_parallel import VocabParallelEmbedding
from megafp8.layers.mixer import LayerInputs
from megafp8.layers.mlp.op import unfused
from megafp8.layers.norm.module import RMSNormPart, block_norm, normalized
from megafp8.linear.linear import linear
from megafp8.parallel.sharding import Init, unsharded
from megafp8.plan import LinearSite
from megafp8.spec import ModelSpec


class WholeLinear(nn.Module):
    """A linear layer that is whole on each tensor-parallel rank, and computes its own tokens in high precision."""

    def __init__(self, name: str, inputs: int, outputs: int, context: BuildContext, std: float) -> None:
        super().__init__()
        shards = unsharded(f"{name}.weight", (outputs, inputs))
        self.weight = replicated_parameter(context, shards, Init("normal", std), matrix=True)
        reason = "whole on each rank, it stays in training.precision"
        self.state = context.fp8.linear(LinearSite(name, inputs, outputs, high_precision=reason))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.state)


class PerLayerEmbedding(nn.Module):
    """Tokens `[b, s]` and their embeddings `[s, b, h]` -> vectors for the layers, `[s, b, l, p]` (s/t
    sequence-parallel)."""

    def __init__(self, model: ModelSpec, context: BuildContext) -> None:
        super().__init__()
        p, layers, name = model.stem.per_layer_width, model.num_layers, "per_layer_embedding"
        self.width, self.scale = p, 1 / math.sqrt(model.hidden_size)
        self.word = VocabParallelEmbedding(
            f"{name}.word", model.stem.rows, layers * p, group=context.tensor,
            init=Init("normal", model.init_std), dtype=context.dtype, device=context.device,
            sequence_parallel=context.sequence_parallel, multiplier=math.sqrt(p),
        )  # fmt: skip
        self.projection = WholeLinear(f"{name}.projection", model.hidden_size, layers * p, context, model.init_std)
        self.norm = RMSNormPart(
            f"{name}.norm", p, context, eps=model.norm.eps, sees_a_slice=context.sequence_sharded,
            zero_centered=model.norm.zero_centered,
        )  # fmt: skip

    def forward(self, tokens_bs: Tensor, x_sbh: Tensor) -> Tensor:
        embedded, projected = self.word(tokens_bs), self.projection(x_sbh) * self.scale
        projected, embedded = (x.unflatten(-1, (-1, self.width)) for x in (projected, embedded))
        return (self.norm(projected) + embedded) * math.sqrt(0.5)


class LayerTail(nn.Module):
    """The residual stream `[s, b, h]` (`[s/t, b, h]` sequence-parallel), with all branches added -> the next layer's.

    `scalar`: fp32 `[1]`, a constant of the layer that belongs to the weights and is not trained; None without one.
    """

    def __init__(self, index: int, model: ModelSpec, context: BuildContext) -> None:
        super().__init__()
        name, h = f"layers.{index}", model.hidden_size
        self.index, self.hidden_size, self.kind = index, h, model.activation
        self.batch_invariant = context.batch_invariant
        self.width = model.stem.per_layer_width
        if self.width:
            self.gate = WholeLinear(f"{name}.per_layer_gate", h, self.width, context, model.hidden_init_std)
            std = model.output_init_std
            self.projection = WholeLinear(f"{name}.per_layer_projection", self.width, h, context, std)
            self.norm = block_norm(f"{name}.per_layer_norm", model, context)
        self.scalar: Tensor | None = None
        if model.layer_scalar:
            self.scalar = torch.ones(1, dtype=torch.float32, device=context.buffer_device)

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward, by tensor, with this layer's part of the per-layer embeddings."""
        saved = {} if self.scalar is None else {"layer scalar": batch.element}
        if not self.width:
            return saved
        inputs = batch.own_tokens * (2 * self.hidden_size + 2 * self.width) * batch.element
        return saved | {"per-layer tail": inputs + self.norm.saved(batch), **self.kept(batch)}

    def kept(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved by `PerLayerEmbedding` for this layer, even where the layer is recomputed."""
        if not self.width:
            return {}
        return {"per-layer embedding": batch.own_tokens * (3 * self.width * batch.element + batch.statistic)}

    def work(self, batch: MicroBatch) -> KernelWork:
        """It reads and writes the stream once or twice, and reads a branch."""
        stream = batch.own_tokens * self.hidden_size * batch.element
        total = KernelWork() if self.scalar is None else KernelWork(2.0 * stream, 2.0 * stream, 1)
        per_layer = 6.0 * batch.own_tokens * self.width * batch.element
        total += KernelWork(3.0 * stream, 0.0, 1)
        return total + KernelWork(per_layer + 5 * stream, per_layer + 4 * stream, 4) if self.width else total

    def forward(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        if self.width:
            assert inputs.per_layer_sblp is not None, "a stage without the embedding"
            both = torch.cat([self.gate(x_sbh), inputs.per_layer_sblp[:, :, self.index]], dim=-1)
            if ACTIVATIONS[self.kind].fused:
                gated = activation(self.kind, both, None, None, None)
            else:
                gated = unfused(self.kind, batch_invariant=self.batch_invariant)(both)
            assert isinstance(gated, Tensor)
            x_sbh = x_sbh + normalized(self.norm, self.projection(gated))
        return x_sbh if self.scalar is None else x_sbh * self.scalar.to(x_sbh.dtype)
