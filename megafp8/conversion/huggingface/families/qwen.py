"""Qwen2 and Qwen3, with and without experts."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, SLIDING, layer_types, num_layers
from megafp8.conversion.huggingface.names import like_llama
from megafp8.conversion.huggingface.traits import llama_like
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, check, flag, only, same

_WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def _read_window(hf: HfConfig) -> Fields:
    """Read the window of each layer.

    With use_sliding_window, the layers in layer_types have a window, or by default the layers from max_window_layers
    on.
    """
    kinds, window = layer_types(hf), hf.get("sliding_window", 4096) if flag(hf, "use_sliding_window") else None
    if window is None:
        traits.check_window(None, kinds)
        return {"sliding_window": None}
    first = hf.get("max_window_layers", 28)
    if kinds is None and not isinstance(first, int):
        refuse("max_window_layers", first, "a number of layers")
    windowed = (i >= first if kinds is None else kinds[i] == SLIDING for i in range(num_layers(hf)))
    return {"mixer.sliding_window": [window if x else None for x in windowed]}


def _write_window(ours: Fields) -> Keys:
    windows = ours["mixer.sliding_window"]
    first = next((i for i, window in enumerate(windows) if window is not None), len(windows))
    window = windows[first] if first < len(windows) else None
    written = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": first}
    kinds = [FULL if x is None else SLIDING for x in windows]
    return written if FULL not in kinds[first:] else {**written, "layer_types": kinds}


def _check_no_window(hf: HfConfig) -> None:
    if flag(hf, "use_sliding_window"):
        # In transformers 5, all layers of qwen3_moe have a window, and every second layer of qwen2_moe below
        # max_window_layers.
        refuse("use_sliding_window", True, "false in models with experts: releases differ in which layers have it")
    traits.check_window(None, layer_types(hf))


def step_and_dense_layers(hf: HfConfig) -> tuple[int, list[int]]:
    """Return decoder_sparse_step and mlp_only_layers."""
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not isinstance(step, int) or step < 1:
        refuse("decoder_sparse_step", step, "a number of layers from 1 on")
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        refuse("mlp_only_layers", dense, "a list of layers")
    return step, dense


def _read_sparse_layers(hf: HfConfig) -> Fields:
    """Read which layers have experts: multiples of decoder_sparse_step, except for mlp_only_layers."""
    step, dense = step_and_dense_layers(hf)
    candidates = range(step - 1, num_layers(hf), step)
    first = max((layer + 1 for layer in candidates if layer in dense), default=0)
    if any(layer < first and layer not in dense for layer in candidates):
        refuse("mlp_only_layers", dense, "the first layers of the model, or none")
    return {"moe.first_dense_layers": first, "moe.layer_interval": step}


def _write_sparse_layers(ours: Fields) -> Keys:
    dense = [*range(ours["moe.first_dense_layers"])]
    return {"decoder_sparse_step": ours["moe.layer_interval"], "mlp_only_layers": dense}


_DENSE = (Trait(_WINDOW_KEYS, _read_window, _write_window), only(written=False, mlp_bias=False, use_mrope=False))
_SPARSE_LAYERS = Trait(("decoder_sparse_step", "mlp_only_layers"), _read_sparse_layers, _write_sparse_layers)
_EXPERTS = (
    *traits.ROUTER,
    same("moe", normalize=("norm_topk_prob", False), ffn_hidden_size="moe_intermediate_size"),
    _SPARSE_LAYERS,
    check(_check_no_window, *_WINDOW_KEYS, use_sliding_window=lambda ours: False),
)
EXPERT_NAMES = {
    **{f"mlp.shared.{x}": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
FAMILIES = (
    Family("qwen2", "Qwen2ForCausalLM", (*llama_like(32), always(qkv_bias=True), *_DENSE), rank=1,
        about="Qwen2, Qwen2.5; windows in any layers",
    ),
    Family("qwen3", "Qwen3ForCausalLM", (
        *llama_like(32, head_dim=128), always(qk_norm=True), only(attention_bias=False), *_DENSE,
    ), rank=1,
        about="Qwen3, dense; windows in any layers",
    ),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", (
        *llama_like(4), *_EXPERTS, traits.num_experts("num_experts", "num_local_experts"), always(qk_norm=True),
        only(attention_bias=False),
    ), like_llama(EXPERT_NAMES), moe=True,
        about="Qwen3 with experts; `mlp_only_layers` at the beginning",
    ),
    Family("qwen2_moe", "Qwen2MoeForCausalLM", (
        *llama_like(16), *_EXPERTS, same(qkv_bias=("qkv_bias", True)), always("moe", shared_gate=True),
        same("moe", num_experts="num_experts", shared_ffn_hidden_size=("shared_expert_intermediate_size", 5632)),
    ), like_llama(EXPERT_NAMES), moe=True,
        about="Qwen1.5 and Qwen2 with experts",
    ),
)  # fmt: skip
