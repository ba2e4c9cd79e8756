"""GLM-4 with norms before attention and MLP (glm) or on both sides (glm4), and GLM-4.5 and 4.6 (glm4_moe)."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import FUSED_GATE_UP, MULTI_TOKEN_PREDICTION, like_llama
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import always, only, same, switch

_GLM = (*traits.llama_like(2, 128, 1.5625e-7, rope(1e4, partial=0.5)), traits.NO_PADDING, *traits.NO_WINDOW)
_OUTPUT_NORMS = {"attention_output_norm": "post_self_attn_layernorm", "mlp_output_norm": "post_mlp_layernorm"}
FAMILIES = (
    Family("glm", "GlmForCausalLM", (*_GLM, same(qkv_bias=("attention_bias", True))),
           like_llama(FUSED_GATE_UP, rotation="neighbors")),
    Family("glm4", "Glm4ForCausalLM", (*_GLM, same(qkv_bias=("attention_bias", False)), always(norm_position="both")),
           like_llama(FUSED_GATE_UP, _OUTPUT_NORMS, rotation="neighbors")),
    Family("glm4_moe", "Glm4MoeForCausalLM", (
        *traits.llama_like(8, norm_eps=1e-5, rope=rope(1e4, partial=0.5)), traits.NO_PADDING, *traits.NO_WINDOW,
        same(qkv_bias=("attention_bias", False)), switch("qk_norm", "use_qk_norm"),
        *traits.ROUTER, traits.num_experts("n_routed_experts", "num_local_experts"), traits.shared_experts(1),
        same(
            "moe", first_dense_layers=("first_k_dense_replace", 1), normalize=("norm_topk_prob", True),
            scaling_factor=("routed_scaling_factor", 1.0), ffn_hidden_size=("moe_intermediate_size", 1408),
        ),
        traits.expert_groups(1, 1), always("moe", score="sigmoid", selection_bias=True),
        traits.MULTI_TOKEN_PREDICTION, only(written=False, mlp_bias=False),
    ), like_llama(MULTI_TOKEN_PREDICTION), moe=True),
)  # fmt: skip
