"""How linear layers are planned: every way a layer can run, and the reason wherever the fast one is not taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megafp8.plan import (
    LinearPrecision,
    LinearSite,
    Neighbor,
    PerGemm,
    Quantization,
    plan_linear,
    plans_table,
)

PER_TENSOR = Quantization("delayed", per_tensor=True, shard_alignment=1, gatherable_weight=True)
BLOCKS = Quantization("blockwise", per_tensor=False, shard_alignment=128, gatherable_weight=False)
WHOLE_ONLY = Quantization("nvfp4", per_tensor=False, shard_alignment=None, gatherable_weight=False)
NORM, ROTARY = Neighbor("norm", "any"), Neighbor("rotary embedding", "per_tensor")
QKV = LinearSite(
    "layers.0.attention.qkv",
    parallel="column",
    tensor_parallel=2,
    sequence_parallel=True,
    tokens=256,
    before=NORM,
    after=ROTARY,
)
DOWN = LinearSite(
    "layers.0.mlp.down",
    parallel="row",
    tensor_parallel=2,
    sequence_parallel=True,
    tokens=256,
    before=Neighbor("swiglu", "any"),
)
NONE, ALL = PerGemm(False, False, False), PerGemm(True, True, True)


def of_(operand: Quantization, high: PerGemm = NONE) -> LinearPrecision:
    return LinearPrecision(operand, operand, operand, high, PerGemm(True, False, False))


def test_everything_is_fused_where_it_can_be() -> None:
    plan = plan_linear(QKV, of_(PER_TENSOR))
    assert plan.gemms == ("fp8 fast", "fp8", "fp8")
    assert (plan.input, plan.gather, plan.saved) == ("fused", "fp8", "columnwise")
    assert (plan.grad_output, plan.weight, plan.reasons) == ("fused", "resident", ())
    assert (plan.input_neighbor, plan.output_neighbor) == ("norm", "rotary embedding")
    plan = plan_linear(DOWN, of_(PER_TENSOR))
    assert (plan.input, plan.gather, plan.grad_output) == ("fused", None, "layer, then gather")
    assert plan.reasons == ()


@pytest.mark.parametrize(
    ("site", "of", "expected", "reason"),
    [
        (QKV, of_(BLOCKS), {"input": "fused", "grad_output": "layer", "saved": "columnwise shard"}, "one scale per"),
        (replace(QKV, tokens=40), of_(BLOCKS), {"input": "layer", "gather": "high", "saved": "columnwise"}, "128"),
        (replace(QKV, tokens=None), of_(BLOCKS), {"input": "fused", "gather": "fp8"}, "one scale per"),
        (QKV, of_(WHOLE_ONLY), {"input": "layer", "gather": "high"}, "cannot quantize slices of the tokens"),
        (replace(QKV, tensor_parallel=1), of_(WHOLE_ONLY), {"input": "fused", "gather": None}, "rotary"),
        (DOWN, of_(WHOLE_ONLY), {"input": "fused", "grad_output": "layer"}, "output gradient gathered in high"),
        (replace(QKV, before=Neighbor("attention", "none", "it is bf16")), of_(PER_TENSOR),
         {"input": "layer", "gather": "high"}, "gathered in high precision: it is bf16"),
        (replace(QKV, adds_bias=True), of_(PER_TENSOR), {"grad_output": "layer", "input": "fused"}, "bias gradient"),
        (QKV, of_(PER_TENSOR, PerGemm(False, False, True)),
         {"input": "layer", "grad_output": "layer", "saved": "high", "gemms": ("fp8 fast", "fp8", "high")}, "wgrad"),
        (QKV, of_(PER_TENSOR, PerGemm(False, True, True)), {"grad_output": "high"}, "override_linear_precision"),
        (QKV, of_(PER_TENSOR, ALL), {"input": "high", "grad_output": "high", "fp8": False}, "fprop, dgrad, wgrad"),
        (replace(QKV, recompute_input=True), of_(BLOCKS), {"saved": "recompute"}, "rotary"),
        (replace(QKV, weight_storage="zero", param_gather=True), of_(PER_TENSOR), {"weight": "zero fp8"}, ""),
        (replace(QKV, keeps_transpose=False), of_(PER_TENSOR), {"keeps_transpose": False, "fp8_only": False}, ""),
        (replace(QKV, tensor_parallel=1, keeps_transpose=False), of_(BLOCKS), {"keeps_transpose": True},
         "transposed weight kept"),
        (replace(QKV, weight_storage="fsdp", param_gather=True), of_(PER_TENSOR), {"weight": "fsdp fp8"}, ""),
        (replace(QKV, weight_storage="zero"), of_(PER_TENSOR), {"weight": "resident"}, "fp8.param_gather is off"),
        (replace(QKV, weight_storage="fsdp", param_gather=True), of_(BLOCKS), {"weight": "fsdp"}, "several scales"),
        (replace(QKV, weight_storage="zero", param_gather=True), of_(PER_TENSOR, PerGemm(False, True, False)),
         {"weight": "resident"}, "needs the high-precision values"),
        (replace(DOWN, weight_storage="fsdp", param_gather=True, expert=True, after=NORM), of_(PER_TENSOR),
         {"weight": "fsdp fp8"}, ""),
        (replace(QKV, weight_storage="fsdp", param_gather=True, gathers_values="others are not"), of_(PER_TENSOR),
         {"weight": "fsdp"}, "weight gathered in high precision: others are not"),
    ],
)  # fmt: skip
def test_what_is_not_fused_has_a_reason(
    site: LinearSite, of: LinearPrecision, expected: dict[str, Any], reason: str
) -> None:
    plan = plan_linear(site, of)
    assert {field: getattr(plan, field) for field in expected} == expected
    assert reason in "\n".join(plan.reasons)
    assert bool(reason) == bool(plan.reasons)


@pytest.mark.parametrize(
    ("options", "saved", "reason"),
    [({"calibrating": True}, "high", "static scales"), ({"high_reason": "fp8.exclude"}, "recompute", "fp8.exclude")],
)
def test_a_layer_in_high_precision_says_why(options: dict[str, Any], saved: str, reason: str) -> None:
    of = of_(PER_TENSOR) if "calibrating" in options else None
    plan = plan_linear(replace(DOWN, recompute_input=True), of, **options)
    assert (plan.gemms, plan.fp8, plan.saved) == (("high",) * 3, False, saved)
    assert reason in plan.reasons[0]


def test_the_table_folds_equal_layers() -> None:
    plans = [
        plan_linear(replace(QKV, name=f"layers.{i}.attention.qkv"), precision, high_reason="x")
        for i, precision in enumerate([of_(PER_TENSOR), of_(PER_TENSOR), None, of_(PER_TENSOR)])
    ]  # fmt: skip
    header, folded, single, reason = plans_table(plans).splitlines()
    assert header.split()[:4] == ["layer", "fprop", "dgrad", "wgrad"]
    assert folded.startswith("layers.0-1,3.attention.qkv  fp8 fast  fp8")
    assert single.startswith("layers.2.attention.qkv [1]  high")
    assert reason == "[1] all GEMMs in high precision: x"
