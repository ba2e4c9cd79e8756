"""RecurrentGemma, with the RG-LRU or attention to a window in each layer."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import num_layers
from megafp8.conversion.huggingface.names import LLAMA, TensorNames, in_layers, usual
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import ConfigKey, Fields, HfConfig, Keys, Trait, always, check, expect, only, same, unread
from megafp8.layers.rg_lru.record import RgLruConfig
from megafp8.numerics.dtypes import in_bf16

_LRU, _ATTENTION, _WINDOW = "recurrent", "attention", "attention_window_size"
_SIZES = {"inner_size": "lru_width", "conv_kernel_size": "conv1d_width"}


def _read_layers(hf: HfConfig) -> Fields:
    types, hidden = hf.get("block_types", [_LRU, _LRU, _ATTENTION]), hf["hidden_size"]
    if not isinstance(types, list) or not types or any(kind not in (_LRU, _ATTENTION) for kind in types):
        refuse("block_types", types, f"a list of {_LRU} and {_ATTENTION}")
    recurrent = [types[i % len(types)] == _LRU for i in range(num_layers(hf))]
    width = hidden if hf.get("lru_width") is None else hf["lru_width"]
    sizes = {"inner_size": width, "conv_kernel_size": hf.get("conv1d_width", 4), "num_heads": hf["num_attention_heads"]}
    return {
        "mixer.kind": ["rg_lru" if x else "attention" for x in recurrent],
        "mixer.sliding_window": [None if x else hf.get(_WINDOW, 2048) for x in recurrent],
        **{f"mixer.{key}": [value if x else None for x in recurrent] for key, value in sizes.items()},
        # transformers rounds this multiplier to bf16 in any precision.
        "embedding_multiplier": in_bf16(hidden**0.5),
    }


def _write_layers(ours: Fields) -> Keys:
    kinds, windows = ours["mixer.kind"], [x for x in ours["mixer.sliding_window"] if x is not None]
    written: Keys = {"block_types": [_LRU if kind == "rg_lru" else _ATTENTION for kind in kinds]}
    if "rg_lru" in kinds:
        written |= {theirs: ours[f"mixer.{key}"][kinds.index("rg_lru")] for key, theirs in _SIZES.items()}
    return written | ({_WINDOW: windows[0]} if windows else {})


def _check_head_dim(hf: HfConfig) -> None:
    expect(hf, "head_dim", hf["hidden_size"] // hf["num_attention_heads"], "hidden_size / num_attention_heads")


FAMILIES = (
    Family("recurrent_gemma", "RecurrentGemmaForCausalLM", (
        same(num_layers="num_hidden_layers", hidden_size="hidden_size", num_attention_heads="num_attention_heads",
             vocab_size="vocab_size", num_query_groups=ConfigKey("num_key_value_heads", None),
             norm_eps=("rms_norm_eps", 1e-6), logit_softcap=("logits_soft_cap", 30.0),
             qkv_bias=("attention_bias", False), attention_dropout=("attention_dropout", 0.0)),
        traits.TIED, rope(1e4, 0.5), Trait(("block_types", _WINDOW, *_SIZES.values()), _read_layers, _write_layers),
        Trait(("intermediate_size",), lambda hf: {"ffn_hidden_size": hf.get("intermediate_size", 7680) // 2},
              lambda ours: {"intermediate_size": 2 * ours["ffn_hidden_size"]}),
        always(normalization="rmsnorm", zero_centered_gamma=True, activation="geglu_tanh", linear_bias="mlp",
               proj_bias=True),
        only(hidden_activation="gelu_pytorch_tanh"), only(written=False, embeddings_scale_by_sqrt_dim=True),
        check(_check_head_dim, "head_dim"), traits.HEADS_DIVIDE, traits.NO_PADDING,
        unread("_block_types", "final_w_init_variance_scale", "w_init_variance_scale"),
    ), TensorNames({
        **LLAMA, "final_norm": "model.final_norm", **in_layers(
            "model.layers.*", {"attention_norm": "temporal_pre_norm", "mlp_norm": "channel_pre_norm"},
            {f"mlp.{x}": f"mlp_block.{x}_proj" for x in ("gate", "up", "down")},
            {f"attention.{x}": f"temporal_block.{x}_proj" for x in "qkv"}, {"attention.proj": "temporal_block.o_proj"},
            usual(RgLruConfig),
        ),
    }), rank=5,
        about="RecurrentGemma",
    ),
)  # fmt: skip
