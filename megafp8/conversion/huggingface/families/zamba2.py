"""Zamba2: Mamba-2 in each layer, in some layers after a transformer that they share, with adapters for each layer."""

from megafp8.config import AttentionConfig
from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import layer_list, num_layers
from megafp8.conversion.huggingface.mamba import LINEAR, MAMBA_NAMES, mamba, mamba_value
from megafp8.conversion.huggingface.names import LLAMA, TensorNames, equal_parts, fused, in_layers, usual
from megafp8.conversion.huggingface.rope import ROPE_KEYS, read_rope, write_rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, expect, only, unread

_HYBRID, _OURS, _ADAPTED = "hybrid", "shared_attention", "use_shared_attention_adapter"


def _read_layers(hf: HfConfig) -> Fields:
    kinds = layer_list(hf, "layers_block_type", (LINEAR, "mamba", _HYBRID)) or []
    sharing, blocks = [i for i, kind in enumerate(kinds) if kind == _HYBRID], hf.get("num_mem_blocks", 1)
    if not isinstance(blocks, int) or not 0 < blocks <= len(sharing):
        refuse("num_mem_blocks", blocks, f"at most the number of hybrid layers in layers_block_type ({len(sharing)})")
    heads, h, adapted = hf["num_attention_heads"], hf["hidden_size"], hf.get(_ADAPTED, False)
    if adapted:
        expect(hf, "num_key_value_heads", heads, f"num_attention_heads ({heads}), with {_ADAPTED}")
    lists: Keys = {"kind": ["mamba2"] * len(kinds), **{key: [None] * len(kinds) for key in _KEYS}}
    for use, layer in enumerate(sharing):
        for key, value in zip(lists, (_OURS, use % blocks, hf.get("adapter_rank", 128), adapted), strict=True):
            lists[key][layer] = value
    lists["head_dim"] = [hf.get("mamba_expand", 2) * h // hf.get("n_mamba_heads", 8)] * len(kinds)
    return {
        "head_dim": 2 * h // heads, "attention_scale": (2 * h // heads / 2) ** -0.5, "ffn.kind": ["none"] * len(kinds),
        **{f"mixer.{key}": values for key, values in lists.items()},
    }  # fmt: skip


def _write_layers(ours: Fields) -> Keys:
    kinds = [_HYBRID if kind == _OURS else LINEAR for kind in ours["mixer.kind"]]
    blocks, ranks, adapted = ([x for x in ours[f"mixer.{key}"] if x is not None] or [0] for key in _KEYS)
    width = (mamba_value(ours, "num_heads") or 0) * (mamba_value(ours, "head_dim") or 0)
    return {
        "layers_block_type": kinds, "num_mem_blocks": len({*blocks}), "adapter_rank": ranks[0], _ADAPTED: adapted[0],
        "mamba_expand": width // ours["hidden_size"],
    }  # fmt: skip


_KEYS = ("shared_block", "adapter_rank", "adapt_attention")
_LAYERS, _MLP = "model.layers.*", "feed_forward.gate_up_proj"
_DOWN = {f"{x}.down": f"self_attn.linear_{x}_adapter_list.*.0" for x in "qkv"}
_UP = {f"{x}.up": f"self_attn.linear_{x}_adapter_list.*.1" for x in "qkv"}
_NAMES = {
    **LLAMA, "final_norm": "model.final_layernorm", **in_layers(_LAYERS, MAMBA_NAMES, {f"{_OURS}.output": "linear"}),
    **in_layers(f"{_LAYERS}.mamba_decoder", {x.replace("mamba2", _OURS): y for x, y in MAMBA_NAMES.items()}),
    f"layers.*.{_OURS}.input_norm": f"{_LAYERS}.mamba_decoder.input_layernorm",
    **in_layers(
        f"{_LAYERS}.shared_transformer", fused(_MLP, equal_parts(2), ("mlp.gate", "mlp.up")), usual(AttentionConfig),
        {"norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm", "mlp.down": "feed_forward.down_proj"},
        ours=f"layers.*.{_OURS}.transformer",
    ),
    **in_layers(
        f"{_LAYERS}.shared_transformer", _DOWN, _UP, {"gate_up.down": f"{_MLP}_adapter_list.*.0"},
        fused(f"{_MLP}_adapter_list.*.1", equal_parts(2), ("gate_up.gate", "gate_up.up")),
        ours=f"layers.*.{_OURS}.adapters.*",
    ),
}  # fmt: skip
FAMILIES = (
    Family("zamba2", "Zamba2ForCausalLM", (
        *traits.llama_like(
            None, norm_eps=1e-5, activation=traits.activation(default="gelu"),
            rope=Trait(
                (*ROPE_KEYS, "use_mem_rope"),
                lambda hf: read_rope(hf, 1e4) if hf.get("use_mem_rope", False) else {"position_embedding": "none"},
                lambda ours: {"use_mem_rope": True, **write_rope(ours)} if ours["position_embedding"] == "rope" else {},
            ),
        ),
        mamba(
            lambda hf: [LINEAR] * num_layers(hf), num_heads=("n_mamba_heads", 8), num_groups=("mamba_ngroups", 1),
            state_size=("mamba_d_state", 64), conv_kernel_size=("mamba_d_conv", 4), min_step=("time_step_min", 0.001),
        ),
        Trait(
            ("layers_block_type", "num_mem_blocks", "adapter_rank", _ADAPTED, "mamba_expand"), _read_layers,
            _write_layers,
        ),
        only(add_bias_linear=False, rms_norm_eps=1e-5, use_conv_bias=True, use_long_context=False),
        only(why="transformers ties shared transformers only together with the embeddings", tie_word_embeddings=True),
        only(written=False, use_shared_mlp_adapter=True), always(tie_embeddings=True), traits.NO_PADDING,
        unread(
            "attention_head_dim", "attention_hidden_size", "chunk_size", "ffn_hidden_size", "hybrid_layer_ids",
            "kv_channels", "mamba_headdim", "num_logits_to_keep", "num_query_groups", "time_step_floor",
            "time_step_max", "use_mamba_kernels", "use_mem_eff_path",
        ),
    ), TensorNames(_NAMES), rank=5,
        about="Zamba2",
    ),
)  # fmt: skip
