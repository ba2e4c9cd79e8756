"""DeepSeek-V4, with compressed attention, experts by token id in the first layers, and hyper-connections."""

from typing import Any

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import layer_list, layer_types, num_layers
from megafp8.conversion.huggingface.names import LLAMA, TensorNames, in_layers, usual
from megafp8.conversion.huggingface.rope import read_rope, write_rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, only, same, unread
from megafp8.layers.attention.record import YarnConfig
from megafp8.layers.compressed_attention.record import CompressedAttentionConfig

_WINDOW, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_SPARSE: 4, _HEAVY: 128}
_RATIOS = {0: _WINDOW, **{rate: kind for kind, rate in _RATES.items()}}  # of compress_ratios, an older key
_OF_ALL = {"q_rank": ("q_lora_rank", 1024), "output_groups": ("o_groups", 8), "output_rank": ("o_lora_rank", 1024)}
_OF_INDEXER = {
    "top_k": ("index_topk", 512), "index_heads": ("index_n_heads", 64), "index_head_dim": ("index_head_dim", 128)
}  # fmt: skip
_KIND, _ROPE, _PARTIAL, _FACTOR = "compressed_attention", "rope_parameters", "partial_rotary_factor", "attention_factor"


def _types(hf: HfConfig) -> list[str]:
    layers, ratios = num_layers(hf), layer_list(hf, "compress_ratios", [*_RATIOS], longer=True)
    by_default = [_HEAVY if i < 2 or i % 2 == 0 else _SPARSE for i in range(layers)]
    by_ratio = by_default if ratios is None else [_RATIOS[ratio] for ratio in ratios]
    return layer_types(hf, (_WINDOW, _SPARSE, _HEAVY)) or by_ratio


def _read_mixers(hf: HfConfig) -> Fields:
    kinds, rates = _types(hf), _RATES | (hf.get("compress_rates") or {})
    if rates.keys() != _RATES.keys():
        refuse("compress_rates", hf["compress_rates"], f"a dictionary of {' and '.join(_RATES)}")
    lists = {ours: [hf.get(*key)] * len(kinds) for ours, key in _OF_ALL.items()}
    lists |= {ours: [hf.get(*key) if kind == _SPARSE else None for kind in kinds] for ours, key in _OF_INDEXER.items()}
    lists |= {"kind": [_KIND] * len(kinds), "compress_rate": [rates.get(kind) for kind in kinds]}
    ropes = {label: _read_rope(hf, label) for label in ("main", "compress")}
    if ropes["main"][_PARTIAL] != ropes["compress"][_PARTIAL]:
        refuse(_ROPE, hf[_ROPE], f"the same {_PARTIAL} for both")
    for key in ("rope_theta", "rope_interpolation_factor", "rope_scaling", "yarn"):
        lists[key] = [ropes["main" if kind == _WINDOW else "compress"].get(key) for kind in kinds]
    return {f"mixer.{ours}": values for ours, values in lists.items()} | {_PARTIAL: ropes["main"][_PARTIAL]}


def _read_rope(hf: HfConfig, label: str) -> Fields:
    """Read the rotary embedding of layers with only a window (`main`), or of layers with compressed entries."""
    top, rope = ("rope_theta", 1e4) if label == "main" else ("compress_rope_theta", 1.6e5), hf.get(_ROPE) or {}
    is_nested = isinstance(rope, dict) and {"main", "compress"} <= rope.keys()
    scaled = dict(rope[label] if is_nested else {} if label == "main" else rope or hf.get("rope_scaling") or {})
    width, rotated = hf.get("head_dim", 512), hf.get("qk_rope_head_dim")
    partial = rotated / width if isinstance(rotated, int) and isinstance(width, int) else 1 / 8
    partial = scaled.pop(_PARTIAL, None) or hf.get(_PARTIAL) or partial
    unscaled = scaled.get(_FACTOR, None if is_nested else 1.0) == 1.0  # rotated channels are not multiplied
    if unscaled:
        scaled.pop(_FACTOR, None)
    theta = scaled.get("rope_theta", hf.get(*top)) if is_nested else hf.get(*top)
    fields = read_rope({_ROPE: scaled | {"rope_theta": theta}}, 1e4) | {_PARTIAL: partial}
    if unscaled and "yarn" in fields:
        fields["yarn"] = fields["yarn"] | {"mscale": 0.0}
    return fields


def _write_mixers(ours: Fields) -> Keys:
    if {*ours["mixer.kind"]} != {_KIND}:
        return {}  # a model of another family
    by_layer, top_ks = ours["mixer.compress_rate"], ours["mixer.top_k"]
    kinds = [_WINDOW if m is None else _HEAVY if k is None else _SPARSE for m, k in zip(by_layer, top_ks, strict=True)]
    layers = {kind: i for i, kind in reversed([*enumerate(kinds)])}  # the first of each kind
    sparse, compressed = layers.get(_SPARSE, 0), layers.get(_SPARSE, layers.get(_HEAVY, 0))
    written: Keys = {key: ours[f"mixer.{name}"][0] for name, (key, _) in _OF_ALL.items()}
    written |= {key: ours[f"mixer.{name}"][sparse] or default for name, (key, default) in _OF_INDEXER.items()}
    rates = {kind: by_layer[layers[kind]] if kind in layers else rate for kind, rate in _RATES.items()}
    ropes = {"main": _write_rope(ours, layers.get(_WINDOW)), "compress": _write_rope(ours, compressed)}
    thetas = {"rope_theta": ropes["main"]["rope_theta"], "compress_rope_theta": ropes["compress"]["rope_theta"]}
    written |= {"layer_types": kinds, "compress_rates": rates, _ROPE: ropes, _PARTIAL: ours[_PARTIAL]}
    return written | thetas | {"qk_rope_head_dim": int(ours["head_dim"] * ours[_PARTIAL])}


