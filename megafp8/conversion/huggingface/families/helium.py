"""Helium, which is Llama with biases on queries, keys and values alone."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import like_llama
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import HfConfig, check, only, same


def _check_width(hf: HfConfig) -> None:
    """Raise ValueError if heads are not as wide as the model together, which transformers' output projection needs."""
    hidden, heads, width = hf.get("hidden_size"), hf.get("num_attention_heads"), hf.get("head_dim", 128)
    if isinstance(hidden, int) and isinstance(heads, int) and heads * width != hidden:
        refuse("head_dim", width, f"hidden_size / num_attention_heads ({hidden / max(heads, 1):g}) in this family")


FAMILIES = (
    Family("helium", "HeliumForCausalLM", (
        *traits.llama_like(20, 128, 1e-8, rope(1e5)), *traits.NO_WINDOW, traits.NO_PADDING, check(_check_width),
        same(qkv_bias=("attention_bias", False)), only(mlp_bias=False),
    ), like_llama(rotation="neighbors"), rank=5,
        about="Helium; biases of queries, keys and values, or none",
    ),
)  # fmt: skip
