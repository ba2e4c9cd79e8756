"""EXAONE 4, with norms of outputs and, if some layers have a window, no rotary embedding in the other layers."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, SLIDING, full_every, layer_types
from megafp8.conversion.huggingface.names import OUTPUT_NORMS, like_llama
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, only

_KEYS = ("sliding_window", "layer_types", "sliding_window_pattern")


def _read_layers(hf: HfConfig) -> Fields:
    """Read the window of each layer. With sliding_window, layers without a window have no rotary embedding."""
    window, kinds, interval = hf.get(_KEYS[0], 4096), layer_types(hf), hf.get(_KEYS[2], 4)
    if window is None:
        traits.check_window(None, kinds)
        return {"sliding_window": None}
    if kinds is None:
        if not isinstance(interval, int) or interval < 1:
            refuse(_KEYS[2], interval, "a number of layers, or layer_types, because transformers cannot read it")
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


FAMILIES = (
    Family("exaone4", "Exaone4ForCausalLM", (
        *traits.llama_like(32, norm_eps=1e-5), Trait(_KEYS, _read_layers, _write_layers),
        always(norm_position="output", qk_norm=True), only(written=False, attention_bias=False, mlp_bias=False),
    ), like_llama(OUTPUT_NORMS), rank=4,
        about="EXAONE 4",
    ),
)  # fmt: skip
