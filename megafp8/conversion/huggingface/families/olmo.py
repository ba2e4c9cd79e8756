"""OLMo 2, OLMo 3, OLMoE, FlexOlmo, and OLMo Hybrid.

OLMo Hybrid has Gated DeltaNet with norms of its inputs, and some layers of attention with norms of its outputs.
"""

from typing import Any

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, full_every, layer_types, num_layers, windows
from megafp8.conversion.huggingface.names import OUTPUT_NORMS, Entries, like_llama
from megafp8.conversion.huggingface.rope import ROPE_KEYS, read_rope, rope, ropes_by_type, write_rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, only, same, unread
from megafp8.conversion.safetensors_format import Entry
from megafp8.spec import ModelSpec

_LAYERS = full_every(4)
_OLMO2 = (always(norm_position="output"), only(attention_bias=False), only(written=False, clip_qkv=None))
_EXPERTS = (
    *traits.ROUTER, traits.EXPERTS_ONLY, traits.num_experts("num_experts", "num_local_experts"),
    same("moe", normalize=("norm_topk_prob", False)),
)  # fmt: skip
_OLMO = (*traits.llama_like(None, norm_eps=1e-5), always(qk_norm="projection"), *traits.NO_WINDOW)
_LINEAR, _OURS = "linear_attention", "gated_delta_net"
_KEYS = {
    "num_key_heads": "linear_num_key_heads", "num_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim", "value_head_dim": "linear_value_head_dim",
    "conv_kernel_size": "linear_conv_kernel_dim", "allow_neg_eigval": "linear_allow_neg_eigval",
}  # fmt: skip


def _values(hf: HfConfig) -> dict[str, Any]:
    """Return the values of the keys of Gated DeltaNet. Missing keys follow from others."""
    values = {ours: hf.get(key) for ours, key in _KEYS.items()}
    heads = values["num_key_heads"] or hf["num_attention_heads"]
    width = values["key_head_dim"] or int(0.75 * hf["hidden_size"] / heads)
    usual = {
        "num_key_heads": heads, "num_value_heads": hf["num_attention_heads"], "key_head_dim": width,
        "value_head_dim": 2 * width, "conv_kernel_size": 4, "allow_neg_eigval": True,
    }  # fmt: skip
    return {ours: usual[ours] if value is None else value for ours, value in values.items()} | {"norm_eps": 1e-5}


def _read_layers(hf: HfConfig) -> Fields:
    types, layers = layer_types(hf, (_LINEAR, FULL)), num_layers(hf)
    if types is None:
        types = [FULL if i % 4 == 3 or (i == layers - 1 and layers < 4) else _LINEAR for i in range(layers)]
    if {*types} != {_LINEAR, FULL}:
        refuse("layer_types", sorted({*types}), f"both {_LINEAR} and {FULL} in this family")
    linear = [kind == _LINEAR for kind in types]
    return {
        "mixer.kind": [_OURS if x else "attention" for x in linear],
        "layer.norm_position": ["pre" if x else "output" for x in linear],
        **{f"mixer.{key}": [value if x else None for x in linear] for key, value in _values(hf).items()},
    }


def _write_layers(ours: Fields) -> Keys:
    kinds = ours["mixer.kind"]
    written: Keys = {"layer_types": [_LINEAR if kind == _OURS else FULL for kind in kinds]}
    if _OURS in kinds:
        written |= {key: ours[f"mixer.{name}"][kinds.index(_OURS)] for name, key in _KEYS.items()}
    return written


def _read_rope(hf: HfConfig) -> Fields:
    """Read the rotary embedding. If its base is null, as in published folders, there is none."""
    rope = hf.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_theta", 0) is not None:
        return read_rope(hf, 1e4)
    if others := {key: hf[key] for key in ROPE_KEYS if key != "rope_parameters" and hf.get(key) is not None}:
        refuse(next(iter(others)), next(iter(others.values())), "null, because rope_parameters.rope_theta is null")
    return {"position_embedding": "none"}


def _write_rope(ours: Fields) -> Keys:
    if ours["position_embedding"] == "rope":
        return write_rope(ours)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}


