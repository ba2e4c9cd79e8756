"""Llama, Mistral, Mixtral, Ministral with a window in some layers, InternLM 3 and IQuest-Coder."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, SLIDING, num_layers, windows
from megafp8.conversion.huggingface.names import like_llama
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.huggingface.traits import llama_like
from megafp8.conversion.keys import Fields, HfConfig, Trait, aliases, only, unread

_W = {"gate": "w1", "up": "w3", "down": "w2"}
MIXTRAL_ROUTER = {"mlp.router": "block_sparse_moe.gate"}
MIXTRAL_EXPERTS = {f"mlp.experts.*.{ours}": f"block_sparse_moe.experts.*.{theirs}" for ours, theirs in _W.items()}
_NO_BIASES = only(written=False, attention_bias=False, mlp_bias=False)
_INTERNLM_BIASES = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}
"""Second names of keys. The second name counts if both are present."""


def _ministral_kinds(hf: HfConfig) -> list[str]:
    return [FULL if hf.get("sliding_window", 4096) is None else SLIDING] * num_layers(hf)


def _read_internlm_biases(hf: HfConfig) -> Fields:
    aliases(**{second: first for second, first in _INTERNLM_BIASES.items() if first in hf}).read(hf)
    named = {first: hf[second] for second, first in _INTERNLM_BIASES.items() if second in hf}
    return traits.LINEAR_BIASES.read({**hf, **named})


FAMILIES = (
    Family("llama", "LlamaForCausalLM", (
        *llama_like(None), traits.LINEAR_BIASES, *traits.NO_WINDOW,
        traits.HEADS_DIVIDE,  # other models are written as Mistral
    ), rank=0,
        about="Llama 1 to 3; biases everywhere or nowhere; `hidden_act` `silu`, `gelu`, `gelu_pytorch_tanh`",
    ),
    Family("mistral", "MistralForCausalLM", (
        *llama_like(8), traits.window_of_all(4096), _NO_BIASES,
    ), rank=0,
        about="Mistral; any `head_dim`",
    ),
    Family("mixtral", "MixtralForCausalLM", (
        *llama_like(8, norm_eps=1e-5, rope=rope(1e6)), *traits.ROUTER, traits.EXPERTS_ONLY,
        traits.num_experts("num_local_experts", "num_experts"), traits.window_of_all(None),
    ), like_llama(MIXTRAL_ROUTER, MIXTRAL_EXPERTS), moe=True, rank=0,
        about="Mixtral",
    ),
    Family("ministral", "MinistralForCausalLM", (
        *llama_like(8), windows(4096, _ministral_kinds), _NO_BIASES,
    ), rank=5,
        about="Ministral 8B; windows in any layers",
    ),
    Family("internlm3", "InternLM3ForCausalLM", (
        *llama_like(2, 128, 1e-5), *traits.NO_WINDOW, traits.HEADS_DIVIDE,
        Trait((*traits.LINEAR_BIASES.keys, *_INTERNLM_BIASES), _read_internlm_biases, traits.LINEAR_BIASES.write),
    ), also="LlamaForCausalLM", rank=5,
        about="InternLM 3; biases of attention, MLP, both or none",
    ),
    Family("iquestcoder", "LlamaForCausalLM", (
        *llama_like(8, 128, norm_eps=1e-5), traits.LINEAR_BIASES, *traits.NO_WINDOW, traits.HEADS_DIVIDE,
        only(written=False, clip_qkv=None, use_sliding_window=False), unread("max_window_layers"),
    ), also="IQuestCoderForCausalLM", rank=4,
        about="IQuest-Coder; `clip_qkv` is refused",
    ),
)  # fmt: skip
