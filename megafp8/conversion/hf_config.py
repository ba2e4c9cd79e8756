"""Hugging Face config.json <-> ModelConfig.

A family (a `model_type`) is a list of traits. A trait covers some keys of config.json: it reads them into fields of
ModelConfig, and writes them. `same` renames one field, `always` sets what config.json does not say, `only` accepts one
value, and a few functions cover several keys at once (rotary embedding, sliding windows, biases). Fields of a section
such as model.moe are called `moe.top_k`.

No value is ignored unless it cannot change the logits. Every key of a config.json is one of these:

- a key of a trait of the family: read, or refused with key, value and what is supported;
- a key of `_FIXED`, which changes what the model computes and of which megafp8 supports one value;
- a key of `_HARMLESS`, such as token ids and settings of `generate`;
- any other key is refused by name, as nobody has checked what it does.

Keys that exist in several copies (rotary embedding in transformers 4 and 5) must agree, because versions of
transformers differ in which copy they read. A model can be written as a family if what is written reads back as the
same model; `choose` tries all families, and names the fields that the nearest one cannot express.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from megafp8.config import LatentAttentionConfig, ModelConfig, MoeConfig, RopeScaling, encoder_checks, moe_checks
from megafp8.config.activations import ACTIVATIONS
from megafp8.config.checks import attention_heads
from megafp8.conversion.base import refuse

HfConfig = Mapping[str, Any]
_REQUIRED: Any = object()
_SECTIONS: Mapping[str, type[BaseModel]] = {"moe": MoeConfig, "latent_attention": LatentAttentionConfig}
_LARGEST_NUMBER, _MOST_LAYERS = 1 << 40, 10_000
MTP_LAYERS = "num_nextn_predict_layers"
"""Key for the number of layers of multi-token prediction."""


def _write_nothing(model: ModelConfig) -> dict[str, Any]:
    return {}


class Trait(NamedTuple):
    """One property of a family: all its `keys` of config.json to fields of ours (raises ValueError), and back."""

    keys: tuple[str, ...]
    read: Callable[[HfConfig], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]] = _write_nothing


class Family(NamedTuple):
    """What `transformers` calls a model_type, with the class that holds its weights.

    `moe`: its layers have experts; `latent`: they have latent attention. `also`: another name of the class. `kind`:
    `ModelConfig.architecture`.
    """

    model_type: str
    architecture: str
    traits: tuple[Trait, ...]
    moe: bool = False
    latent: bool = False
    also: str | None = None
    kind: str = "gpt"


def same(
    field: str,
    key: str,
    default: Any = _REQUIRED,
    values: Mapping[str, str] | None = None,
    nullable: bool = False,
) -> Trait:
    """Our `field` is their `key`, by default `default`. `values`: their word to ours; `nullable`: null is None."""

    def read(hf: HfConfig) -> dict[str, Any]:
        value = hf.get(key, default)
        if value is _REQUIRED:
            raise ValueError(f"has no key {key}")
        if value is None and default is not None and not nullable:
            refuse(key, value, ", ".join(values) if values else "a value that is not null")
        if values is None:
            return {field: value}
        if not isinstance(value, str) or value not in values:
            refuse(key, value, ", ".join(values))
        return {field: values[value]}

    def write(model: ModelConfig) -> dict[str, Any]:
        value = canonical(model)[field]
        if values is None:
            return {} if value is None and not nullable else {key: value}
        return {key: next((theirs for theirs, ours in values.items() if ours == value), next(iter(values)))}

    return Trait((key,), read, write)


def always(**fields: Any) -> Trait:
    """Fields of ours that are the same in the whole family, and not in config.json."""
    return Trait((), lambda hf: fields)


def only(written: bool = True, why: str = "", **values: Any) -> Trait:
    """Keys of which megafp8 supports one value, which is their default too, and `why`.

    `written`: stated in what we write.
    """

    def read(hf: HfConfig) -> dict[str, Any]:
        for key, value in values.items():
            if hf.get(key, value) != value:
                refuse(key, hf[key], f"{value!r}{why and ', '}{why}")
        return {}

    return Trait(tuple(values), read, lambda model: values if written else {})


def aliases(**names: str) -> Trait:
    """Second names of keys, which transformers uses instead of these where both are there: they must agree."""

    def read(hf: HfConfig) -> dict[str, Any]:
        for key, of in names.items():
            if key in hf and hf[key] != hf.get(of):
                refuse(key, hf[key], f"the value of {of} ({hf.get(of)!r}), of which it is another name")
        return {}

    return Trait(tuple(names), read)


def _flag(hf: HfConfig, key: str) -> bool:
    """A boolean key, false by default."""
    value = hf.get(key, False)
    if not isinstance(value, bool):
        refuse(key, value, "true, false")
    return value


_ROPE_KEYS = ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor")
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_YARN = ("factor", _ORIGINAL_LENGTH)
_ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "llama3": tuple(RopeScaling.model_fields), "yarn": _YARN,
    "longrope": ("short_factor", "long_factor", _ORIGINAL_LENGTH),
}  # fmt: skip
"""Supported values of rope_type, and the keys that each requires."""
_OF_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
_OPTIONAL = {"yarn": _OF_YARN, "longrope": ("factor", "attention_factor")}
"""By rope_type, keys that need not be there."""


def _read_rope(hf: HfConfig, default_theta: float, partial: float | None = None) -> dict[str, Any]:
    """transformers 4 reads rope_theta and rope_scaling, 5 keeps all of it in rope_parameters: copies must agree.

    `partial`: the family's default of partial_rotary_factor; None where it rotates whole heads.
    """
    keys = ("rope_scaling", "rope_parameters")
    found = [_read_rope_dict(key, hf[key], hf, default_theta) for key in keys if hf.get(key)]
    if len(found) == 2 and found[0] != found[1]:
        refuse("rope_parameters", hf["rope_parameters"], "the same as rope_scaling, or only one of the two")
    key = "partial_rotary_factor"
    factors = [x for source in (hf, *(hf[k] for k in keys if hf.get(k))) if (x := source.get(key)) is not None]
    if any(x != (factors[0] if partial is not None else 1) for x in factors):
        refuse(key, factors[-1], "1.0" if partial is None else f"the value of its other copy ({factors[0]!r})")
    read = found[0] if found else {"rope_theta": hf.get("rope_theta", default_theta)}
    return read if partial is None else read | {key: factors[0] if factors else partial}


def _read_rope_dict(key: str, rope: Any, hf: HfConfig, default_theta: float) -> dict[str, Any]:
    """One of the two dictionaries, compared with the keys at the top level of config.json."""
    if not isinstance(rope, dict):
        refuse(key, rope, "a dictionary, or null")
    if any(isinstance(value, dict) for value in rope.values()):
        refuse(key, rope, "one rotary embedding for all layers")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        refuse(f"{key}.rope_type", kind, ", ".join(_ROPE_TYPES))
    if rope.get("type", kind) != kind:
        refuse(f"{key}.type", rope["type"], f"the value of {key}.rope_type ({kind!r}), of which it is the old name")
    theta = rope.get("rope_theta", hf.get("rope_theta", default_theta))
    if hf.get("rope_theta", theta) != theta:
        refuse("rope_theta", hf["rope_theta"], f"the value of {key}.rope_theta ({theta!r}), or no second copy")
    needed, others = _ROPE_TYPES[kind], _OPTIONAL.get(kind, ())
    if missing := [name for name in needed if name not in rope]:
        raise ValueError(f"{key} has no key {missing[0]}")
    if unknown := sorted(rope.keys() - {*needed, *others, "rope_type", "type", "rope_theta", "partial_rotary_factor"}):
        known = ", ".join((*needed, *others)) or "none"
        refuse(f"{key}.{unknown[0]}", rope[unknown[0]], f"with rope_type {kind!r} only {known}")
    if not needed:
        return {"rope_theta": theta}
    if kind == "linear":
        return {"rope_theta": theta, "rope_interpolation_factor": rope["factor"]}
    if hf.get(_ORIGINAL_LENGTH, rope[_ORIGINAL_LENGTH]) != rope[_ORIGINAL_LENGTH]:
        copy = f"{key}.{_ORIGINAL_LENGTH} ({rope[_ORIGINAL_LENGTH]!r})"
        refuse(_ORIGINAL_LENGTH, hf[_ORIGINAL_LENGTH], f"the value of {copy}, or no second copy")
    if kind == "yarn":
        return {"rope_theta": theta, "yarn": _read_yarn(key, rope)}
    if kind == "longrope":
        return {"rope_theta": theta, "longrope": _read_longrope(key, rope, hf)}
    return {"rope_theta": theta, "rope_scaling": {name: rope[name] for name in needed}}


def _read_longrope(key: str, rope: Mapping[str, Any], hf: HfConfig) -> dict[str, Any]:
    """The section model.longrope. transformers 4 takes the factor from two lengths, 5 from the key if it is there."""
    lengths = {"max_position_embeddings": hf.get("max_position_embeddings"), _ORIGINAL_LENGTH: rope[_ORIGINAL_LENGTH]}
    for name, length in lengths.items():
        if not isinstance(length, int) or length < 1:
            refuse(name, length, "a number of tokens, from which longrope has its factor")
    if rope.get("attention_factor") is not None:
        refuse(f"{key}.attention_factor", rope["attention_factor"], "null, as it follows from the factor")
    longest, original = lengths.values()
    if rope.get("factor") not in (None, longest / original):
        refuse(f"{key}.factor", rope["factor"], f"max_position_embeddings / {_ORIGINAL_LENGTH} ({longest / original})")
    return {name: rope[name] for name in _ROPE_TYPES["longrope"]} | {"factor": longest / original}


def _read_yarn(key: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The section model.yarn; absent keys and null are the defaults."""
    if rope.get("attention_factor") is not None:
        refuse(f"{key}.attention_factor", rope["attention_factor"], "null, or mscale and mscale_all_dim")
    given = {name: rope[name] for name in (*_YARN, *_OF_YARN) if rope.get(name) is not None}
    if given.get("mscale", 1) != 1 and not given.get("mscale_all_dim"):
        refuse(f"{key}.mscale", given["mscale"], "1 without mscale_all_dim, as transformers ignores it then")
    if given.get("mscale_all_dim") and not given.get("mscale"):
        refuse(f"{key}.mscale", rope.get("mscale"), "a number beside mscale_all_dim, as others differ in its default")
    return given