def _write_rope(ours: Fields, layer: int | None) -> dict[str, Any]:
    keys = ("rope_theta", "longrope", "yarn", "rope_scaling", "rope_interpolation_factor")
    fields = {key: ours[key] if layer is None else ours[f"mixer.{key}"][layer] for key in keys}
    yarn, factor = fields["yarn"], {}
    if isinstance(yarn, YarnConfig) and yarn.mscale == 0 and yarn.mscale_all_dim == 0:
        fields["yarn"], factor = yarn.model_copy(update={"mscale": 1.0}), {_FACTOR: 1.0}
    written = write_rope(fields)
    scaled = written["rope_scaling"] or {"rope_type": "default"}
    return {**scaled, **factor, "rope_theta": written["rope_theta"], _PARTIAL: ours[_PARTIAL]}


def _read_ffns(hf: HfConfig) -> Fields:
    kinds, hashed = layer_list(hf, "mlp_layer_types", ("hash_moe", "moe")), hf.get("num_hash_layers", 3)
    if kinds is None:
        kinds = ["hash_moe" if i < hashed else "moe" for i in range(num_layers(hf))]
    return {
        "ffn.kind": ["moe"] * len(kinds), "ffn.routing": ["hash" if x == "hash_moe" else "top_k" for x in kinds],
        "moe.shared_ffn_hidden_size": hf.get("moe_intermediate_size"),
    }  # fmt: skip


def _write_ffns(ours: Fields) -> Keys:
    return {"mlp_layer_types": ["hash_moe" if x == "hash" else "moe" for x in ours["ffn.routing"]]}


_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
_PARAMETERS = ("fn", "base", "scale")
_NAMES = {
    "attention_norm": "attn_norm", "mlp_norm": "ffn_norm", "mlp.router": "ffn.gate",
    "mlp.router.bias": "ffn.gate.bias", "mlp.router.table": "ffn.gate.tid2eid",
    **{f"mlp.experts.*.{ours}": f"ffn.experts.*.{theirs}" for ours, theirs in _EXPERT.items()},
    **{f"{ours}_connection.{x}": f"hc_{theirs}_{x}" for ours, theirs in (("attention", "attn"), ("mlp", "ffn"))
       for x in _PARAMETERS},
    **{f"mlp.shared.{ours}": f"ffn.shared_experts.{theirs}" for ours, theirs in _EXPERT.items()},
}  # fmt: skip
FAMILIES = (
    Family("deepseek_v4", "DeepseekV4ForCausalLM", (
        same(
            num_layers="num_hidden_layers", hidden_size="hidden_size", num_attention_heads="num_attention_heads",
            vocab_size="vocab_size", head_dim=("head_dim", 512), sliding_window=("sliding_window", 128),
            norm_eps=("rms_norm_eps", 1e-6),
        ),
        traits.INIT_STD, traits.POSITIONS, traits.UNTIED, always(normalization="rmsnorm", activation="limited_swiglu"),
        only(hidden_act="silu", swiglu_limit=10.0, num_key_value_heads=1, attention_bias=False, attention_dropout=0.0),
        only(written=False, mlp_bias=False, topk_method="noaux_tc"),
        Trait(
            ("layer_types", "compress_ratios", "compress_rates", "compress_rope_theta", "qk_rope_head_dim", _ROPE,
             _PARTIAL, "rope_theta", "rope_scaling",
             *(key for table in (_OF_ALL, _OF_INDEXER) for key, _ in table.values())),
            _read_mixers, _write_mixers,
        ),
        Trait(("mlp_layer_types", "num_hash_layers"), _read_ffns, _write_ffns),
        same(
            "hyper_connections", streams=("hc_mult", 4), sinkhorn_iterations=("hc_sinkhorn_iters", 20),
            eps=("hc_eps", 1e-6),
        ),
        traits.num_experts("n_routed_experts", "num_local_experts"), only(n_shared_experts=1, norm_topk_prob=True),
        same(
            "moe", top_k=("num_experts_per_tok", 6), ffn_hidden_size="moe_intermediate_size",
            scaling_factor=("routed_scaling_factor", 1.5),
        ),
        always("moe", score="sqrtsoftplus", selection_bias=True, normalize=True), only(scoring_func="sqrtsoftplus"),
        traits.AUX_LOSS, unread("router_jitter_noise", pad_token_id=None, num_nextn_predict_layers=0),
    ), TensorNames({
        **LLAMA, **in_layers("model.layers.*", _NAMES, usual(CompressedAttentionConfig)), "output": "head",
        **{f"final_connection.{x}": f"model.hc_head.hc_{x}" for x in _PARAMETERS},
    }), moe=True, hyper=True,
        about="DeepSeek-V4, without multi-token prediction; the published weights in FP4 and FP8 are refused",
    ),
)  # fmt: skip
