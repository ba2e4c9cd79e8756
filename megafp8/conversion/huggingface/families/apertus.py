"""Apertus, with xIELU in its MLPs, and norms of queries and keys."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import like_llama
from megafp8.conversion.huggingface.rope import stated_rope
from megafp8.conversion.keys import always, only, switch
from megafp8.layers.activation.reference import BETA, EPS

_NORMS = {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
_LEARNED = {f"mlp.{x}.weight": f"mlp.act_fn.{x}" for x in ("alpha_p", "alpha_n")}
FAMILIES = (
    Family("apertus", "ApertusForCausalLM", (
        *traits.llama_like(None, norm_eps=1e-5, rope=stated_rope(1.2e7), activation=always(activation="xielu")),
        *traits.NO_WINDOW, always(qk_norm=True), switch("linear_bias", "attention_bias", "attention"),
        only(hidden_act="xielu"),
        # Published folders have these keys, which transformers does not read.
        only(written=False, mlp_bias=False, post_norm=False, qk_norm=True),
    ), like_llama(_NORMS, _LEARNED, constants={
        f"model.layers.*.mlp.act_fn.{name}": value for name, value in (("beta", BETA), ("eps", EPS))
    }), rank=4,
        about="Apertus",
    ),
)  # fmt: skip
