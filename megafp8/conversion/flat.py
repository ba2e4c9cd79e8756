"""Describe a network by flat keys: one section of keys, and lists for values that differ between layers.

Configs of other programs have this form. `flat_keys` computes the keys from the records of the layers:

    hidden_size, moe.top_k, ...        the value for the whole network, or for the layers that have such a part
    mixer.sliding_window, ffn.kind     a list with the value for each layer; None if a layer does not have or use it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from megafp8.config import AttentionConfig, MlpConfig, MoeFfnConfig, RotaryKeys, with_keys
from megafp8.config.parts import Ffn, Mixer
from megafp8.conversion.keys import Fields
from megafp8.layers.attention.record import AttentionKeys
from megafp8.layers.experts.record import MoeKeys
from megafp8.layers.latent_attention.record import LatentAttentionKeys, LatentRecord
from megafp8.layers.mlp.record import MlpKeys
from megafp8.layers.sparse_attention.record import SparseAttentionKeys, SparseLatentMixerConfig
from megafp8.section import Section
from megafp8.spec import LayerSpec, ModelSpec, PartRecord

PARTS: dict[str, tuple[type[PartRecord], ...]] = {"mixer": get_args(Mixer), "ffn": get_args(Ffn)}
SECTIONS = ("moe", "latent_attention", "sparse_attention", "per_layer_embedding", "hyper_connections")
_LAYER_SECTIONS: dict[str, tuple[type[Section], type[PartRecord]]] = {
    "moe": (MoeKeys, MoeFfnConfig),
    "latent_attention": (LatentAttentionKeys, LatentRecord),
    "sparse_attention": (SparseAttentionKeys, SparseLatentMixerConfig),
}
"""Sections that describe parts of layers, with their keys and the records that have these keys."""
_ROTARY = RotaryKeys.model_fields.keys() - {"position_embedding"}
_PLACEMENT = {
    "kind": {"moe.first_dense_layers", "moe.layer_interval", *_LAYER_SECTIONS},
    "sliding_window": {"full_attention_layers"},
    **{key: {"rope_local_theta"} for key in _ROTARY},
}
"""Keys that determine which layers have which value of a key."""
_LAYER_KEYS = {*AttentionKeys.model_fields, *MlpKeys.model_fields, "norm_position", "layer_kinds", "pattern"}
_LAYER_KEYS |= set().union(*_PLACEMENT.values())
_TRAINING = {
    "vocab_multiple", "init_std", "mup", "mtp_num_layers", "mtp_loss_scaling_factor", "hidden_dropout",
    "attention_dropout", "kl_loss", "bias_update_rate", "aux_loss", "aux_loss_scope", "z_loss",
}  # fmt: skip
"""Keys that do not change the result that a model computes from given weights."""
_POSITIONS = {
    "max_position_embeddings": "learned",
    "relative_attention_num_buckets": "relative",
    "relative_attention_max_distance": "relative",
}
"""Keys of the network that only one kind of position embedding uses, with this kind."""


def is_by_layer(key: str) -> bool:
    """Return whether the value of a flat key is a list with a value for each layer."""
    return key.partition(".")[0] in (*PARTS, "layer")


def flattened(model: ModelSpec) -> ModelSpec:
    """Return the same network described without a pattern, or `model` itself if this is not possible."""
    if not model.keys["pattern"]:
        return model
    layers = _blocks(model)
    windows = [getattr(layer.mixer, "sliding_window", None) for layer in layers]
    keys: Fields = {"pattern": [], "layer_kinds": {}, "norm_position": layers[0].norm_position}
    if attention := [x for x in _rotary(layers) if isinstance(x, AttentionConfig)]:
        full, local = attention[0], attention[-1]
        keys |= {key: getattr(full, key) for key in AttentionKeys.model_fields}
        if any(getattr(local, key) != getattr(full, key) for key in RotaryKeys.model_fields):
            keys["rope_local_theta"] = local.rope_theta
    keys["sliding_window"] = max(filter(None, windows), default=None)
    if any(windows):
        keys["full_attention_layers"] = [index for index, window in enumerate(windows) if window is None]
    if (moe := model.keys["moe"]) is not None:
        keys["moe"] = {**moe, "first_dense_layers": _first_sparse(layers)} if model.has_experts else None
    for layer in layers:
        if isinstance(layer.ffn, MlpConfig):
            keys |= {key: getattr(layer.ffn, key) for key in MlpKeys.model_fields}
    alike = with_keys(model, **keys)
    return alike if alike.layers == model.layers else model


def flat_keys(model: ModelSpec) -> Fields:
    """Return all flat keys of a network, with defaults resolved.

    A key that is not a list has the value of the layers that have it. If these layers differ, or if no layer has the
    key, it has the value in the config.
    """
    model = flattened(model)
    layers, rotary = _blocks(model), _rotary(_blocks(model))
    ffns = [layer.ffn for layer in layers if layer.ffn.present]
    mlps = [ffn for ffn in ffns if isinstance(ffn, MlpConfig)]
    fields = dict(model.keys)
    for section in SECTIONS:
        fields |= {f"{section}.{key}": value for key, value in (fields[section] or {}).items()}
    for section, (keys, kind) in _LAYER_SECTIONS.items():
        if records := [x for x in (*rotary, *ffns) if isinstance(x, kind)]:
            for key in keys.model_fields:
                written = fields.get(f"{section}.{key}", getattr(records[0], key))
                fields[f"{section}.{key}"] = _common(records, key, written)
            fields[section] = {key: fields[f"{section}.{key}"] for key in keys.model_fields}
    if model.has_experts and model.keys["pattern"]:
        fields |= {"moe.first_dense_layers": _first_sparse(layers), "moe.layer_interval": 1}
    attention = AttentionKeys.model_validate({key: model.keys[key] for key in AttentionKeys.model_fields})
    fields |= {key: _common(rotary, key, getattr(attention, key)) for key in AttentionKeys.model_fields}
    heads = fields["num_attention_heads"]
    width = _common(rotary, "channels", fields["head_dim"] or model.hidden_size // heads)
    return fields | {
        "num_query_groups": fields["num_query_groups"] or heads,
        "head_dim": width,
        "attention_scale": fields["attention_scale"] or width**-0.5,
        "activation": _common(mlps or ffns, "activation", model.activation),
        "ffn_hidden_size": _common(mlps, "width", fields["ffn_hidden_size"] or 4 * model.hidden_size),
        "norm_position": _common(layers, "norm_position", fields["norm_position"]),
        "num_decoder_layers": (model.num_blocks - model.num_layers) or None,
        "transform_activation": model.head.activation,
        "logits_scaling": model.head.logits_divisor,
        **_lists(model),
    }


def _common(records: Sequence[Any], key: str, otherwise: Any) -> Any:
    """Return the common value of a key in the records that have it, or `otherwise` if they differ or none has it."""
    values = [value for record in records if (value := getattr(record, key, None)) is not None]
    return values[0] if values and all(value == values[0] for value in values) else otherwise


def has_mixed_experts(fields: Fields) -> bool:
    """Return whether layers have experts that differ in more than their routing and training."""
    keys = [key for key in fields if key.startswith("ffn.") and key != "ffn.routing" and _last(key) not in _TRAINING]
    sparse = [index for index, kind in enumerate(fields["ffn.kind"]) if kind == "moe"]
    return any(fields[key][index] != fields[key][sparse[0]] for key in keys for index in sparse)


def differences(one: ModelSpec, other: ModelSpec) -> list[str]:
    """Return the keys of the model section that make the two networks compute different results from equal weights."""
    return differing(flat_keys(one), flat_keys(other), by_layer=False)


def differing(a: Fields, b: Fields, *, by_layer: bool) -> list[str]:
    """Return the flat keys that make two networks compute different results from equal weights.

    Args:
        a: Flat keys of one network.
        b: Flat keys of the other network.
        by_layer: Return the lists for parts of layers, instead of the config keys that determine these lists.
    """
    unused = {key for key, kind in _POSITIONS.items() if a["position_embedding"] == b["position_embedding"] != kind}
    if all(fields["linear_bias"] in (True, "attention") for fields in (a, b)):
        unused |= {"mixer.qkv_bias", "mixer.proj_bias"}  # have no effect then
    differing_keys = [
        key
        for key in a
        if not (key in unused or key in _LAYER_KEYS or key.partition(".")[0] in _LAYER_SECTIONS)
        if _last(key) not in _TRAINING and _differ(key, a, b)
    ]
    words = {_last(key) for key in differing_keys if is_by_layer(key)}
    if by_layer or not words:
        return differing_keys
    placing = {"layer_kinds", "pattern"}.union(*(_PLACEMENT.get(word, ()) for word in words))
    placed = {key for key in a if (key in placing or _last(key) in words) and _differ(key, a, b)}
    return [key for key in a if (key in differing_keys or key in placed) and not is_by_layer(key)] or differing_keys


def _last(key: str) -> str:
    """Return the last word of a key."""
    return key.rpartition(".")[2]


def _differ(key: str, a: Fields, b: Fields) -> bool:
    """Return whether two networks have different values of a key.

    Lists are compared in layers in which both networks have a part of the same kind. The activation is also compared
    between an MLP and experts, because a dense model can become a mixture of experts (`upcycle`).
    """
    if key in SECTIONS:  # keys of a section are compared one by one
        return (a[key] is None) != (b[key] is None)
    if not is_by_layer(key):
        return key in b and a[key] != b[key]
    kind = f"{key.partition('.')[0]}.kind"
    if key in ("layer.norm_position", "ffn.activation", kind):
        return any(x != y and None not in (x, y) for x, y in zip(a[key], b[key], strict=False))
    layers = zip(a[key], b[key], a[kind], b[kind], strict=False)
    return any(x != y and one == other for x, y, one, other in layers)


def _blocks(model: ModelSpec) -> tuple[LayerSpec, ...]:
    """Return the layers that keys describe. T5's decoder and multi-token prediction have copies of the last layer."""
    return model.layers[: model.num_layers]


