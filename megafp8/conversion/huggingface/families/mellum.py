"""JetBrains' Mellum 2, with experts, and a rotary embedding for each kind of attention layer."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, SLIDING, layer_types, num_layers, sparse_layers, windows
from megafp8.conversion.huggingface.names import like_llama
from megafp8.conversion.huggingface.rope import ropes_of_types
from megafp8.conversion.keys import HfConfig, always, only, same, unread


def _types(hf: HfConfig) -> list[str]:
    return layer_types(hf) or [FULL] * num_layers(hf)


_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5e5}, SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
FAMILIES = (
    Family("mellum", "MellumForCausalLM", (
        *traits.llama_like(4, 128, rope=ropes_of_types(_types, _ROPES)), windows(1024, _types),
        always(position_embedding="rope", qk_norm=True), only(attention_bias=False),
        *traits.ROUTER, traits.num_experts("num_local_experts", "num_experts"), sparse_layers(0, None),
        same("moe", normalize=("norm_topk_prob", True), ffn_hidden_size=("moe_intermediate_size", 896)),
        unread("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
    ), like_llama(other_heads=r"mtp\..*"), moe=True, rank=4,
        about="Mellum 2",
    ),
)  # fmt: skip
