"""DeepSeek-V2 and V3, and models with the same latent attention.

SK Telecom's A.X-K1 is DeepSeek-V3 with a norm after the experts. Youtu-LLM has no experts.
"""

from collections.abc import Mapping

from megafp8.config import LatentMixerConfig
from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import sparse_layers
from megafp8.conversion.huggingface.names import MULTI_TOKEN_PREDICTION, Entries, like_llama, usual
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import REQUIRED, Fields, HfConfig, Keys, Trait, always, check, expect, only, same, unread
from megafp8.spec import ModelSpec

_DERIVED_WIDTHS = {
    "qk_head_dim": ("qk_nope_head_dim", "qk_rope_head_dim"),
    "head_dim": ("qk_rope_head_dim",),  # width of the rotary embedding
    "num_key_value_heads": ("num_attention_heads",),
}
_GROUP_METHODS = ("greedy", "group_limited_greedy")


def check_derived_widths(hf: HfConfig, derived: Mapping[str, tuple[str, ...]] = _DERIVED_WIDTHS) -> None:
    """Raise ValueError if a key that follows from other keys has another value; transformers would use that value."""
    for key, parts in derived.items():
        values = [x for part in parts if isinstance(x := hf.get(part), int)]  # others are refused elsewhere
        if len(values) == len(parts):
            expect(hf, key, sum(values), f"{' + '.join(parts)} ({sum(values)})")


def _read_group_method(hf: HfConfig) -> Fields:
    """Read the expert groups of deepseek_v2, which uses them with one method and ignores them with the other."""
    method = hf.get("topk_method", "greedy")
    if method not in _GROUP_METHODS:
        refuse("topk_method", method, ", ".join(_GROUP_METHODS))
    if method == "greedy":
        return {}
    return {"moe.num_groups": hf.get("n_group"), "moe.top_groups": hf.get("topk_group")}


def _write_group_method(ours: Fields) -> Keys:
    groups = traits.write_expert_groups(ours)
    return {**groups, "topk_method": _GROUP_METHODS[groups["n_group"] > 1]}


def latent_norms(eps: float) -> tuple[Trait, ...]:
    """Return traits for the epsilon of norms, by default `eps`, which is always 1e-6 for the norms of the latents."""
    return same(norm_eps=("rms_norm_eps", eps)), always("latent_attention", norm_eps=1e-6)


def _read_init(hf: HfConfig) -> Fields:
    """Read the standard deviation of youtu's weights, which by default follows from hidden_size."""
    return {"init_std": hf.get("initializer_range") or 2 / (5 * hf["hidden_size"]) ** 0.5}


_WIDTHS = {
    "q_rank": "q_lora_rank", "kv_rank": "kv_lora_rank", "nope_head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim", "value_head_dim": "v_head_dim",
}  # fmt: skip


def latent_widths(**defaults: int | None) -> Trait:
    """Return a trait for the widths of latents and heads. `defaults` has the keys that may be missing."""
    keys = {ours: (key, defaults.get(key, REQUIRED), None, ours == "q_rank") for ours, key in _WIDTHS.items()}
    return same("latent_attention", **keys)


LATENT_LAYERS = (
    *traits.RMSNORM_MODEL, traits.POSITIONS, traits.activation(), traits.UNTIED, only(attention_bias=False),
)  # fmt: skip
LATENT_ATTENTION = (*LATENT_LAYERS, latent_widths())
LATENT_KEYS = (*LATENT_ATTENTION, same("moe", top_k="num_experts_per_tok", ffn_hidden_size="moe_intermediate_size"))
LATENT_MODEL = (
    *LATENT_KEYS, always(norm_eps=1e-6),
    only(rms_norm_eps=1e-6, why="which transformers always uses for the norms of the latents"),
)  # fmt: skip
# The default of num_key_value_heads in transformers does not depend on the number of heads.
LATENT_HEADS = check(
    check_derived_widths, *_DERIVED_WIDTHS, num_key_value_heads=lambda ours: ours["num_attention_heads"]
)  # fmt: skip
LATENT_ROPE = (rope(1e4), LATENT_HEADS)
DEEPSEEK_KEYS = (
    *LATENT_ROPE,
    only(moe_layer_freq=1),  # this key and the next ones are read by engines other than transformers
    unread("aux_loss_alpha", "seq_aux"),  # like router_aux_loss_coef, for losses that we do not have
)  # fmt: skip
_DEEPSEEK = *LATENT_MODEL, *DEEPSEEK_KEYS
_NAMES = like_llama(usual(LatentMixerConfig), MULTI_TOKEN_PREDICTION)


