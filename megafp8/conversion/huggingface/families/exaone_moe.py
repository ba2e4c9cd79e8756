"""K-EXAONE, with experts; only layers with a sliding window have a rotary embedding."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import full_every, rotated_windows, sparse_layers
from megafp8.conversion.huggingface.names import like_llama, without_prediction
from megafp8.conversion.keys import always, same, unread

_INTERVAL = "sliding_window_pattern"
FAMILIES = (
    Family("exaone_moe", "ExaoneMoeForCausalLM", (
        *traits.llama_like(32, norm_eps=1e-5), always(qk_norm=True),
        rotated_windows(4096, full_every(4, _INTERVAL), _INTERVAL), sparse_layers(1, "first_k_dense_replace"),
        *traits.sigmoid_router(2.5, num_experts="num_experts"), same("moe", num_experts="num_experts"),
        traits.shared_experts(1, "num_shared_experts"),
        unread(num_nextn_predict_layers=0),
    ), like_llama({"mlp.router.bias": "mlp.e_score_correction_bias"}, stored=without_prediction), moe=True, rank=5,
        about="K-EXAONE, without multi-token prediction",
    ),
)  # fmt: skip
