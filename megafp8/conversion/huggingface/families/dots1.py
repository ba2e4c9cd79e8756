"""dots.llm1, with the attention of Qwen3 and the experts of DeepSeek-V3."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, SLIDING, num_layers, sparse_layers, windows
from megafp8.conversion.huggingface.names import like_llama
from megafp8.conversion.keys import HfConfig, always, only, unread

_FIRST = "max_window_layers"


def _types(hf: HfConfig) -> list[str]:
    """Return the kind of each layer if layer_types is missing: layers from max_window_layers on have a window."""
    first = num_layers(hf) if hf.get("sliding_window", 4096) is None else hf.get(_FIRST, 62)
    return [FULL if i < first else SLIDING for i in range(num_layers(hf))]


FAMILIES = (
    Family("dots1", "Dots1ForCausalLM", (
        *traits.llama_like(32), always(qk_norm=True), only(attention_bias=False), windows(4096, _types, _FIRST),
        sparse_layers(0, "first_k_dense_replace", listed=False), *traits.sigmoid_router(1.0, normalize=False),
        traits.num_experts("n_routed_experts", "num_local_experts"), traits.shared_experts(0),
        unread("use_sliding_window"),
    ), like_llama(), moe=True, rank=5,
        about="dots.llm1",
    ),
)  # fmt: skip
