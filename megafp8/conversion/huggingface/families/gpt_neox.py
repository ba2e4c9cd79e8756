"""GPT-NeoX and BLOOM."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import NORMS, QKV, Names, TensorNames, fused, in_layers, qkv_by_group
from megafp8.conversion.huggingface.rope import ORIGINAL_LENGTH, read_rope, write_rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, either, only, same, switch, unread


def _read_rope(hf: HfConfig) -> Fields:
    """Read the rotary embedding from this family's names; transformers does not read the usual names at top level."""
    names = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
    return read_rope({names.get(key, key): value for key, value in hf.items()}, 1e4, 0.25)


def _write_rope(ours: Fields) -> Keys:
    rope = write_rope(ours)
    return {"rotary_emb_base": rope.pop("rope_theta"), "rotary_pct": ours["partial_rotary_factor"], **rope}


def _layers(theirs: str, attention: str) -> Names:
    linears = {"attention.proj": f"{attention}.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}
    return in_layers(theirs, NORMS, fused(f"{attention}.query_key_value", qkv_by_group, QKV), linears)


FAMILIES = (
    Family("bloom", "BloomForCausalLM", (
        either("num_layers", "n_layer", "num_hidden_layers"), either("hidden_size", "hidden_size", "n_embed"),
        either("num_attention_heads", "n_head", "num_attention_heads"),
        same(vocab_size="vocab_size", norm_eps=("layer_norm_epsilon", 1e-5)), traits.TIED, traits.INIT_STD,
        always(position_embedding="alibi", normalization="layernorm", embedding_norm=True),
        always(activation="gelu_tanh", linear_bias=True), only(apply_residual_connection_post_layernorm=False),
        only(written=False, n_inner=None),
        # Keys of the program that trained it; transformers does not read them.
        unread("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi"),
        unread("seq_length", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id"),
    ), TensorNames({
        "embedding.word": "transformer.word_embeddings", "embedding_norm": "transformer.word_embeddings_layernorm",
        "final_norm": "transformer.ln_f", "output": "lm_head", **_layers("transformer.h.*", "self_attention"),
    }),
        about="BLOOM; MLPs of 4 × hidden size",
    ),
    Family("gpt_neox", "GPTNeoXForCausalLM", (
        traits.SIZES, traits.POSITIONS, traits.UNTIED, traits.INIT_STD,
        traits.activation(default="gelu", gated=False), always(normalization="layernorm", linear_bias=True),
        same(norm_eps=("layer_norm_eps", 1e-5)), switch("parallel_block", "use_parallel_residual", default=True),
        Trait(("rotary_pct", "rotary_emb_base", "rope_scaling", "rope_parameters", ORIGINAL_LENGTH),
              _read_rope, _write_rope),
        only(attention_bias=True), traits.HEADS_DIVIDE,
    ), TensorNames({
        "embedding.word": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "output": "embed_out",
        **_layers("gpt_neox.layers.*", "attention"),
    }),
        about="GPT-NeoX, Pythia",
    ),
)  # fmt: skip
