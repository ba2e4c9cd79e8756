"""Nemotron-4 and Minitron: squared ReLU without a gate, and LayerNorm with zero-centered weights."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import ConfigKey, always, same

FAMILIES = (
    Family("nemotron", "NemotronForCausalLM", (
        traits.SIZES, traits.POSITIONS, traits.UNTIED, traits.INIT_STD, rope(1e4, partial=0.5), *traits.NO_WINDOW,
        traits.activation(default="relu2", gated=False), traits.LINEAR_BIASES,
        always(normalization="layernorm", zero_centered_gamma=True),
        same(
            num_query_groups=ConfigKey("num_key_value_heads", None), head_dim=("head_dim", None),
            norm_eps=("norm_eps", 1e-5), attention_dropout=("attention_dropout", 0.0),
        ),
    ), rank=5,
        about="Nemotron-4, Minitron",
    ),
)  # fmt: skip
