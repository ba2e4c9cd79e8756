"""ERNIE 4.5 without and with experts."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import num_layers
from megafp8.conversion.huggingface.names import HfPlace, like_llama
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, aliases, always, only, same, switch, unread

_LAYER_KEYS = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")


def _read_layers(hf: HfConfig) -> Fields:
    """Read which layers have experts: multiples of the interval, from the first to the last index (-1 for the end)."""
    layers = num_layers(hf)
    first, last, interval = (hf.get(key, default) for key, default in zip(_LAYER_KEYS, (1, -1, 1), strict=True))
    for key, value in zip(_LAYER_KEYS, (first, last, interval), strict=True):
        if not isinstance(value, int) or value < (-1 if value is last else 0) or (value == 0 and key == _LAYER_KEYS[2]):
            refuse(key, value, "a number of layers")
    last = layers - 1 if last == -1 else last
    return {"ffn.kind": ["moe" if (i + 1) % interval == 0 and first <= i <= last else "mlp" for i in range(layers)]}


def _write_layers(ours: Fields) -> Keys:
    sparse = [i for i, kind in enumerate(ours["ffn.kind"]) if kind == "moe"]
    if not sparse:
        raise ValueError("no layer with experts (ffn.kind)")
    interval = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    return dict(zip(_LAYER_KEYS, (sparse[0], sparse[-1], interval), strict=True))


FAMILIES = (
    Family("ernie4_5", "Ernie4_5ForCausalLM", (
        *traits.llama_like(2, 128, 1e-5, rope(5e5)), traits.TIED, *traits.NO_WINDOW, traits.NO_PADDING,
        switch("linear_bias", "use_bias"),
    ), like_llama(rotation="neighbors"), rank=5,
        about="ERNIE 4.5; biases everywhere or nowhere",
    ),
    Family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", (
        *traits.llama_like(4, norm_eps=1e-5, rope=rope(5e5)), traits.TIED, *traits.NO_WINDOW,
        only(use_bias=False), Trait(_LAYER_KEYS, _read_layers, _write_layers),
        same("moe", num_experts=("moe_num_experts", 64), top_k=("moe_k", 6),
             ffn_hidden_size=("moe_intermediate_size", 1536)),
        aliases(num_experts="moe_num_experts", num_experts_per_tok="moe_k"),
        traits.shared_experts(2, "moe_num_shared_experts", least=0), always("moe", selection_bias=True),
        only(moe_norm_min=1e-12), traits.AUX_LOSS,
        # Baidu's own code reads these keys.
        only(written=False, use_rmsnorm=True, moe_gate="topk", moe_use_aux_free=True), unread("moe_capacity"),
    ), like_llama(
        {"mlp.router.bias": HfPlace("mlp.moe_statics.e_score_correction_bias", shape=(1, -1))}, rotation="neighbors",
    ), moe=True,
        about="ERNIE 4.5 with experts in any layers",
    ),
)  # fmt: skip
