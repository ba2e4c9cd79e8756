"""Ministral 3, and Mistral 4 with DeepSeek's latent attention and experts. Both scale queries by their positions."""

from functools import partial

from megafp8.config import LatentMixerConfig
from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.families.deepseek import LATENT_MODEL, check_derived_widths
from megafp8.conversion.huggingface.names import like_llama, stacked_experts, usual
from megafp8.conversion.huggingface.rope import ORIGINAL_LENGTH, ROPE_KEYS, read_rope, write_rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, check, expect, only, same

_SCALING = "llama_4_scaling_beta"
_WIDTHS = {
    **dict.fromkeys(("qk_head_dim", "head_dim"), ("qk_nope_head_dim", "qk_rope_head_dim")),
    "num_key_value_heads": ("num_attention_heads",),
}


def _read_rope(hf: HfConfig) -> Fields:
    """Read YaRN and the scaling of queries from one dictionary, which also has keys that follow from others."""
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    rope = dict(hf.get(key) or {})
    if rope.get("rope_type", rope.get("type")) != "yarn":
        refuse(key, hf.get(key), "in this family a dictionary with rope_type 'yarn'")
    for name in (_SCALING, ORIGINAL_LENGTH):
        if not isinstance(rope.get(name), int | float):
            refuse(f"{key}.{name}", rope.get(name), "a number, by which queries are scaled")
    rotated, width = hf.get("qk_rope_head_dim", 1), hf.get("qk_nope_head_dim", 0)
    if isinstance(rotated, int) and isinstance(width, int):
        share = rotated / (rotated + width)
        expect(rope, "partial_rotary_factor", share, f"{share}, the rotated part of a head")
    expect(rope, "max_position_embeddings", hf.get("max_position_embeddings"), "the value of max_position_embeddings")
    scaling = {"factor": rope[_SCALING], "length": rope[ORIGINAL_LENGTH]}
    yarn_keys = {_SCALING, "partial_rotary_factor", "max_position_embeddings"}
    fields = read_rope({**hf, key: {name: value for name, value in rope.items() if name not in yarn_keys}}, 1e4)
    return fields | {"query_scaling": scaling}


def _write_rope(ours: Fields) -> Keys:
    """Return the keys of YaRN and of the scaling of queries; none if a model's scaling differs or is missing."""
    scaling, yarn = ours["query_scaling"], ours["yarn"]
    if scaling is None or yarn is None or scaling.length != yarn.original_max_position_embeddings:
        return {}
    rope = write_rope(ours)
    return {"rope_parameters": rope["rope_scaling"] | {"rope_theta": rope["rope_theta"], _SCALING: scaling.factor}}


def _read_dense_rope(hf: HfConfig) -> Fields:
    """Read YaRN for whole heads, in which equal values of mscale and mscale_all_dim cancel each other."""
    fields = _read_rope(hf)
    yarn = fields["yarn"]
    if strength := yarn.pop("mscale_all_dim", 0):
        expect(yarn, "mscale", strength, f"the value of mscale_all_dim ({strength}), or neither of the two")
        yarn["mscale"] = 0
    return fields


def _write_dense_rope(ours: Fields) -> Keys:
    written = _write_rope(ours)
    if written and ours["yarn"].mscale == 0:
        written["rope_parameters"] |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    return written


FAMILIES = (
    Family("ministral3", "Ministral3ForCausalLM", (
        *traits.llama_like(8, 128, 1e-5, Trait(ROPE_KEYS, _read_dense_rope, _write_dense_rope)),
        traits.window_of_all(None), traits.NO_PADDING, only(written=False, attention_bias=False, mlp_bias=False),
    ),
        about="Ministral 3",
    ),
    Family("mistral4", "Mistral4ForCausalLM", (
        *LATENT_MODEL, Trait(ROPE_KEYS, _read_rope, _write_rope), only(rope_interleave=True), traits.NO_PADDING,
        check(partial(check_derived_widths, derived=_WIDTHS), *_WIDTHS,
              num_key_value_heads=lambda ours: ours["num_attention_heads"]),
        traits.num_experts("n_routed_experts", "num_local_experts"), traits.shared_experts(1),
        same(
            "moe", first_dense_layers=("first_k_dense_replace", 0), normalize=("norm_topk_prob", True),
            scaling_factor=("routed_scaling_factor", 1.0),
        ),
        always("moe", score="softmax"), only(n_group=1, topk_group=1),
    ), like_llama(usual(LatentMixerConfig), stacked_experts("mlp.experts")), moe=True, latent=True,
        about="Mistral 4",
    ),
)  # fmt: skip