_AXK1_LAYERS = sparse_layers(1, "first_k_dense_replace")


def _read_axk1_layers(hf: HfConfig) -> Fields:
    kinds = _AXK1_LAYERS.read(hf)["ffn.kind"]
    return {"ffn.kind": kinds, "layer.norm_position": ["mlp_both" if kind == "moe" else "pre" for kind in kinds]}


def _axk1_stored(model: ModelSpec, entries: Entries) -> Entries:
    """Return the tensors without the norms after MLPs, which published folders have and transformers does not use."""
    dense = {f"model.layers.{i}.post_mlp_layernorm.weight" for i, x in enumerate(model.layers) if not x.has_experts}
    return {name: entry for name, entry in entries.items() if name not in dense}


FAMILIES = (
    Family("deepseek_v2", "DeepseekV2ForCausalLM", (
        *_DEEPSEEK, traits.num_experts("n_routed_experts", "num_experts"), traits.shared_experts(2),
        same("moe", first_dense_layers=("first_k_dense_replace", 0), scaling_factor=("routed_scaling_factor", 1.0)),
        Trait(("topk_method", "n_group", "topk_group"), _read_group_method, _write_group_method),
        # transformers never normalizes; other engines do if the key says so.
        always("moe", normalize=False), only(norm_topk_prob=False, scoring_func="softmax"),
        only(written=False, mlp_bias=False), traits.HEADS_DIVIDE,
    ), _NAMES, moe=True, latent=True,
        about="DeepSeek-V2, V2-Lite; `greedy` and `group_limited_greedy`",
    ),
    Family("deepseek_v3", "DeepseekV3ForCausalLM", (
        *_DEEPSEEK, only(rope_interleave=True), traits.num_experts("n_routed_experts", "num_local_experts"),
        traits.shared_experts(1),
        same(
            "moe", first_dense_layers=("first_k_dense_replace", 3), normalize=("norm_topk_prob", True),
            scaling_factor=("routed_scaling_factor", 2.5),
        ),
        traits.expert_groups(8, 4), always("moe", score="sigmoid", selection_bias=True),
        only(scoring_func="sigmoid", topk_method="noaux_tc"), traits.MULTI_TOKEN_PREDICTION,
    ), _NAMES, moe=True, latent=True,
        about="DeepSeek-V3, R1",
    ),
    Family("youtu", "YoutuForCausalLM", (
        *LATENT_ATTENTION, *LATENT_ROPE, *latent_norms(1e-6), traits.TIED,
        Trait(("initializer_range", "embedding_initializer_range"), _read_init),
        only(rope_interleave=True), only(written=False, mlp_bias=False),
    ), like_llama(usual(LatentMixerConfig)), latent=True, rank=5,
        about="Youtu-LLM",
    ),
    Family("axk1", "AXK1ForCausalLM", (
        *LATENT_LAYERS, LATENT_HEADS, rope(1e4), only(rope_interleave=True),
        latent_widths(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        *latent_norms(1e-6), Trait(_AXK1_LAYERS.keys, _read_axk1_layers, _AXK1_LAYERS.write),
        only(written=False, moe_layer_freq=1, scoring_func="sigmoid"),
        traits.num_experts("n_routed_experts", "num_local_experts"), traits.shared_experts(1),
        same(
            "moe", top_k=("num_experts_per_tok", 8), ffn_hidden_size=("moe_intermediate_size", 2048),
            normalize=("norm_topk_prob", True), scaling_factor=("routed_scaling_factor", 2.5),
        ),
        traits.expert_groups(8, 4), always("moe", score="sigmoid", selection_bias=True), traits.MULTI_TOKEN_PREDICTION,
        unread("topk_method", "aux_loss_alpha", "seq_aux"),
    ), like_llama(
        usual(LatentMixerConfig), MULTI_TOKEN_PREDICTION, {"mlp_output_norm": "post_mlp_layernorm"},
        zeros=r"model\.layers\.\d+\.mlp\.gate\.e_score_correction_bias", stored=_axk1_stored,
    ), moe=True, latent=True, rank=4,
        about="A.X-K1",
    ),
)  # fmt: skip
