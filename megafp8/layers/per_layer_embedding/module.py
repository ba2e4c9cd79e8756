"""Per-layer embeddings, and the end of a layer after its mixer and feed-forward network.

With per-layer embeddings (Gemma 3n and 4) each token has a vector for each layer: the sum of the token's row in a
second embedding table and the norm of a projection of the token's embedding. At its end, a layer multiplies its vector
by a gate computed from the residual stream, projects and normalizes the product, and adds it to the stream. The vectors
are narrow, so every tensor-parallel rank holds the whole projections and applies them to its own tokens.

Shapes: s sequence length, b micro-batch size, h hidden size, l layers, p width of a token's vector for a layer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megafp8.layers.activation.op import activation
from megafp8.layers.activation.record import ACTIVATIONS
from megafp8.layers.context import BuildContext
from megafp8.layers.costs import KernelWork, MicroBatch
from megafp8.layers.embedding.vocab_parallel import VocabParallelEmbedding
from megafp8.layers.mixer import LayerInputs
from megafp8.layers.mlp.op import unfused
from megafp8.layers.norm.module import block_norm, normalized, rms_norm
from megafp8.layers.whole_linear import WholeLinear
from megafp8.parallel.sharding import Init
from megafp8.spec import ModelSpec


class PerLayerEmbedding(nn.Module):
    """Embedding that gives each token a vector for each layer."""

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
        self.norm = rms_norm(f"{name}.norm", p, model, context)

    def forward(self, tokens_bs: Tensor, x_sbh: Tensor) -> Tensor:
        """Compute the vectors of all layers.

        Args:
            tokens_bs: Token ids.
            x_sbh: Embeddings of the tokens, `[s/t, b, h]` with sequence parallelism over t ranks.

        Returns:
            Vectors `[s, b, l, p]`, or `[s/t, b, l, p]` with sequence parallelism.
        """
        embedded, projected = self.word(tokens_bs), self.projection(x_sbh) * self.scale
        projected, embedded = (x.unflatten(-1, (-1, self.width)) for x in (projected, embedded))
        return (self.norm(projected) + embedded) * math.sqrt(0.5)


class LayerTail(nn.Module):
    """End of a layer: it adds the layer's per-layer embedding to the residual stream and multiplies by a scalar.

    Both steps are optional.

    Attributes:
        scalar: Constant factor of the layer, fp32 `[1]`. It belongs to the weights but is not trained. None if the
            model has no layer scalars.
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
        """Return the bytes saved by `PerLayerEmbedding` for this layer, even if the layer is recomputed."""
        if not self.width:
            return {}
        widths = 2 if self.norm.zero_centered else 3  # PyTorch's norm also keeps its result before the weights
        return {"per-layer embedding": batch.own_tokens * (widths * self.width * batch.element + batch.statistic)}

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the work of passes over the residual stream and, if used, over the per-layer embedding."""
        stream = batch.own_tokens * self.hidden_size * batch.element
        total = KernelWork() if self.scalar is None else KernelWork(2.0 * stream, 2.0 * stream, 1)
        per_layer = 6.0 * batch.own_tokens * self.width * batch.element
        total += KernelWork(3.0 * stream, 0.0, 1)
        return total + KernelWork(per_layer + 5 * stream, per_layer + 4 * stream, 4) if self.width else total

    def forward(self, x_sbh: Tensor, inputs: LayerInputs) -> Tensor:
        """Return the residual stream of the next layer.

        `x_sbh` is the residual stream with all branches added, `[s, b, h]`, or `[s/t, b, h]` with sequence parallelism.
        """
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
