"""Per-layer embeddings: their keys and rules."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.host.problems import Problem
from megafp8.layers.activation.record import ACTIVATIONS
from megafp8.section import Channels, Section
from megafp8.spec import ModelSection, RunConfig


class PerLayerEmbeddingConfig(Section):
    """Per-layer embeddings (Gemma 3n and 4): a second table gives each token a small vector for each layer, to which a
    projection of its embedding is added. At its end a layer multiplies it by a gate, and adds a projection of that."""

    width: Channels = 256
    """Channels of a token's vector for a layer (hidden_size_per_layer_input)."""


def per_layer_embedding(m: ModelSection) -> Iterator[Problem]:
    """Rules about per-layer embeddings and layers' scalars that hold in any run."""
    for key in ("layer_scalar", "per_layer_embedding"):
        value = getattr(m, key)
        if value and (m.parallel_block or m.norm_position == "post" or m.architecture != "gpt"):
            rule = "it is for layers of gpt whose parts add to the residual stream one after the other"
            yield Problem(f"model.{key}", True if value is True else "(a section)", rule, "leave it out")
    if m.per_layer_embedding is None:
        return
    path, shown = "model.per_layer_embedding", "(a section)"
    if not ACTIVATIONS[m.activation].gated or m.activation == "clamped_swiglu":
        rule = f"model.activation is {m.activation}, which is not that of a gate alone"
        yield Problem(path, shown, rule, "try model.activation=geglu_tanh")
    if m.mtp_num_layers:
        rule = f"model.mtp_num_layers is {m.mtp_num_layers}, whose layers have no such embeddings"
        yield Problem(path, shown, rule, "leave one of them out")


def per_layer_embedding_layout(config: RunConfig) -> Iterator[Problem]:
    """The rule between per-layer embeddings and the layout."""
    if config.model.per_layer_embedding is not None and config.parallel.pipeline > 1:
        rule = "model.per_layer_embedding is set, which all layers read, and stages send the residual stream only"
        yield Problem("parallel.pipeline", config.parallel.pipeline, rule, "try 1, with parallel.tensor or fsdp")
