"""Dense models that differ from Llama in a few properties.

Apertus     xIELU in its MLPs, and norms of queries and keys
Arcee's AFM squared ReLU, without a gate
Baichuan 1  q, k and v in one tensor; config.json does not state whether it is the model with 7B or with 13B
Helium      biases on queries, keys and values alone
nanochat    squared ReLU without a gate, norms without weights, and rotation backwards before norms of queries and keys
Nemotron-4  squared ReLU without a gate, and LayerNorm with zero-centered weights; Minitron, too
Seed-OSS    biases of queries, keys and values, or of all linear layers
SmolLM3     no rotary embedding in some layers
StableLM    without norms of queries and keys: attention and MLP in sequence, or in parallel with one norm
"""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, SLIDING, layer_types, num_layers, without_rotary
from megafp8.conversion.huggingface.names import QKV, equal_parts, fused, like_llama
from megafp8.conversion.huggingface.rope import rope, stated_rope
from megafp8.conversion.keys import ConfigKey, Fields, HfConfig, Keys, Trait, always, flag, only, same, switch, unread
from megafp8.layers.activation.reference import BETA, EPS

_RELU2 = traits.activation(default="relu2", gated=False)
_BIASES = ("attention_bias", "attention_out_bias", "mlp_bias")
_BIASES_BY_DEFAULT = (True, False, False)


def _read_biases(hf: HfConfig) -> Fields:
    """Read which linear layers have biases: q, k and v; the output projection of attention; the MLP."""
    biases = tuple(flag(hf, key, default) for key, default in zip(_BIASES, _BIASES_BY_DEFAULT, strict=True))
    if biases[1] != biases[2] or biases[1] > biases[0]:
        refuse("attention_out_bias", biases[1], "the value of mlp_bias; with attention_bias = false, false for both")
    return {"linear_bias": biases[1], "qkv_bias": biases[0] and not biases[1]}


def _write_biases(ours: Fields) -> Keys:
    every = ours["linear_bias"]
    return dict(zip(_BIASES, (every or ours["qkv_bias"], every, every), strict=True))


_SMOLLM_POSITIONS = without_rotary(4)


def _read_windows(hf: HfConfig) -> Fields:
    """Read the window of each layer.

    With use_sliding_window, the layers in layer_types have a window, or by default the layers without rotary embedding.
    """
    types, window = layer_types(hf), hf.get("sliding_window") if flag(hf, "use_sliding_window") else None
    if types is None:
        positions = _SMOLLM_POSITIONS.read(hf)["mixer.position_embedding"]
        types = [SLIDING if x == "none" and window is not None else FULL for x in positions]
    elif window is None:
        traits.check_window(None, types)
    return {"mixer.sliding_window": [window if kind == SLIDING else None for kind in types[: num_layers(hf)]]}


def _write_windows(ours: Fields) -> Keys:
    windows = ours["mixer.sliding_window"]
    window = next((x for x in windows if x is not None), None)
    written = {"use_sliding_window": window is not None, "sliding_window": window}
    return written | {"layer_types": [FULL if x is None else SLIDING for x in windows]}


