"""LFM2, with and without experts, and LFM3. Layers have gated short convolutions, and some have attention."""

from collections.abc import Callable

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, SLIDING, layer_list, num_layers, sparse_layers
from megafp8.conversion.huggingface.names import LLAMA, TensorNames, equal_parts, fused, in_layers
from megafp8.conversion.huggingface.rope import rope, ropes_of_types
from megafp8.conversion.keys import (
    Fields,
    HfConfig,
    Keys,
    Trait,
    aliases,
    always,
    flag,
    only,
    same,
    switch,
    unread,
    with_second_names,
)

_CONV, _OURS, _KERNEL, _WINDOW = "conv", "short_convolution", "conv_L_cache", "sliding_window"
_W = {"gate": "w1", "up": "w3", "down": "w2"}
_WIDTH = ("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of")


def _types(hf: HfConfig) -> list[str]:
    """Return the kind of each layer of LFM2. Without layer_types, full_attn_idxs lists the layers with attention."""
    types, indices = layer_list(hf, "layer_types", (FULL, _CONV)), hf.get("full_attn_idxs")
    if types is not None:
        return types
    if not isinstance(indices, list):
        refuse("layer_types", None, f"{FULL} or {_CONV} for each layer, or a list of numbers in full_attn_idxs")
    return [FULL if i in indices else _CONV for i in range(num_layers(hf))]


def _windowed_types(hf: HfConfig) -> list[str]:
    """Return the kind of each layer of LFM3."""
    usual = [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else _CONV for i in range(num_layers(hf))]
    return layer_list(hf, "layer_types", (FULL, SLIDING, _CONV)) or usual


def _mixers(types: Callable[[HfConfig], list[str]], kernel: int, window: int | None = None) -> Trait:
    """Return a trait for the mixers; `kernel` and `window` are default widths of convolutions and of the window."""

    def read(hf: HfConfig) -> Fields:
        kinds = types(hf)
        return {
            "mixer.kind": [_OURS if kind == _CONV else "attention" for kind in kinds],
            "mixer.conv_kernel_size": [hf.get(_KERNEL, kernel) if kind == _CONV else None for kind in kinds],
            "mixer.sliding_window": [hf.get(_WINDOW, window) if kind == SLIDING else None for kind in kinds],
        }

    def write(ours: Fields) -> Keys:
        mixers, windows = ours["mixer.kind"], ours["mixer.sliding_window"]
        kinds = [FULL if window is None else SLIDING for window in windows]
        written: Keys = {"layer_types": [_CONV if x == _OURS else y for x, y in zip(mixers, kinds, strict=True)]}
        if _OURS in mixers:
            written[_KERNEL] = ours["mixer.conv_kernel_size"][mixers.index(_OURS)]
        return written | ({_WINDOW: windows[kinds.index(SLIDING)]} if SLIDING in kinds else {})

    return Trait(("layer_types", _KERNEL, _WINDOW if window else "full_attn_idxs"), read, write)


def _read_width(hf: HfConfig) -> Fields:
    """Read the width of the MLPs, which is by default 2/3 of intermediate_size, rounded up to a multiple."""
    width = hf.get("intermediate_size", 12288)
    if flag(hf, _WIDTH[0], True) and isinstance(width, int):
        width = int(2 * width / 3)
        if (factor := hf.get(_WIDTH[1], 1.0)) is not None:
            multiple = hf.get(_WIDTH[2], 256)
            width = multiple * -(-int(factor * width) // multiple)
    return {"ffn_hidden_size": width}


_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}  # fmt: skip
_LAYERS = (
    *traits.RMSNORM_MODEL, traits.POSITIONS, traits.TIED, traits.NO_PADDING, same(norm_eps=("norm_eps", 1e-5)),
    always(qk_norm=True, activation="swiglu"), only(conv_bias=False),
)  # fmt: skip
_LFM2 = (
    *_LAYERS, rope(1e6), same(num_query_groups=("num_key_value_heads", 8), head_dim=("head_dim", None)),
    _mixers(_types, 3),
)  # fmt: skip
_SECOND_NAMES = {"tie_embedding": "tie_word_embeddings"}
_NAMES = {
    **LLAMA, "final_norm": "model.embedding_norm",
    **in_layers(
        "model.layers.*", {"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"},
        fused("conv.in_proj", equal_parts(3), tuple(f"short_convolution.{x}" for x in "bcx")),
        {"short_convolution.x_conv": "conv.conv", "short_convolution.proj": "conv.out_proj"},
        {"mlp.router": "feed_forward.gate", "mlp.router.bias": "feed_forward.expert_bias"},
        {f"mlp.{ours}": f"feed_forward.{theirs}" for ours, theirs in _W.items()},
        {f"mlp.experts.*.{ours}": f"feed_forward.experts.*.{theirs}" for ours, theirs in _W.items()},
    ),
}  # fmt: skip
_LFM2_NAMES = TensorNames({**_NAMES, **in_layers("model.layers.*", {
    "attention.proj": "self_attn.out_proj", **{f"attention.{x}_norm": f"self_attn.{x}_layernorm" for x in "qk"},
})})  # fmt: skip
FAMILIES = (
    Family("lfm2", "Lfm2ForCausalLM", (
        *with_second_names(
            _SECOND_NAMES | {"block_ff_dim": "intermediate_size"}, *_LFM2,
            Trait(("intermediate_size", *_WIDTH), _read_width, lambda ours: {_WIDTH[0]: False}),
        ),
        # Keys of the first folders, which transformers does not read.
        aliases(block_dim="hidden_size", conv_dim="hidden_size", conv_dim_out="hidden_size",
                num_heads="num_attention_heads", block_norm_eps="norm_eps"),
        only(written=False, block_use_swiglu=True, use_pos_enc=True),
        unread("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
    ), _LFM2_NAMES, rank=4,
        about="LFM2",
    ),
    Family("lfm2_moe", "Lfm2MoeForCausalLM", (
        *with_second_names(_SECOND_NAMES, *_LFM2), sparse_layers(2, "num_dense_layers", listed=False),
        *traits.ROUTER, always("moe", score="sigmoid"),
        same(
            "moe", num_experts=("num_experts", 32), ffn_hidden_size=("moe_intermediate_size", 1792),
            normalize=("norm_topk_prob", True), scaling_factor=("routed_scaling_factor", 1.0),
            selection_bias=("use_expert_bias", True),
        ),
    ), _LFM2_NAMES, moe=True, rank=4,
        about="LFM2 with experts; no `conv_bias`",
    ),
    Family("lfm3", "Lfm3ForCausalLM", (
        *with_second_names({"rms_norm_eps": "norm_eps"}, *_LAYERS), ropes_of_types(_windowed_types, _ROPES),
        _mixers(_windowed_types, 7, 256), same(num_query_groups=("num_key_value_heads", 4), head_dim=("head_dim", 128)),
        always(position_embedding="rope"), only(attention_bias=False),
        switch("norm_position", "use_sandwich_norm", "both", "pre", default=True),
        switch("output_gate", "use_attention_gate", "head", default=True),
    ), TensorNames({**_NAMES, **in_layers("model.layers.*", {
        "attention_output_norm": "post_operator_norm", "mlp_output_norm": "post_ffn_norm",
        "attention.gate": "self_attn.gate_proj",
    })}), rank=4,
        about="LFM3",
    ),
)  # fmt: skip
