"""MPT: ALiBi, exact GELU, and LayerNorm without biases."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import QKV, TensorNames, equal_parts, fused, in_layers
from megafp8.conversion.keys import Fields, HfConfig, Trait, aliases, always, only, same, unread

_ATTENTION = {
    "attn_type": "multihead_attention", "clip_qkv": None, "qk_ln": False, "prefix_lm": False, "alibi": True,
    "alibi_bias_max": 8, "attn_uses_sequence_id": False,
}  # fmt: skip
"""Keys of attn_config with a single supported value. transformers does not read most of them."""
_SCALE = "softmax_scale"
_UNREAD = {
    "_name_or_path", "architectures", "attn_impl", "attn_pdrop", "chunk_size_feed_forward", "dtype", "id2label",
    "is_encoder_decoder", "label2id", "model_type", "output_attentions", "output_hidden_states", "problem_type",
    "return_dict", "torch_dtype",
}  # fmt: skip
"""Keys of attn_config without effect. transformers also saves the usual keys of a whole config there."""


def _read_attention(hf: HfConfig) -> Fields:
    attention = hf.get("attn_config") or {}
    if unknown := sorted(attention.keys() - {*_ATTENTION, *_UNREAD, _SCALE}):
        refuse(f"attn_config.{unknown[0]}", attention[unknown[0]], f"only {', '.join([*_ATTENTION, _SCALE])}")
    for key, value in _ATTENTION.items():
        if attention.get(key, value) != value:
            refuse(f"attn_config.{key}", attention[key], repr(value))
    return {"attention_scale": attention.get(_SCALE)}


_LAYER = {
    "attention_norm": "norm_1", **fused("attn.Wqkv", equal_parts(3), QKV), "attention.proj": "attn.out_proj",
    "mlp_norm": "norm_2", "mlp.up": "ffn.up_proj", "mlp.down": "ffn.down_proj",
}  # fmt: skip
_NORM = dict.fromkeys(("low_precision_layernorm", "layernorm"), "layernorm_no_bias")
FAMILIES = (
    Family("mpt", "MptForCausalLM", (
        same(
            num_layers="n_layers", hidden_size="d_model", num_attention_heads="n_heads", vocab_size="vocab_size",
            max_position_embeddings=("max_seq_len", 2048), norm_eps=("layer_norm_epsilon", 1e-5),
            normalization=("norm_type", "low_precision_layernorm", _NORM),
        ),
        aliases(num_hidden_layers="n_layers", hidden_size="d_model", num_attention_heads="n_heads"),
        traits.TIED, traits.INIT_STD, always(position_embedding="alibi", activation="gelu"),
        Trait(("attn_config",), _read_attention,
              lambda ours: {"attn_config": {**_ATTENTION, _SCALE: ours["attention_scale"]}}),
        only(expansion_ratio=4, no_bias=True, logit_scale=None),
        unread("emb_pdrop", "embedding_fraction", "init_config", "init_device", "learned_pos_emb", "tokenizer_name"),
        unread("verbose"),
    ), TensorNames({
        "embedding.word": "transformer.wte", "final_norm": "transformer.norm_f", "output": "lm_head",
        **in_layers("transformer.blocks.*", _LAYER),
    }), also="MPTForCausalLM", rank=5,
        about="MPT; `clip_qkv`, learned positions and biases are refused",
    ),
)  # fmt: skip
