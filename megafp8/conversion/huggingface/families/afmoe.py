"""Trinity (AFMoE), with gated attention and experts; only layers with a sliding window have a rotary embedding."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import full_every, rotated_windows, sparse_layers
from megafp8.conversion.huggingface.names import like_llama
from megafp8.conversion.keys import Fields, HfConfig, Trait, always, flag, only, same, unread

_INTERVAL = "global_attn_every_n_layers"


def _read_multiplier(hf: HfConfig) -> Fields:
    return {"embedding_multiplier": hf["hidden_size"] ** 0.5 if flag(hf, "mup_enabled") else 1.0}


FAMILIES = (
    Family("afmoe", "AfmoeForCausalLM", (
        *traits.llama_like(None, 128, 1e-5), always(qk_norm=True, output_gate=True, norm_position="both"),
        only(attention_bias=False), rotated_windows(1024, full_every(4, _INTERVAL), _INTERVAL),
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
)  # fmt: skip
