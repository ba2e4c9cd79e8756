"""Translate between Hugging Face's config.json and `ModelSpec`.

`families` has a record for each `model_type`. No value is ignored unless it cannot change the logits. Every key of a
config.json is one of these:

- a key of one of the family's traits: it is read, or refused with the key, its value and the supported values;
- a key in `_FIXED`, which changes the model's results and has a single supported value;
- a key in `_HARMLESS`, such as token ids and settings of `generate`;
- any other key: it is refused by name, because its effect has not been checked.

If a key exists in several copies (rotary embedding in transformers 4 and 5), the copies must agree, because versions of
transformers differ in the copy that they read. A model can be written as a family if the written config.json reads back
as the same model. `choose` tries all families; if none fits, it names the fields that the nearest one cannot express.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from megafp8.config import model_problems, model_spec
from megafp8.conversion.base import refuse
from megafp8.conversion.flat import SECTIONS, differing, flat_keys, flattened, has_mixed_experts, is_by_layer
from megafp8.conversion.huggingface import families
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import pattern_of
from megafp8.conversion.keys import MOST_LAYERS, Fields, HfConfig
from megafp8.host.messages import join_first, join_names, name_text, value_text
from megafp8.host.registry import records_of
from megafp8.spec import ModelSpec

_LARGEST_NUMBER = 1 << 40


def _discover() -> dict[str, Family]:
    """Return the records of all files in `families/`. If several can express a model, earlier ones are preferred."""
    records = [*chain.from_iterable(records_of(families, "FAMILIES"))]
    by_type = {family.model_type: family for family in sorted(records, key=lambda family: family.rank)}
    assert len(by_type) == len(records), "two families have the same model_type"
    return by_type


FAMILIES = _discover()

_FIXED: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),  # transformers treats null as false
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "per_layer_config": ({}, None),
    "auto_map": ({}, None),  # code in the folder, which may compute anything
}
"""Keys of any family that change the model's results, with their supported values."""

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
"""Keys of any family that do not change the logits, by the reason."""
_HARMLESS = frozenset(key for keys in _HARMLESS_FOR.values() for key in keys.split())


def read_config(hf: HfConfig) -> tuple[Family, ModelSpec]:
    """Return the family and model that a config.json describes. Raises ValueError if megafp8 has no such model."""
    kind = hf.get("model_type")
    if isinstance(kind, str) and kind in families.LACKING:
        raise ValueError(
            f"model_type = {value_text(kind)}: megafp8 has no such model; it lacks {families.LACKING[kind]}"
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        refuse("model_type", kind, ", ".join(sorted(FAMILIES)))
    family = FAMILIES[kind]
    _check_numbers(hf)
    try:
        return _read(hf, family)
    except (TypeError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        raise ValueError(f"a value has another type than in {kind} models: {error}") from None


def _check_numbers(hf: HfConfig) -> None:
    """Raise ValueError for numbers too large for any model. Some are loop counts before the tensors are compared."""
    for key, value in hf.items():
        if type(value) in (int, float) and abs(value) > _LARGEST_NUMBER:
            refuse(key, value, f"numbers up to {_LARGEST_NUMBER:,}")
        counts = "layer" in key and "norm" not in key and "size" not in key
        if counts and type(value) in (int, float) and value > MOST_LAYERS:
            refuse(key, value, f"up to {MOST_LAYERS:,}")


def _read(hf: HfConfig, family: Family) -> tuple[Family, ModelSpec]:
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
            f"which may change the model's results; if not, remove {join_names(unknown, ' and ')}"
        )
    return family, build_model(fields)


def build_model(fields: Mapping[str, Any]) -> ModelSpec:
    """Return the model that flat keys describe, with lists for parts of layers. Raises ValueError if it is invalid."""
    tree = {key: value for key, value in fields.items() if not is_by_layer(key)}
    if lists := {key: value for key, value in fields.items() if is_by_layer(key)}:
        tree |= pattern_of(lists)
    for section in SECTIONS:
        values = {key: tree.pop(key) for key in fields if key.startswith(f"{section}.")}
        tree |= {section: {key.removeprefix(f"{section}."): value for key, value in values.items()}} if values else {}
    try:
        model = model_spec(tree)
    except ValueError as error:  # from pydantic, if a value is not a number
        raise ValueError(" ".join(str(error).split())) from None
    _check_model(model)
    return flattened(model)


def _check_model(model: ModelSpec) -> None:
    """Raise ValueError for attention or experts that neither transformers nor megafp8 can build."""
    if problems := dict.fromkeys(map(str, model_problems(model))):
        raise ValueError("; ".join(problems))


def write_config(family: Family, model: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `model` as a model of `family`. It is complete only if the family can express it."""
    return _written(family, flat_keys(model))


def _written(family: Family, fields: Fields) -> dict[str, Any]:
    """Return the config.json of a model with these flat keys."""
    written: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for trait in family.traits:
        written |= trait.write(fields)
    return written


def choose(model: ModelSpec) -> Family:
    """Return the first family that can express `model`. Raises ValueError with the gaps of the nearest if none can."""
    _check_model(model)
    fields = flat_keys(model)
    if has_mixed_experts(fields):
        raise ValueError("no Hugging Face family has this model: layers have two kinds of experts (model.layer_kinds)")
    moe, latent, sparse, hyper = (
        fields[section] is not None for section in ("moe", "latent_attention", "sparse_attention", "hyper_connections")
    )
    kind = latent, sparse, hyper, model.architecture
    lacking: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        if kind == (family.latent, family.sparse, family.hyper, family.kind) and family.moe in (None, moe):
            if not (lacks := _lacks(family, fields)):
                return family
            lacking[family.model_type] = lacks
    if not lacking:
        parts = ", latent attention (model.latent_attention)" if latent else ""
        parts += " to selected tokens (model.sparse_attention)" if sparse else ""
        parts += ", model.hyper_connections" if hyper else ""
        raise ValueError(
            f"no Hugging Face family has this model: model.architecture {model.architecture}{parts} "
            f"{'with' if moe else 'without'} experts (model.moe)"
        )
    nearest, lacks = min(lacking.items(), key=lambda item: len(item[1]))
    raise ValueError(f"no Hugging Face family has this model; the nearest, {nearest}, lacks {', '.join(lacks)}")


def _lacks(family: Family, fields: Fields) -> list[str]:
    """Return messages for the keys of a model that the family cannot express, with their values."""
    try:
        theirs = flat_keys(read_config(_written(family, fields))[1])
    except ValueError as error:
        return [str(error)]
    keys = differing(fields, theirs, by_layer=bool(fields["pattern"] or theirs["pattern"]))
    return [f"model.{key} = {_shown(key, fields)} (there {_shown(key, theirs)})" for key in keys]


def _shown(key: str, fields: Fields) -> str:
    """Return a value as text for a message; for a list, its distinct values."""
    if not is_by_layer(key):
        return repr(fields[key])
    values = dict.fromkeys(map(repr, fields[key]))
    return " and ".join(values) + (" by layer" if len(values) > 1 else "")
