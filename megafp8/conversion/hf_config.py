"""Hugging Face's config.json and our ModelConfig, both ways.

A family (a `model_type`) is a list of traits. A trait knows one thing that config.json says, how it reads in our
fields, and how our fields are written: `same` a key under another name, `always` what the family never says, `only` a
key of which we have one value, and three that take more than one key (rotary embedding, sliding windows, biases).

What we cannot express is refused by the trait that meets it, naming key, value and what is supported. Keys that no
trait knows are ignored: the family's code in `transformers` reads none that matters besides these. (Dropout is one: we
have none, and evaluation has none.)

Writing needs no rules of its own. A model can be written as a family if what is written reads back as the same model;
`choose` tries all, and says which fields stand in the way of the nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from megafp8.config import ModelConfig, RopeScaling

HfConfig = Mapping[str, Any]
_REQUIRED: Any = object()


class Trait(NamedTuple):
    """One thing about a family: from config.json to fields of ours (raises ValueError), and back."""

    read: Callable[[HfConfig], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]


class Family(NamedTuple):
    """What `transformers` calls a model_type, with the class that holds its weights."""

    model_type: str
    architecture: str
    traits: tuple[Trait, ...]


def _refuse(key: str, value: object, supported: str) -> NoReturn:
    raise ValueError(f"{key} = {value!r}: megafp8 has no such model; supported: {supported}")


def same(field: str, key: str, default: Any = _REQUIRED, values: Mapping[str, str] | None = None) -> Trait:
    """Our `field` is their `key`, or `default` where config.json has no such key; `values`: their word to ours."""

    def read(hf: HfConfig) -> dict[str, Any]:
        value = hf.get(key, default)
        if value is _REQUIRED:
            raise ValueError(f"has no key {key}")
        if values is None:
            return {field: value}
        if value not in values:
            _refuse(key, value, ", ".join(values))
        return {field: values[value]}

    def write(model: ModelConfig) -> dict[str, Any]:
        value = canonical(model)[field]
        if values is None:
            return {} if value is None else {key: value}
        return {key: next((theirs for theirs, ours in values.items() if ours == value), next(iter(values)))}

    return Trait(read, write)


def always(**fields: Any) -> Trait:
    """Fields of ours that are so in the whole family, which config.json does not say."""
    return Trait(lambda hf: fields, lambda model: {})


def only(key: str, value: Any) -> Trait:
    """Of this key we have one value, which is also its default."""

    def read(hf: HfConfig) -> dict[str, Any]:
        if hf.get(key, value) != value:
            _refuse(key, hf[key], repr(value))
        return {}

    return Trait(read, lambda model: {key: value})


def _read_rope(hf: HfConfig) -> dict[str, Any]:
    """transformers 4 has rope_theta and rope_scaling, 5 keeps it all in rope_parameters; the former win in both."""
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = hf.get(key) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        _refuse(key, rope, "one rotary embedding for all layers")
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        _refuse("partial_rotary_factor", partial, "1.0")
    theta = rope.get("rope_theta", hf.get("rope_theta", 10000.0))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind != "llama3":
        _refuse(f"{key}.rope_type", kind, "default, llama3")
    missing = [name for name in RopeScaling.model_fields if name not in rope]
    if missing:
        raise ValueError(f"{key} has no key {missing[0]}")
    return {"rope_theta": theta, "rope_scaling": RopeScaling(**{name: rope[name] for name in RopeScaling.model_fields})}


def _write_rope(model: ModelConfig) -> dict[str, Any]:
    """In the keys of transformers 4, which 5 and other engines read too."""
    scaling = model.rope_scaling
    written = None if scaling is None else {"rope_type": "llama3", **scaling.model_dump()}
    return {"rope_theta": model.rope_theta, "rope_scaling": written}


def _one_kind(hf: HfConfig) -> str | None:
    """What layer_types says of all layers; None where it is not there."""
    kinds = hf.get("layer_types") or [None]
    if set(kinds) not in ({None}, {"full_attention"}, {"sliding_attention"}):
        _refuse("layer_types", sorted(set(kinds)), "all layers full_attention, or all sliding_attention")
    found: str | None = kinds[0]
    return found


def _check_kinds(hf: HfConfig) -> dict[str, Any]:
    _one_kind(hf)
    return {}


def _read_mistral_window(hf: HfConfig) -> dict[str, Any]:
    window = hf.get("sliding_window", 4096)
    if window is not None and _one_kind(hf) == "full_attention":
        _refuse("sliding_window", window, "null where layer_types are full_attention")
    return {"sliding_window": window}


def _read_qwen_window(hf: HfConfig) -> dict[str, Any]:
    """Layers from max_window_layers on have the window, if use_sliding_window; or layer_types lists them."""
    kind, window = _one_kind(hf), hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    if kind is None and window is not None:
        first, layers = hf.get("max_window_layers", 28), hf["num_hidden_layers"]
        if 0 < first < layers:
            _refuse("max_window_layers", first, f"0, or num_hidden_layers ({layers}): all layers alike")
        kind = "sliding_attention" if first <= 0 else "full_attention"
    return {"sliding_window": window if kind == "sliding_attention" else None}


def _write_qwen_window(model: ModelConfig) -> dict[str, Any]:
    window = model.sliding_window
    first = model.num_layers if window is None else 0
    return {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": first}


def _read_llama_biases(hf: HfConfig) -> dict[str, Any]:
    attention, mlp = bool(hf.get("attention_bias", False)), bool(hf.get("mlp_bias", False))
    if attention != mlp:
        key, other = ("attention_bias", "mlp_bias") if attention else ("mlp_bias", "attention_bias")
        _refuse(key, True, f"biases on all linear layers ({other} = true too), or on none")
    return {"linear_bias": attention}


def _write_llama_biases(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.linear_bias, "mlp_bias": model.linear_bias}


def _llama_like(*, num_key_value_heads: int | None, head_dim: int | None = None) -> tuple[Trait, ...]:
    """What Llama and its relatives share; the arguments are the defaults of `transformers`."""
    return (
        same("num_layers", "num_hidden_layers"),
        same("hidden_size", "hidden_size"),
        same("num_attention_heads", "num_attention_heads"),
        same("num_query_groups", "num_key_value_heads", num_key_value_heads),
        same("head_dim", "head_dim", head_dim),
        same("ffn_hidden_size", "intermediate_size"),
        same("vocab_size", "vocab_size"),
        same("max_position_embeddings", "max_position_embeddings", None),
        same("activation", "hidden_act", "silu", {"silu": "swiglu", "swish": "swiglu"}),
        same("norm_eps", "rms_norm_eps", 1e-6),
        same("tie_embeddings", "tie_word_embeddings", False),
        same("init_std", "initializer_range", 0.02),
        always(position_embedding="rope", normalization="rmsnorm"),
        Trait(_check_kinds, lambda model: {}),
        Trait(_read_rope, _write_rope),
    )


_QWEN_WINDOW = Trait(_read_qwen_window, _write_qwen_window)
_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_LLAMA_BIASES = Trait(_read_llama_biases, _write_llama_biases)
_MISTRAL_WINDOW = Trait(_read_mistral_window, lambda model: {"sliding_window": model.sliding_window})

_LLAMA = Family("llama", "LlamaForCausalLM", (*_llama_like(num_key_value_heads=None), _LLAMA_BIASES))
_MISTRAL = Family("mistral", "MistralForCausalLM", (*_llama_like(num_key_value_heads=8), _MISTRAL_WINDOW))
_QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    (*_llama_like(num_key_value_heads=32), always(qkv_bias=True), _QWEN_WINDOW),
)
_QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (
        *_llama_like(num_key_value_heads=32, head_dim=128),
        always(qk_norm=True),
        only("attention_bias", False),
        _QWEN_WINDOW,
    ),
)
_GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    (
        same("num_layers", "n_layer"),
        same("hidden_size", "n_embd"),
        same("num_attention_heads", "n_head"),
        same("ffn_hidden_size", "n_inner", None),
        same("vocab_size", "vocab_size"),
        same("max_position_embeddings", "n_positions", 1024),
        same("activation", "activation_function", "gelu_new", _GELUS),
        same("norm_eps", "layer_norm_epsilon", 1e-5),
        same("tie_embeddings", "tie_word_embeddings", True),
        same("init_std", "initializer_range", 0.02),
        always(position_embedding="learned", normalization="layernorm", linear_bias=True),
        only("scale_attn_weights", True),
        only("scale_attn_by_inverse_layer_idx", False),
        only("add_cross_attention", False),
    ),
)
FAMILIES = {family.model_type: family for family in (_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _GPT2)}
"""In the order of preference where several can express a model."""


def read_config(hf: HfConfig) -> tuple[Family, ModelConfig]:
    """The family and model that a config.json describes. Raises ValueError where we have no such model."""
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        _refuse("model_type", kind, ", ".join(sorted(FAMILIES)))
    if hf.get("quantization_config"):
        _refuse("quantization_config", hf["quantization_config"].get("quant_method"), "weights in floating point")
    fields: dict[str, Any] = {}
    for trait in FAMILIES[kind].traits:
        fields |= trait.read(hf)
    try:
        return FAMILIES[kind], ModelConfig(**fields)
    except ValueError as error:  # pydantic's, of a value that is no number
        raise ValueError(" ".join(str(error).split())) from None


def write_config(family: Family, model: ModelConfig) -> dict[str, Any]:
    """What config.json says of `model` as one of `family`; only if `choose` allows it is that all there is to say."""
    written: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for trait in family.traits:
        written |= trait.write(model)
    return written


def choose(model: ModelConfig) -> Family:
    """The first family that can express `model`. Raises ValueError naming what the nearest one cannot."""
    nearest: tuple[int, str] | None = None
    for family in FAMILIES.values():
        _, again = read_config(write_config(family, model))
        wrong = differences(model, again)
        if not wrong:
            return family
        ours, theirs = canonical(model), canonical(again)
        text = ", ".join(f"model.{key} = {ours[key]!r} (there {theirs[key]!r})" for key in wrong)
        if nearest is None or len(wrong) < nearest[0]:
            nearest = (
                len(wrong),
                f"no Hugging Face family has this model; the nearest, {family.model_type}, lacks {text}",
            )
    assert nearest is not None
    raise ValueError(nearest[1])


def canonical(model: ModelConfig) -> dict[str, Any]:
    """All fields of `model`, defaults that depend on other fields resolved."""
    fields = {name: getattr(model, name) for name in ModelConfig.model_fields}
    return fields | {
        "num_query_groups": model.query_groups,
        "head_dim": model.channels,
        "ffn_hidden_size": model.ffn_size,
    }


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Fields in which two models differ, of those that change what a model computes from given weights."""
    a, b = canonical(one), canonical(other)
    ignored = {"vocab_multiple", "init_std"}
    if one.position_embedding == other.position_embedding:
        ignored |= set() if one.position_embedding == "learned" else {"max_position_embeddings"}
        ignored |= set() if one.position_embedding == "rope" else {"rope_theta", "rope_scaling"}
    if one.linear_bias and other.linear_bias:
        ignored.add("qkv_bias")  # it adds nothing then
    return [key for key in a if key not in ignored and a[key] != b[key]]