def _read_local_rope(hf: HfConfig) -> dict[str, Any]:
    """Gemma 3: two rotary embeddings; in transformers 4 three keys, in 5 two dictionaries in rope_parameters."""
    nested = hf.get("rope_parameters") or {}
    if not isinstance(nested, dict) or not all(key in _KINDS and isinstance(x, dict) for key, x in nested.items()):
        refuse("rope_parameters", nested, f"a dictionary of two, {' and '.join(_KINDS)}")
    found = _read_rope({**hf, "rope_parameters": nested.get("full_attention")}, 1e6)
    key = "rope_local_base_freq"
    local = _read_rope_dict(
        "rope_parameters.sliding_attention", nested.get("sliding_attention", {}), {}, hf.get(key, 1e4)
    )
    if local.keys() != {"rope_theta"}:
        refuse("rope_parameters", nested, "no scaling of layers with a window")
    if hf.get(key, local["rope_theta"]) != local["rope_theta"]:
        refuse(key, hf[key], f"the value in rope_parameters ({local['rope_theta']!r}), or no second copy")
    return found | {"rope_local_theta": local["rope_theta"]}


def _write_local_rope(model: ModelConfig) -> dict[str, Any]:
    return _write_rope(model) | {"rope_local_base_freq": model.rope_local_theta or model.rope_theta}


def _write_rope(model: ModelConfig) -> dict[str, Any]:
    """Keys of transformers 4, which 5 and other engines read too."""
    written = None
    if model.longrope is not None:
        written = {"rope_type": "longrope", **model.longrope.model_dump(exclude={"factor"})}
        original = model.longrope.original_max_position_embeddings
        lengths = {"max_position_embeddings": model.longrope.extended_length, _ORIGINAL_LENGTH: original}
        return {"rope_theta": model.rope_theta, "rope_scaling": written, **lengths}
    if model.yarn is not None:
        written = {"rope_type": "yarn", **model.yarn.model_dump()}
        if model.yarn.mscale == 1 and not model.yarn.mscale_all_dim:
            del written["mscale"], written["mscale_all_dim"]
        if model.yarn.truncate:
            del written["truncate"]
    elif model.rope_scaling is not None:
        written = {"rope_type": "llama3", **model.rope_scaling.model_dump()}
    elif model.rope_interpolation_factor > 1:
        written = {"rope_type": "linear", "factor": model.rope_interpolation_factor}
    return {"rope_theta": model.rope_theta, "rope_scaling": written}


_KINDS = ("sliding_attention", "full_attention")


def _layer_types(hf: HfConfig) -> list[str] | None:
    """Whether each layer has a window; None where there is no such key."""
    kinds = hf.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != hf.get("num_hidden_layers"):
        refuse("layer_types", kinds, f"one entry for each of num_hidden_layers ({hf.get('num_hidden_layers')})")
    if not {*map(str, kinds)} <= set(_KINDS):
        refuse("layer_types", sorted(set(map(str, kinds))), "full_attention and sliding_attention")
    return [str(kind) for kind in kinds]


def _check_window(window: Any, kinds: list[str] | None) -> None:
    """Refuse layer_types that contradict a window of all layers, or of none."""
    kind = f"{'full' if window is None else 'sliding'}_attention"
    if kinds is not None and set(kinds) != {kind}:
        refuse("layer_types", sorted(set(kinds)), f"{kind} of all layers, as the window is {window}")


def _read_no_window(hf: HfConfig) -> dict[str, Any]:
    _check_window(None, _layer_types(hf))
    return {}


def _window_of_all(default: int | None) -> Trait:
    """A window that all layers have, or none; `default`: of `transformers`, where the key is absent."""

    def read(hf: HfConfig) -> dict[str, Any]:
        window = hf.get("sliding_window", default)
        _check_window(window, _layer_types(hf))
        return {"sliding_window": window}

    return Trait(("sliding_window", "layer_types"), read, lambda model: {"sliding_window": model.sliding_window})


