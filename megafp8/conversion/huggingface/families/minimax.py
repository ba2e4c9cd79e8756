"""MiniMax-M2."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.families.llama import MIXTRAL_EXPERTS, MIXTRAL_ROUTER
from megafp8.conversion.huggingface.names import like_llama
from megafp8.conversion.huggingface.rope import ROPE_KEYS, read_rope, rotary_fraction, write_rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, only, unread


def _read_rope(hf: HfConfig) -> Fields:
    """Read the rotary embedding.

    The first folders state the number of rotated channels as rotary_dim. If partial_rotary_factor is also present,
    transformers prefers it, so the two must agree.
    """
    fields, width, dim = read_rope(hf, 5e6, 1.0), hf.get("head_dim", 128), hf.get("rotary_dim")
    if dim is None:
        return fields
    sources = [x for x in (hf, hf.get("rope_parameters"), hf.get("rope_scaling")) if x and "partial_rotary_factor" in x]
    if sources and dim != fields["partial_rotary_factor"] * width:
        refuse("rotary_dim", dim, f"partial_rotary_factor × head_dim ({fields['partial_rotary_factor'] * width:g})")
    return fields | {"partial_rotary_factor": rotary_fraction(dim, width)}


def _write_rope(ours: Fields) -> Keys:
    return write_rope(ours) | {"partial_rotary_factor": ours["partial_rotary_factor"]}


FAMILIES = (
    Family("minimax_m2", "MiniMaxM2ForCausalLM", (
        *traits.llama_like(8, 128, rope=Trait((*ROPE_KEYS, "rotary_dim"), _read_rope, _write_rope)),
        *traits.NO_WINDOW, always(qk_norm="projection"), *traits.ROUTER, traits.EXPERTS_ONLY,
        traits.num_experts("num_local_experts", "num_experts"), always("moe", score="sigmoid", selection_bias=True),
        # The code in the first folders reads these keys; transformers always uses this value.
        only(written=False, use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True,
             shared_intermediate_size=0, attention_bias=False),
        unread("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    ), like_llama(MIXTRAL_ROUTER, MIXTRAL_EXPERTS, {"mlp.router.bias": "block_sparse_moe.e_score_correction_bias"}),
        moe=True, rank=4,
        about="MiniMax-M2",
    ),
)  # fmt: skip
