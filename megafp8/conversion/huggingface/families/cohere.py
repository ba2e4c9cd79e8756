"""Command R (cohere), Command R7B and A (cohere2) with windows, and Command A+ (cohere2_moe) with experts."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import (
    FULL,
    SLIDING,
    full_every,
    layer_list,
    layer_types,
    num_layers,
    windows,
)
from megafp8.conversion.huggingface.names import like_llama
from megafp8.conversion.huggingface.rope import ROPE_KEYS, read_rope, rope, write_rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, expect, only, same, switch, unread

_LOGIT_SCALE = Trait(
    ("logit_scale",),
    lambda hf: {"logits_scaling": 1 / hf.get("logit_scale", 0.0625)},
    lambda ours: {"logit_scale": 1 / ours["logits_scaling"]},
)


def _model(rope: Trait) -> tuple[Trait, ...]:
    return (
        *traits.llama_like(None, norm_eps=1e-5, rope=rope, norm_eps_key="layer_norm_eps"), traits.TIED,
        always(parallel_block="shared_norm", normalization="layernorm_no_bias"), traits.NO_PADDING, _LOGIT_SCALE,
        switch("linear_bias", "attention_bias", "attention"), only(written=False, use_qk_norm=False),
        # Cohere's own code reads these keys.
        only(written=False, use_gated_activation=True, use_parallel_block=True, rotary_pct=1.0),
        only(written=False, position_embedding_type="rope_gptj", order_of_interleaved_layers="local_attn_first"),
        unread("use_embedding_sharing", "use_parallel_embedding", "layer_switch", "model_max_length"),
    )  # fmt: skip


_WINDOWS = windows(4096, full_every(4, "sliding_window_pattern"), "sliding_window_pattern")


def _read_windows(hf: HfConfig) -> Fields:
    """Read the window of each layer; the layers without a window have no rotary embedding."""
    fields = _WINDOWS.read(hf)
    return fields | {"mixer.position_embedding": _positions(fields["mixer.sliding_window"])}


def _positions(rotates: list[object]) -> list[str]:
    return ["rope" if x else "none" for x in rotates]


def _read_rope(hf: HfConfig) -> Fields:
    expect(hf, "rope_scaling", None, "null in this family, because transformers only reads rope_parameters")
    return read_rope(hf, 1e4)


def _write_rope(ours: Fields) -> Keys:
    written = write_rope(ours)
    scaling = written.pop("rope_scaling") or {"rope_type": "default"}
    return written | {"rope_parameters": scaling | {"rope_theta": written["rope_theta"]}}


_PREFIX_PATTERN = "prefix_dense_sliding_window_pattern"
_LAYER_KEYS = ("sliding_window", "layer_types", "mlp_layer_types", "sliding_window_pattern", _PREFIX_PATTERN)


def _read_layers(hf: HfConfig) -> Fields:
    """Read the parts of each layer. Layers with an MLP have a rotary embedding, too, if their window pattern is 1."""
    layers, dense, pattern = num_layers(hf), hf.get("first_k_dense_replace", 0), hf.get(_PREFIX_PATTERN, 1)
    ffns = layer_list(hf, "mlp_layer_types", ("dense", "sparse"))
    ffns = ["dense" if i < dense else "sparse" for i in range(layers)] if ffns is None else ffns
    if "sparse" not in ffns:
        refuse("mlp_layer_types", ffns, "a layer with experts")
    intervals = [
        (i + 1, pattern) if i < dense else (i + 1 - dense, hf.get("sliding_window_pattern", 4)) for i in range(layers)
    ]
    kinds = layer_types(hf) or [SLIDING if i % interval else FULL for i, interval in intervals]
    window = hf.get("sliding_window", 4096)
    by_layer = [window if kind == SLIDING else None for kind in kinds]
    rotates = [x or (ffn == "dense" and pattern == 1) for x, ffn in zip(by_layer, ffns, strict=True)]
    return {
        "mixer.sliding_window": by_layer, "mixer.position_embedding": _positions(rotates),
        "ffn.kind": ["mlp" if x == "dense" else "moe" for x in ffns],
    }  # fmt: skip


def _write_layers(ours: Fields) -> Keys:
    layers = zip(ours["mixer.sliding_window"], ours["mixer.position_embedding"], ours["ffn.kind"], strict=True)
    rotates = any(x is None and position == "rope" for x, position, ffn in layers if ffn == "mlp")
    ffns = ["dense" if x == "mlp" else "sparse" for x in ours["ffn.kind"]]
    return _WINDOWS.write(ours) | {"mlp_layer_types": ffns, _PREFIX_PATTERN: 1 if rotates else 2}


_EXPERT_KEYS = (
    "num_shared_experts", "shared_expert_combination_strategy", "prefix_dense_intermediate_size", "expert_selection_fn",
    "norm_topk_prob",
)  # fmt: skip
_COUNT, _COMBINATION, _DENSE_WIDTH, _SCORE, _NORMALIZE = _EXPERT_KEYS


def _read_experts(hf: HfConfig) -> Fields:
    width, count, how = hf["intermediate_size"], hf.get(_COUNT, 0), hf.get(_COMBINATION, "average")
    score = hf.get(_SCORE, "softmax")
    if how not in ("average", "sum"):
        refuse(_COMBINATION, how, "average, sum")
    if score not in ("softmax", "sigmoid"):
        refuse(_SCORE, score, "softmax, sigmoid")
    dense = hf.get(_DENSE_WIDTH)
    factor = 0.5 if count and how == "average" else 1.0
    return {
        "ffn_hidden_size": width if dense is None else dense, "moe.ffn_hidden_size": width,
        "moe.shared_ffn_hidden_size": count * width or None, "moe.score": score,
        "moe.normalize": score == "softmax" or hf.get(_NORMALIZE, True),
        "moe.scaling_factor": factor, "moe.shared_scaling_factor": factor,
    }  # fmt: skip


def _write_experts(ours: Fields) -> Keys:
    width = ours["moe.ffn_hidden_size"]
    return {
        "intermediate_size": width, _DENSE_WIDTH: ours["ffn_hidden_size"],
        _COUNT: (ours["moe.shared_ffn_hidden_size"] or 0) // width,
        _COMBINATION: "sum" if ours["moe.shared_scaling_factor"] == 1 else "average",
        _SCORE: ours["moe.score"], _NORMALIZE: ours["moe.normalize"],
    }  # fmt: skip


_NORM = Trait(
    ("rms_norm_eps",),
    lambda hf: {} if hf.get("rms_norm_eps") is None else {"normalization": "rmsnorm", "norm_eps": hf["rms_norm_eps"]},
    lambda ours: {"rms_norm_eps": ours["norm_eps"] if ours["normalization"] == "rmsnorm" else None},
)
_NAMES = like_llama(rotation="neighbors")
FAMILIES = (
    Family("cohere", "CohereForCausalLM", (*_model(rope(5e5)), *traits.NO_WINDOW), _NAMES,
        about="Command R and R+; `use_qk_norm: true` is refused",
    ),
    Family("cohere2", "Cohere2ForCausalLM", (
        *_model(rope(1e4)), Trait(_WINDOWS.keys, _read_windows, _WINDOWS.write),
    ), _NAMES,
        about="Command R7B, Command A",
    ),
    Family("cohere2_moe", "Cohere2MoeForCausalLM", (
        *_model(Trait(ROPE_KEYS, _read_rope, _write_rope)), same(head_dim=("head_dim", 128)), _NORM,
        same("moe", top_k=("num_experts_per_tok", 2)), traits.num_experts("num_experts", "num_local_experts"),
        Trait((*_LAYER_KEYS, "first_k_dense_replace"), _read_layers, _write_layers),
        Trait(_EXPERT_KEYS, _read_experts, _write_experts),
    ), _NAMES, moe=True,
        about="Command A+",
    ),
)  # fmt: skip
