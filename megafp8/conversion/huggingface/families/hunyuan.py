"""Hunyuan without experts, and with experts, with norms of queries and keys after the rotary embedding."""

from typing import Any

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import like_llama
from megafp8.conversion.huggingface.rope import ROPE_KEYS, read_rope, write_rope
from megafp8.conversion.keys import (
    REQUIRED,
    ConfigKey,
    Fields,
    HfConfig,
    Keys,
    Trait,
    aliases,
    always,
    check,
    expect,
    only,
    unread,
)

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


def _equal(hf: HfConfig, key: str, default: Any = REQUIRED) -> Any:
    """Return a value that config.json gives once, or in a list for each layer. All layers must have the same value."""
    value = ConfigKey(key, default).read(hf)
    values = value if isinstance(value, list) and value else [value]
    if any(x != values[0] for x in values):
        refuse(key, value, "the same value in all layers")
    return values[0]


def _check_experts(hf: HfConfig) -> None:
    """Raise ValueError for keys that transformers does not read if Hunyuan's own code would use another value."""
    for key, value in (("num_shared_expert", 1), ("moe_intermediate_size", hf.get("intermediate_size"))):
        if _equal(hf, key, value) != value:
            refuse(key, hf[key], f"{value} in all layers, which transformers always uses")


def _read_experts(hf: HfConfig) -> Fields:
    widths = {"moe.shared_ffn_hidden_size": hf.get("intermediate_size")}
    return widths | {"moe.num_experts": _equal(hf, "num_experts"), "moe.top_k": _equal(hf, "moe_topk", 1)}


def _write_experts(ours: Fields) -> Keys:
    return {"num_experts": ours["moe.num_experts"], "moe_topk": ours["moe.top_k"]}


_HUNYUAN = (
    *traits.llama_like(None, norm_eps=1e-5, rope=Trait(ROPE_KEYS, _read_rope, write_rope)), *traits.NO_WINDOW,
    always(qk_norm="after_rotation"), only(attention_bias=False), aliases(attention_head_dim="head_dim"),
    # Published folders have these keys, which transformers does not read.
    only(
        written=False, mlp_bias=False, use_qk_norm=True, use_cla=False, use_rotary_pos_emb=True, norm_type="rms",
        position_embedding_xdrope=False, xdrope_section=None, add_classification_head=False,
    ),
    unread("cla_share_factor", "class_num", "dense_list", "enable_lm_head_fp32", "eod_token_id", "image_token_id",
           "im_end_id", "im_newline_id", "im_start_id", "mask_init_id", "org_vocab_size", "pad_id", "pool_type",
           "text_end_id", "text_start_id"),
)  # fmt: skip
FAMILIES = (
    Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", (*_HUNYUAN, only(written=False, num_experts=1)),
           like_llama(_NORMS), rank=4,
        about="Hunyuan, dense; `alpha` of dynamic rope",
    ),
    Family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", (
        *_HUNYUAN, Trait(("num_experts", "moe_topk"), _read_experts, _write_experts), traits.EXPERTS_ONLY,
        aliases(num_experts_per_tok="moe_topk", num_local_experts="num_experts"), traits.AUX_LOSS,
        check(_check_experts, "num_shared_expert", "moe_intermediate_size"),
        only(
            written=False, moe_layer_num_skipped=0, use_mixed_mlp_moe=True, norm_topk_prob=True, n_group=False,
            topk_group=False, group_limited_greedy=False, routed_scaling_factor=1.0, moe_drop_tokens=False,
            kv_lora_rank=None, q_lora_rank=None, qk_nope_head_dim=None, qk_rope_head_dim=None, v_head_dim=None,
        ),
        unread("moe_random_routing_dropped_token"),
    ), like_llama(
        _NORMS, {"mlp.router": "mlp.gate.wg"},
        {f"mlp.shared.{x}": f"mlp.shared_mlp.{x}_proj" for x in ("gate", "up", "down")},
    ), moe=True, rank=4,
        about="Hunyuan with experts; one `moe_topk` in all layers",
    ),
)  # fmt: skip