def _pattern_of_windows(default: int, every: Callable[[HfConfig], int], *more: str) -> Trait:
    """Layers with a window, and some without. Without layer_types these are the last of each `every` layers.

    `default`: the window where the key is absent. `more`: keys that say the same.
    """

    def read(hf: HfConfig) -> dict[str, Any]:
        kinds, layers = _layer_types(hf), hf.get("num_hidden_layers")
        if not isinstance(layers, int):
            refuse("num_hidden_layers", layers, "a number of layers")
        if kinds is None:
            kinds = [_KINDS[(i + 1) % every(hf) == 0] for i in range(layers)]
        window, full = hf.get("sliding_window", default), [i for i in range(layers) if kinds[i] == _KINDS[1]]
        return {} if window is None else {"sliding_window": window, "full_attention_layers": full}

    def write(model: ModelConfig) -> dict[str, Any]:
        kinds = [_KINDS[model.window_of(i) is None] for i in range(model.num_layers)]
        return {"sliding_window": model.sliding_window or default, "layer_types": kinds}

    return Trait(("sliding_window", "layer_types", *more), read, write)


def _read_qwen_window(hf: HfConfig) -> dict[str, Any]:
    """With use_sliding_window, layers from max_window_layers on have the window, or those in layer_types."""
    kinds, window = _layer_types(hf), hf.get("sliding_window", 4096) if _flag(hf, "use_sliding_window") else None
    if window is None:
        _check_window(None, kinds)
        return {"sliding_window": None}
    layers, first = hf["num_hidden_layers"], hf.get("max_window_layers", 28)
    if kinds is None and not isinstance(first, int):
        refuse("max_window_layers", first, "a number of layers")
    full = [i for i in range(layers) if (i < first if kinds is None else kinds[i] == "full_attention")]
    return (
        {"sliding_window": None} if len(full) == layers else {"sliding_window": window, "full_attention_layers": full}
    )


def _write_qwen_window(model: ModelConfig) -> dict[str, Any]:
    window, full, layers = model.sliding_window, model.full_attention_layers, range(model.num_layers)
    kinds = ["full_attention" if window is None or i in full else "sliding_attention" for i in layers]
    first = kinds.index("sliding_attention") if "sliding_attention" in kinds else len(kinds)
    written = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": first}
    return written if full in ([], [*range(first)]) else {**written, "layer_types": kinds}


def _read_qwen_moe_window(hf: HfConfig) -> dict[str, Any]:
    if _flag(hf, "use_sliding_window"):
        # In transformers 5 those of qwen3_moe are all, and of qwen2_moe every second below max_window_layers.
        refuse("use_sliding_window", True, "false in models with experts, as releases differ in which layers have it")
    return _read_no_window(hf)


def either(field: str, key: str, other: str) -> Trait:
    """Our `field` under either name, which transformers takes for the same; `key` is what we write."""

    def read(hf: HfConfig) -> dict[str, Any]:
        found = [name for name in (key, other) if name in hf]
        if not found:
            raise ValueError(f"has no key {key}")
        if hf[found[0]] != hf[found[-1]]:
            refuse(other, hf[other], f"the value of {key} ({hf[key]!r}), of which it is another name")
        return {field: hf[found[0]]}

    return Trait((key, other), read, lambda model: {key: canonical(model)[field]})


def _num_experts(key: str, other: str) -> Trait:
    return either("moe.num_experts", key, other)


def _partial_rope(partial: float) -> Trait:
    """Rotary embedding of a part of each head; `partial`: the default of `transformers`."""
    return Trait(
        (*_ROPE_KEYS, _ORIGINAL_LENGTH),
        lambda hf: _read_rope(hf, 1e4, partial),
        lambda model: _write_rope(model) | {"partial_rotary_factor": model.partial_rotary_factor},
    )


def _read_phi3_rope(hf: HfConfig) -> dict[str, Any]:
    """longrope, whose first name is su, or none: transformers takes yarn for longrope in this family.

    It reads the original length at the top level of config.json, with a default, whatever the dictionary says.
    """
    original, ropes = hf.get(_ORIGINAL_LENGTH, 4096), {}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(rope := hf.get(key), dict):
            continue
        rope = {name: "longrope" if name in ("type", "rope_type") and x == "su" else x for name, x in rope.items()}
        ropes[key] = {_ORIGINAL_LENGTH: original} | rope if "longrope" in map(str, rope.values()) else rope
    found = _read_rope({**hf, **ropes, _ORIGINAL_LENGTH: original}, 1e4, 1.0)
    if not found.keys() <= {"rope_theta", "partial_rotary_factor", "longrope"}:
        given = hf.get("rope_scaling") or hf.get("rope_parameters")
        refuse("rope_scaling", given, "in this family rope_type 'longrope', or null")
    return found


def _write_phi3_rope(model: ModelConfig) -> dict[str, Any]:
    """transformers 4 takes three keys of rope_scaling only."""
    written = _write_rope(model) | {"partial_rotary_factor": model.partial_rotary_factor}
    if model.longrope is not None:
        kept = ("short_factor", "long_factor")
        written["rope_scaling"] = {"type": "longrope", **{key: written["rope_scaling"][key] for key in kept}}
    return written


def _read_neox_rope(hf: HfConfig) -> dict[str, Any]:
    """Under names of its own at the top level, where transformers does not read the usual ones."""
    names = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
    return _read_rope({names.get(key, key): value for key, value in hf.items()}, 1e4, 0.25)


def _write_neox_rope(model: ModelConfig) -> dict[str, Any]:
    rope = _write_rope(model)
    return {"rotary_emb_base": rope.pop("rope_theta"), "rotary_pct": model.partial_rotary_factor, **rope}


def _read_sparse_layers(hf: HfConfig) -> dict[str, Any]:
    """Layers with experts: those at multiples of decoder_sparse_step, but for mlp_only_layers."""
    layers, step, dense = hf["num_hidden_layers"], hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not isinstance(layers, int):
        refuse("num_hidden_layers", layers, "a number of layers")
    if not isinstance(step, int) or step < 1:
        refuse("decoder_sparse_step", step, "a number of layers from 1 on")
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        refuse("mlp_only_layers", dense, "a list of layers")
    candidates = range(step - 1, layers, step)
    first = max((layer + 1 for layer in candidates if layer in dense), default=0)
    if any(layer < first and layer not in dense for layer in candidates):
        refuse("mlp_only_layers", dense, "the first layers of the model, or none")
    return {"moe.first_dense_layers": first, "moe.layer_interval": step}


def _write_sparse_layers(model: ModelConfig) -> dict[str, Any]:
    assert model.moe is not None
    dense = [*range(model.moe.first_dense_layers)]
    return {"decoder_sparse_step": model.moe.layer_interval, "mlp_only_layers": dense}


_DERIVED_WIDTHS: Mapping[str, tuple[str, ...]] = {
    "qk_head_dim": ("qk_nope_head_dim", "qk_rope_head_dim"),
    "head_dim": ("qk_rope_head_dim",),  # of the rotary embedding
    "num_key_value_heads": ("num_attention_heads",),
}


def _check_derived_widths(hf: HfConfig) -> dict[str, Any]:
    """Keys of DeepSeek's families that follow from others, but that transformers uses as they are in config.json."""
    for key, parts in _DERIVED_WIDTHS.items():
        values = [x for part in parts if isinstance(x := hf.get(part), int)]  # others are refused elsewhere
        if key in hf and len(values) == len(parts) and hf[key] != sum(values):
            refuse(key, hf[key], f"{' + '.join(parts)} ({sum(values)})")
    return {}


