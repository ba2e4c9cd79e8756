"""Arcee's AFM, which is Llama with squared ReLU and without a gate."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family

_RELU2 = traits.activation(default="relu2", gated=False)
FAMILIES = (
    Family("arcee", "ArceeForCausalLM", (
        *traits.llama_like(None, norm_eps=1e-5, activation=_RELU2), traits.LINEAR_BIASES, *traits.NO_WINDOW,
        traits.HEADS_DIVIDE,
    ), rank=4,
        about="AFM",
    ),
)  # fmt: skip
