"""Poolside's Laguna and JetBrains' Mellum 2, with experts, and a rotary embedding for each kind of attention layer.

Laguna has softplus gates after attention, and several numbers of query heads.
"""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, SLIDING, layer_types, num_layers, sparse_layers, windows
from megafp8.conversion.huggingface.names import like_llama
from megafp8.conversion.huggingface.rope import ropes_of_types
from megafp8.conversion.keys import Fields, HfConfig, Trait, always, only, same, unread

_HEADS = "num_attention_heads_per_layer"
_GATES = {True: "per-element", "head": "per-head"}
"""Values of gating by ours."""
_LAGUNA_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}  # fmt: skip


def _types(hf: HfConfig) -> list[str]:
    return layer_types(hf) or [FULL] * num_layers(hf)


def _read_heads(hf: HfConfig) -> Fields:
    heads = hf.get(_HEADS) or [hf.get("num_attention_heads")] * num_layers(hf)
    if not isinstance(heads, list) or len(heads) != num_layers(hf):
        refuse(_HEADS, heads, "one number for each layer")
    return {"mixer.num_attention_heads": heads}


def _read_gate(hf: HfConfig) -> Fields:
    gating = hf.get("gating", True)
    if gating is not True and gating not in _GATES.values():
        refuse("gating", gating, "true, per-head, per-element")
    return {"output_gate": True if gating == "per-element" else "head"}


_MELLUM_ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5e5}, SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
FAMILIES = (
    Family("laguna", "LagunaForCausalLM", (
        *traits.llama_like(8, 128, rope=ropes_of_types(_types, _LAGUNA_ROPES, 1.0)), windows(512, _types),
        always(position_embedding="rope", qk_norm=True, output_gate_function="softplus"),
        Trait((_HEADS,), _read_heads, lambda ours: {_HEADS: ours["mixer.num_attention_heads"]}),
        Trait(("gating",), _read_gate, lambda ours: {"gating": _GATES.get(ours["output_gate"], "per-head")}),
        sparse_layers(1, None), *traits.ROUTER, traits.num_experts("num_experts", "num_local_experts"),
        same(
            "moe", ffn_hidden_size=("moe_intermediate_size", 512), scaling_factor=("moe_routed_scaling_factor", 1.0),
            shared_ffn_hidden_size=("shared_expert_intermediate_size", 512),
        ),
        always("moe", score="sigmoid", selection_bias=True), only(attention_bias=False),
        only(moe_apply_router_weight_on_input=False, moe_router_logit_softcapping=0.0),
    ), like_llama(
        {"attention.gate": "self_attn.g_proj", "mlp.router.bias": "mlp.experts.e_score_correction_bias"},
        {f"mlp.shared.{x}": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
    ), moe=True, rank=5,
        about="Laguna; `moe_router_logit_softcapping` is refused",
    ),
    Family("mellum", "MellumForCausalLM", (
        *traits.llama_like(4, 128, rope=ropes_of_types(_types, _MELLUM_ROPES)), windows(1024, _types),
        always(position_embedding="rope", qk_norm=True), only(attention_bias=False),
        *traits.ROUTER, traits.num_experts("num_local_experts", "num_experts"), sparse_layers(0, None),
        same("moe", normalize=("norm_topk_prob", True), ffn_hidden_size=("moe_intermediate_size", 896)),
        unread("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
    ), like_llama(other_heads=r"mtp\..*"), moe=True, rank=4,
        about="Mellum 2",
    ),
)  # fmt: skip
