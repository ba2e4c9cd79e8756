"""The nanochat family."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import like_llama
from megafp8.conversion.keys import ConfigKey, always, only, same

_RELU2 = traits.activation(default="relu2", gated=False)
FAMILIES = (
    Family("nanochat", "NanoChatForCausalLM", (
        *traits.llama_like(None, activation=_RELU2), *traits.NO_WINDOW, traits.NO_PADDING,
        same(logit_softcap=ConfigKey("final_logit_softcapping", 15.0, nullable=True)),
        always(norm_weights=False, embedding_norm=True, qk_norm="rotated"), only(attention_bias=False),
    ), like_llama({"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}, rotation="backwards"), rank=4,
        about="nanochat",
    ),
)  # fmt: skip