def _read_groups(hf: HfConfig) -> dict[str, Any]:
    experts, groups = hf.get("n_routed_experts"), hf.get("n_group", 8)
    if isinstance(experts, int) and isinstance(groups, int) and 0 < experts < 2 * groups:
        refuse("n_group", groups, f"groups of at least two of the n_routed_experts ({experts})")
    return {"moe.num_groups": groups, "moe.top_groups": hf.get("topk_group", 4)}


def _write_groups(model: ModelConfig) -> dict[str, Any]:
    moe = model.moe
    assert moe is not None
    if moe.top_groups in (None, moe.num_groups):  # experts of all groups are chosen from
        return {"n_group": 1, "topk_group": 1}
    return {"n_group": moe.num_groups, "topk_group": moe.top_groups}


_GROUP_METHODS = ("greedy", "group_limited_greedy")


def _read_group_method(hf: HfConfig) -> dict[str, Any]:
    """deepseek_v2 has groups with one method, and ignores their number with the other."""
    method = hf.get("topk_method", "greedy")
    if method not in _GROUP_METHODS:
        refuse("topk_method", method, ", ".join(_GROUP_METHODS))
    if method == "greedy":
        return {}
    return {"moe.num_groups": hf.get("n_group"), "moe.top_groups": hf.get("topk_group")}


def _write_group_method(model: ModelConfig) -> dict[str, Any]:
    groups = _write_groups(model)
    return {**groups, "topk_method": _GROUP_METHODS[groups["n_group"] > 1]}


def _shared_experts(default: int) -> Trait:
    """One MLP in place of `n_shared_experts` of the width of the others."""

    def read(hf: HfConfig) -> dict[str, Any]:
        count, width = hf.get("n_shared_experts", default), hf.get("moe_intermediate_size")
        if not isinstance(count, int) or count < 1:
            refuse("n_shared_experts", count, "1 or more in this family")
        return {"moe.shared_ffn_hidden_size": count * width if isinstance(width, int) else width}

    return Trait(("n_shared_experts",), read, _write_shared_experts)


