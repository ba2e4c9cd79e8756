"""Resolution of the model section of a config into a `ModelSpec`.

Users describe a model in one of two forms: flat keys for layers that are all alike, or `layer_kinds` and `pattern`.
Only this module turns both forms into complete records.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from megafp8.config.parts import LayerKind
from megafp8.layers.attention.record import AttentionConfig
from megafp8.layers.experts.record import MoeFfnConfig
from megafp8.layers.latent_attention.record import LatentMixerConfig
from megafp8.layers.mlp.record import MlpConfig
from megafp8.layers.sparse_attention.record import SparseLatentMixerConfig
from megafp8.spec import HeadSpec, LayerSpec, ModelSection, ModelSpec, NormSpec, StemSpec


def resolve(model: ModelSection) -> ModelSpec:
    """Return the network that a model section describes."""
    layers = _layers(model)
    blocks, kinds = layers[: model.num_layers], _kinds(layers)
    width = 1.0 if model.mup is None else model.hidden_size / model.mup.base_hidden_size
    hidden_std = model.init_std / math.sqrt(width)
    present = sum(part.present for layer in blocks for part in (layer.mixer, layer.ffn))
    has_experts = any(layer.has_experts for layer in layers)
    distinct = [layers[index] for index in sorted(set(kinds))]
    parts = [part for layer in distinct for part in (layer.mixer, layer.ffn)]
    return ModelSpec(
        architecture=model.architecture,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_blocks=model.num_layers + _decoder_blocks(model),
        layers=layers,
        kinds=kinds,
        stem=_stem(model),
        head=_head(model, width),
        norm=NormSpec(model.normalization, model.norm_eps, model.norm_weights, model.zero_centered_gamma),
        sources=_sources([layer.mixer for layer in blocks]),
        causal=model.architecture == "gpt",
        cuts_documents=not any(part.is_recurrent for part in parts),
        parallel_block=model.parallel_block,
        residual_multiplier=model.residual_multiplier,
        layer_scalar=model.layer_scalar,
        hyper_connections=model.hyper_connections,
        stream_width=model.hidden_size * (1 if model.hyper_connections is None else model.hyper_connections.streams),
        attention_bias=model.linear_bias in (True, "attention"),
        mlp_bias=model.linear_bias in (True, "mlp"),
        activation=model.activation,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_std=model.init_std,
        hidden_init_std=hidden_std,
        output_init_std=hidden_std / math.sqrt(max(present, 1)),
        score_init_std=model.init_std / width,
        width_multiplier=width,
        has_experts=has_experts,
        has_indexers=any(part.index_loss is not None for part in parts),
        has_auxiliary_loss=any(part.has_router_loss or part.index_loss for part in parts),
        lora_targets=_lora_targets(distinct, has_experts),
        keys=model.model_dump(mode="json"),
    )


def kind_names(model: ModelSection) -> tuple[str, ...]:
    """Return the names in `pattern` with counts expanded; empty without a pattern."""
    return _expanded(tuple(model.pattern))


def kind_name(model: ModelSection, layer: int) -> str:
    """Return the name of a layer's kind; empty without a pattern."""
    names = kind_names(model)
    return names[layer % len(names)] if names else ""


@lru_cache(maxsize=16)
def _expanded(pattern: tuple[str, ...]) -> tuple[str, ...]:
    entries = (entry.partition("*") for entry in pattern)
    return tuple(name.strip() for name, _, count in entries for _ in range(int(count or 1)))


def _decoder_blocks(model: ModelSection) -> int:
    """Return the number of blocks of T5's decoder."""
    return (model.num_decoder_layers or model.num_layers) if model.architecture == "t5" else 0


def _layers(model: ModelSection) -> tuple[LayerSpec, ...]:
    """Return all layers. Layers of T5's decoder and of multi-token prediction are like the last layer."""
    cache: dict[Any, tuple[Any, ...]] = {}

    def parts(index: int) -> tuple[Any, ...]:
        window = None if index in model.full_attention_layers else model.sliding_window
        key = kind_name(model, index), window, model.moe is not None and model.moe.is_sparse(index)
        if key not in cache:
            cache[key] = _parts(model, *key)
        return cache[key]

    blocks = [parts(index) for index in range(model.num_layers)]
    read = {*_sources([mixer for mixer, *_ in blocks]).values()}
    mixer, *others = blocks[-1]
    if getattr(mixer, "shared_indexer", False):  # multi-token prediction reads other tokens, so it chooses its own
        mixer = mixer.model_copy(update={"shared_indexer": False})
    described = [*blocks, *[blocks[-1]] * _decoder_blocks(model), *[(mixer, *others)] * model.mtp_num_layers]

    def layer(index: int) -> LayerSpec:
        decoder = model.architecture == "t5" and index >= model.num_layers
        return shared(*described[index], decoder, index >= num_blocks, index in read)

    num_blocks = model.num_layers + _decoder_blocks(model)
    made: dict[Any, LayerSpec] = {}

    def shared(*fields: Any) -> LayerSpec:
        """Return one object for equal layers, so that a model of thousands of layers stays small."""
        key = (id(fields[0]), id(fields[1]), *fields[2:])
        if key not in made:
            made[key] = LayerSpec(*fields)
        return made[key]

    return tuple(layer(index) for index in range(len(described)))


