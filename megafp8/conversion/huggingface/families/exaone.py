"""EXAONE 4 with norms of outputs, and K-EXAONE with experts. Layers without a window may have no rotary embedding."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, SLIDING, full_every, layer_types, rotated_windows, sparse_layers
from megafp8.conversion.huggingface.names import OUTPUT_NORMS, like_llama, without_prediction
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, only, same, unread

_LAYER_KEYS = ("sliding_window", "layer_types", "sliding_window_pattern")


def _read_layers(hf: HfConfig) -> Fields:
    """Read the window of each layer. With sliding_window, layers without a window have no rotary embedding."""
    window, kinds, interval = hf.get(_LAYER_KEYS[0], 4096), layer_types(hf), hf.get(_LAYER_KEYS[2], 4)
    if window is None:
        traits.check_window(None, kinds)
        return {"sliding_window": None}
    if kinds is None:
        if not isinstance(interval, int) or interval < 1:
            refuse(_LAYER_KEYS[2], interval, "a number of layers, or layer_types, because transformers cannot read it")
        kinds = full_every(interval)(hf)
    windowed = [kind == SLIDING for kind in kinds]
    return {
        "mixer.sliding_window": [window if x else None for x in windowed],
        "mixer.position_embedding": ["rope" if x else "none" for x in windowed],
    }


def _write_layers(ours: Fields) -> Keys:
    windows, positions = ours["mixer.sliding_window"], ours["mixer.position_embedding"]
    window = next((x for x in windows if x is not None), 4096 if "none" in positions else None)
    return {"sliding_window": window, "layer_types": [FULL if x is None else SLIDING for x in windows]}


_INTERVAL = "sliding_window_pattern"

FAMILIES = (
    Family("exaone4", "Exaone4ForCausalLM", (
        *traits.llama_like(32, norm_eps=1e-5), Trait(_LAYER_KEYS, _read_layers, _write_layers),
        always(norm_position="output", qk_norm=True), only(written=False, attention_bias=False, mlp_bias=False),
    ), like_llama(OUTPUT_NORMS), rank=4,
        about="EXAONE 4",
    ),
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
