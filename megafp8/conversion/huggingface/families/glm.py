"""GLM-4 (with norms on both sides in glm4), GLM-4.5 and 4.6, and GLM-4.7 Flash with latent attention."""

from megafp8.config import LatentMixerConfig
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.families.deepseek import LATENT_ATTENTION, LATENT_ROPE, latent_norms
from megafp8.conversion.huggingface.layers import sparse_layers
from megafp8.conversion.huggingface.names import FUSED_GATE_UP, MULTI_TOKEN_PREDICTION, like_llama, usual
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import always, only, same, switch

_GLM = (*traits.llama_like(2, 128, 1.5625e-7, rope(1e4, partial=0.5)), traits.NO_PADDING, *traits.NO_WINDOW)
_OUTPUT_NORMS = {"attention_output_norm": "post_self_attn_layernorm", "mlp_output_norm": "post_mlp_layernorm"}
FAMILIES = (
    Family("glm", "GlmForCausalLM", (*_GLM, same(qkv_bias=("attention_bias", True))),
           like_llama(FUSED_GATE_UP, rotation="neighbors"),
        about="GLM-4",
    ),
    Family("glm4", "Glm4ForCausalLM", (*_GLM, same(qkv_bias=("attention_bias", False)), always(norm_position="both")),
           like_llama(FUSED_GATE_UP, _OUTPUT_NORMS, rotation="neighbors"),
        about="GLM-4-0414",
    ),
    Family("glm4_moe", "Glm4MoeForCausalLM", (
        *traits.llama_like(8, norm_eps=1e-5, rope=rope(1e4, partial=0.5)), traits.NO_PADDING, *traits.NO_WINDOW,
        same(qkv_bias=("attention_bias", False)), switch("qk_norm", "use_qk_norm"),
        traits.num_experts("n_routed_experts", "num_local_experts"), traits.shared_experts(1),
        *traits.sigmoid_router(1.0), same("moe", first_dense_layers=("first_k_dense_replace", 1)),
        traits.MULTI_TOKEN_PREDICTION, only(written=False, mlp_bias=False),
    ), like_llama(MULTI_TOKEN_PREDICTION), moe=True,
        about="GLM-4.5, 4.6",
    ),
    Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", (
        *LATENT_ATTENTION, *LATENT_ROPE, *latent_norms(1e-5),
        traits.num_experts("n_routed_experts", "num_local_experts"), traits.shared_experts(1),
        *traits.sigmoid_router(1.8), sparse_layers(1, None), traits.MULTI_TOKEN_PREDICTION,
        only(rope_interleave=True), only(written=False, mlp_bias=False, first_k_dense_replace=1),
    ), like_llama(usual(LatentMixerConfig), MULTI_TOKEN_PREDICTION), moe=True, latent=True, rank=5,
        about="GLM-4.7 Flash",
    ),
)  # fmt: skip
