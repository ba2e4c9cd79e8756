"""LFM2 with experts. Its layers have gated short convolutions, and some have attention."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, layer_list, num_layers
from megafp8.conversion.huggingface.names import LLAMA, TensorNames, equal_parts, fused, in_layers
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import ConfigKey, Fields, HfConfig, Keys, Trait, aliases, always, only, same

_CONV, _OURS = "conv", "short_convolution"
_W = {"gate": "w1", "up": "w3", "down": "w2"}


def _read_layers(hf: HfConfig) -> Fields:
    types, dense, kernel = layer_list(hf, "layer_types", (FULL, _CONV)), hf.get("num_dense_layers", 2), "conv_L_cache"
    if types is None:
        refuse("layer_types", None, f"{FULL} or {_CONV} for each layer")
    return {
        "mixer.kind": [_OURS if kind == _CONV else "attention" for kind in types],
        "mixer.conv_kernel_size": [hf.get(kernel, 3) if kind == _CONV else None for kind in types],
        "ffn.kind": ["mlp" if i < dense else "moe" for i in range(num_layers(hf))],
    }


def _write_layers(ours: Fields) -> Keys:
    mixers, ffns = ours["mixer.kind"], ours["ffn.kind"]
    written: Keys = {"layer_types": [_CONV if kind == _OURS else FULL for kind in mixers]}
    if _OURS in mixers:
        written["conv_L_cache"] = ours["mixer.conv_kernel_size"][mixers.index(_OURS)]
    return written | {"num_dense_layers": ffns.index("moe") if "moe" in ffns else len(ffns)}


FAMILIES = (
    Family("lfm2_moe", "Lfm2MoeForCausalLM", (
        rope(1e6), *traits.RMSNORM_MODEL, traits.POSITIONS, traits.TIED, aliases(tie_embedding="tie_word_embeddings"),
        same(
            num_query_groups=ConfigKey("num_key_value_heads", 8), head_dim=("head_dim", None),
            norm_eps=("norm_eps", 1e-5),
        ),
        always(qk_norm=True, activation="swiglu"),
        Trait(("layer_types", "conv_L_cache", "num_dense_layers"), _read_layers, _write_layers),
        *traits.ROUTER, always("moe", score="sigmoid"),
        same(
            "moe", num_experts=("num_experts", 32), ffn_hidden_size=("moe_intermediate_size", 1792),
            normalize=("norm_topk_prob", True), scaling_factor=("routed_scaling_factor", 1.0),
            selection_bias=("use_expert_bias", True),
        ),
        only(conv_bias=False), traits.NO_PADDING,
    ), TensorNames({
        **LLAMA, "final_norm": "model.embedding_norm",
        **in_layers(
            "model.layers.*",
            {"attention_norm": "operator_norm", "mlp_norm": "ffn_norm", "attention.proj": "self_attn.out_proj"},
            {f"attention.{x}_norm": f"self_attn.{x}_layernorm" for x in "qk"},
            fused("conv.in_proj", equal_parts(3), tuple(f"short_convolution.{x}" for x in "bcx")),
            {"short_convolution.x_conv": "conv.conv", "short_convolution.proj": "conv.out_proj"},
            {"mlp.router": "feed_forward.gate", "mlp.router.bias": "feed_forward.expert_bias"},
            {f"mlp.{ours}": f"feed_forward.{theirs}" for ours, theirs in _W.items()},
            {f"mlp.experts.*.{ours}": f"feed_forward.experts.*.{theirs}" for ours, theirs in _W.items()},
        ),
    }), moe=True, rank=4),
)  # fmt: skip
