"""StarCoder and SantaCoder (gpt_bigcode), which are GPT-2 with one key-value head, and StarCoder2."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.families.gpt2 import LEARNED, gpt2_like, gpt2_names
from megafp8.conversion.huggingface.names import QKV, fused, like_llama, qkv_by_group
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import Fields, HfConfig, Trait, always, flag, only, same, switch, unread


def _read_groups(hf: HfConfig) -> Fields:
    return {"num_query_groups": 1 if flag(hf, "multi_query", True) else None}


_LINEARS = {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
_IN_FP32 = ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
FAMILIES = (
    Family("gpt_bigcode", "GPTBigCodeForCausalLM", (
        *gpt2_like(1024, dropout=0.1), *LEARNED,
        Trait(("multi_query",), _read_groups, lambda ours: {"multi_query": ours["num_query_groups"] == 1}),
        only(scale_attn_weights=True, add_cross_attention=False),
        # The last ones are settings of the program that ran the first models.
        unread(*_IN_FP32, "num_key_value_heads", "inference_runner", "validate_runner_input", "pre_allocate_kv_cache"),
        unread("max_batch_size", "pad_key_length"),
    ), gpt2_names(_LINEARS, fused("attn.c_attn", qkv_by_group, QKV), {
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