def _write_shared_experts(model: ModelConfig) -> dict[str, Any]:
    shared = canonical(model)["moe.shared_ffn_hidden_size"] or 0
    return {"n_shared_experts": max(1, shared // model.expert_size)}


def _read_llama_biases(hf: HfConfig) -> dict[str, Any]:
    attention, mlp = _flag(hf, "attention_bias"), _flag(hf, "mlp_bias")
    if attention != mlp:
        key, other = ("attention_bias", "mlp_bias") if attention else ("mlp_bias", "attention_bias")
        refuse(key, True, f"biases on all linear layers ({other} = true too), or on none")
    return {"linear_bias": attention}


_LLAMA_BIASES = Trait(
    ("attention_bias", "mlp_bias"),
    _read_llama_biases,
    lambda model: {"attention_bias": model.linear_bias, "mlp_bias": model.linear_bias},
)


def _check_embedding_width(hf: HfConfig) -> dict[str, Any]:
    width, hidden = hf.get("word_embed_proj_dim"), hf.get("hidden_size")
    if width not in (None, hidden):
        refuse("word_embed_proj_dim", width, f"hidden_size ({hidden})")
    return {}


def _check_llama(hf: HfConfig) -> dict[str, Any]:
    """LlamaConfig of transformers refuses this, although its layers could; such a model is written as Mistral.

    So does DeepseekV2Config.
    """
    hidden, heads = hf.get("hidden_size"), hf.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and hidden % max(heads, 1):
        refuse("hidden_size", hidden, f"a multiple of num_attention_heads ({heads}) in this family, even with head_dim")
    return {}


def _check_head_dim(hf: HfConfig) -> dict[str, Any]:
    """transformers norms hidden_size channels of the queries of olmoe, whatever head_dim says."""
    hidden, heads, width = hf.get("hidden_size"), hf.get("num_attention_heads"), hf.get("head_dim")
    if width is not None and isinstance(hidden, int) and isinstance(heads, int) and width * heads != hidden:
        refuse("head_dim", width, f"hidden_size / num_attention_heads ({hidden / heads:g}) in this family")
    return {}


_INIT_STD = Trait(
    ("initializer_range",),
    lambda hf: {"init_std": hf.get("initializer_range", 0.02)},
    # LlamaConfig refuses more than 1. It does not matter for a trained model.
    lambda model: {"initializer_range": model.init_std} if model.init_std <= 1 else {},
)


def _activations(*, gated: bool) -> dict[str, str]:
    """Their names of activations to ours, for families whose MLP is `gated` or not."""
    return {theirs: name for name, ours in ACTIVATIONS.items() if ours.gated == gated for theirs in ours.hugging_face}


def _sizes_and_norm(
    activation_key: str = "hidden_act", activation: str = "silu", *, tied: bool = False
) -> tuple[Trait, ...]:
    """Traits of all relatives of Llama; the arguments are the defaults of `transformers`."""
    return (
        same("num_layers", "num_hidden_layers"),
        same("hidden_size", "hidden_size"),
        same("num_attention_heads", "num_attention_heads"),
        same("ffn_hidden_size", "intermediate_size"),
        same("vocab_size", "vocab_size"),
        same("max_position_embeddings", "max_position_embeddings", None),
        same("activation", activation_key, activation, _activations(gated=True)),
        same("tie_embeddings", "tie_word_embeddings", tied),
        _INIT_STD,
        same("attention_dropout", "attention_dropout", 0.0),
        always(normalization="rmsnorm"),
    )


def _any_rope_model(rope_theta: float) -> tuple[Trait, ...]:
    """Traits of all families with one rotary embedding, whatever their attention."""
    return *_sizes_and_norm(), *_one_rope(rope_theta)


def _one_rope(rope_theta: float) -> tuple[Trait, ...]:
    return (
        always(position_embedding="rope"),
        Trait((*_ROPE_KEYS, _ORIGINAL_LENGTH), lambda hf: _read_rope(hf, rope_theta), _write_rope),
    )


def _llama_like(
    *, num_key_value_heads: int | None, head_dim: int | None = None, norm_eps: float = 1e-6, rope_theta: float = 1e4
) -> tuple[Trait, ...]:
    """Traits of Llama and its relatives; the arguments are the defaults of `transformers`."""
    return *_one_rope(rope_theta), *_heads_like_llama(num_key_value_heads, head_dim, norm_eps)


def _heads_like_llama(num_key_value_heads: int | None, head_dim: int | None, norm_eps: float) -> tuple[Trait, ...]:
    """All of `_llama_like` but the rotary embedding."""
    return (
        *_sizes_and_norm(),
        same("num_query_groups", "num_key_value_heads", num_key_value_heads, nullable=True),
        same("head_dim", "head_dim", head_dim),
        same("norm_eps", "rms_norm_eps", norm_eps),
        only(written=False, rope_interleaved=False),
    )


_QWEN_WINDOW = Trait(
    ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"), _read_qwen_window, _write_qwen_window
)

_LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (
        *_llama_like(num_key_value_heads=None),
        _LLAMA_BIASES,
        Trait(("layer_types",), _read_no_window),
        only(written=False, sliding_window=None),
        Trait((), _check_llama),
    ),
)
_MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    (
        *_llama_like(num_key_value_heads=8),
        _window_of_all(4096),
        only(written=False, attention_bias=False, mlp_bias=False),
    ),
)
_QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    (
        *_llama_like(num_key_value_heads=32),
        always(qkv_bias=True),
        _QWEN_WINDOW,
        only(written=False, mlp_bias=False, use_mrope=False),
    ),
)
_QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (
        *_llama_like(num_key_value_heads=32, head_dim=128),
        always(qk_norm=True),
        only(attention_bias=False),
        _QWEN_WINDOW,
        only(written=False, mlp_bias=False, use_mrope=False),
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
        same("activation", "activation_function", "gelu_new", _activations(gated=False)),
        same("norm_eps", "layer_norm_epsilon", 1e-5),
        same("tie_embeddings", "tie_word_embeddings", True),
        same("init_std", "initializer_range", 0.02),
        same("attention_dropout", "attn_pdrop", 0.1),
        # After the embedding (embd_pdrop) it is that of the branches here.
        same("hidden_dropout", "resid_pdrop", 0.1),
        Trait(("embd_pdrop",), lambda hf: {}, lambda model: {"embd_pdrop": model.hidden_dropout}),
        aliases(
            num_hidden_layers="n_layer",
            hidden_size="n_embd",
            num_attention_heads="n_head",
            max_position_embeddings="n_positions",
        ),
        always(position_embedding="learned", normalization="layernorm", linear_bias=True),
        only(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False),
    ),
)
_ROUTER = (
    same("moe.top_k", "num_experts_per_tok"),
    # Not read: model.moe.aux_loss weights another loss, of each sequence alone and divided by top_k. Written as 0, for
    # the default of transformers would not be a weight that somebody chose for this model.
    Trait(("router_aux_loss_coef",), lambda hf: {}, lambda model: {"router_aux_loss_coef": 0.0}),
)
_QWEN_MOE = (
    *_ROUTER,
    same("moe.normalize", "norm_topk_prob", False),
    same("moe.ffn_hidden_size", "moe_intermediate_size"),
    Trait(("decoder_sparse_step", "mlp_only_layers"), _read_sparse_layers, _write_sparse_layers),
    Trait(
        ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
        _read_qwen_moe_window,
        lambda model: {"use_sliding_window": False},
    ),
)
_WIDTH_OF_EXPERTS = Trait((), lambda hf: {}, lambda model: {"intermediate_size": model.expert_size})
"""Where all layers have experts, the width of an MLP is theirs."""
_MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    (
        *_llama_like(num_key_value_heads=8, norm_eps=1e-5, rope_theta=1e6),
        *_ROUTER,
        _num_experts("num_local_experts", "num_experts"),
        _WIDTH_OF_EXPERTS,
        _window_of_all(None),
    ),
    moe=True,
)
_QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (
        *_llama_like(num_key_value_heads=4),
        *_QWEN_MOE,
        _num_experts("num_experts", "num_local_experts"),
        always(qk_norm=True),
        only(attention_bias=False),
    ),
    moe=True,
)
_QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (
        *_llama_like(num_key_value_heads=16),
        *_QWEN_MOE,
        same("moe.num_experts", "num_experts"),
        same("moe.shared_ffn_hidden_size", "shared_expert_intermediate_size", 5632),
        always(**{"moe.shared_gate": True}),
        same("qkv_bias", "qkv_bias", True),
    ),
    moe=True,
)
_OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    (
        *_llama_like(num_key_value_heads=None, norm_eps=1e-5),
        *_ROUTER,
        same("moe.normalize", "norm_topk_prob", False),
        _num_experts("num_experts", "num_local_experts"),
        _WIDTH_OF_EXPERTS,
        always(qk_norm="projection"),
        Trait((), _check_head_dim),
        Trait(("layer_types",), _read_no_window),
        only(attention_bias=False, clip_qkv=None),
        only(written=False, sliding_window=None),
    ),
    moe=True,
)
_OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    (
        *_llama_like(num_key_value_heads=None, norm_eps=1e-5),
        always(norm_position="output", qk_norm="projection"),
        Trait(("layer_types",), _read_no_window),
        only(attention_bias=False),
        only(written=False, clip_qkv=None, sliding_window=None),
    ),
)
_ATTENTION_SCALE = Trait(
    ("query_pre_attn_scalar",),
    lambda hf: {"attention_scale": hf.get("query_pre_attn_scalar", 256) ** -0.5},
    lambda model: {"query_pre_attn_scalar": round(model.score_scale**-2)},
)
_GEMMA = (
    *_sizes_and_norm("hidden_activation", "gelu_pytorch_tanh", tied=True),
    same("num_query_groups", "num_key_value_heads", 4),
    same("head_dim", "head_dim", 256),
    same("norm_eps", "rms_norm_eps", 1e-6),
    aliases(hidden_act="hidden_activation"),
    always(position_embedding="rope", norm_position="both", zero_centered_gamma=True),
    Trait(
        (),
        # A number that is none is refused elsewhere.
        lambda hf: {"embedding_multiplier": x**0.5} if isinstance(x := hf.get("hidden_size"), int) else {},
    ),
    _ATTENTION_SCALE,
    only(attention_bias=False),
    Trait((), _check_llama),
)
_GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    (
        *_GEMMA,
        Trait((*_ROPE_KEYS, _ORIGINAL_LENGTH), lambda hf: _read_rope(hf, 1e4), _write_rope),
        same("attention_softcap", "attn_logit_softcapping", 50.0, nullable=True),
        same("logit_softcap", "final_logit_softcapping", 30.0, nullable=True),
        _pattern_of_windows(4096, lambda hf: 2),
        aliases(sliding_window_size="sliding_window"),
        only(written=False, use_bidirectional_attention=None),
    ),
)
_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
_GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (
        *_GEMMA,
        always(qk_norm=True),
        Trait((*_ROPE_KEYS, _ORIGINAL_LENGTH, "rope_local_base_freq"), _read_local_rope, _write_local_rope),
        same("attention_softcap", "attn_logit_softcapping", None, nullable=True),
        same("logit_softcap", "final_logit_softcapping", None, nullable=True),
        _pattern_of_windows(
            4096, lambda hf: hf.get("sliding_window_pattern", 6), "sliding_window_pattern", "_sliding_window_pattern"
        ),
        only(written=False, use_bidirectional_attention=False),
    ),
)
_DEEPSEEK = (
    *_any_rope_model(rope_theta=1e4),
    always(norm_eps=1e-6),
    only(rms_norm_eps=1e-6, why="which transformers uses for the norms of the latents, whatever this key says"),
    same("latent_attention.q_rank", "q_lora_rank", nullable=True),
    same("latent_attention.kv_rank", "kv_lora_rank"),
    same("latent_attention.nope_head_dim", "qk_nope_head_dim"),
    same("latent_attention.rope_head_dim", "qk_rope_head_dim"),
    same("latent_attention.value_head_dim", "v_head_dim"),
    Trait(
        tuple(_DERIVED_WIDTHS),
        _check_derived_widths,
        # The default of transformers is 128 in deepseek_v3, whatever the number of heads.
        lambda model: {"num_key_value_heads": model.num_attention_heads},
    ),
    only(attention_bias=False),
    same("moe.top_k", "num_experts_per_tok"),
    same("moe.ffn_hidden_size", "moe_intermediate_size"),
    # Not read by transformers, but by other engines.
    only(moe_layer_freq=1),
    # Of losses that ours is not, as router_aux_loss_coef.
    Trait(("aux_loss_alpha", "seq_aux"), lambda hf: {}),
)
_DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    (
        *_DEEPSEEK,
        _num_experts("n_routed_experts", "num_experts"),
        _shared_experts(2),
        same("moe.first_dense_layers", "first_k_dense_replace", 0),
        same("moe.scaling_factor", "routed_scaling_factor", 1.0),
        Trait(("topk_method", "n_group", "topk_group"), _read_group_method, _write_group_method),
        # transformers never normalizes; other engines do if the key says so.
        always(**{"moe.normalize": False}),
        only(norm_topk_prob=False, scoring_func="softmax"),
        only(written=False, mlp_bias=False),
        Trait((), _check_llama),
    ),
    moe=True,
    latent=True,
)
_DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (
        *_DEEPSEEK,
        only(rope_interleave=True),
        _num_experts("n_routed_experts", "num_local_experts"),
        _shared_experts(1),
        same("moe.first_dense_layers", "first_k_dense_replace", 3),
        same("moe.normalize", "norm_topk_prob", True),
        same("moe.scaling_factor", "routed_scaling_factor", 2.5),
        Trait(("n_group", "topk_group"), _read_groups, _write_groups),
        always(**{"moe.score": "sigmoid", "moe.selection_bias": True}),
        # Not read by transformers, but by other engines.
        only(scoring_func="sigmoid", topk_method="noaux_tc"),
        # Not written: transformers has no such layers.
        Trait(
            (MTP_LAYERS, "num_mtp_layers"),
            lambda hf: {"mtp_num_layers": hf.get(MTP_LAYERS) or 0},
            lambda model: {MTP_LAYERS: 0},
        ),
    ),
    moe=True,
    latent=True,
)
_NO_PADDING = Trait((), lambda hf: {}, lambda model: {"pad_token_id": None})
"""Where the default of `transformers` is a token that a smaller vocabulary lacks."""
_PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    (
        *_heads_like_llama(None, None, 1e-5),
        always(position_embedding="rope"),
        Trait((*_ROPE_KEYS, _ORIGINAL_LENGTH), _read_phi3_rope, _write_phi3_rope),
        _NO_PADDING,
        _window_of_all(None),
        # The others are in Phi-4-mini's, and are read by code of its own.
        only(written=False, attention_bias=False, mlp_bias=False, lm_head_bias=False),
        only(written=False, full_attn_mod=1, interpolate_factor=1),
    ),
)
_MULTIPLIERS = (
    same("embedding_multiplier", "embedding_multiplier", 1.0),
    same("residual_multiplier", "residual_multiplier", 1.0),
    same("logits_scaling", "logits_scaling", 1.0),
    same("attention_scale", "attention_multiplier", 1.0),
)
_GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    (
        *_llama_like(num_key_value_heads=None),
        *_MULTIPLIERS,
        _LLAMA_BIASES,
        Trait(("layer_types",), _read_no_window),
        only(written=False, sliding_window=None),
    ),
)
_GRANITE_MOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    (
        *_llama_like(num_key_value_heads=None),
        *_MULTIPLIERS,
        *_ROUTER,
        _num_experts("num_local_experts", "num_experts"),
        _WIDTH_OF_EXPERTS,
        Trait(("layer_types",), _read_no_window),
        only(written=False, sliding_window=None, attention_bias=False),
    ),
    moe=True,
)
_GLM_TRAITS = (
    *_heads_like_llama(2, 128, 1.5625e-7),
    always(position_embedding="rope"),
    _partial_rope(0.5),
    _NO_PADDING,
    Trait(("layer_types",), _read_no_window),
    only(written=False, sliding_window=None),
)
_GLM = Family("glm", "GlmForCausalLM", (*_GLM_TRAITS, same("qkv_bias", "attention_bias", True)))
_GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    (*_GLM_TRAITS, same("qkv_bias", "attention_bias", False), always(norm_position="both")),
)
_GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    (
        same("num_layers", "num_hidden_layers"),
        same("hidden_size", "hidden_size"),
        same("num_attention_heads", "num_attention_heads"),
        same("ffn_hidden_size", "intermediate_size"),
        same("vocab_size", "vocab_size"),
        same("max_position_embeddings", "max_position_embeddings", None),
        same("activation", "hidden_act", "gelu", _activations(gated=False)),
        same("norm_eps", "layer_norm_eps", 1e-5),
        same("tie_embeddings", "tie_word_embeddings", False),
        same("parallel_block", "use_parallel_residual", True),
        _INIT_STD,
        always(position_embedding="rope", normalization="layernorm", linear_bias=True),
        Trait(
            ("rotary_pct", "rotary_emb_base", "rope_scaling", "rope_parameters", _ORIGINAL_LENGTH),
            _read_neox_rope,
            _write_neox_rope,
        ),
        only(attention_bias=True),
        Trait((), _check_llama),
    ),
)
_OPT = Family(
    "opt",
    "OPTForCausalLM",
    (
        same("num_layers", "num_hidden_layers"),
        same("hidden_size", "hidden_size"),
        same("num_attention_heads", "num_attention_heads"),
        same("ffn_hidden_size", "ffn_dim"),
        same("vocab_size", "vocab_size"),
        same("max_position_embeddings", "max_position_embeddings", 2048),
        same("activation", "activation_function", "relu", {"relu": "relu"}),
        same("tie_embeddings", "tie_word_embeddings", True),
        same("init_std", "init_std", 0.02),
        always(position_embedding="learned", normalization="layernorm", norm_eps=1e-5, linear_bias=True),
        Trait(
            ("word_embed_proj_dim",),
            _check_embedding_width,
            lambda model: {"word_embed_proj_dim": model.hidden_size},
        ),
        only(do_layer_norm_before=True, enable_bias=True, layer_norm_elementwise_affine=True),
        only(written=False, _remove_final_layer_norm=False),
    ),
)
_BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    (
        either("num_layers", "n_layer", "num_hidden_layers"),
        either("hidden_size", "hidden_size", "n_embed"),
        either("num_attention_heads", "n_head", "num_attention_heads"),
        same("vocab_size", "vocab_size"),
        same("norm_eps", "layer_norm_epsilon", 1e-5),
        same("tie_embeddings", "tie_word_embeddings", True),
        _INIT_STD,
        always(
            position_embedding="alibi", normalization="layernorm", activation="gelu_tanh", linear_bias=True,
            embedding_norm=True,
        ),
        only(apply_residual_connection_post_layernorm=False),
        only(written=False, n_inner=None),
        # Of the program that trained it; transformers does not read them.
        Trait(
            (
                "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi",
                "seq_length", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id",
            ),
            lambda hf: {},
        ),
    ),
)  # fmt: skip


