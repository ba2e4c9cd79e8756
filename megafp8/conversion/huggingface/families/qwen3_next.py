"""Qwen3-Next and the language models of Qwen3.5, with linear attention, and with gated attention in some layers."""

import torch
from torch import Tensor

from megafp8.config import GatedDeltaNetConfig
from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.families.qwen import EXPERT_NAMES, step_and_dense_layers
from megafp8.conversion.huggingface.layers import FULL, layer_types, num_layers
from megafp8.conversion.huggingface.names import HfPlace, Rows, alternating_blocks, consecutive, like_llama, usual
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, only, same

LINEAR = "linear_attention"
_KEYS = {
    "num_key_heads": ("linear_num_key_heads", 16), "num_value_heads": ("linear_num_value_heads", 32),
    "key_head_dim": ("linear_key_head_dim", 128), "value_head_dim": ("linear_value_head_dim", 128),
    "conv_kernel_size": ("linear_conv_kernel_dim", 4),
}  # fmt: skip


def _read_layers(hf: HfConfig) -> Fields:
    """Read the kind of each layer. By default, the last layer of each full_attention_interval has attention."""
    kinds, interval = layer_types(hf, (LINEAR, FULL)), hf.get("full_attention_interval", 4)
    if kinds is None:
        if not isinstance(interval, int) or interval < 1:
            refuse("full_attention_interval", interval, "a number of layers from 1 on")
        kinds = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers(hf))]
    lists = {
        f"mixer.{ours}": [hf.get(*key) if kind == LINEAR else None for kind in kinds] for ours, key in _KEYS.items()
    }
    return {"mixer.kind": ["gated_delta_net" if kind == LINEAR else "attention" for kind in kinds], **lists}


def _write_layers(ours: Fields) -> Keys:
    kinds = ours["mixer.kind"]
    values = {key: next((x for x in ours[f"mixer.{name}"] if x is not None), d) for name, (key, d) in _KEYS.items()}
    return {"layer_types": [LINEAR if kind == "gated_delta_net" else FULL for kind in kinds], **values}


_LAYERS = Trait(
    ("layer_types", "full_attention_interval", *(key for key, _ in _KEYS.values())), _read_layers, _write_layers
)


def _read_experts(hf: HfConfig) -> Fields:
    """Read which layers have experts: multiples of decoder_sparse_step, except for mlp_only_layers."""
    step, dense = step_and_dense_layers(hf)
    sparse = ((i + 1) % step == 0 and i not in dense for i in range(num_layers(hf)))
    return {"ffn.kind": ["moe" if x else "mlp" for x in sparse]}


def _write_experts(ours: Fields) -> Keys:
    dense = [i for i, kind in enumerate(ours["ffn.kind"]) if kind == "mlp"]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


_SPARSE_LAYERS = Trait(("decoder_sparse_step", "mlp_only_layers"), _read_experts, _write_experts)


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
    always(zero_centered_gamma=True), only(attention_bias=False), _LAYERS,
)  # fmt: skip
_EXPERTS = (
    *traits.ROUTER, always("moe", shared_gate=True),
    same("moe", ffn_hidden_size=("moe_intermediate_size", 512),
         shared_ffn_hidden_size=("shared_expert_intermediate_size", 512)),
    traits.num_experts("num_experts", "num_local_experts"),
)  # fmt: skip
_SEPARATELY = _names({**_SEPARATE, "z": HfPlace("linear_attn.in_proj_z"), "beta": HfPlace("linear_attn.in_proj_b"),
                      "decay": HfPlace("linear_attn.in_proj_a")})  # fmt: skip
FAMILIES = (
    Family("qwen3_next", "Qwen3NextForCausalLM", (
        *_NEXT, *_EXPERTS, same("moe", normalize=("norm_topk_prob", True)), _SPARSE_LAYERS,
    ), like_llama(EXPERT_NAMES, _names(_FUSED | _GATES)), moe=True,
        about="Qwen3-Next, without multi-token prediction",
    ),
    Family("qwen3_5_text", "Qwen3_5ForCausalLM", _NEXT, like_llama(_SEPARATELY),
        about="Qwen3.5, dense; `qwen3_5`, with images, is refused",
    ),
    Family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", (
        *_NEXT, *_EXPERTS, always("moe", normalize=True),
    ), like_llama(EXPERT_NAMES, _SEPARATELY), moe=True,
        about="Qwen3.5 with experts; `qwen3_5_moe`, with images, is refused",
    ),
)  # fmt: skip
