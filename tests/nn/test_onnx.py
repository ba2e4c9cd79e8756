"""ONNX export: what onnxruntime computes against the model's own inference, and what is refused.

Shapes: x `[s, b, h]`.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from examples.llama import LlamaForCausalLM
from megafp8 import fp8, nn
from megafp8.fp8.onnx import exported

H = 32
CPU: dict[str, Any] = {"device": "cpu"}
POWERS_OF_TWO = fp8.DelayedScaling(power_of_two_scale=True)


def trained(module: torch.nn.Module, recipe: fp8.Fp8Recipe, *args: Tensor) -> torch.nn.Module:
    """After a step that gave it scales."""
    with fp8.autocast(recipe=recipe):
        module(*args).sum().backward()
    fp8.end_step(module)
    return module.eval()


def in_onnxruntime(
    module: torch.nn.Module,
    recipe: fp8.Fp8Recipe,
    traced: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    **options: Any,
) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Outputs of the module and of a copy's export; data type and number of dims of each initializer."""
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    copied = copy.deepcopy(module)
    with torch.no_grad(), fp8.autocast(recipe=recipe):
        expected, _ = module(*inputs), copied(*traced)
        program = torch.onnx.export(copied, traced, dynamo=True, opset_version=20, verbose=False, **options)
    file = io.BytesIO()
    program.save(file)
    model = onnx.load_from_string(file.getvalue())
    onnx.checker.check_model(model)
    session = runtime.InferenceSession(file.getvalue())
    (y,) = session.run(None, {own.name: x.numpy() for own, x in zip(session.get_inputs(), inputs, strict=True)})
    return expected, torch.from_numpy(y), [(i.data_type, len(i.dims)) for i in model.graph.initializer]


@pytest.mark.slow
def test_a_linear_layer_is_exported_bit_for_bit() -> None:
    """Small integers, so that all sums are exact in fp32; the scales are powers of two."""
    torch.manual_seed(0)
    layer, x = nn.Linear(H, 48, **CPU), torch.randint(-9, 10, (4, 2, H)).float()
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-40, 41, (48, H)))
        layer.bias.copy_(torch.randint(-9, 10, (48,)))
    expected, actual, initializers = in_onnxruntime(trained(layer, POWERS_OF_TWO, x), POWERS_OF_TWO, (x,), (x,))
    assert torch.equal(actual, expected)
    assert not torch.equal(expected, x @ layer.weight.T + layer.bias)  # integers above 16 are rounded
    assert (17, 2) in initializers  # FLOAT8E4M3FN
    assert (1, 2) not in initializers


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["layer", "converted"])
def test_a_model_is_exported(kind: str) -> None:
    """With dynamic dims, at another length than it was traced with. A difference of sums may round an FP8 value."""
    torch.manual_seed(0)
    module: torch.nn.Module
    if kind == "layer":
        recipe: fp8.Fp8Recipe = POWERS_OF_TWO
        traced, inputs = ((torch.randn(s, b, H), _masked(s, b)) for s, b in ((8, 2), (5, 3)))
        options: dict[str, Any] = {"normalization": "RMSNorm", "activation": "swiglu", "num_gqa_groups": 2}
        options |= {"hidden_dropout": 0, "attention_dropout": 0, "self_attn_mask_type": "padding_causal"}
        module, layers = nn.TransformerLayer(H, 64, 4, **options, **CPU), 4
        dims: Any = {"hidden_states": _DYNAMIC, "attention_mask": {0: Dim.DYNAMIC, 3: Dim.DYNAMIC}}
    else:
        recipe = fp8.CurrentScaling()
        traced, inputs = ((torch.randint(32, shape),) for shape in ((2, 8), (3, 5)))
        module, layers = LlamaForCausalLM(vocab=32, h=H, intermediate=64, layers=1, heads=2), 7
        fp8.convert(module, recipe)
        dims = (_DYNAMIC,)
    module = trained(module, recipe, *traced)
    expected, actual, initializers = in_onnxruntime(module, recipe, traced, inputs, dynamic_shapes=dims)
    assert initializers.count((17, 2)) == layers
    with torch.no_grad():
        fp8_error = (module(*inputs) - expected).abs().mean()
    assert (actual - expected).abs().mean() < 0.02 * fp8_error


_DYNAMIC = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


