"""Seed-OSS, which is Llama with biases of queries, keys and values, or of all linear layers."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, flag, same, unread

_BIASES = ("attention_bias", "attention_out_bias", "mlp_bias")
_DEFAULTS = (True, False, False)


def _read_biases(hf: HfConfig) -> Fields:
    """Read which linear layers have biases: q, k and v; the output projection of attention; the MLP."""
    biases = tuple(flag(hf, key, default) for key, default in zip(_BIASES, _DEFAULTS, strict=True))
    if biases[1] != biases[2] or biases[1] > biases[0]:
        refuse("attention_out_bias", biases[1], "the value of mlp_bias; with attention_bias = false, false for both")
    return {"linear_bias": biases[1], "qkv_bias": biases[0] and not biases[1]}


def _write_biases(ours: Fields) -> Keys:
    every = ours["linear_bias"]
    return dict(zip(_BIASES, (every or ours["qkv_bias"], every, every), strict=True))


FAMILIES = (
    Family("seed_oss", "SeedOssForCausalLM", (
        *traits.llama_like(8, 128), Trait(_BIASES, _read_biases, _write_biases), *traits.NO_WINDOW,
        same(attention_dropout=("attention_dropout", 0.1)), unread(residual_dropout=0.0),
    ), rank=4,
        about="Seed-OSS; biases of queries, keys and values, everywhere or nowhere",
    ),
)  # fmt: skip
