"""MultiheadAttention and TransformerLayer against the dense float64 twin: outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8 import nn
from tests.nn import twin
from tests.nn.compare import CPU64, TIGHT, assert_same, random, randomized

S, T, B, H, HEADS = 6, 5, 2, 16, 4
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def causal(sample: int, i: int, j: int) -> bool:
    return j <= i


def everything(sample: int, i: int, j: int) -> bool:
    return True


LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "llama": (
        {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "num_gqa_groups": 2,
         "fuse_qkv_params": True},
        {"activation": "swiglu", "groups": 2, "interleaved": True},
    ),
    "not interleaved": (
        {"fuse_qkv_params": True, "qkv_weight_interleaved": False, "num_gqa_groups": 2, "activation": "geglu"},
        {"activation": "geglu", "groups": 2},
    ),
    "decoder": ({"layer_type": "decoder", "num_gqa_groups": 2, "activation": "relu"},
                {"groups": 2, "activation": "relu"}),
    "decoder bshd": ({"layer_type": "decoder", "attn_input_format": "bshd"}, {}),
    "fused decoder": (
        {"layer_type": "decoder", "fuse_qkv_params": True, "zero_centered_gamma": True, "activation": "srelu",
         "apply_residual_connection_post_layernorm": True},
        {"interleaved": True, "zero_centered": True, "activation": "srelu", "post_norm_residual": True},
    ),
    "post-norm": ({"output_layernorm": True, "activation": "reglu", "zero_centered_gamma": True},
                  {"output_layernorm": True, "activation": "reglu", "zero_centered": True}),
    "bert": ({"output_layernorm": True, "apply_residual_connection_post_layernorm": True},
             {"output_layernorm": True, "post_norm_residual": True}),
    "falcon": ({"parallel_attention_mlp": True, "kv_channels": 8}, {"parallel": True}),
    "rotary": ({"qk_norm_type": "L2Normalization"}, {"qk_norm": "L2Normalization", "rotary": 4}),
    "rotary, half of pairs beside each other": (
        {"rotary_pos_interleaved": True, "qk_norm_type": "RMSNorm", "qk_norm_before_rope": True, "kv_channels": 8,
         "attn_input_format": "bshd"},
        {"pairs_interleaved": True, "qk_norm": "RMSNorm", "before_rope": True, "rotary": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    options, how = LAYERS[name][0], dict(LAYERS[name][1])
    rotary, groups = how.pop("rotary", None), how.pop("groups", HEADS)
    layer = randomized(nn.TransformerLayer(H, 24, HEADS, **NO_DROPOUT, **options, **CPU64))
    angles = None
    if rotary is not None:
        angles = nn.RotaryPositionEmbedding(rotary, interleaved=how.get("pairs_interleaved", False)).cpu()(S)
    batch_first = options.get("attn_input_format") == "bshd"
    inputs = [random(S, B, H)]
    if options.get("layer_type") == "decoder":
        inputs.append(random(T, B, H, seed=1))

    def run(x: Tensor, encoder_output: Tensor | None = None) -> Tensor:
        if not batch_first:
            return layer(x, encoder_output=encoder_output, rotary_pos_emb=angles)
        memory = None if encoder_output is None else encoder_output.transpose(0, 1)
        return layer(x.transpose(0, 1), encoder_output=memory, rotary_pos_emb=angles).transpose(0, 1)

    def expected(p: twin.Params, x: Tensor, encoder_output: Tensor | None = None) -> Tensor:
        return twin.transformer_layer(
            x, p, causal, HEADS, groups, encoder_output=encoder_output, cross_attends=everything, angles=angles, **how
        )

    assert_same(layer, run, expected, inputs)


@pytest.mark.parametrize(("kind", "input_layernorm"), [("self", False), ("self", True), ("cross", False)])
def test_attention_returns_its_bias_and_the_norm(kind: str, input_layernorm: bool) -> None:
    module = randomized(
        nn.MultiheadAttention(
            H, HEADS, attention_dropout=0.0, attention_type=kind, input_layernorm=input_layernorm, return_bias=True,
            return_layernorm_output=True, attn_mask_type="no_mask", **CPU64,
        )
    )  # fmt: skip

    def run(x: Tensor, memory: Tensor | None = None) -> Any:
        y, bias, *normed = module(x, encoder_output=memory)
        return y + bias, *normed

    def expected(p: twin.Params, x: Tensor, memory: Tensor | None = None) -> Any:
        y, normed = twin.multi_head_attention(x, p, everything, HEADS, HEADS, encoder_output=memory)
        return (y, normed) if input_layernorm else (y,)

    assert_same(module, run, expected, [random(S, B, H)] + [random(T, B, H, seed=1)] * (kind == "cross"))


def test_sequences_of_different_lengths_are_each_as_alone() -> None:
    """Rotary positions begin with each."""
    layer = randomized(
        nn.TransformerLayer(
            H, 24, HEADS, attn_input_format="thd", self_attn_mask_type="padding_causal", **NO_DROPOUT, **CPU64
        )
    )
    alone = nn.TransformerLayer(H, 24, HEADS, **NO_DROPOUT, **CPU64)
    alone.load_state_dict(layer.state_dict())
    angles, x = nn.RotaryPositionEmbedding(4).cpu()(4), random(8, H)
    cu = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    actual = layer(x, cu_seqlens_q=cu, cu_seqlens_kv=cu, rotary_pos_emb=angles)
    expected = [alone(part[:, None], rotary_pos_emb=angles).squeeze(1) for part in x.split([3, 1, 4])]
    torch.testing.assert_close(actual, torch.cat(expected), **TIGHT)


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("what", ["drop_path_rate", "hidden_dropout"])
def test_what_dropout_keeps_is_scaled(what: str, form: str) -> None:
    """Drop path keeps or leaves out whole samples. In evaluation nothing is dropped."""
    torch.manual_seed(0)
    s, b, p = 2, 500, 0.3
    options: dict[str, Any] = NO_DROPOUT | {what: p, "attn_input_format": form, "parallel_attention_mlp": True}
    layer = randomized(nn.TransformerLayer(8, 8, 2, **options, **CPU64))
    x = random(s, b, 8) if form == "sbhd" else random(b, s, 8)
    branch = layer(x) - x
    layer.eval()
    ratio_sbh = (branch / (layer(x) - x)).detach()
    if form == "bshd":
        ratio_sbh = ratio_sbh.transpose(0, 1)
    kept = ratio_sbh.abs() > 1e-6
    torch.testing.assert_close(ratio_sbh[kept], torch.full_like(ratio_sbh[kept], 1 / (1 - p)), rtol=1e-6, atol=0)
    assert abs(kept.double().mean() - (1 - p)) < 0.06
    per_sample = kept.all(0).all(-1) | ~kept.any(0).any(-1)
    assert per_sample.all() == (what == "drop_path_rate")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"drop_path_rate": 0.1, "attn_input_format": "thd"}, "drop_path_rate is 0.1"),
        ({"parallel_attention_mlp": True, "output_layernorm": True}, "which does not go with output_layernorm"),
        ({"fuse_wgrad_accumulation": True}, "set fuse_qkv_params=True"),
        ({"ub_tp_comm_overlap": True}, "ub_tp_comm_overlap is True"),
        ({"layer_type": "prefix"}, "layer_type is 'prefix'; it must be one of 'encoder', 'decoder'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        nn.TransformerLayer(H, 24, HEADS, **options, **CPU64)
