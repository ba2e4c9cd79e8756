"""GPT-2 and models with its names: OPT, GPT-Neo, GPT-J, CodeGen, StarCoder and SantaCoder (gpt_bigcode); StarCoder2."""

from typing import Any

import torch

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import (
    QKV,
    HfPlace,
    Names,
    Rows,
    TensorNames,
    after,
    equal_parts,
    fused,
    in_layers,
    like_llama,
    qkv_by_group,
)
from megafp8.conversion.huggingface.rope import rope, rotary_fraction
from megafp8.conversion.keys import (
    Fields,
    HfConfig,
    Keys,
    Trait,
    aliases,
    always,
    check,
    flag,
    only,
    same,
    switch,
    unread,
)


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
_LEARNED = (traits.TIED, always(position_embedding="learned", normalization="layernorm", linear_bias=True))
_ENDS = {
    "embedding.word": "transformer.wte", "embedding.position": "transformer.wpe", "final_norm": "transformer.ln_f",
    "output": "lm_head",
}  # fmt: skip


def _names(*layer: Names, **options: Any) -> TensorNames:
    """Return the names of a model whose tensors outside the layers are named as in GPT-2."""
    return TensorNames({**_ENDS, **in_layers("transformer.h.*", *layer)}, **options)


_ATTENTION_TYPES, _ATTENTION_LAYERS, _WINDOW = "attention_types", "attention_layers", "window_size"


def _read_windows(hf: HfConfig) -> Fields:
    """Read the kinds of layers, which are given as lists of kinds with the number of times that each list repeats."""
    runs, layers = hf.get(_ATTENTION_TYPES) or [[["global", "local"], 12]], hf.get("num_layers")
    if sum(len(kinds) * max(count, 0) for kinds, count in runs) != layers:
        refuse(_ATTENTION_TYPES, runs, f"one kind for each of num_layers ({layers})")
    kinds = [kind for kinds, count in runs for _ in range(count) for kind in kinds]
    if not {*kinds} <= {"global", "local"}:
        refuse(_ATTENTION_TYPES, runs, "global, local")
    if hf.get(_ATTENTION_LAYERS, kinds) != kinds:
        refuse(_ATTENTION_LAYERS, hf[_ATTENTION_LAYERS], f"the kinds in {_ATTENTION_TYPES}")
    return {"mixer.sliding_window": [hf.get(_WINDOW, 256) if kind == "local" else None for kind in kinds]}


def _write_windows(ours: Fields) -> Keys:
    windows = ours["mixer.sliding_window"]
    kinds = ["global" if window is None else "local" for window in windows]
    return {_ATTENTION_TYPES: [[kinds, 1]], _WINDOW: max((x for x in windows if x is not None), default=256)}


