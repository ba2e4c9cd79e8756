"""Tencent's Hy3, with normalized queries and keys, and experts that a sigmoid router chooses."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import sparse_layers
from megafp8.conversion.huggingface.names import MULTI_TOKEN_PREDICTION, like_llama
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import aliases, always, only, same, unread

FAMILIES = (
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
    ), moe=True,
        about="Hy3",
    ),
)  # fmt: skip
