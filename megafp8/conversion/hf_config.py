"""Hugging Face config.json <-> ModelConfig.

`families` has a record of each `model_type`. No value is ignored unless it cannot change the logits. Every key of a
config.json is one of these:

- a key of a trait of the family: read, or refused with key, value and what is supported;
- a key of `_FIXED`, which changes what the model computes and of which megafp8 supports one value;
- a key of `_HARMLESS`, such as token ids and settings of `generate`;
- any other key is refused by name, since what it does has not been checked.

Keys that exist in several copies (rotary embedding in transformers 4 and 5) must agree, because versions of
transformers differ in which copy they read. A model can be written as a family if what is written reads back as the
same model; `choose` tries all families, and names the fields that the nearest one cannot express.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from pydantic import BaseModel

from megafp8.config import LatentAttentionConfig, ModelConfig, MoeConfig
from megafp8.config.checks import network_problems
from megafp8.config.parts.attention import AttentionKeys
from megafp8.config.parts.hyper_connections import HyperConnectionsConfig
from megafp8.config.parts.mlp import MlpKeys
from megafp8.config.parts.per_layer_embedding import PerLayerEmbeddingConfig
from megafp8.config.parts.sparse_attention import SparseAttentionConfig
from megafp8.conversion import families
from megafp8.conversion.base import refuse
from megafp8.conversion.families import Family
from megafp8.conversion.hf_layers import by_layer, is_by_layer, pattern_of
from megafp8.conversion.keys import MOST_LAYERS, HfConfig
from megafp8.messages import join_first, join_names, name_text, value_text
from megafp8.registry import records_of

_SECTIONS: Mapping[str, type[BaseModel]] = {
    "moe": MoeConfig, "latent_attention": LatentAttentionConfig, "sparse_attention": SparseAttentionConfig,
    "per_layer_embedding": PerLayerEmbeddingConfig,
    "hyper_connections": HyperConnectionsConfig,
}  # fmt: skip
_LARGEST_NUMBER = 1 << 40
_OF_LAYERS = {*AttentionKeys.model_fields, *MlpKeys.model_fields, "norm_position"}
"""Fields of the model that its layers may have other values of."""
_PATTERNS = (
    "layer_kinds",
    "pattern",
    "full_attention_layers",
    "rope_local_theta",
    "moe.first_dense_layers",
    "moe.layer_interval",
)
"""Fields of the model that say which layers have which."""


def _discover() -> dict[str, Family]:
    """The records of all files in `families/`, in order of preference where several can express a model."""
    records = [*chain.from_iterable(records_of(families, "FAMILIES"))]
    by_type = {family.model_type: family for family in sorted(records, key=lambda family: family.rank)}
    assert len(by_type) == len(records), "two families have the same model_type"
    return by_type


FAMILIES = _discover()

_FIXED: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),  # transformers takes null as false
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "per_layer_config": ({}, None),
    "auto_map": ({}, None),  # code in the folder, which may compute anything
}
"""Keys of any family that change what the model computes, and the values that are supported."""

_HARMLESS_FOR: Mapping[str, str] = {
    "they describe the file": "model_type architectures transformers_version name_or_path _name_or_path _commit_hash "
    "transformers.js_config torch_dtype dtype use_bfloat16 torchscript tf_legacy_loss is_llama_config unsloth_fixed "
    "unsloth_version",
    "they name tokens": "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class "
    "prefix",
    "they choose outputs, caches, and implementations that differ in rounding alone": "use_cache return_dict "
    "output_hidden_states output_attentions output_router_logits output_past tie_last_hidden_states is_decoder "
    "chunk_size_feed_forward pretraining_tp attn_implementation _attn_implementation _attn_implementation_autoset "
    "experts_implementation ep_size gradient_checkpointing reorder_and_upcast_attn cache_implementation",
    "evaluation has no dropout or noise": "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop "
    "classifier_dropout router_jitter_noise dropout activation_dropout layerdrop",
    "they are sizes of buffers in old releases": "n_ctx max_sequence_length",
    "they belong to other heads over the same layers": "summary_type summary_use_proj summary_activation "
    "summary_proj_to_labels summary_first_dropout id2label label2id num_labels _num_labels problem_type "
    "task_specific_params finetuning_task predict_special_tokens",
    "they are settings of generate()": "max_length min_length do_sample early_stopping num_beams num_beam_groups "
    "num_return_sequences diversity_penalty temperature top_k top_p typical_p epsilon_cutoff eta_cutoff "
    "repetition_penalty encoder_repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "bad_words_ids output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    "assistant_confidence_threshold assistant_lookbehind num_assistant_tokens num_assistant_tokens_schedule "
    "target_lookbehind",
}
"""Keys of any family that do not change the logits, by the reason why."""
_HARMLESS = frozenset(key for keys in _HARMLESS_FOR.values() for key in keys.split())


def read_config(hf: HfConfig) -> tuple[Family, ModelConfig]:
    """The family and model that a config.json describes. Raises ValueError where megafp8 has no such model."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        refuse("model_type", kind, ", ".join(sorted(FAMILIES)))
    family = FAMILIES[kind]
    _check_numbers(hf)
    try:
        return _read(hf, family)
    except (TypeError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        raise ValueError(f"a value is of another kind than {kind} models have: {error}") from None


def _check_numbers(hf: HfConfig) -> None:
    """Raise ValueError for numbers that no model has, some of which are counted up to before tensors are compared."""
    for key, value in hf.items():
        if type(value) in (int, float) and abs(value) > _LARGEST_NUMBER:
            refuse(key, value, f"numbers up to {_LARGEST_NUMBER:,}")
        counts = "layer" in key and "norm" not in key and "size" not in key
        if counts and type(value) in (int, float) and value > MOST_LAYERS:
            refuse(key, value, f"up to {MOST_LAYERS:,}")


def _read(hf: HfConfig, family: Family) -> tuple[Family, ModelConfig]:
    kind = family.model_type
    several = any("architectures" in trait.keys for trait in family.traits)
    if not several and hf.get("architectures") not in (None, [], [family.architecture], [family.also]):
        refuse("architectures", hf["architectures"], repr([family.architecture]))
    if hf.get("quantization_config"):
        refuse("quantization_config", hf["quantization_config"].get("quant_method"), "weights in floating point")
    fields: dict[str, Any] = {}
    known = {"quantization_config"}
    for trait in family.traits:
        fields |= trait.read(hf)
        known |= set(trait.keys)
    for key, values in _FIXED.items():
        if key not in known and key in hf and hf[key] not in values:
            refuse(key, hf[key], repr(values[0]))
    if unknown := sorted(hf.keys() - known - _FIXED.keys() - _HARMLESS):
        values_of = join_first([f"{name_text(key)} = {value_text(hf[key])}" for key in unknown])
        raise ValueError(
            f"{values_of}: megafp8 does not know {'this key' if len(unknown) == 1 else 'these keys'} of {kind} models, "
            f"which may change what the model computes; if that is not so, remove {join_names(unknown, ' and ')}"
        )
    return family, build_model(fields)


def build_model(fields: Mapping[str, Any]) -> ModelConfig:
    """The model of `fields`, with those of sections as moe.top_k. Raises ValueError where there is no such model.

    Fields of layers' parts, such as mixer.sliding_window, are lists with the value of each layer.
    """
    tree = {key: value for key, value in fields.items() if not is_by_layer(key)}
    if lists := {key: value for key, value in fields.items() if is_by_layer(key)}:
        tree |= pattern_of(lists)
    for section in _SECTIONS:
        values = {key: tree.pop(key) for key in fields if key.startswith(f"{section}.")}
        tree |= {section: {key.removeprefix(f"{section}."): value for key, value in values.items()}} if values else {}
    try:
        model = ModelConfig(**tree)
    except ValueError as error:  # pydantic's, of a value that is no number
        raise ValueError(" ".join(str(error).split())) from None
    check_model(model)
    return model.without_pattern


def check_model(model: ModelConfig) -> None:
    """Raise ValueError for attention or experts that neither transformers nor megafp8 can build."""
    if problems := [*map(str, network_problems(model))]:
        raise ValueError("; ".join(problems))


def write_config(family: Family, model: ModelConfig) -> dict[str, Any]:
    """config.json of `model` as one of `family`; complete only if `choose` allows that family."""
    fields = canonical(model)
    written: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for trait in family.traits:
        written |= trait.write(fields)
    return written


def choose(model: ModelConfig) -> Family:
    """The first family that can express `model`. Raises ValueError naming what the nearest one cannot."""
    check_model(model)
    model = model.without_pattern
    sections = (model.latent_attention, model.sparse_attention, model.hyper_connections)
    present = *(section is not None for section in sections), model.architecture
    lacking: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        kind = family.latent, family.sparse, family.hyper, family.kind
        if kind == present and family.moe in (None, model.moe is not None):
            if not (lacks := _lacks(family, model)):
                return family
            lacking[family.model_type] = lacks
    if not lacking:
        latent = "" if model.latent_attention is None else ", latent attention (model.latent_attention)"
        latent += "" if model.sparse_attention is None else " to chosen tokens (model.sparse_attention)"
        latent += "" if model.hyper_connections is None else ", model.hyper_connections"
        raise ValueError(
            f"no Hugging Face family has this model: model.architecture {model.architecture}{latent} "
            f"{'with' if model.moe else 'without'} experts (model.moe)"
        )
    nearest, lacks = min(lacking.items(), key=lambda item: len(item[1]))
    raise ValueError(f"no Hugging Face family has this model; the nearest, {nearest}, lacks {', '.join(lacks)}")


def _lacks(family: Family, model: ModelConfig) -> list[str]:
    """The fields of `model` that the family cannot express."""
    try:
        _, again = read_config(write_config(family, model))
    except ValueError as error:
        return [str(error)]
    ours, theirs = canonical(model), canonical(again)
    return [f"model.{key} = {_shown(key, ours)} (there {_shown(key, theirs)})" for key in _differing(model, again)]


def _shown(key: str, fields: Mapping[str, Any]) -> str:
    """A value; of layers' parts all that layers have."""
    if not is_by_layer(key):
        return repr(fields[key])
    values = dict.fromkeys(map(repr, fields[key]))
    return " and ".join(values) + (" by layer" if len(values) > 1 else "")


def canonical(model: ModelConfig) -> dict[str, Any]:
    """All fields of `model`, and of its sections as moe.top_k, with defaults that depend on other fields resolved.

    Those of layers' parts are lists, as mixer.sliding_window. Where layers that a pattern describes have one value of
    it, that is the model's, too.
    """
    model = model.without_mup.without_pattern
    fields = {name: getattr(model, name) for name in ModelConfig.model_fields}
    for name, section in _SECTIONS.items():
        if fields[name] is not None:
            fields |= {f"{name}.{key}": getattr(fields[name], key) for key in section.model_fields}
    if model.moe is not None:
        fields["moe.ffn_hidden_size"] = model.expert_size
    if model.latent_attention is not None:
        fields["latent_attention.norm_eps"] = model.latent_attention.norm_eps or model.norm_eps
    fields |= {
        "num_query_groups": model.query_groups,
        "head_dim": model.channels,
        "ffn_hidden_size": model.ffn_size,
        "num_decoder_layers": model.decoder_blocks or None,
        "attention_scale": model.score_scale,
        "transform_activation": model.head_activation,
        "rope_local_theta": model.rope_local_theta if _has_local_rope(model) else None,
    }
    lists = by_layer(model)
    for field, values in lists.items() if model.pattern else ():
        key, given = field.partition(".")[2], [value for value in values if value is not None]
        if key in _OF_LAYERS and given and all(value == given[0] for value in given):
            fields[key] = given[0]
    return fields | lists


def _has_local_rope(model: ModelConfig) -> bool:
    """Whether layers with a window have other rotary frequencies than the others."""
    sections = model.yarn, model.longrope, model.rope_scaling
    scaled = any(section is not None for section in sections) or model.rope_interpolation_factor > 1
    return model.sliding_window is not None and (scaled or model.rope_local_theta != model.rope_theta)


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    """The fields in which two models differ that change what a model computes from given weights."""
    found, (a, b) = _differing(one, other), (canonical(one), canonical(other))
    if not any(map(is_by_layer, found)):
        return found
    of_layers = {key.partition(".")[2] for key in found if is_by_layer(key)} | {*_PATTERNS}
    return [key for key in a if not is_by_layer(key) and (key in found or (key in of_layers and a[key] != b.get(key)))]


def _differing(one: ModelConfig, other: ModelConfig) -> list[str]:
    """The same, with the keys of layers' parts instead of those that say which layers have which."""
    one, other = (model.without_mup.without_pattern for model in (one, other))
    a, b = canonical(one), canonical(other)
    ignored = {"vocab_multiple", "init_std", "mtp_num_layers", "mtp_loss_scaling_factor"}
    ignored |= {"hidden_dropout", "attention_dropout"}
    if one.pattern or other.pattern:
        ignored |= {*_OF_LAYERS, *_PATTERNS}
        for kind in ("mixer.kind", "ffn.kind"):
            if a[kind] != b[kind]:  # they have other keys
                part = kind.partition(".")[0]
                ignored |= {key for key in a if key.startswith(f"{part}.") and key != kind}
    else:
        ignored |= {key for key in a if is_by_layer(key)}
    if one.attention_scale is None and other.attention_scale is None:
        ignored.add("attention_scale")  # it follows from head_dim
    if one.position_embedding == other.position_embedding:
        unused = {
            "learned": {"max_position_embeddings"},
            "rope": {key for key in a if ("rope" in key or "rotary" in key or key == "yarn") and not is_by_layer(key)},
            "relative": {"relative_attention_num_buckets", "relative_attention_max_distance"},
        }
        ignored |= {key for kind, keys in unused.items() if kind != one.position_embedding for key in keys}
    if one.linear_bias and other.linear_bias:
        ignored |= {"qkv_bias", "mixer.qkv_bias"}  # it adds nothing then
    for section in _SECTIONS:
        if a[section] is None or b[section] is None:
            ignored |= {key for key in a if key.startswith(f"{section}.")}
        else:
            ignored.add(section)
    if one.latent_attention is not None and other.latent_attention is not None:
        ignored.add("head_dim")  # the sum of two widths
        if all(x["latent_attention.norm_eps"] == x["norm_eps"] for x in (a, b)):
            ignored.add("latent_attention.norm_eps")
    ignored |= {"sparse_attention.kl_loss", "mixer.kl_loss"}  # of training
    if one.moe is not None and other.moe is not None:
        ignored |= {f"moe.{key}" for key in ("bias_update_rate", "aux_loss", "aux_loss_scope", "z_loss")}  # of training
        dense = [[i for i in range(m.num_layers) if m.moe_of(i) is None] for m in (one, other)]
        ignored |= {"moe.first_dense_layers", "moe.layer_interval"} if dense[0] == dense[1] else set()
        ignored |= {"ffn_hidden_size"} if dense == [[], []] else set()
        if all(m.top_groups in (None, m.num_groups) for m in (one.moe, other.moe)):
            ignored |= {"moe.num_groups", "moe.top_groups"}  # experts of all groups are chosen from
    found = [key for key in a if key not in ignored and a[key] != b.get(key)]
    experts = one.moe is not None and other.moe is not None
    if experts and one.activation != other.activation and "activation" not in found:
        found.append("activation")  # of experts, which is the model's, whatever that of other layers is
    return found