def _rotary(layers: Sequence[LayerSpec]) -> list[Any]:
    """Return the records of softmax attention, with layers without a sliding window first."""
    records = [layer.mixer for layer in layers if isinstance(layer.mixer, RotaryKeys)]
    return sorted(records, key=lambda x: getattr(x, "sliding_window", None) is not None)


def _first_sparse(layers: Sequence[LayerSpec]) -> int:
    """Return the number of the first layer with experts."""
    return next(index for index, layer in enumerate(layers) if layer.has_experts)


def _lists(model: ModelSpec) -> Fields:
    """Return the lists: for each key of a part, its value in each layer."""
    lists: Fields = {"layer.norm_position": [layer.norm_position for layer in _blocks(model)]}
    for part, kinds in PARTS.items():
        records = [getattr(layer, part) for layer in _blocks(model)]
        distinct = {id(record): record for record in records}
        for key in dict.fromkeys(key for kind in kinds for key in kind.model_fields):
            values = {address: _value(record, key, model) for address, record in distinct.items()}
            lists[f"{part}.{key}"] = [values[id(record)] for record in records]
    return lists


def _value(record: Any, key: str, model: ModelSpec) -> Any:
    """Return the value of a record's key, or None if the record does not have the key or the value has no effect."""
    value = getattr(record, key, None)
    if value is None:
        return None
    without_effect = (
        (key in _ROTARY and record.position_embedding != "rope")
        or (key == "attention_scale" and value == record.channels**-0.5)
        or (key == "norm_eps" and isinstance(record, LatentRecord) and value == model.norm.eps)
        or (key in ("num_groups", "top_groups") and _chooses_from_all_groups(record))
        or (key in ("index_heads", "index_head_dim") and getattr(record, "top_k", None) is None)
    )
    return None if without_effect else value


def _chooses_from_all_groups(record: Any) -> bool:
    """Return whether experts of all groups may be chosen."""
    return isinstance(record, MoeFfnConfig) and record.top_groups in (None, record.num_groups)
