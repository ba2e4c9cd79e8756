"""Traits that several Hugging Face families share. Their arguments are the defaults in `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface.layers import FULL, SLIDING, layer_types
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import (
    ConfigKey,
    Fields,
    HfConfig,
    Keys,
    Trait,
    always,
    check,
    either,
    flag,
    only,
    same,
    unread,
)
from megafp8.layers.activation.record import ACTIVATIONS

SIZES = same(
    num_layers="num_hidden_layers", hidden_size="hidden_size", num_attention_heads="num_attention_heads",
    ffn_hidden_size="intermediate_size", vocab_size="vocab_size",
)  # fmt: skip
POSITIONS = same(max_position_embeddings=("max_position_embeddings", None))
TIED, UNTIED = (same(tie_embeddings=("tie_word_embeddings", tied)) for tied in (True, False))
INIT_STD = Trait(
    ("initializer_range",),
    lambda hf: {"init_std": hf.get("initializer_range", 0.02)},
    # LlamaConfig refuses values greater than 1. The key has no effect on a trained model.
    lambda ours: {"initializer_range": ours["init_std"]} if ours["init_std"] <= 1 else {},
)
NO_PADDING = unread(pad_token_id=None)
"""Trait for families in which the default of `transformers` is a token that a smaller vocabulary lacks."""


def activation(key: str = "hidden_act", default: str = "silu", *, gated: bool = True) -> Trait:
    """Return a trait for the activation of an MLP, gated or not, under any of its names in transformers."""
    kinds = {name: ours for name, ours in ACTIVATIONS.items() if ours.gated == gated}
    return same(activation=(key, default, {theirs: name for name, x in kinds.items() for theirs in x.hugging_face}))


RMSNORM_MODEL = (SIZES, INIT_STD, same(attention_dropout=("attention_dropout", 0.0)), always(normalization="rmsnorm"))
_ROPE, _SILU = rope(1e4), activation()


def llama_like(
    groups: int | None,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    rope: Trait = _ROPE,
    activation: Trait = _SILU,
    norm_eps_key: str = "rms_norm_eps",
) -> tuple[Trait, ...]:
    """Return the traits of Llama and similar families.

    Args:
        groups: Default of num_key_value_heads; None means the number of heads.
        head_dim: Default of head_dim.
        norm_eps: Default of `norm_eps_key`.
        rope: Trait for the rotary embedding.
        activation: Trait for the activation.
        norm_eps_key: Key of the number added to the variance in norms.
    """
    return (
        rope,
        *RMSNORM_MODEL,
        POSITIONS,
        activation,
        UNTIED,
        same(num_query_groups=ConfigKey("num_key_value_heads", groups, nullable=True), head_dim=("head_dim", head_dim)),
        same(norm_eps=(norm_eps_key, norm_eps)),
        only(written=False, rope_interleaved=False),
    )


_ATTENTION_BIAS, _MLP_BIAS = "attention_bias", "mlp_bias"
_BIASES = {(False, False): False, (True, True): True, (True, False): "attention", (False, True): "mlp"}
LINEAR_BIASES = Trait(
    (_ATTENTION_BIAS, _MLP_BIAS),
    lambda hf: {"linear_bias": _BIASES[flag(hf, _ATTENTION_BIAS), flag(hf, _MLP_BIAS)]},
    lambda ours: {key: ours["linear_bias"] in (True, key.partition("_")[0]) for key in (_ATTENTION_BIAS, _MLP_BIAS)},
)


def _check_heads(hf: HfConfig) -> None:
    hidden, heads = hf.get("hidden_size"), hf.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and hidden % max(heads, 1):
        refuse("hidden_size", hidden, f"a multiple of num_attention_heads ({heads}) in this family, even with head_dim")


HEADS_DIVIDE = check(_check_heads)
"""Check that some classes of transformers make, although their layers would work without it."""


def heads_fill(head_dim: int | None) -> Trait:
    """Return a check that heads are as wide as the model together.

    The output projection of these classes of transformers, or their norm of the queries, needs that. `head_dim` is the
    default; None means a width that fulfills it.
    """

    def read(hf: HfConfig) -> None:
        hidden, heads, width = hf.get("hidden_size"), hf.get("num_attention_heads"), hf.get("head_dim", head_dim)
        if width is not None and isinstance(hidden, int) and isinstance(heads, int) and heads * width != hidden:
            refuse("head_dim", width, f"hidden_size / num_attention_heads ({hidden / max(heads, 1):g}) in this family")

    return check(read)


_AUX_LOSS = "router_aux_loss_coef"
AUX_LOSS = Trait((_AUX_LOSS,), write=lambda ours: {_AUX_LOSS: ours["moe.aux_loss"]})
"""Weight of the balancing loss, written from the run's config. It is not read, because transformers computes the loss
over the whole batch and does not divide it by top_k."""
ROUTER = (same("moe", top_k="num_experts_per_tok"), AUX_LOSS)
EXPERTS_ONLY = Trait((), write=lambda ours: {"intermediate_size": ours["moe.ffn_hidden_size"]})
"""Trait for families in which all layers have experts: the width of an MLP is the width of the experts."""


def if_sparse(sparse: Callable[[HfConfig], bool], *traits: Trait) -> tuple[Trait, ...]:
    """Return traits that only apply to models with experts. `sparse` returns whether a config.json has experts."""

    def where_sparse(trait: Trait) -> Trait:
        return Trait(
            trait.keys,
            lambda hf: trait.read(hf) if sparse(hf) else {},
            lambda ours: trait.write(ours) if ours["moe"] is not None else {},
        )

    return tuple(map(where_sparse, traits))


MTP_LAYERS = "num_nextn_predict_layers"
"""Key for the number of layers of multi-token prediction."""
MULTI_TOKEN_PREDICTION = Trait(
    (MTP_LAYERS, "num_mtp_layers"),
    lambda hf: {"mtp_num_layers": hf.get(MTP_LAYERS) or 0},
    lambda ours: {MTP_LAYERS: 0},  # transformers has no such layers
)


def expert_groups(groups: int, top: int, num_experts: str = "n_routed_experts") -> Trait:
    """Return a trait for groups of experts, some of which are candidates for a token.

    Args:
        groups: Default number of groups.
        top: Default number of groups that are chosen for a token.
        num_experts: Key for the number of experts.
    """

    def read(hf: HfConfig) -> Fields:
        experts, count = hf.get(num_experts), hf.get("n_group", groups)
        if isinstance(experts, int) and isinstance(count, int) and 0 < experts < 2 * count:
            refuse("n_group", count, f"groups of at least two of the {num_experts} ({experts})")
        return {"moe.num_groups": count, "moe.top_groups": hf.get("topk_group", top)}

    return Trait(("n_group", "topk_group"), read, write_expert_groups)


def write_expert_groups(ours: Fields) -> Keys:
    """Return the keys for the number of expert groups and the number of groups chosen for each token."""
    groups, top = ours["moe.num_groups"], ours["moe.top_groups"]
    if top in (None, groups):  # experts of all groups may be chosen
        groups = top = 1
    return {"n_group": groups, "topk_group": top}


def shared_experts(default: int, key: str = "n_shared_experts", least: int = 1) -> Trait:
    """Return a trait that represents several shared experts, as wide as the other experts, by one MLP.

    Args:
        default: Default number of shared experts.
        key: Key for the number of shared experts.
        least: Smallest number that the family allows.
    """

    def read(hf: HfConfig) -> Fields:
        count, width = hf.get(key, default), hf.get("moe_intermediate_size")
        if not isinstance(count, int) or count < least:
            refuse(key, count, f"{least} or more in this family")
        return {"moe.shared_ffn_hidden_size": (count * width if isinstance(width, int) else width) if count else None}

    def write(ours: Fields) -> Keys:
        return {key: max(least, (ours["moe.shared_ffn_hidden_size"] or 0) // ours["moe.ffn_hidden_size"])}

    return Trait((key,), read, write)


def num_experts(key: str, other: str) -> Trait:
    """Return a trait for the number of experts under either of two names."""
    return either("moe.num_experts", key, other)


def sigmoid_router(
    scaling: float, *, normalize: bool = True, num_experts: str = "n_routed_experts"
) -> tuple[Trait, ...]:
    """Return the traits for a router with sigmoid scores, a selection bias and groups of experts, as in DeepSeek-V3.

    Args:
        scaling: Default of routed_scaling_factor.
        normalize: Default of norm_topk_prob.
        num_experts: Key for the number of experts.
    """
    return (
        *ROUTER, expert_groups(1, 1, num_experts), always("moe", score="sigmoid", selection_bias=True),
        same("moe", normalize=("norm_topk_prob", normalize), scaling_factor=("routed_scaling_factor", scaling),
             ffn_hidden_size="moe_intermediate_size"),
        # Code in the first folders and other engines read these keys.
        only(written=False, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1),
    )  # fmt: skip


def check_window(window: Any, kinds: list[str] | None) -> None:
    """Raise ValueError if layer_types (`kinds`) contradicts a window in all layers, or in none (`window` is None)."""
    kind = FULL if window is None else SLIDING
    if kinds is not None and set(kinds) != {kind}:
        refuse("layer_types", sorted(set(kinds)), f"{kind} for all layers, because the window is {window}")


NO_WINDOW = (
    check(lambda hf: check_window(None, layer_types(hf)), "layer_types"),
    only(written=False, sliding_window=None),
)
"""Traits for families in which no layer has a window, although config.json may have keys for it."""


def window_of_all(default: int | None) -> Trait:
    """Return a trait for a window that either all layers have, or none."""

    def read(hf: HfConfig) -> Fields:
        window = hf.get("sliding_window", default)
        check_window(window, layer_types(hf))
        return {"sliding_window": window}

    keys = ("sliding_window", "layer_types")
    return Trait(keys, read, lambda ours: {"sliding_window": ours["sliding_window"]})
