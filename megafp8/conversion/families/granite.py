"""Granite and GraniteMoE."""

from megafp8.conversion import hf_traits as traits
from megafp8.conversion.families import Family
from megafp8.conversion.hf_names import Place, equal_parts, fused, like_llama
from megafp8.conversion.keys import only, same

_GRANITE = (
    *traits.llama_like(None),
    same(
        embedding_multiplier=("embedding_multiplier", 1.0), residual_multiplier=("residual_multiplier", 1.0),
        logits_scaling=("logits_scaling", 1.0), attention_scale=("attention_multiplier", 1.0),
    ),
    *traits.NO_WINDOW,
)  # fmt: skip
_GATE_UP = ("mlp.experts.*.gate", "mlp.experts.*.up")
_EXPERTS = {
    "mlp.router": "block_sparse_moe.router.layer",
    **fused("block_sparse_moe.input_linear", equal_parts(2), _GATE_UP, stacked=True),
    "mlp.experts.*.down": Place("block_sparse_moe.output_linear", stacked=True),
}
FAMILIES = (
    Family("granite", "GraniteForCausalLM", (*_GRANITE, traits.LINEAR_BIASES)),
    Family("granitemoe", "GraniteMoeForCausalLM", (
        *_GRANITE, *traits.ROUTER, traits.EXPERTS_ONLY, traits.num_experts("num_local_experts", "num_experts"),
        only(written=False, attention_bias=False),
    ), like_llama(_EXPERTS), moe=True),
)  # fmt: skip
