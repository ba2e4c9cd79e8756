"""Bamba, with Mamba-2 or attention, and an MLP, in each layer."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, num_layers
from megafp8.conversion.huggingface.mamba import LINEAR, MAMBA_NAMES, bamba_like, mixers
from megafp8.conversion.huggingface.names import LLAMA, TensorNames, in_layers
from megafp8.conversion.huggingface.rope import ROPE_KEYS, read_rope, write_rope
from megafp8.conversion.keys import Fields, HfConfig, Trait, only, unread


def _kinds(hf: HfConfig) -> list[str]:
    full = hf.get("attn_layer_indices") or []
    return [FULL if i in full else LINEAR for i in range(num_layers(hf))]


def _read_rope(hf: HfConfig) -> Fields:
    """Read the rotary embedding. It always rotates half of a head; partial_rotary_factor is ignored."""
    return read_rope({key: x for key, x in hf.items() if key != "partial_rotary_factor"}, 1e4, 0.5)


_LAYERS = Trait(
    ("attn_layer_indices",),
    lambda hf: mixers(_kinds(hf)),
    lambda ours: {"attn_layer_indices": [i for i, kind in enumerate(ours["mixer.kind"]) if kind == "attention"]},
)
_NAMES = {f"mlp.{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")} | {"mlp_norm": "pre_ff_layernorm"}
FAMILIES = (
    Family("bamba", "BambaForCausalLM", (
        *traits.llama_like(8, norm_eps=1e-5, rope=Trait(ROPE_KEYS, _read_rope, write_rope)), _LAYERS,
        *bamba_like(_kinds), only(attention_bias=False, mlp_bias=False), traits.HEADS_DIVIDE, traits.NO_PADDING,
        unread("num_logits_to_keep", "z_loss_coefficient"),
    ), TensorNames({
        **LLAMA, **in_layers("model.layers.*", MAMBA_NAMES, _NAMES), "final_norm": "model.final_layernorm",
    }), rank=5,
        about="Bamba",
    ),
)  # fmt: skip
