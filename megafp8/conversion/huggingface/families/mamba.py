"""Mamba and Falcon Mamba, with only Mamba-1 in each layer, and Jamba, with Mamba-1 or attention, and experts."""

from collections.abc import Sequence
from typing import Any

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, num_layers
from megafp8.conversion.huggingface.mamba import LINEAR, Kinds, mamba, mamba_fields, mamba_value, mixers
from megafp8.conversion.huggingface.names import LLAMA, Names, TensorNames, equal_parts, fused, in_layers, usual
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, aliases, always, only, same, unread
from megafp8.layers.mamba1.record import Mamba1Config


def _mamba1(kinds: Kinds, norms: str, expand: str, rank: str, inner: str = "", **keys: Any) -> tuple[Trait, ...]:
    """Return the traits of Mamba-1.

    Args:
        kinds: Function that returns the kind of each layer.
        norms: Value of the record's key.
        expand: Key for the number of channels, relative to hidden_size.
        rank: Key for the rank of the steps.
        inner: Key for the number of channels, which transformers prefers to `expand`; empty if there is none.
        **keys: Other keys of the record, each given by its name and default in transformers.
    """

    def read(hf: HfConfig) -> Fields:
        hidden, low = hf["hidden_size"], hf.get(rank, "auto")
        width, low = hf.get(inner, hf.get(expand, 2) * hidden), -(-hidden // 16) if low == "auto" else low
        sizes = {"inner_size": width, "step_rank": low}
        return mixers(kinds(hf), "mamba1") | mamba_fields(kinds, hf, sizes | {"norms": norms})

    def write(ours: Fields) -> Keys:
        if (width := mamba_value(ours, "inner_size")) is None:
            return {}
        written = {expand: width // ours["hidden_size"], rank: mamba_value(ours, "step_rank")}
        return written | ({inner: width} if inner else {})

    unused = unread("use_associative_scan", "use_mambapy", "use_falcon_mambapy", "use_mamba_kernels")
    keys_of_record = (expand, rank, inner) if inner else (expand, rank)
    return Trait(keys_of_record, read, write), mamba(kinds, **keys), only(hidden_act="silu"), unused


def _linear(hf: HfConfig) -> list[str]:
    return [LINEAR] * num_layers(hf)


def _mamba_only(norms: str, **keys: Any) -> tuple[Trait, ...]:
    """Return the traits of models whose layers have only Mamba-1; `keys` are keys of its record."""
    return (
        same(num_layers="num_hidden_layers", hidden_size="hidden_size", vocab_size="vocab_size",
             norm_eps=("layer_norm_epsilon", 1e-5)),
        traits.TIED, traits.INIT_STD, always(normalization="rmsnorm", position_embedding="none", num_attention_heads=1),
        Trait((), lambda hf: {"ffn.kind": ["none"] * num_layers(hf)}),
        *_mamba1(
            _linear, norms, "expand", "time_step_rank", "intermediate_size", state_size=("state_size", 16),
            conv_kernel_size=("conv_kernel", 4), conv_bias=("use_conv_bias", True), proj_bias=("use_bias", False),
            **keys,
        ),
        unread(
            "residual_in_fp32", "rescale_prenorm_residual", "time_step_floor", "time_step_init_scheme", "time_step_max",
            "time_step_min", "time_step_scale",
        ),
        # The first folders have these keys, which transformers does not read.
        unread("d_inner", "d_model", "fused_add_norm", "n_layer", "pad_vocab_size_multiple", "ssm_cfg"),
        only(written=False, rms_norm=True),
    )  # fmt: skip


def _every(hf: HfConfig, part: str, period: int, offset: int) -> list[bool]:
    """Return whether each layer has a part, which one layer of each period has. The numbers are defaults."""
    every, first = hf.get(f"{part}_layer_period", period), hf.get(f"{part}_layer_offset", offset)
    if not isinstance(every, int) or not isinstance(first, int) or not 0 <= first < every:
        refuse(f"{part}_layer_offset", first, f"a number from 0 to {part}_layer_period ({every}) - 1")
    return [i % every == first for i in range(num_layers(hf))]


def _written(part: str, layers: Sequence[bool]) -> Keys:
    """Return the keys for the layers with a part."""
    first = layers.index(True) if any(layers) else len(layers)
    every = layers.index(True, first + 1) - first if sum(layers) > 1 else len(layers) + 1
    return {f"{part}_layer_period": every, f"{part}_layer_offset": first}


def _kinds(hf: HfConfig) -> list[str]:
    return [FULL if x else LINEAR for x in _every(hf, "attn", 8, 4)]


def _ffns(hf: HfConfig) -> list[str]:
    sparse = hf.get("num_experts", 16) > 1
    return ["moe" if x and sparse else "mlp" for x in _every(hf, "expert", 2, 1)]


def _write_layers(ours: Fields) -> Keys:
    written = _written("attn", [kind == "attention" for kind in ours["mixer.kind"]])
    if ours["moe"] is None:
        return written | {"num_experts": 1}
    return written | _written("expert", [kind == "moe" for kind in ours["ffn.kind"]])


def _names(mixer: str) -> Names:
    """Return the names of the tensors of a layer with Mamba-1, for the name of the mixer."""
    places = {ours: str(theirs).replace("mamba", mixer) for ours, theirs in usual(Mamba1Config).items()}
    return {**places, **fused(f"{mixer}.in_proj", equal_parts(2), ("mamba1.x", "mamba1.z"))}


_MAMBA = TensorNames({
    "embedding.word": "backbone.embeddings", "final_norm": "backbone.norm_f", "output": "lm_head",
    **in_layers("backbone.layers.*", _names("mixer"), {"attention_norm": "norm"}),
})  # fmt: skip
_MLPS = {
    f"mlp.{experts}{part}": f"feed_forward.{experts}{part}_proj"
    for part in ("gate", "up", "down") for experts in ("", "experts.*.")
}  # fmt: skip
FAMILIES = (
    Family("mamba", "MambaForCausalLM", _mamba_only("none"), _MAMBA, rank=5,
        about="Mamba",
    ),
    Family("falcon_mamba", "FalconMambaForCausalLM", _mamba_only("unweighted", norm_eps=("mixer_rms_eps", 1e-6)),
           _MAMBA, rank=5,
        about="Falcon Mamba",
    ),
    Family("jamba", "JambaForCausalLM", (
        *traits.llama_like(8, rope=always(position_embedding="none")),
        *_mamba1(
            _kinds, "weighted", "mamba_expand", "mamba_dt_rank", state_size=("mamba_d_state", 16),
            conv_kernel_size=("mamba_d_conv", 4), conv_bias=("mamba_conv_bias", True),
            proj_bias=("mamba_proj_bias", False), norm_eps=("rms_norm_eps", 1e-6),
        ),
        Trait(
            tuple(f"{part}_layer_{key}" for part in ("attn", "expert") for key in ("period", "offset")),
            lambda hf: {"ffn.kind": _ffns(hf)}, _write_layers,
        ),
        *traits.if_sparse(
            lambda hf: "moe" in _ffns(hf), traits.AUX_LOSS, always("moe", normalize=False),
            same("moe", num_experts=("num_experts", 16), top_k=("num_experts_per_tok", 2),
                 ffn_hidden_size="intermediate_size"),
        ),
        aliases(num_local_experts="num_experts"), only(written=False, mamba_inner_layernorms=True, sliding_window=None),
        traits.NO_PADDING, unread("calc_logits_for_entire_prompt", "num_logits_to_keep"),
    ), TensorNames({
        **LLAMA, "final_norm": "model.final_layernorm",
        **in_layers("model.layers.*", _names("mamba"), _MLPS, {
            "mlp_norm": "pre_ff_layernorm", "mlp.router": "feed_forward.router",
        }),
    }), moe=None, rank=5,
        about="Jamba",
    ),
)  # fmt: skip
