"""SmolLM3, in which some layers have no rotary embedding."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, SLIDING, layer_types, num_layers, without_rotary
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, flag

_NO_ROPE = without_rotary(4)


def _read_windows(hf: HfConfig) -> Fields:
    """Read the window of each layer.

    With use_sliding_window, the layers in layer_types have a window, or by default the layers without rotary embedding.
    """
    types, window = layer_types(hf), hf.get("sliding_window") if flag(hf, "use_sliding_window") else None
    if types is None:
        positions = _NO_ROPE.read(hf)["mixer.position_embedding"]
        types = [SLIDING if x == "none" and window is not None else FULL for x in positions]
    elif window is None:
        traits.check_window(None, types)
    return {"mixer.sliding_window": [window if kind == SLIDING else None for kind in types[: num_layers(hf)]]}


def _write_windows(ours: Fields) -> Keys:
    windows = ours["mixer.sliding_window"]
    window = next((x for x in windows if x is not None), None)
    written = {"use_sliding_window": window is not None, "sliding_window": window}
    return written | {"layer_types": [FULL if x is None else SLIDING for x in windows]}


FAMILIES = (
    Family("smollm3", "SmolLM3ForCausalLM", (
        *traits.llama_like(4, rope=rope(2e6)), traits.LINEAR_BIASES, traits.TIED, _NO_ROPE, traits.NO_PADDING,
        Trait(("use_sliding_window", "sliding_window", "layer_types"), _read_windows, _write_windows),
        traits.HEADS_DIVIDE,
    ), rank=4,
        about="SmolLM3; biases as in `llama`",
    ),
)  # fmt: skip