_NORMS = {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
_XIELU = {f"mlp.{x}.weight": f"mlp.act_fn.{x}" for x in ("alpha_p", "alpha_n")}
_LENGTHS = ("max_position_embeddings", "model_max_length")


def _read_positions(hf: HfConfig) -> Fields:
    """Read the kind of position embedding from the key for the length, which differs between Baichuan 7B and 13B."""
    if "z_loss_weight" in hf:
        raise ValueError("z_loss_weight: this is Baichuan 2, whose output layer normalizes its weights")
    lengths = [key for key in _LENGTHS if key in hf]
    if len(lengths) != 1:
        raise ValueError(
            f"has {' and '.join(lengths) or 'neither'}: supported: {_LENGTHS[0]} (rope) or {_LENGTHS[1]} (ALiBi)"
        )
    kind = "rope" if lengths == [_LENGTHS[0]] else "alibi"
    return {"position_embedding": kind, "max_position_embeddings": hf[lengths[0]]}


FAMILIES = (
    Family("arcee", "ArceeForCausalLM", (
        *traits.llama_like(None, norm_eps=1e-5, activation=_RELU2), traits.LINEAR_BIASES, *traits.NO_WINDOW,
        traits.HEADS_DIVIDE,
    ), rank=4,
        about="AFM",
    ),
    Family("helium", "HeliumForCausalLM", (
        *traits.llama_like(20, 128, 1e-8, rope(1e5)), *traits.NO_WINDOW, traits.NO_PADDING, traits.heads_fill(128),
        same(qkv_bias=("attention_bias", False)), only(mlp_bias=False),
    ), like_llama(rotation="neighbors"), rank=5,
        about="Helium; biases of queries, keys and values, or none",
    ),
    Family("seed_oss", "SeedOssForCausalLM", (
        *traits.llama_like(8, 128), Trait(_BIASES, _read_biases, _write_biases), *traits.NO_WINDOW,
        same(attention_dropout=("attention_dropout", 0.1)), unread(residual_dropout=0.0),
    ), rank=4,
        about="Seed-OSS; biases of queries, keys and values, everywhere or nowhere",
    ),
    Family("smollm3", "SmolLM3ForCausalLM", (
        *traits.llama_like(4, rope=rope(2e6)), traits.LINEAR_BIASES, traits.TIED, _SMOLLM_POSITIONS, traits.NO_PADDING,
        Trait(("use_sliding_window", "sliding_window", "layer_types"), _read_windows, _write_windows),
        traits.HEADS_DIVIDE,
    ), rank=4,
        about="SmolLM3; biases as in `llama`",
    ),
    Family("nanochat", "NanoChatForCausalLM", (
        *traits.llama_like(None, activation=_RELU2), *traits.NO_WINDOW, traits.NO_PADDING,
        same(logit_softcap=ConfigKey("final_logit_softcapping", 15.0, nullable=True)),
        always(norm_weights=False, embedding_norm=True, qk_norm="rotated"), only(attention_bias=False),
    ), like_llama({"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}, rotation="backwards"), rank=4,
        about="nanochat",
    ),
    Family("nemotron", "NemotronForCausalLM", (
        traits.SIZES, traits.POSITIONS, traits.UNTIED, traits.INIT_STD, rope(1e4, partial=0.5), *traits.NO_WINDOW,
        _RELU2, traits.LINEAR_BIASES,
        always(normalization="layernorm", zero_centered_gamma=True),
        same(
            num_query_groups=ConfigKey("num_key_value_heads", None), head_dim=("head_dim", None),
            norm_eps=("norm_eps", 1e-5), attention_dropout=("attention_dropout", 0.0),
        ),
    ), rank=5,
        about="Nemotron-4, Minitron",
    ),
    Family("apertus", "ApertusForCausalLM", (
        *traits.llama_like(None, norm_eps=1e-5, rope=stated_rope(1.2e7), activation=always(activation="xielu")),
        *traits.NO_WINDOW, always(qk_norm=True), switch("linear_bias", "attention_bias", "attention"),
        only(hidden_act="xielu"),
        # Published folders have these keys, which transformers does not read.
        only(written=False, mlp_bias=False, post_norm=False, qk_norm=True),
    ), like_llama(_NORMS, _XIELU, constants={
        f"model.layers.*.mlp.act_fn.{name}": value for name, value in (("beta", BETA), ("eps", EPS))
    }), rank=4,
        about="Apertus",
    ),
    Family("stablelm", "StableLmForCausalLM", (
        rope(1e4, partial=0.25), *traits.RMSNORM_MODEL, traits.POSITIONS, traits.UNTIED, traits.activation(),
        same(
            num_query_groups=("num_key_value_heads", 32), norm_eps=("layer_norm_eps", 1e-5),
            qkv_bias=("use_qkv_bias", False),
        ),
        always(normalization="layernorm"), switch("parallel_block", "use_parallel_residual", "shared_norm"),
        only(qk_layernorm=False), traits.HEADS_DIVIDE,
    ),
        about="StableLM; `qk_layernorm: true` is refused",
    ),
    Family("baichuan", "BaichuanForCausalLM", (
        *traits.RMSNORM_MODEL, traits.activation(), traits.UNTIED, same(norm_eps=("rms_norm_eps", 1e-6)),
        Trait((*_LENGTHS, "z_loss_weight"), _read_positions,
              lambda ours: {_LENGTHS[ours["position_embedding"] == "alibi"]: ours["max_position_embeddings"]}),
        unread("_from_model_config"),
    ), like_llama(fused("self_attn.W_pack", equal_parts(3), QKV)), also="BaiChuanForCausalLM", rank=4,
        about="Baichuan 7B and 13B, which transformers lacks; Baichuan 2 is refused",
    ),
)  # fmt: skip
