"""Sarvam's models with experts: with ordinary attention (sarvam_moe), and with latent attention (sarvam_mla)."""

from megafp8.config import LatentMixerConfig
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.families.deepseek import LATENT_LAYERS, check_derived_widths, latent_widths
from megafp8.conversion.huggingface.names import (
    LLAMA,
    MULTI_TOKEN_PREDICTION,
    QKV,
    TensorNames,
    fused,
    in_layers,
    like_llama,
    qkv,
    usual,
)
from megafp8.conversion.huggingface.rope import ROPE_KEYS, read_rope, rope, write_rope
from megafp8.conversion.keys import (
    Fields,
    HfConfig,
    Trait,
    always,
    check,
    only,
    same,
    switch,
    unread,
    with_second_names,
)


def _read_rope(hf: HfConfig) -> Fields:
    scaling = hf.get("rope_scaling") or {}
    if "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):  # the name in the first folders
        scaling = {key: value for key, value in scaling.items() if key != "type"} | {"rope_type": "yarn"}
    return read_rope({**hf, "rope_scaling": scaling}, 1e4)


_MOE = (
    traits.num_experts("n_routed_experts", "num_local_experts"), traits.shared_experts(1), traits.expert_groups(1, 1),
    same(
        "moe", first_dense_layers=("first_k_dense_replace", 1), normalize=("norm_topk_prob", True),
        scaling_factor=("routed_scaling_factor", 2.5),
    ),
    always("moe", score="sigmoid", selection_bias=True), traits.MULTI_TOKEN_PREDICTION,
    # The code in the published folders reads these keys; transformers always uses this value.
    only(written=False, moe_router_enable_expert_bias=True), unread("embedding_dropout", "output_dropout"),
)  # fmt: skip
_SECOND_NAMES = {
    "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias",
}  # fmt: skip
_WIDTHS = {
    "qk_head_dim": ("qk_nope_head_dim", "qk_rope_head_dim"), "num_key_value_heads": ("num_attention_heads",),
}  # fmt: skip
FAMILIES = (
    Family("sarvam_moe", "Glm4MoeForCausalLM", with_second_names(
        _SECOND_NAMES, *traits.llama_like(4, 64, rope=rope(8e6, partial=1.0)), *traits.NO_WINDOW, traits.NO_PADDING,
        same(qkv_bias=("attention_bias", False)), switch("qk_norm", "use_qk_norm", default=True), *_MOE,
        same("moe", top_k=("num_experts_per_tok", 6), ffn_hidden_size=("moe_intermediate_size", 1024)),
        only(written=False, use_bias=False), unread("max_window_layers"),
    ), TensorNames({
        **LLAMA, "embedding.word": "model.word_embeddings",
        **in_layers("model.layers.*", MULTI_TOKEN_PREDICTION, fused("attention.query_key_value", qkv, QKV), {
            "attention.proj": "attention.dense", "attention.q_norm": "attention.query_layernorm",
            "attention.k_norm": "attention.key_layernorm", "mlp.router.bias": "mlp.gate.expert_bias",
        }),
    }), also="SarvamMoEForCausalLM", moe=True, rank=6,
        about="Sarvam MoE",
    ),
    Family("sarvam_mla", "DeepseekV3ForCausalLM", with_second_names(
        _SECOND_NAMES, *LATENT_LAYERS, *_MOE, Trait(ROPE_KEYS, _read_rope, write_rope), only(rope_interleave=True),
        latent_widths(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        same(norm_eps=("rms_norm_eps", 1e-6)), always("latent_attention", norm_eps=1e-6),
        same("moe", top_k=("num_experts_per_tok", 8), ffn_hidden_size=("moe_intermediate_size", 2048)),
        check(lambda hf: check_derived_widths(hf, _WIDTHS), *_WIDTHS), unread("head_dim", "q_head_dim"),
        only(written=False, use_qk_norm=True),
    ), like_llama(usual(LatentMixerConfig), MULTI_TOKEN_PREDICTION), also="SarvamMLAForCausalLM", moe=True,
        latent=True, rank=6,
        about="Sarvam MLA",
    ),
)  # fmt: skip
