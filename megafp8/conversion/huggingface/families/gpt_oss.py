"""The gpt-oss family."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import full_every, windows
from megafp8.conversion.huggingface.names import like_llama, stacked_experts
from megafp8.conversion.huggingface.rope import stated_rope
from megafp8.conversion.keys import aliases, always, only, unread

FAMILIES = (
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
