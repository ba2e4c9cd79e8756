"""Phi-3 and Phi-4."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import FUSED_GATE_UP, QKV, fused, like_llama, qkv
from megafp8.conversion.huggingface.rope import ORIGINAL_LENGTH, ROPE_KEYS, read_rope, write_rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, only


def _read_rope(hf: HfConfig) -> Fields:
    """Read a rotary embedding with longrope, formerly named su, or without scaling.

    Other kinds are refused, because transformers treats yarn as longrope in this family. transformers always reads the
    original length at the top level of config.json, with a default, regardless of the dictionary.
    """
    original, ropes = hf.get(ORIGINAL_LENGTH, 4096), {}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(rope := hf.get(key), dict):
            continue
        rope = {name: "longrope" if name in ("type", "rope_type") and x == "su" else x for name, x in rope.items()}
        ropes[key] = {ORIGINAL_LENGTH: original} | rope if "longrope" in map(str, rope.values()) else rope
    fields = read_rope({**hf, **ropes, ORIGINAL_LENGTH: original}, 1e4, 1.0)
    if {"yarn", "rope_scaling", "rope_interpolation_factor"} & fields.keys():
        scaling = hf.get("rope_scaling") or hf.get("rope_parameters")
        refuse("rope_scaling", scaling, "rope_type 'longrope', or null in this family")
    return fields


def _write_rope(ours: Fields) -> Keys:
    """Return the keys of the rotary embedding. transformers 4 only accepts three keys in rope_scaling."""
    written = write_rope(ours) | {"partial_rotary_factor": ours["partial_rotary_factor"]}
    if ours["longrope"] is not None:
        kept = ("short_factor", "long_factor")
        written["rope_scaling"] = {"type": "longrope", **{key: written["rope_scaling"][key] for key in kept}}
    return written


FAMILIES = (
    Family("phi3", "Phi3ForCausalLM", (
        *traits.llama_like(None, norm_eps=1e-5, rope=Trait(ROPE_KEYS, _read_rope, _write_rope)), traits.NO_PADDING,
        traits.window_of_all(None),
        # Phi-4-mini has the other keys, which its own code reads.
        only(written=False, attention_bias=False, mlp_bias=False, lm_head_bias=False),
        only(written=False, full_attn_mod=1, interpolate_factor=1),
    ), like_llama(fused("self_attn.qkv_proj", qkv, QKV), FUSED_GATE_UP), rank=2,
        about="Phi-3, Phi-3.5, Phi-4, Phi-4-mini; `longrope` or no scaling",
    ),
)  # fmt: skip