_LENGTHS = ("max_position_embeddings", "model_max_length")


def _read_baichuan_positions(hf: HfConfig) -> dict[str, Any]:
    """Which of the two models it is, its config.json does not say: they have different names for the length."""
    if "z_loss_weight" in hf:
        raise ValueError("z_loss_weight: this is Baichuan 2, whose output layer normalizes its weights")
    found = [key for key in _LENGTHS if key in hf]
    if len(found) != 1:
        raise ValueError(
            f"has {' and '.join(found) or 'neither'}: supported: {_LENGTHS[0]} (rope) or {_LENGTHS[1]} (ALiBi)"
        )
    kind = "rope" if found == [_LENGTHS[0]] else "alibi"
    return {"position_embedding": kind, "max_position_embeddings": hf[found[0]]}


_BAICHUAN = Family(
    "baichuan",
    "BaichuanForCausalLM",
    (
        *(trait for trait in _sizes_and_norm() if trait.keys != ("max_position_embeddings",)),
        same("norm_eps", "rms_norm_eps", 1e-6),
        Trait(
            (*_LENGTHS, "z_loss_weight"),
            _read_baichuan_positions,
            lambda model: {_LENGTHS[model.position_embedding == "alibi"]: model.max_position_embeddings},
        ),
        Trait(("_from_model_config",), lambda hf: {}),
    ),
    also="BaiChuanForCausalLM",
)


