"""T5 1.0 and 1.1."""

from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import Names, TensorNames, in_layers
from megafp8.conversion.keys import Fields, HfConfig, Trait, always, check, expect, flag, only, same, unread

_GATED = "gated-gelu"


def _check_activation(hf: HfConfig) -> None:
    """Raise ValueError if keys that follow from feed_forward_proj, and that transformers also writes, differ."""
    gated = hf.get("feed_forward_proj", "relu") == _GATED
    for key, value in (("is_gated_act", gated), ("dense_act_fn", "gelu_new" if gated else "relu")):
        expect(hf, key, value, f"{value!r}, which follows from feed_forward_proj")


def _read_tied(hf: HfConfig) -> Fields:
    """Read whether embeddings are tied.

    transformers 5 always writes tie_word_embeddings = true, and writes the actual value as scale_decoder_outputs.
    """
    tied, scaled = (flag(hf, key, default=True) for key in ("tie_word_embeddings", "scale_decoder_outputs"))
    return {"tie_embeddings": tied and scaled}


def _attention(ours: str, theirs: str) -> Names:
    return {f"{ours}.{x}": f"{theirs}.{name}" for x, name in (("q", "q"), ("k", "k"), ("v", "v"), ("proj", "o"))}


_SELF_ATTENTION = {"attention_norm": "layer.0.layer_norm", **_attention("attention", "layer.0.SelfAttention")}
_CROSS_ATTENTION = {"cross_norm": "layer.1.layer_norm", **_attention("cross_attention", "layer.1.EncDecAttention")}


def _mlp(layer: str) -> Names:
    names = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
    return {"mlp_norm": f"{layer}.layer_norm", **{f"mlp.{x}": f"{layer}.DenseReluDense.{y}" for x, y in names.items()}}


_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias"
FAMILIES = (
    Family("t5", "T5ForConditionalGeneration", (
        same(
            num_layers="num_layers", num_decoder_layers=("num_decoder_layers", None), hidden_size="d_model",
            num_attention_heads="num_heads", head_dim=("d_kv", 64), ffn_hidden_size="d_ff", vocab_size="vocab_size",
            relative_attention_num_buckets=("relative_attention_num_buckets", 32),
            relative_attention_max_distance=("relative_attention_max_distance", 128),
            norm_eps=("layer_norm_epsilon", 1e-6),
            activation=("feed_forward_proj", "relu", {"relu": "relu", _GATED: "geglu_tanh"}),
        ),
        check(_check_activation, "is_gated_act", "dense_act_fn"),
        Trait(("tie_word_embeddings", "scale_decoder_outputs"), _read_tied,
              lambda ours: {"tie_word_embeddings": ours["tie_embeddings"]}),
        always(architecture="t5", position_embedding="relative", normalization="rmsnorm"),
        only(is_encoder_decoder=True), only(written=False, is_decoder=False),
        Trait(("dropout_rate",),
              lambda hf: dict.fromkeys(("hidden_dropout", "attention_dropout"), hf.get("dropout_rate", 0.1)),
              lambda ours: {"dropout_rate": ours["hidden_dropout"]}),
        # Keys of initial values, and a length that no class reads.
        unread("classifier_dropout", "initializer_factor", "n_positions"),
    ), TensorNames(
        {
            "embedding.word": "shared", "output": "lm_head",
            "encoder.relative_bias": f"encoder.{_BIAS}", "decoder.relative_bias": f"decoder.{_BIAS}",
            "encoder_norm": "encoder.final_layer_norm", "final_norm": "decoder.final_layer_norm",
            **in_layers("encoder.block.*", _SELF_ATTENTION, _mlp("layer.1")),
            **in_layers("decoder.block.*", _SELF_ATTENTION, _CROSS_ATTENTION, _mlp("layer.2"), ours="decoder.*"),
        },
        ungated={
            "layers.*.mlp.up": "encoder.block.*.layer.1.DenseReluDense.wi",
            "decoder.*.mlp.up": "decoder.block.*.layer.2.DenseReluDense.wi",
        },
        copies={f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")},
    ), kind="t5",
        about="T5 1.0, 1.1, Flan-T5; `relu` or `gated-gelu`",
    ),
)  # fmt: skip
