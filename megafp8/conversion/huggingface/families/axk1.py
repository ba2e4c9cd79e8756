"""SK Telecom's A.X-K1, which is DeepSeek-V3 with a norm after the experts."""

from megafp8.config import LatentMixerConfig
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.families.deepseek import LATENT_HEADS, LATENT_LAYERS, latent_widths
from megafp8.conversion.huggingface.layers import sparse_layers
from megafp8.conversion.huggingface.names import MULTI_TOKEN_PREDICTION, Entries, like_llama, usual
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import Fields, HfConfig, Trait, always, only, same, unread
from megafp8.spec import ModelSpec

_LAYERS = sparse_layers(1, "first_k_dense_replace")


def _read_layers(hf: HfConfig) -> Fields:
    kinds = _LAYERS.read(hf)["ffn.kind"]
    return {"ffn.kind": kinds, "layer.norm_position": ["mlp_both" if kind == "moe" else "pre" for kind in kinds]}


def _stored(model: ModelSpec, entries: Entries) -> Entries:
    """Return the tensors without the norms after MLPs, which published folders have and transformers does not use."""
    dense = {f"model.layers.{i}.post_mlp_layernorm.weight" for i, x in enumerate(model.layers) if not x.has_experts}
    return {name: entry for name, entry in entries.items() if name not in dense}


FAMILIES = (
    Family("axk1", "AXK1ForCausalLM", (
        *LATENT_LAYERS, LATENT_HEADS, rope(1e4), only(rope_interleave=True),
        latent_widths(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        same(norm_eps=("rms_norm_eps", 1e-6)), always("latent_attention", norm_eps=1e-6),
        Trait(_LAYERS.keys, _read_layers, _LAYERS.write), only(written=False, moe_layer_freq=1, scoring_func="sigmoid"),
        traits.num_experts("n_routed_experts", "num_local_experts"), traits.shared_experts(1),
        same(
            "moe", top_k=("num_experts_per_tok", 8), ffn_hidden_size=("moe_intermediate_size", 2048),
            normalize=("norm_topk_prob", True), scaling_factor=("routed_scaling_factor", 2.5),
        ),
        traits.expert_groups(8, 4), always("moe", score="sigmoid", selection_bias=True), traits.MULTI_TOKEN_PREDICTION,
        unread("topk_method", "aux_loss_alpha", "seq_aux"),
    ), like_llama(
        usual(LatentMixerConfig), MULTI_TOKEN_PREDICTION, {"mlp_output_norm": "post_mlp_layernorm"},
        zeros=r"model\.layers\.\d+\.mlp\.gate\.e_score_correction_bias", stored=_stored,
    ), moe=True, latent=True, rank=4,
        about="A.X-K1",
    ),
)  # fmt: skip
