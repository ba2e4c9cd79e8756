"""Models with experts that a sigmoid router chooses.

Trinity (AFMoE) gated attention; only layers with a sliding window have a rotary embedding
dots.llm1       the attention of Qwen3 and the experts of DeepSeek-V3
Hy3             normalized queries and keys
Solar Open      the experts of DeepSeek-V3 in all layers
"""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import (
    FULL,
    SLIDING,
    full_every,
    num_layers,
    rotated_windows,
    sparse_layers,
    windows,
)
from megafp8.conversion.huggingface.names import MULTI_TOKEN_PREDICTION, like_llama
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import Fields, HfConfig, Trait, aliases, always, flag, only, same, unread

_TRINITY_INTERVAL = "global_attn_every_n_layers"


def _read_multiplier(hf: HfConfig) -> Fields:
    return {"embedding_multiplier": hf["hidden_size"] ** 0.5 if flag(hf, "mup_enabled") else 1.0}


_FIRST = "max_window_layers"


def _dots_types(hf: HfConfig) -> list[str]:
    """Return the kind of each layer if layer_types is missing: layers from max_window_layers on have a window."""
    first = num_layers(hf) if hf.get("sliding_window", 4096) is None else hf.get(_FIRST, 62)
    return [FULL if i < first else SLIDING for i in range(num_layers(hf))]


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
)  # fmt: skip
