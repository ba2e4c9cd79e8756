"""Llama, Mistral, Mixtral and IQuest-Coder."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import like_llama
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.huggingface.traits import llama_like
from megafp8.conversion.keys import only, unread

_W = {"gate": "w1", "up": "w3", "down": "w2"}
MIXTRAL_ROUTER = {"mlp.router": "block_sparse_moe.gate"}
MIXTRAL_EXPERTS = {f"mlp.experts.*.{ours}": f"block_sparse_moe.experts.*.{theirs}" for ours, theirs in _W.items()}
FAMILIES = (
    Family("llama", "LlamaForCausalLM", (
        *llama_like(None), traits.LINEAR_BIASES, *traits.NO_WINDOW,
        traits.HEADS_DIVIDE,  # other models are written as Mistral
    ), rank=0),
    Family("mistral", "MistralForCausalLM", (
        *llama_like(8), traits.window_of_all(4096), only(written=False, attention_bias=False, mlp_bias=False),
    ), rank=0),
    Family("mixtral", "MixtralForCausalLM", (
        *llama_like(8, norm_eps=1e-5, rope=rope(1e6)), *traits.ROUTER, traits.EXPERTS_ONLY,
        traits.num_experts("num_local_experts", "num_experts"), traits.window_of_all(None),
    ), like_llama(MIXTRAL_ROUTER, MIXTRAL_EXPERTS), moe=True, rank=0),
    Family("iquestcoder", "LlamaForCausalLM", (
        *llama_like(8, 128, norm_eps=1e-5), traits.LINEAR_BIASES, *traits.NO_WINDOW, traits.HEADS_DIVIDE,
        only(written=False, clip_qkv=None, use_sliding_window=False), unread("max_window_layers"),
    ), also="IQuestCoderForCausalLM", rank=4),
)  # fmt: skip