def _masked(s: int, b: int) -> Tensor:
    """A mask of samples of different lengths, the last of length s."""
    return (torch.arange(s) >= torch.arange(s - b + 1, s + 1)[:, None])[:, None, None]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (fp8.MXFP8Scaling(), "one scale per tensor"),
        (fp8.CurrentScaling(power_of_two=True), "no operator"),
        (fp8.StaticScaling(calibration_steps=2), "calibrates"),
        (None, "run the model once"),
    ],
)
def test_what_onnx_cannot_express_is_refused(recipe: fp8.Fp8Recipe | None, message: str) -> None:
    layer, x = nn.Linear(H, H, **CPU).eval(), torch.ones(1, 1, H)
    linear = layer.gemm.linear
    assert linear is not None
    with torch.no_grad(), fp8.autocast(recipe=recipe):
        if recipe is not None:
            layer(x)
        with pytest.raises(ValueError, match=message):
            exported(linear, x.device)
        with fp8.autocast(enabled=False):
            assert exported(linear, x.device) is None


def test_a_changed_weight_and_a_gpu_are_refused() -> None:
    layer, x = nn.Linear(H, H, **CPU).eval(), torch.ones(1, 1, H)
    linear = layer.gemm.linear
    assert linear is not None
    with torch.no_grad(), fp8.autocast():
        layer(x)
        assert exported(linear, x.device) is not None
        with pytest.raises(ValueError, match=r"cuda; .* on the CPU"):
            exported(linear, torch.device("cuda"))
        layer.weight.mul_(2)
        with pytest.raises(ValueError, match="no FP8 weight"):
            exported(linear, x.device)


def test_experts_and_packed_sequences_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("fp8.standalone", "nn.attention"):
        monkeypatch.setattr(f"megafp8.{file}.in_onnx_export", lambda: True)
    with fp8.autocast(), pytest.raises(ValueError, match="experts"):
        nn.GroupedLinear(2, H, H, **CPU)(torch.ones(4, H), [2, 2])
    q, cu = torch.ones(4, 2, 16), torch.tensor([0, 4])
    with pytest.raises(ValueError, match="thd cannot be exported"):
        nn.DotProductAttention(2, 16, qkv_format="thd", attn_mask_type="padding")(q, q, q, cu_seqlens_q=cu)
    with pytest.raises(ValueError, match="attention_dropout cannot be exported"):
        nn.DotProductAttention(2, 16, attention_dropout=0.1)(q[:, None], q[:, None], q[:, None])


MASKED = torch.arange(6) >= torch.tensor([4, 6])[:, None]
ATTENTION: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"attn_mask_type": "padding_causal", "softcap": 2.0}, {"attention_mask": MASKED[:, None, None]}),
    ({"attn_mask_type": "padding", "window_size": (1, 2)}, {"attention_mask": MASKED[:, None, None]}),
    ({"attn_mask_type": "arbitrary", "softmax_type": "off-by-one"}, {"attention_mask": torch.eye(6, dtype=torch.bool)}),
    ({"window_size": (2, 0), "softmax_type": "learnable"}, {}),
    ({}, {"core_attention_bias_type": "alibi"}),
]


@pytest.mark.parametrize(("options", "arguments"), ATTENTION)
def test_attention_in_one_block_is_attention(
    options: dict[str, Any], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = nn.DotProductAttention(4, 8, 2, **options).eval()
    q, k, v = (torch.randn(6, 2, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    expected = module(q, k, v, **arguments)
    for file in ("layers.attention.op", "layers.attention.mask"):
        monkeypatch.setattr(f"megafp8.{file}.in_onnx_export", lambda: True)
    torch.testing.assert_close(module(q, k, v, **arguments), expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(expected, nn.DotProductAttention(4, 8, 2)(q, k, v))


class _Attention(torch.nn.Module):
    """Attention with arguments besides x, of which it makes q, k and v."""

    def __init__(self, options: dict[str, Any], arguments: dict[str, Any]) -> None:
        super().__init__()
        self.attention, self.arguments = nn.DotProductAttention(4, 8, **options).eval(), arguments

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (4, -1)).chunk(3, dim=-1)
        return self.attention(q, k, v, **self.arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "arguments"), ATTENTION)
def test_attention_is_exported(options: dict[str, Any], arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 2, 96)
    expected, actual, _ = in_onnxruntime(_Attention(options, arguments).eval(), POWERS_OF_TWO, (x,), (x,))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
