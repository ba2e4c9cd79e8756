"""Hunyuan without experts, with norms of queries and keys after the rotary embedding."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import like_llama
from megafp8.conversion.huggingface.rope import ROPE_KEYS, read_rope, write_rope
from megafp8.conversion.keys import Fields, HfConfig, Trait, aliases, always, expect, only, unread

_DYNAMIC = {"rope_type", "type", "rope_theta", "alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}

_NORMS = {"attention.q_norm": "self_attn.query_layernorm", "attention.k_norm": "self_attn.key_layernorm"}


def _read_rope(hf: HfConfig) -> Fields:
    """Read the rotary embedding. `alpha` of rope_type dynamic only multiplies the base; other keys have no effect."""
    known, width = dict(hf), hf.get("head_dim")
    for key in ("rope_scaling", "rope_parameters"):
        rope = hf.get(key) or {}
        if {rope.get("rope_type"), rope.get("type")} - {None} != {"dynamic"} or not rope.get("alpha"):
            continue
        if others := sorted(rope.keys() - _DYNAMIC):
            refuse(f"{key}.{others[0]}", rope[others[0]], "no such key with rope_type dynamic")
        if not isinstance(width, int) or width <= 2:
            refuse("head_dim", width, f"a number of channels, which {key}.alpha needs")
        theta = rope.get("rope_theta", hf.get("rope_theta", 1e4))
        expect(hf, "rope_theta", theta, f"the value of {key}.rope_theta ({theta!r}), or no second copy")
        known |= {key: {"rope_theta": theta * rope["alpha"] ** (width / (width - 2))}}
        known.pop("rope_theta", None)
    return read_rope(known, 1e4)


FAMILIES = (
    Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", (
        *traits.llama_like(None, norm_eps=1e-5, rope=Trait(ROPE_KEYS, _read_rope, write_rope)), *traits.NO_WINDOW,
        always(qk_norm="after_rotation"), only(attention_bias=False), aliases(attention_head_dim="head_dim"),
        # Published folders have these keys, which transformers does not read.
        only(
            written=False, mlp_bias=False, use_qk_norm=True, use_cla=False, use_rotary_pos_emb=True, norm_type="rms",
            num_experts=1, position_embedding_xdrope=False, xdrope_section=None, add_classification_head=False,
        ),
        unread("cla_share_factor", "class_num", "dense_list", "enable_lm_head_fp32", "eod_token_id", "image_token_id",
               "im_end_id", "im_newline_id", "im_start_id", "mask_init_id", "org_vocab_size", "pad_id", "pool_type",
               "text_end_id", "text_start_id"),
    ), like_llama(_NORMS), rank=4,
        about="Hunyuan, dense; `alpha` of dynamic rope",
    ),
)  # fmt: skip