def _stored(model: ModelSpec, entries: Entries) -> Entries:
    """Return the tensors of a folder under the names in published folders.

    transformers 5.24 gives a norm of attention layers the name that it has in other layers. It splits the convolution,
    which it holds in one piece, into three equal parts, regardless of the widths of queries, keys and values.
    """
    for layer in range(model.num_layers):
        name, net = f"model.layers.{layer}", model.layers[layer].mixer
        is_linear = net.kind == _OURS
        others = _NORMS.items() if is_linear else [(y, x) for x, y in _NORMS.items() if x == "post_attention_layernorm"]
        for other, published in others:
            if f"{name}.{published}.weight" not in entries and f"{name}.{other}.weight" in entries:
                entries[f"{name}.{published}.weight"] = entries.pop(f"{name}.{other}.weight")
        if not is_linear:
            continue
        convolutions = [f"{name}.linear_attn.{x}_conv1d.weight" for x in "qkv"]
        whole = f"{name}.linear_attn.conv1d.weight"
        parts = [entries[x] for x in ([whole] if whole in entries else convolutions) if x in entries]
        keys, values = net.num_key_heads * net.key_head_dim, net.num_value_heads * net.value_head_dim
        if parts and (joined := Entry.joined(parts)).shape[0] == 2 * keys + values:
            entries.pop(whole, None)
            ends = [keys, 2 * keys, 2 * keys + values]
            entries |= {x: joined.rows(i, j) for x, i, j in zip(convolutions, [0, *ends[:2]], ends, strict=True)}
    return entries


_NORMS = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
"""Names of the norms in layers of linear attention: the name in transformers, and the name in published folders."""
_LINEARS = {"q": "q", "k": "k", "v": "v", "z": "g", "beta": "b", "decay": "a", "proj": "o"}
_PLACES = {
    **{ours: f"{theirs}_proj" for ours, theirs in _LINEARS.items()}, **{f"{x}_conv": f"{x}_conv1d" for x in "qkv"},
    "log_rate.weight": "A_log", "decay.bias": "dt_bias", "norm": "o_norm",
}  # fmt: skip

FAMILIES = (
    Family("olmo2", "Olmo2ForCausalLM", (*_OLMO, *_OLMO2), like_llama(OUTPUT_NORMS),
        about="OLMo 2",
    ),
    Family("olmo3", "Olmo3ForCausalLM", (
        *traits.llama_like(None, norm_eps=1e-5, rope=ropes_by_type(_LAYERS, 5e5, None, nested=True)),
        always(qk_norm="projection"), windows(4096, _LAYERS), *_OLMO2, traits.NO_PADDING,
    ), like_llama(OUTPUT_NORMS), rank=4,
        about="OLMo 3",
    ),
    Family("olmoe", "OlmoeForCausalLM", (
        *_OLMO, *_EXPERTS, traits.heads_fill(None), only(attention_bias=False, clip_qkv=None),
    ), moe=True, rank=4,
        about="OLMoE; no `clip_qkv`",
    ),
    Family("flex_olmo", "FlexOlmoForCausalLM", (
        *traits.llama_like(None, rope=rope(5e5)), always(qk_norm="projection"), *traits.NO_WINDOW, *_OLMO2, *_EXPERTS,
        traits.NO_PADDING,
    ), like_llama(OUTPUT_NORMS), moe=True, rank=4,
        about="FlexOlmo",
    ),
    Family("olmo_hybrid", "OlmoHybridForCausalLM", (
        *traits.llama_like(None, rope=Trait(ROPE_KEYS, _read_rope, _write_rope)), always(qk_norm="projection"),
        Trait(("layer_types", *_KEYS.values()), _read_layers, _write_layers), only(attention_bias=False),
        unread(*(f"linear_{key}" for key in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor"))),
        traits.NO_PADDING,
    ), like_llama(
        {"attention_norm": "attention_layer_norm", "mlp_norm": "feedforward_layer_norm"}, OUTPUT_NORMS,
        {f"attention.{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
        {f"{_OURS}.{ours}": f"linear_attn.{theirs}" for ours, theirs in _PLACES.items()}, stored=_stored,
    ), rank=4,
        about="OLMo Hybrid; folders of transformers 5.24 are read, and written as published",
    ),
)  # fmt: skip
