"""Solar Open, with the experts of DeepSeek-V3 in all layers."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import always, only, same, unread

FAMILIES = (
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
