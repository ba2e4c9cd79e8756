"""GPT-2 and OPT."""

from typing import Any

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import QKV, HfPlace, Names, TensorNames, after, equal_parts, fused, in_layers
from megafp8.conversion.keys import HfConfig, Trait, aliases, always, check, only, same


def _check_embedding_width(hf: HfConfig) -> None:
    width, hidden = hf.get("word_embed_proj_dim"), hf.get("hidden_size")
    if width not in (None, hidden):
        refuse("word_embed_proj_dim", width, f"hidden_size ({hidden})")


def gpt2_like(positions: int, dropout: float) -> tuple[Trait, ...]:
    """Return the traits of sizes, activation and dropout under GPT-2's names. The arguments are defaults."""
    return (
        same(
            num_layers="n_layer", hidden_size="n_embd", num_attention_heads="n_head", ffn_hidden_size=("n_inner", None),
            vocab_size="vocab_size", max_position_embeddings=("n_positions", positions),
            norm_eps=("layer_norm_epsilon", 1e-5), init_std=("initializer_range", 0.02),
            attention_dropout=("attn_pdrop", dropout), hidden_dropout=("resid_pdrop", dropout),
        ),
        traits.activation("activation_function", "gelu_new", gated=False),
        # The dropout after the embedding is our hidden_dropout, too.
        Trait(("embd_pdrop",), write=lambda ours: {"embd_pdrop": ours["hidden_dropout"]}),
        aliases(
            num_hidden_layers="n_layer", hidden_size="n_embd", num_attention_heads="n_head",
            max_position_embeddings="n_positions",
        ),
    )  # fmt: skip


_GPT2_LAYER = {
    "attention_norm": "ln_1", **fused("attn.c_attn", equal_parts(3), QKV, transposed=True),
    "attention.proj": HfPlace("attn.c_proj", transposed=True), "mlp_norm": "ln_2",
    "mlp.up": HfPlace("mlp.c_fc", transposed=True), "mlp.down": HfPlace("mlp.c_proj", transposed=True),
}  # fmt: skip
_OPT_LAYER = {
    "attention_norm": "self_attn_layer_norm", **{f"attention.{x}": f"self_attn.{x}_proj" for x in "qkv"},
    "attention.proj": "self_attn.out_proj", "mlp_norm": "final_layer_norm", "mlp.up": "fc1", "mlp.down": "fc2",
}  # fmt: skip
LEARNED = (traits.TIED, always(position_embedding="learned", normalization="layernorm", linear_bias=True))
_ENDS = {
    "embedding.word": "transformer.wte", "embedding.position": "transformer.wpe", "final_norm": "transformer.ln_f",
    "output": "lm_head",
}  # fmt: skip


def gpt2_names(*layer: Names, **options: Any) -> TensorNames:
    """Return the names of a model whose tensors outside the layers are named as in GPT-2."""
    return TensorNames({**_ENDS, **in_layers("transformer.h.*", *layer)}, **options)


FAMILIES = (
    Family("opt", "OPTForCausalLM", (
        same(
            num_layers="num_hidden_layers", hidden_size="hidden_size", num_attention_heads="num_attention_heads",
            ffn_hidden_size="ffn_dim", vocab_size="vocab_size",
            max_position_embeddings=("max_position_embeddings", 2048), init_std=("init_std", 0.02),
            activation=("activation_function", "relu", {"relu": "relu"}),
        ),
        *LEARNED, always(norm_eps=1e-5),
        check(_check_embedding_width, word_embed_proj_dim=lambda ours: ours["hidden_size"]),
        only(do_layer_norm_before=True, enable_bias=True, layer_norm_elementwise_affine=True),
        only(written=False, _remove_final_layer_norm=False),
    ), TensorNames({
        "embedding.word": "model.decoder.embed_tokens",
        "embedding.position": HfPlace("model.decoder.embed_positions", after(2)),
        "final_norm": "model.decoder.final_layer_norm", "output": "lm_head",
        **in_layers("model.decoder.layers.*", _OPT_LAYER),
    }), rank=2,
        about="OPT, except OPT-350M",
    ),
    Family("gpt2", "GPT2LMHeadModel", (
        *gpt2_like(1024, dropout=0.1), *LEARNED,
        only(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False),
    ), gpt2_names(_GPT2_LAYER), rank=2,
        about="GPT-2; `gelu_new` or `gelu`; scores scaled by 1/√d",
    ),
)  # fmt: skip