def _sources(mixers: Sequence[Any]) -> dict[int, int]:
    """Return, for each layer that reads keys and values, or chosen tokens, of an earlier layer, the earlier layer."""
    sources: dict[int, int] = {}
    latest: int | None = None
    for index, mixer in enumerate(mixers):
        shares = getattr(mixer, "shared_indexer", None)
        latest = index if shares is False else latest
        source = latest if shares else getattr(mixer, "kv_layer", None)
        if source is not None:
            sources[index] = source
    return sources


def _parts(model: ModelSection, name: str, window: int | None, sparse: bool) -> tuple[Any, ...]:
    """Return mixer, feed-forward network and norm position of the layers of a kind.

    Args:
        model: Model section.
        name: Name of the kind; empty without a pattern.
        window: Sliding window if the kind names no mixer.
        sparse: Whether the layer has experts if the kind names no feed-forward network.
    """
    kind = model.layer_kinds[name] if name else LayerKind()
    mixer, ffn = kind.mixer, kind.ffn
    if mixer is None and model.latent_attention is None:
        mixer = AttentionConfig.from_section(model, window)
    elif mixer is None and model.sparse_attention is not None:
        mixer = SparseLatentMixerConfig()
    elif mixer is None:
        mixer = LatentMixerConfig(sliding_window=window)
    if ffn is None:
        ffn = MoeFfnConfig() if sparse else MlpConfig()
    return mixer.resolved(model), ffn.resolved(model), kind.norm_position or model.norm_position


def _kinds(layers: Sequence[LayerSpec]) -> tuple[int, ...]:
    """Return for each layer the first layer that equals it."""
    first_of: dict[int, int] = {}
    distinct: list[int] = []
    for index, layer in enumerate(layers):
        if id(layer) not in first_of:
            first = next((other for other in distinct if layers[other] == layer), index)
            first_of[id(layer)] = first
            distinct += [index] if first == index else []
    return tuple(first_of[id(layer)] for layer in layers)


def _lora_targets(layers: Sequence[LayerSpec], has_experts: bool) -> tuple[str, ...]:
    """Return the linear layers that LoRA can adapt; in a model with experts, of mixers only."""
    targets: dict[str, None] = {}
    for layer in layers:
        targets |= dict.fromkeys(layer.mixer.lora_targets)
        targets |= {} if has_experts else dict.fromkeys(layer.ffn.lora_targets)
    return tuple(targets)


def _stem(model: ModelSection) -> StemSpec:
    """Return the embeddings of a model."""
    size, multiple = model.vocab_size, model.vocab_multiple
    return StemSpec(
        vocab_size=size,
        vocab_multiple=multiple,
        padded_vocab_size=None if size is None else -(-size // multiple) * multiple,
        position_embedding=model.position_embedding,
        max_position_embeddings=model.max_position_embeddings,
        relative_buckets=model.relative_attention_num_buckets,
        relative_distance=model.relative_attention_max_distance,
        normalizes=model.embedding_norm,
        multiplier=model.embedding_multiplier,
        token_types=model.token_types,
        per_layer_width=0 if model.per_layer_embedding is None else model.per_layer_embedding.width,
    )


def _head(model: ModelSection, width_multiplier: float) -> HeadSpec:
    """Return the output layer of a model."""
    activation: Literal["gelu", "gelu_tanh"] | None = None
    if model.architecture == "bert":
        activation = model.transform_activation or ("gelu_tanh" if model.activation == "gelu_tanh" else "gelu")
    divisor = model.logits_scaling * width_multiplier
    return HeadSpec(
        normalizes=model.norm_position != "post",
        activation=activation,
        tied=model.tie_embeddings,
        logits_divisor=divisor,
        logit_softcap=model.logit_softcap,
        biased=model.output_bias or model.architecture == "bert",
        binary=model.binary_head,
        extra_losses=model.mtp_num_layers + model.binary_head,
        extra_losses_factor=1.0 if model.binary_head else model.mtp_loss_scaling_factor,
    )