def _read_given_rope(hf: HfConfig) -> dict[str, Any]:
    if not hf.get("rope_scaling") and not hf.get("rope_parameters"):
        refuse("rope_scaling", None, "a dictionary, as releases of transformers differ in its default for gpt_oss")
    return _read_rope(hf, 1.5e5)


def _write_given_rope(model: ModelConfig) -> dict[str, Any]:
    rope = _write_rope(model)
    plain = {"rope_type": "default", "rope_theta": model.rope_theta}
    return rope if rope["rope_scaling"] else rope | {"rope_parameters": plain}


_GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        *_heads_like_llama(8, 64, 1e-5),
        always(position_embedding="rope", activation="clamped_swiglu", linear_bias=True, attention_sinks=True),
        Trait((*_ROPE_KEYS, _ORIGINAL_LENGTH), _read_given_rope, _write_given_rope),
        _pattern_of_windows(128, lambda hf: 2),
        *_ROUTER,
        _num_experts("num_local_experts", "num_experts"),
        _WIDTH_OF_EXPERTS,
        aliases(experts_per_token="num_experts_per_tok"),
        only(hidden_act="silu", swiglu_limit=7.0, attention_bias=True),
        only(written=False, swiglu_alpha=1.702),
        # Not read by transformers: original_max_position_embeddings under another name.
        Trait(("initial_context_length",), lambda hf: {}),
    ),
    moe=True,
)
_BERT_HEADS = {"BertForPreTraining": True, "BertForMaskedLM": False}
"""Whether each class has the pooler and the binary head."""


def _read_bert_head(hf: HfConfig) -> dict[str, Any]:
    """Of the class that config.json names; folders of BertForMaskedLM may have the tensors of the other head too."""
    named = hf.get("architectures") or ["BertForMaskedLM"]
    if len(named) != 1 or named[0] not in _BERT_HEADS:
        refuse("architectures", named, " or ".join(repr([name]) for name in _BERT_HEADS))
    return {"binary_head": _BERT_HEADS[named[0]]}


def _write_bert_head(model: ModelConfig) -> dict[str, Any]:
    return {"architectures": [name for name, binary in _BERT_HEADS.items() if binary == model.binary_head]}


