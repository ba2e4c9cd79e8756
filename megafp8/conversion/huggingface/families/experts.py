"""Models with ordinary attention and experts: Trinity, dots.llm1, gpt-oss, Hy3, Laguna, Mellum 2 and Solar Open."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import (
    FULL,
    SLIDING,
    full_every,
    layer_types,
    num_layers,
    rotated_windows,
    sparse_layers,
    windows,
)
from megafp8.conversion.huggingface.names import (
    MULTI_TOKEN_PREDICTION,
    like_llama,
    stacked_experts,
)
from megafp8.conversion.huggingface.rope import rope, ropes_of_types, stated_rope
from megafp8.conversion.keys import Fields, HfConfig, Trait, aliases, always, flag, only, same, unread

_TRINITY_INTERVAL = "global_attn_every_n_layers"


def _read_multiplier(hf: HfConfig) -> Fields:
    return {"embedding_multiplier": hf["hidden_size"] ** 0.5 if flag(hf, "mup_enabled") else 1.0}


_FIRST = "max_window_layers"


def _dots_types(hf: HfConfig) -> list[str]:
    """Return the kind of each layer if layer_types is missing: layers from max_window_layers on have a window."""
    first = num_layers(hf) if hf.get("sliding_window", 4096) is None else hf.get(_FIRST, 62)
    return [FULL if i < first else SLIDING for i in range(num_layers(hf))]


_HEADS = "num_attention_heads_per_layer"
_GATES = {True: "per-element", "head": "per-head"}
"""Values of gating by ours."""
_LAGUNA_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}  # fmt: skip


def _types(hf: HfConfig) -> list[str]:
    return layer_types(hf) or [FULL] * num_layers(hf)


def _read_heads(hf: HfConfig) -> Fields:
    heads = hf.get(_HEADS) or [hf.get("num_attention_heads")] * num_layers(hf)
    if not isinstance(heads, list) or len(heads) != num_layers(hf):
        refuse(_HEADS, heads, "one number for each layer")
    return {"mixer.num_attention_heads": heads}


def _read_gate(hf: HfConfig) -> Fields:
    gating = hf.get("gating", True)
    if gating is not True and gating not in _GATES.values():
        refuse("gating", gating, "true, per-head, per-element")
    return {"output_gate": True if gating == "per-element" else "head"}


_MELLUM_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5e5}, SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


FAMILIES = (
    Family("afmoe", "AfmoeForCausalLM", (
        *traits.llama_like(None, 128, 1e-5), always(qk_norm=True, output_gate=True, norm_position="both"),
        only(attention_bias=False), rotated_windows(1024, full_every(4, _TRINITY_INTERVAL), _TRINITY_INTERVAL),
        Trait(("mup_enabled",), _read_multiplier, lambda ours: {"mup_enabled": ours["embedding_multiplier"] != 1}),
        sparse_layers(1, "num_dense_layers", listed=False), *traits.ROUTER,
        same("moe", num_experts=("num_experts", 64), ffn_hidden_size="moe_intermediate_size",
             scaling_factor=("route_scale", 1.0)),
        traits.shared_experts(2, "num_shared_experts"), always("moe", score="sigmoid", selection_bias=True),
        # The code in the first folders reads these keys; transformers always uses this value.
        only(written=False, n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1, score_func="sigmoid",
             route_norm=True),
        unread("load_balance_coeff", "use_grouped_mm"),
    ), like_llama({
        "attention_output_norm": "post_attention_layernorm", "mlp_norm": "pre_mlp_layernorm",
        "mlp_output_norm": "post_mlp_layernorm", "attention.gate": "self_attn.gate_proj",
        "mlp.router": "mlp.router.gate", "mlp.router.bias": "mlp.expert_bias",
    }), moe=True, rank=5,
        about="Trinity",
    ),
    Family("dots1", "Dots1ForCausalLM", (
        *traits.llama_like(32), always(qk_norm=True), only(attention_bias=False), windows(4096, _dots_types, _FIRST),
        sparse_layers(0, "first_k_dense_replace", listed=False), *traits.sigmoid_router(1.0, normalize=False),
        traits.num_experts("n_routed_experts", "num_local_experts"), traits.shared_experts(0),
        unread("use_sliding_window"),
    ), like_llama(), moe=True, rank=5,
        about="dots.llm1",
    ),
    Family("hy_v3", "HYV3ForCausalLM", (
        *traits.llama_like(8, 128, 1e-5, rope(11_158_840.0)), *traits.NO_WINDOW, always(qk_norm=True),
        only(attention_bias=False, mlp_bias=False),
        sparse_layers(1, None), traits.num_experts("num_experts", "num_local_experts"),
        same(
            "moe", top_k=("num_experts_per_tok", 8), ffn_hidden_size=("moe_intermediate_size", 1536),
            scaling_factor=("router_scaling_factor", 2.826),
        ),
        traits.shared_experts(1, "num_shared_experts"), always("moe", score="sigmoid", selection_bias=True),
        traits.MULTI_TOKEN_PREDICTION, aliases(expert_hidden_dim="moe_intermediate_size"),
        # Tencent's own code reads these keys; transformers always uses this value.
        only(written=False, first_k_dense_replace=1, qk_norm=True, route_norm=True, moe_router_use_sigmoid=True,
             moe_router_enable_expert_bias=True),
        unread("enable_moe_fp32_combine", "enable_lm_head_fp32", "enable_attention_fp32_softmax"),  # rounding
    ), like_llama(
        MULTI_TOKEN_PREDICTION,
        {"final_norm": "final_layernorm", "mlp.router": "mlp.router.gate", "mlp.router.bias": "mlp.expert_bias"},
        {f"mlp.shared.{x}": f"mlp.shared_mlp.{x}_proj" for x in ("gate", "up", "down")},
    ), moe=True, rank=4,
        about="Hy3",
    ),
    Family("laguna", "LagunaForCausalLM", (
        *traits.llama_like(8, 128, rope=ropes_of_types(_types, _LAGUNA_ROPES, 1.0)), windows(512, _types),
        always(position_embedding="rope", qk_norm=True, output_gate_function="softplus"),
        Trait((_HEADS,), _read_heads, lambda ours: {_HEADS: ours["mixer.num_attention_heads"]}),
        Trait(("gating",), _read_gate, lambda ours: {"gating": _GATES.get(ours["output_gate"], "per-head")}),
        sparse_layers(1, None), *traits.ROUTER, traits.num_experts("num_experts", "num_local_experts"),
        same(
            "moe", ffn_hidden_size=("moe_intermediate_size", 512), scaling_factor=("moe_routed_scaling_factor", 1.0),
            shared_ffn_hidden_size=("shared_expert_intermediate_size", 512),
        ),
        always("moe", score="sigmoid", selection_bias=True), only(attention_bias=False),
        only(moe_apply_router_weight_on_input=False, moe_router_logit_softcapping=0.0),
    ), like_llama(
        {"attention.gate": "self_attn.g_proj", "mlp.router.bias": "mlp.experts.e_score_correction_bias"},
        {f"mlp.shared.{x}": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
    ), moe=True, rank=5,
        about="Laguna; `moe_router_logit_softcapping` is refused",
    ),
    Family("mellum", "MellumForCausalLM", (
        *traits.llama_like(4, 128, rope=ropes_of_types(_types, _MELLUM_ROPES)), windows(1024, _types),
        always(position_embedding="rope", qk_norm=True), only(attention_bias=False),
        *traits.ROUTER, traits.num_experts("num_local_experts", "num_experts"), sparse_layers(0, None),
        same("moe", normalize=("norm_topk_prob", True), ffn_hidden_size=("moe_intermediate_size", 896)),
        unread("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
    ), like_llama(other_heads=r"mtp\..*"), moe=True, rank=4,
        about="Mellum 2",
    ),
    Family("solar_open", "SolarOpenForCausalLM", (
        rope(1e6), traits.INIT_STD, traits.POSITIONS, traits.activation(), traits.UNTIED,
        always(normalization="rmsnorm"),
        same(
            num_layers="num_hidden_layers", hidden_size="hidden_size", num_attention_heads="num_attention_heads",
            vocab_size="vocab_size", num_query_groups=("num_key_value_heads", 8), head_dim=("head_dim", 128),
            norm_eps=("rms_norm_eps", 1e-5), qkv_bias=("attention_bias", False),
            attention_dropout=("attention_dropout", 0.0),
        ),
        *traits.NO_WINDOW, *traits.sigmoid_router(1.0), traits.num_experts("n_routed_experts", "num_local_experts"),
        traits.shared_experts(1),
        # The first folder has these keys of GLM-4.5.
        unread("intermediate_size"), only(written=False, first_k_dense_replace=0, use_qk_norm=False),
    ), moe=True, rank=5,
        about="Solar Open; written as `glm4_moe`",
    ),
    Family("gpt_oss", "GptOssForCausalLM", (
        *traits.llama_like(8, 64, 1e-5, stated_rope(1.5e5), always(activation="clamped_swiglu")),
        always(linear_bias=True, attention_sinks=True), windows(128, full_every(2)),
        *traits.ROUTER, traits.EXPERTS_ONLY, traits.num_experts("num_local_experts", "num_experts"),
        aliases(experts_per_token="num_experts_per_tok"),
        only(hidden_act="silu", swiglu_limit=7.0, attention_bias=True), only(written=False, swiglu_alpha=1.702),
        unread("initial_context_length"),  # original_max_position_embeddings under another name
    ), like_llama(
        {"mlp.router": "mlp.router", "mlp.router.logit_bias": "mlp.router.bias"},
        stacked_experts("mlp.experts", transposed=True, alternate=True),
        stacked_experts("mlp.experts", "bias", "_bias", transposed=True, alternate=True),
    ), moe=True,
        about="gpt-oss; written in bf16, not MXFP4",
    ),
)  # fmt: skip