_NEO_LAYER = {
    "attention_norm": "ln_1", **{f"attention.{x}": f"attn.attention.{x}_proj" for x in "qkv"}, "mlp_norm": "ln_2",
    "attention.proj": "attn.attention.out_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip


def _read_rotary(hf: HfConfig) -> Fields:
    dim, width = hf.get("rotary_dim", 64), hf["n_embd"] // hf["n_head"]
    if not isinstance(dim, int) or not 0 < dim <= width:
        refuse("rotary_dim", dim, f"a number of channels of a head ({width})")
    return {"partial_rotary_factor": rotary_fraction(dim, width)}


def _check_width(hf: HfConfig) -> None:
    if hf["n_embd"] % 4:
        refuse("n_embd", hf["n_embd"], "a multiple of 4, the number of parts in which q, k and v are stored")


def _by_quarter(part: int) -> Rows:
    """Return the rows of a part, if each quarter of the queries is stored before a quarter of values and of keys."""
    return lambda mixer, n: (torch.arange(3 * n).view(4, 3, -1)[:, part].flatten(), 3 * n)


_GPTJ = (
    *gpt2_like(2048, dropout=0.0), traits.UNTIED,
    always(normalization="layernorm", parallel_block="shared_norm", linear_bias="mlp", output_bias=True),
    Trait(
        ("rotary_dim",), _read_rotary,
        lambda ours: {"rotary_dim": round(ours["head_dim"] * ours["partial_rotary_factor"])},
    ),
    only(written=False, rotary=True, scale_attn_weights=True),
)  # fmt: skip


def _gptj_names(qkv: Names) -> TensorNames:
    layer = {"attention.proj": "attn.out_proj", "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out", "shared_norm": "ln_1"}
    return _names(qkv, layer, rotation="neighbors")


_QVK = ("attention.q", "attention.v", "attention.k")


def _read_groups(hf: HfConfig) -> Fields:
    return {"num_query_groups": 1 if flag(hf, "multi_query", True) else None}


_LINEARS = {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
_IN_FP32 = ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")

FAMILIES = (
    Family("opt", "OPTForCausalLM", (
        same(
            num_layers="num_hidden_layers", hidden_size="hidden_size", num_attention_heads="num_attention_heads",
            ffn_hidden_size="ffn_dim", vocab_size="vocab_size",
            max_position_embeddings=("max_position_embeddings", 2048), init_std=("init_std", 0.02),
            activation=("activation_function", "relu", {"relu": "relu"}),
        ),
        *_LEARNED, always(norm_eps=1e-5),
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
        *gpt2_like(1024, dropout=0.1), *_LEARNED,
        only(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False),
    ), _names(_GPT2_LAYER), rank=2,
        about="GPT-2; `gelu_new` or `gelu`; scores scaled by 1/√d",
    ),
    Family("gpt_neo", "GPTNeoForCausalLM", (
        same(
            num_layers="num_layers", hidden_size="hidden_size", num_attention_heads="num_heads",
            ffn_hidden_size=("intermediate_size", None), vocab_size="vocab_size",
            max_position_embeddings=("max_position_embeddings", 2048), norm_eps=("layer_norm_epsilon", 1e-5),
            attention_dropout=("attention_dropout", 0.0), hidden_dropout=("resid_dropout", 0.0),
        ),
        Trait(("embed_dropout",), write=lambda ours: {"embed_dropout": ours["hidden_dropout"]}),
        aliases(num_hidden_layers="num_layers", num_attention_heads="num_heads"),
        Trait((_ATTENTION_TYPES, _ATTENTION_LAYERS, _WINDOW), _read_windows, _write_windows),
        traits.TIED, traits.INIT_STD, traits.activation("activation_function", "gelu_new", gated=False),
        always(position_embedding="learned", normalization="layernorm", attention_scale=1.0),
        always(linear_bias="mlp", proj_bias=True),
    ), _names(_NEO_LAYER), rank=5,
        about="GPT-Neo",
    ),
    Family("gptj", "GPTJForCausalLM", _GPTJ, _gptj_names({f"attention.{x}": f"attn.{x}_proj" for x in "qkv"}),
        about="GPT-J",
    ),
    Family("codegen", "CodeGenForCausalLM", (*_GPTJ, check(_check_width)),
           _gptj_names(fused("attn.qkv_proj", _by_quarter, _QVK)),
        about="CodeGen",
    ),
    Family("gpt_bigcode", "GPTBigCodeForCausalLM", (
        *gpt2_like(1024, dropout=0.1), *_LEARNED,
        Trait(("multi_query",), _read_groups, lambda ours: {"multi_query": ours["num_query_groups"] == 1}),
        only(scale_attn_weights=True, add_cross_attention=False),
        # The last ones are settings of the program that ran the first models.
        unread(*_IN_FP32, "num_key_value_heads", "inference_runner", "validate_runner_input", "pre_allocate_kv_cache"),
        unread("max_batch_size", "pad_key_length"),
    ), _names(_LINEARS, fused("attn.c_attn", qkv_by_group, QKV), {
        "attention_norm": "ln_1", "attention.proj": "attn.c_proj", "mlp_norm": "ln_2",
    }), rank=5,
        about="StarCoder, SantaCoder; one key-value head, or one for each head",
    ),
    Family("starcoder2", "Starcoder2ForCausalLM", (
        traits.SIZES, traits.POSITIONS, traits.TIED, traits.INIT_STD, rope(1e4), traits.window_of_all(None),
        traits.activation(default="gelu_pytorch_tanh", gated=False), always(normalization="layernorm"),
        same(
            num_query_groups=("num_key_value_heads", 2), head_dim=("head_dim", None),
            norm_eps=("norm_epsilon", 1e-5), attention_dropout=("attention_dropout", 0.0),
            hidden_dropout=("residual_dropout", 0.0),
        ),
        switch("linear_bias", "use_bias", default=True),
        Trait(("embedding_dropout",), write=lambda ours: {"embedding_dropout": ours["hidden_dropout"]}),
        # Keys of the program that trained it; transformers does not read them.
        unread(*_IN_FP32, "activation_function", "layer_norm_epsilon", "mlp_type", "norm_type", "scale_attn_weights"),
    ), like_llama(_LINEARS), rank=5,
        about="StarCoder2; biases everywhere or nowhere",
    ),
)  # fmt: skip