_BERT_LIKE = (
    same("num_layers", "num_hidden_layers"),
    same("hidden_size", "hidden_size"),
    same("num_attention_heads", "num_attention_heads"),
    same("ffn_hidden_size", "intermediate_size"),
    same("vocab_size", "vocab_size"),
    same("token_types", "type_vocab_size", 2),
    same(
        "activation",
        "hidden_act",
        "gelu",
        {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
    ),
    same("norm_eps", "layer_norm_eps", 1e-12),
    _INIT_STD,
    always(
        architecture="bert",
        position_embedding="learned",
        normalization="layernorm",
        norm_position="post",
        embedding_norm=True,
        linear_bias=True,
        tie_embeddings=True,
    ),
    only(written=False, position_embedding_type="absolute"),
    only(tie_word_embeddings=True, why="as the head's bias is shared like its weight"),
    only(written=False, is_decoder=False),
    same("attention_dropout", "attention_probs_dropout_prob", 0.1),
    same("hidden_dropout", "hidden_dropout_prob", 0.1),
    # The pooler of multilingual releases, which no class reads.
    Trait(
        (
            "directionality",
            "pooler_fc_size",
            "pooler_num_attention_heads",
            "pooler_num_fc_layers",
            "pooler_size_per_head",
            "pooler_type",
        ),
        lambda hf: {},
    ),
)
_BERT = Family(
    "bert",
    "BertForPreTraining",
    (
        *_BERT_LIKE,
        same("max_position_embeddings", "max_position_embeddings", 512),
        Trait(("architectures",), _read_bert_head, _write_bert_head),
    ),
    kind="bert",
)
ROBERTA_OFFSET = 2
"""Rows of RoBERTa's position table before that of the first token."""


def _read_roberta_positions(hf: HfConfig) -> dict[str, Any]:
    rows = hf.get("max_position_embeddings", 512)
    if not isinstance(rows, int) or rows <= ROBERTA_OFFSET:
        refuse("max_position_embeddings", rows, f"more than {ROBERTA_OFFSET}, the rows before the first token's")
    if hf.get("pad_token_id", 1) != 1:
        refuse("pad_token_id", hf["pad_token_id"], "1, which positions begin after")
    return {"max_position_embeddings": rows - ROBERTA_OFFSET}


_ROBERTA = Family(
    "roberta",
    "RobertaForMaskedLM",
    (
        *_BERT_LIKE,
        Trait(
            ("max_position_embeddings", "pad_token_id"),
            _read_roberta_positions,
            lambda model: {
                "max_position_embeddings": (model.max_position_embeddings or 0) + ROBERTA_OFFSET,
                "pad_token_id": 1,
            },
        ),
        always(transform_activation="gelu"),
    ),
    kind="bert",
)
_T5_ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu_tanh"}


def _check_t5_activation(hf: HfConfig) -> dict[str, Any]:
    """Keys that follow from feed_forward_proj, but that transformers writes beside it."""
    gated = hf.get("feed_forward_proj", "relu") == "gated-gelu"
    for key, value in (("is_gated_act", gated), ("dense_act_fn", "gelu_new" if gated else "relu")):
        if hf.get(key, value) != value:
            refuse(key, hf[key], f"{value!r}, as feed_forward_proj says")
    return {}


def _read_t5_tied(hf: HfConfig) -> dict[str, Any]:
    """transformers 5 writes tie_word_embeddings = true always, and what it was under the other key."""
    return {
        "tie_embeddings": _true_by_default(hf, "tie_word_embeddings") and _true_by_default(hf, "scale_decoder_outputs")
    }


def _true_by_default(hf: HfConfig, key: str) -> bool:
    value = hf.get(key, True)
    if not isinstance(value, bool):
        refuse(key, value, "true, false")
    return value


_T5 = Family(
    "t5",
    "T5ForConditionalGeneration",
    (
        same("num_layers", "num_layers"),
        same("num_decoder_layers", "num_decoder_layers", None),
        same("hidden_size", "d_model"),
        same("num_attention_heads", "num_heads"),
        same("head_dim", "d_kv", 64),
        same("ffn_hidden_size", "d_ff"),
        same("vocab_size", "vocab_size"),
        same("relative_attention_num_buckets", "relative_attention_num_buckets", 32),
        same("relative_attention_max_distance", "relative_attention_max_distance", 128),
        same("norm_eps", "layer_norm_epsilon", 1e-6),
        same("activation", "feed_forward_proj", "relu", _T5_ACTIVATIONS),
        Trait(("is_gated_act", "dense_act_fn"), _check_t5_activation),
        Trait(
            ("tie_word_embeddings", "scale_decoder_outputs"),
            _read_t5_tied,
            lambda model: {"tie_word_embeddings": model.tie_embeddings},
        ),
        always(architecture="t5", position_embedding="relative", normalization="rmsnorm"),
        only(is_encoder_decoder=True),
        only(written=False, is_decoder=False),
        Trait(
            ("dropout_rate",),
            lambda hf: {f"{kind}_dropout": hf.get("dropout_rate", 0.1) for kind in ("hidden", "attention")},
            lambda model: {"dropout_rate": model.hidden_dropout},
        ),
        # Initial values, and a length that no class reads.
        Trait(("classifier_dropout", "initializer_factor", "n_positions"), lambda hf: {}),
    ),
    kind="t5",
)
_ALL = (
    _LLAMA, _MISTRAL, _QWEN2, _QWEN3, _OPT, _GPT2, _OLMO2, _GEMMA2, _GEMMA3, _PHI3, _GRANITE, _BLOOM, _GLM,
    _GLM4, _GPT_NEOX, _BAICHUAN,
    _MIXTRAL, _GRANITE_MOE, _GPT_OSS, _QWEN3_MOE, _QWEN2_MOE, _OLMOE, _DEEPSEEK_V2, _DEEPSEEK_V3,
    _BERT, _ROBERTA, _T5,
)  # fmt: skip
FAMILIES = {family.model_type: family for family in _ALL}
"""In order of preference where several can express a model."""

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
        if "layer" in key and "norm" not in key and type(value) in (int, float) and value > _MOST_LAYERS:
            refuse(key, value, f"up to {_MOST_LAYERS:,}")


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
        values_of = ", ".join(f"{key} = {hf[key]!r}" for key in unknown)
        raise ValueError(
            f"{values_of}: megafp8 does not know {'this key' if len(unknown) == 1 else 'these keys'} of {kind} models, "
            f"which may change what the model computes; if that is not so, remove {' and '.join(unknown)}"
        )
    for section in _SECTIONS:
        keys = [key for key in fields if key.startswith(f"{section}.")]
        fields |= {section: {key.removeprefix(f"{section}."): fields.pop(key) for key in keys}} if keys else {}
    try:
        model = ModelConfig(**fields)
    except ValueError as error:  # pydantic's, of a value that is no number
        raise ValueError(" ".join(str(error).split())) from None
    check_model(model)
    return family, model


def check_model(model: ModelConfig) -> None:
    """Raise ValueError for attention or experts that neither transformers nor megafp8 can build."""
    rules = attention_heads, moe_checks.experts, encoder_checks.model
    if problems := [str(problem) for rule in rules for problem in rule(model)]:
        raise ValueError("; ".join(problems))


def write_config(family: Family, model: ModelConfig) -> dict[str, Any]:
    """config.json of `model` as one of `family`; complete only if `choose` allows that family."""
    model = model.without_mup
    written: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for trait in family.traits:
        written |= trait.write(model)
    return written


def choose(model: ModelConfig) -> Family:
    """The first family that can express `model`. Raises ValueError naming what the nearest one cannot."""
    check_model(model)
    nearest: tuple[int, str] | None = None
    kind = model.moe is not None, model.latent_attention is not None, model.architecture
    for family in FAMILIES.values():
        if (family.moe, family.latent, family.kind) != kind:
            continue
        lacks = _lacks(family, model)
        if not lacks:
            return family
        if nearest is None or len(lacks) < nearest[0]:
            nearest = len(lacks), f"{family.model_type}, lacks {', '.join(lacks)}"
    if nearest is None:
        latent = "" if model.latent_attention is None else ", latent attention (model.latent_attention)"
        raise ValueError(
            f"no Hugging Face family has this model: model.architecture {model.architecture}{latent} "
            f"{'with' if model.moe else 'without'} experts (model.moe)"
        )
    raise ValueError(f"no Hugging Face family has this model; the nearest, {nearest[1]}")


def _lacks(family: Family, model: ModelConfig) -> list[str]:
    """The fields of `model` that the family cannot express."""
    try:
        _, again = read_config(write_config(family, model))
    except ValueError as error:
        return [str(error)]
    ours, theirs = canonical(model), canonical(again)
    return [f"model.{key} = {ours[key]!r} (there {theirs[key]!r})" for key in differences(model, again)]


def canonical(model: ModelConfig) -> dict[str, Any]:
    """All fields of `model`, and of its sections as moe.top_k, with defaults that depend on other fields resolved."""
    model = model.without_mup
    fields = {name: getattr(model, name) for name in ModelConfig.model_fields}
    for name, section in _SECTIONS.items():
        if fields[name] is not None:
            fields |= {f"{name}.{key}": getattr(fields[name], key) for key in section.model_fields}
    if model.moe is not None:
        fields["moe.ffn_hidden_size"] = model.expert_size
    return fields | {
        "num_query_groups": model.query_groups,
        "head_dim": model.channels,
        "ffn_hidden_size": model.ffn_size,
        "num_decoder_layers": model.decoder_blocks or None,
        "attention_scale": model.score_scale,
        "transform_activation": model.head_activation,
        "rope_local_theta": model.rope_local_theta if _has_local_rope(model) else None,
    }


def _has_local_rope(model: ModelConfig) -> bool:
    """Whether layers with a window have other rotary frequencies than the others."""
    sections = model.yarn, model.longrope, model.rope_scaling
    scaled = any(section is not None for section in sections) or model.rope_interpolation_factor > 1
    return model.sliding_window is not None and (scaled or model.rope_local_theta != model.rope_theta)


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    """The fields in which two models differ that change what a model computes from given weights."""
    one, other = one.without_mup, other.without_mup
    a, b = canonical(one), canonical(other)
    ignored = {"vocab_multiple", "init_std", "mtp_num_layers", "mtp_loss_scaling_factor"}
    ignored |= {"hidden_dropout", "attention_dropout"}
    if one.attention_scale is None and other.attention_scale is None:
        ignored.add("attention_scale")  # it follows from head_dim
    if one.position_embedding == other.position_embedding:
        ignored |= set() if one.position_embedding == "learned" else {"max_position_embeddings"}
        ignored |= (
            set()
            if one.position_embedding == "rope"
            else {key for key in a if "rope" in key or "rotary" in key or key == "yarn"}
        )
        of_distances = {"relative_attention_num_buckets", "relative_attention_max_distance"}
        ignored |= set() if one.position_embedding == "relative" else of_distances
    if one.linear_bias and other.linear_bias:
        ignored.add("qkv_bias")  # it adds nothing then
    for section in _SECTIONS:
        if a[section] is None or b[section] is None:
            ignored |= {key for key in a if key.startswith(f"{section}.")}
        else:
            ignored.add(section)
    if one.latent_attention is not None and other.latent_attention is not None:
        ignored.add("head_dim")  # the sum of two widths
    if one.moe is not None and other.moe is not None:
        ignored |= {f"moe.{key}" for key in ("bias_update_rate", "aux_loss", "aux_loss_scope", "z_loss")}  # of training
        dense = [[i for i in range(m.num_layers) if m.moe_of(i) is None] for m in (one, other)]
        ignored |= {"moe.first_dense_layers", "moe.layer_interval"} if dense[0] == dense[1] else set()
        ignored |= {"ffn_hidden_size"} if dense == [[], []] else set()
        if all(m.top_groups in (None, m.num_groups) for m in (one.moe, other.moe)):
            ignored |= {"moe.num_groups", "moe.top_groups"}  # experts of all groups are chosen from
    return [key for key in a if key not in ignored and a[key] != b[key]]
