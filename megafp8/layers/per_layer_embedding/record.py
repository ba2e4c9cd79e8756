"""Config keys and rules of per-layer embeddings."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.host.problems import Problem
from megafp8.layers.activation.record import ACTIVATIONS
from megafp8.section import Channels, Section
from megafp8.spec import ModelSection, RunConfig


class PerLayerEmbeddingConfig(Section):
    """Per-layer embeddings (Gemma 3n and 4): a small vector for each token and layer.

    A vector is the sum of a row of a second embedding table and a projection of the token's embedding. At its end, a
    layer multiplies the vector by a gate and adds a projection of the product to the residual stream.
    """

    width: Channels = 256
    """Channels of a token's vector for a layer (hidden_size_per_layer_input)."""


def per_layer_embedding(m: ModelSection) -> Iterator[Problem]:
    """Yield the rules about per-layer embeddings and layer scalars that a model breaks in any run."""
    for key in ("layer_scalar", "per_layer_embedding"):
        value = getattr(m, key)
        if value and (m.parallel_block or m.norm_position == "post" or m.architecture != "gpt"):
            rule = "it needs model.architecture=gpt, and layers with sequential parts and a norm before each part"
            yield Problem(f"model.{key}", True if value is True else "(a section)", rule, "leave it out")
    if m.per_layer_embedding is None:
        return
    path, shown = "model.per_layer_embedding", "(a section)"
    if not ACTIVATIONS[m.activation].gated or m.activation == "clamped_swiglu":
        rule = f"model.activation is {m.activation}, and it must be a function of a gate times up"
        yield Problem(path, shown, rule, "try model.activation=geglu_tanh")
    if m.mtp_num_layers:
        rule = f"model.mtp_num_layers is {m.mtp_num_layers}, and its layers have no per-layer embeddings"
        yield Problem(path, shown, rule, "leave one of them out")


def per_layer_embedding_layout(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem if per-layer embeddings are used with pipeline parallelism."""
    if config.model.per_layer_embedding is not None and config.parallel.pipeline > 1:
        rule = "all layers read model.per_layer_embedding, but stages send only the residual stream"
        yield Problem("parallel.pipeline", config.parallel.pipeline, rule, "try 1, with parallel.tensor or fsdp")
