"""Falcon with rotary embedding: attention and MLP in parallel, with one norm or a norm each."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import QKV, TensorNames, fused, in_layers, qkv_by_group
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, flag, only, same, switch

_KEYS = ("new_decoder_architecture", "num_ln_in_parallel_attn", "multi_query", "num_kv_heads")


def _read_layer(hf: HfConfig) -> Fields:
    """Read norms and key-value heads. Only the new architecture reads their numbers."""
    new, heads = flag(hf, "new_decoder_architecture"), hf.get("num_attention_heads")
    norms, groups = hf.get("num_ln_in_parallel_attn") or 1 + new, hf.get("num_kv_heads") or heads
    if norms not in (1, 1 + new):
        refuse("num_ln_in_parallel_attn", norms, "1, or 2 with new_decoder_architecture = true")
    if not new and flag(hf, "multi_query", default=True):
        groups = 1
    elif not new and groups != heads:
        refuse("num_kv_heads", groups, f"num_attention_heads ({heads}) without new_decoder_architecture")
    return {"num_query_groups": groups, "parallel_block": True if norms == 2 else "shared_norm"}


def _write_layer(ours: Fields) -> Keys:
    norms = 1 if ours["parallel_block"] == "shared_norm" else 2
    return dict(zip(_KEYS, (True, norms, False, ours["num_query_groups"]), strict=True))


_LAYER = {
    "shared_norm": "input_layernorm", "attention_norm": "ln_attn", "mlp_norm": "ln_mlp",
    **fused("self_attention.query_key_value", qkv_by_group, QKV), "attention.proj": "self_attention.dense",
    "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
}  # fmt: skip
FAMILIES = (
    Family("falcon", "FalconForCausalLM", (
        same(
            num_layers="num_hidden_layers", hidden_size="hidden_size", num_attention_heads="num_attention_heads",
            ffn_hidden_size=("ffn_hidden_size", None), vocab_size="vocab_size", norm_eps=("layer_norm_epsilon", 1e-5),
            max_position_embeddings=("max_position_embeddings", 2048),
        ),
        traits.activation("activation", "gelu", gated=False), rope(1e4), traits.TIED, traits.INIT_STD,
        Trait(_KEYS, _read_layer, _write_layer), switch("linear_bias", "bias"), always(normalization="layernorm"),
        only(why="because ALiBi biases are rounded to bf16", alibi=False), only(parallel_attn=True),
        only(written=False, apply_residual_connection_post_layernorm=False), traits.HEADS_DIVIDE,
    ), TensorNames({
        "embedding.word": "transformer.word_embeddings", "final_norm": "transformer.ln_f", "output": "lm_head",
        **in_layers("transformer.h.*", _LAYER),
    }), rank=4,
        about="Falcon 7B, 40B, 180B, Falcon 2; ALiBi is refused",
    ),
)  # fmt: skip
