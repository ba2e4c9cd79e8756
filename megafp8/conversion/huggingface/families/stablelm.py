"""StableLM, without norms of queries and keys: attention and MLP in sequence, or in parallel with one norm."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import always, only, same, switch

FAMILIES = (
    Family("stablelm", "StableLmForCausalLM", (
        rope(1e4, partial=0.25), *traits.RMSNORM_MODEL, traits.POSITIONS, traits.UNTIED, traits.activation(),
        same(
            num_query_groups=("num_key_value_heads", 32), norm_eps=("layer_norm_eps", 1e-5),
            qkv_bias=("use_qkv_bias", False),
        ),
        always(normalization="layernorm"), switch("parallel_block", "use_parallel_residual", "shared_norm"),
        only(qk_layernorm=False), traits.HEADS_DIVIDE,
    ),
        about="StableLM; `qk_layernorm: true` is refused",
    ),
)  # fmt: skip
