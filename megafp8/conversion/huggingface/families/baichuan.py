"""Baichuan 1, with 7 and with 13 billion parameters. Their config.json does not state which of the two it is."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import QKV, equal_parts, fused, like_llama
from megafp8.conversion.keys import Fields, HfConfig, Trait, same, unread

_LENGTHS = ("max_position_embeddings", "model_max_length")


def _read_positions(hf: HfConfig) -> Fields:
    """Read the kind of position embedding from the key for the length, which differs between the two models."""
    if "z_loss_weight" in hf:
        raise ValueError("z_loss_weight: this is Baichuan 2, whose output layer normalizes its weights")
    lengths = [key for key in _LENGTHS if key in hf]
    if len(lengths) != 1:
        raise ValueError(
            f"has {' and '.join(lengths) or 'neither'}: supported: {_LENGTHS[0]} (rope) or {_LENGTHS[1]} (ALiBi)"
        )
    kind = "rope" if lengths == [_LENGTHS[0]] else "alibi"
    return {"position_embedding": kind, "max_position_embeddings": hf[lengths[0]]}


FAMILIES = (
    Family("baichuan", "BaichuanForCausalLM", (
        *traits.RMSNORM_MODEL, traits.activation(), traits.UNTIED, same(norm_eps=("rms_norm_eps", 1e-6)),
        Trait((*_LENGTHS, "z_loss_weight"), _read_positions,
              lambda ours: {_LENGTHS[ours["position_embedding"] == "alibi"]: ours["max_position_embeddings"]}),
        unread("_from_model_config"),
    ), like_llama(fused("self_attn.W_pack", equal_parts(3), QKV)), also="BaiChuanForCausalLM", rank=4,
        about="Baichuan 7B and 13B, which transformers lacks; Baichuan 2 is refused",
    ),
)  # fmt: skip
