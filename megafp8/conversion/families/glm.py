"""GLM-4, whose norms are before attention and MLP (glm) or on both sides (glm4)."""

from megafp8.conversion import hf_traits as traits
from megafp8.conversion.families import Family
from megafp8.conversion.hf_names import FUSED_GATE_UP, like_llama
from megafp8.conversion.hf_rope import rope
from megafp8.conversion.keys import always, same

_GLM = (*traits.llama_like(2, 128, 1.5625e-7, rope(1e4, partial=0.5)), traits.NO_PADDING, *traits.NO_WINDOW)
_OUTPUT_NORMS = {"attention_output_norm": "post_self_attn_layernorm", "mlp_output_norm": "post_mlp_layernorm"}
FAMILIES = (
    Family("glm", "GlmForCausalLM", (*_GLM, same(qkv_bias=("attention_bias", True))),
           like_llama(FUSED_GATE_UP, rotates_neighbors=True)),
    Family("glm4", "Glm4ForCausalLM", (*_GLM, same(qkv_bias=("attention_bias", False)), always(norm_position="both")),
           like_llama(FUSED_GATE_UP, _OUTPUT_NORMS, rotates_neighbors=True)),
)  # fmt: skip
