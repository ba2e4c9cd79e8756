"""Qwen2 and Qwen3, and Qwen3-Next and Qwen3.5 with linear attention, all with and without experts."""

import torch
from torch import Tensor

from megafp8.config import GatedDeltaNetConfig
from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, SLIDING, layer_types, num_layers
from megafp8.conversion.huggingface.names import HfPlace, Rows, alternating_blocks, consecutive, like_llama, usual
from megafp8.conversion.huggingface.rope import rope
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


def _step_and_dense_layers(hf: HfConfig) -> tuple[int, list[int]]:
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not isinstance(step, int) or step < 1:
        refuse("decoder_sparse_step", step, "a number of layers from 1 on")
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        refuse("mlp_only_layers", dense, "a list of layers")
    return step, dense


def _read_sparse_layers(hf: HfConfig) -> Fields:
    """Read which layers have experts: multiples of decoder_sparse_step, except for mlp_only_layers."""
    layers = hf["num_hidden_layers"]
    if not isinstance(layers, int):
        refuse("num_hidden_layers", layers, "a number of layers")
    step, dense = _step_and_dense_layers(hf)
    candidates = range(step - 1, layers, step)
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


LINEAR = "linear_attention"
_DELTA_NET = {
    "num_key_heads": ("linear_num_key_heads", 16), "num_value_heads": ("linear_num_value_heads", 32),
    "key_head_dim": ("linear_key_head_dim", 128), "value_head_dim": ("linear_value_head_dim", 128),
    "conv_kernel_size": ("linear_conv_kernel_dim", 4),
}  # fmt: skip


def _read_mixers(hf: HfConfig) -> Fields:
    """Read the kind of each layer. By default, the last layer of each full_attention_interval has attention."""
    kinds, interval = layer_types(hf, (LINEAR, FULL)), hf.get("full_attention_interval", 4)
    if kinds is None:
        if not isinstance(interval, int) or interval < 1:
            refuse("full_attention_interval", interval, "a number of layers from 1 on")
        kinds = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers(hf))]
    lists = {
        f"mixer.{ours}": [hf.get(*key) if kind == LINEAR else None for kind in kinds]
        for ours, key in _DELTA_NET.items()
    }
    return {"mixer.kind": ["gated_delta_net" if kind == LINEAR else "attention" for kind in kinds], **lists}


def _write_mixers(ours: Fields) -> Keys:
    kinds = ours["mixer.kind"]
    values = {
        key: next((x for x in ours[f"mixer.{name}"] if x is not None), d) for name, (key, d) in _DELTA_NET.items()
    }
    return {"layer_types": [LINEAR if kind == "gated_delta_net" else FULL for kind in kinds], **values}


_MIXERS = Trait(
    ("layer_types", "full_attention_interval", *(key for key, _ in _DELTA_NET.values())), _read_mixers, _write_mixers
)


def _read_listed_layers(hf: HfConfig) -> Fields:
    """Read which layers have experts: multiples of decoder_sparse_step, except for mlp_only_layers."""
    step, dense = _step_and_dense_layers(hf)
    sparse = ((i + 1) % step == 0 and i not in dense for i in range(num_layers(hf)))
    return {"ffn.kind": ["moe" if x else "mlp" for x in sparse]}


def _write_listed_layers(ours: Fields) -> Keys:
    dense = [i for i, kind in enumerate(ours["ffn.kind"]) if kind == "mlp"]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


_LISTED_LAYERS = Trait(("decoder_sparse_step", "mlp_only_layers"), _read_listed_layers, _write_listed_layers)


def _by_key_head(part: int, *widths: str) -> Rows:
    """Return the rows of a part, if several tensors are stored together by key head.

    `widths` states the rows per key head of each tensor: `key` (the key's width), `value` (the widths of its value
    heads), or `heads` (the number of its value heads).
    """

    def rows(net: GatedDeltaNetConfig, n: int) -> tuple[Tensor, int]:
        ratio = net.num_value_heads // net.num_key_heads
        sizes = {"key": net.key_head_dim, "value": ratio * net.value_head_dim, "heads": ratio}
        head_sizes = [sizes[width] for width in widths]
        total = net.num_key_heads * sum(head_sizes)
        return torch.arange(total).view(net.num_key_heads, -1).split(head_sizes, dim=1)[part].flatten(), total

    return rows


def _convolution(part: int) -> Rows:
    """Return the rows of a part, if the convolutions of queries, keys and values are stored one after the other."""

    def sizes(net: GatedDeltaNetConfig) -> list[int]:
        return [*[net.num_key_heads * net.key_head_dim] * 2, net.num_value_heads * net.value_head_dim]

    return consecutive(part, sizes)


_FUSED = {part: HfPlace("linear_attn.in_proj_qkvz", _by_key_head(i, "key", "key", "value", "value"))
          for i, part in enumerate("qkvz")}  # fmt: skip
_GATES = {part: HfPlace("linear_attn.in_proj_ba", _by_key_head(i, "heads", "heads"))
          for i, part in enumerate(("beta", "decay"))}  # fmt: skip
_SEPARATE = {part: HfPlace("linear_attn.in_proj_qkv", _convolution(i)) for i, part in enumerate("qkv")}
_SHARED = {f"{part}_conv": HfPlace("linear_attn.conv1d", _convolution(i)) for i, part in enumerate("qkv")}
_GATED = {"attention.q": HfPlace("self_attn.q_proj", alternating_blocks(0)),
          "attention.gate": HfPlace("self_attn.q_proj", alternating_blocks(1))}  # fmt: skip


def _names(net: dict[str, HfPlace]) -> dict[str, str | HfPlace]:
    return {**usual(GatedDeltaNetConfig), **{f"gated_delta_net.{k}": place for k, place in (_SHARED | net).items()},
            **_GATED}  # fmt: skip


_NEXT = (
    *traits.llama_like(2, head_dim=256, rope=rope(1e4, partial=0.25)), always(qk_norm=True, output_gate=True),
    always(zero_centered_gamma=True), only(attention_bias=False), _MIXERS,
)  # fmt: skip
_NEXT_EXPERTS = (
    *traits.ROUTER, always("moe", shared_gate=True),
    same("moe", ffn_hidden_size=("moe_intermediate_size", 512),
         shared_ffn_hidden_size=("shared_expert_intermediate_size", 512)),
    traits.num_experts("num_experts", "num_local_experts"),
)  # fmt: skip
_SEPARATELY = _names({**_SEPARATE, "z": HfPlace("linear_attn.in_proj_z"), "beta": HfPlace("linear_attn.in_proj_b"),
                      "decay": HfPlace("linear_attn.in_proj_a")})  # fmt: skip

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
    Family("qwen3_next", "Qwen3NextForCausalLM", (
        *_NEXT, *_NEXT_EXPERTS, same("moe", normalize=("norm_topk_prob", True)), _LISTED_LAYERS,
    ), like_llama(EXPERT_NAMES, _names(_FUSED | _GATES)), moe=True,
        about="Qwen3-Next, without multi-token prediction",
    ),
    Family("qwen3_5_text", "Qwen3_5ForCausalLM", _NEXT, like_llama(_SEPARATELY),
        about="Qwen3.5, dense; `qwen3_5`, with images, is refused",
    ),
    Family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", (
        *_NEXT, *_NEXT_EXPERTS, always("moe", normalize=True),
    ), like_llama(EXPERT_NAMES, _SEPARATELY), moe=True,
        about="Qwen3.5 with experts; `qwen3_5_moe`, with images, is refused",
    ),
)  # fmt: skip
