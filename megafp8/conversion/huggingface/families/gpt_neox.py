"""GPT-NeoX, BLOOM, and Falcon with rotary embedding: attention and MLP in parallel, with one norm or a norm each."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import NORMS, QKV, Names, TensorNames, fused, in_layers, qkv_by_group
from megafp8.conversion.huggingface.rope import ORIGINAL_LENGTH, read_rope, rope, write_rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, either, flag, only, same, switch, unread


def _read_rope(hf: HfConfig) -> Fields:
    """Read the rotary embedding from this family's names; transformers does not read the usual names at top level."""
    names = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
    return read_rope({names.get(key, key): value for key, value in hf.items()}, 1e4, 0.25)


def _write_rope(ours: Fields) -> Keys:
    rope = write_rope(ours)
    return {"rotary_emb_base": rope.pop("rope_theta"), "rotary_pct": ours["partial_rotary_factor"], **rope}


def _layers(theirs: str, attention: str, norms: Names = NORMS) -> Names:
    linears = {"attention.proj": f"{attention}.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}
    return in_layers(theirs, norms, fused(f"{attention}.query_key_value", qkv_by_group, QKV), linears)


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


_FALCON_NORMS = {"shared_norm": "input_layernorm", "attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}

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
        **_layers("transformer.h.*", "self_attention", _FALCON_NORMS),
    }), rank=4,
        about="Falcon 7B, 40B, 180B, Falcon 2; ALiBi is refused",
    ),
)  # fmt: skip
