"""OLMo 2, OLMo 3, OLMoE and FlexOlmo."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import full_every, windows
from megafp8.conversion.huggingface.names import OUTPUT_NORMS, like_llama
from megafp8.conversion.huggingface.rope import rope, ropes_by_type
from megafp8.conversion.keys import HfConfig, always, check, only, same


def _check_head_dim(hf: HfConfig) -> None:
    """Raise ValueError for a head_dim of olmoe that differs from its default.

    transformers always normalizes hidden_size channels of the queries, regardless of head_dim.
    """
    hidden, heads, width = hf.get("hidden_size"), hf.get("num_attention_heads"), hf.get("head_dim")
    if width is not None and isinstance(hidden, int) and isinstance(heads, int) and width * heads != hidden:
        refuse("head_dim", width, f"hidden_size / num_attention_heads ({hidden / heads:g}) in this family")


_LAYERS = full_every(4)
_OLMO2 = (always(norm_position="output"), only(attention_bias=False), only(written=False, clip_qkv=None))
_EXPERTS = (
    *traits.ROUTER, traits.EXPERTS_ONLY, traits.num_experts("num_experts", "num_local_experts"),
    same("moe", normalize=("norm_topk_prob", False)),
)  # fmt: skip
_OLMO = (*traits.llama_like(None, norm_eps=1e-5), always(qk_norm="projection"), *traits.NO_WINDOW)
FAMILIES = (
    Family("olmo2", "Olmo2ForCausalLM", (*_OLMO, *_OLMO2), like_llama(OUTPUT_NORMS),
        about="OLMo 2",
    ),
    Family("olmo3", "Olmo3ForCausalLM", (
        *traits.llama_like(None, norm_eps=1e-5, rope=ropes_by_type(_LAYERS, 5e5, None, nested=True)),
        always(qk_norm="projection"), windows(4096, _LAYERS), *_OLMO2, traits.NO_PADDING,
    ), like_llama(OUTPUT_NORMS), rank=4,
        about="OLMo 3",
    ),
    Family("olmoe", "OlmoeForCausalLM", (
        *_OLMO, *_EXPERTS, check(_check_head_dim), only(attention_bias=False, clip_qkv=None),
    ), moe=True, rank=4,
        about="OLMoE; no `clip_qkv`",
    ),
    Family("flex_olmo", "FlexOlmoForCausalLM", (
        *traits.llama_like(None, rope=rope(5e5)), always(qk_norm="projection"), *traits.NO_WINDOW, *_OLMO2, *_EXPERTS,
        traits.NO_PADDING,
    ), like_llama(OUTPUT_NORMS), moe=True, rank=4,
        about="FlexOlmo",
    ),
)  # fmt: skip
