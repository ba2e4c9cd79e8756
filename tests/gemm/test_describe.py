"""What the log says about the way GEMMs are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.fp8 import RECIPES, CurrentScaling, CustomScaling, Fp8Recipe, MXFP8Scaling, NVFP4Scaling, Rule
from megafp8.gemm.describe import describe_path

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EVERYWHERE = "the same FP8 values, products in fp32"
NOT_BLACKWELL = "in bf16, with the same values: megafp8 does not use Blackwell's tensor cores for them"
APART = "emulated in fp32: no tensor core multiplies such a pair"
CURRENT, MX, FOUR = CurrentScaling(), MXFP8Scaling(), NVFP4Scaling()
MIXED = CustomScaling(rules=(Rule(layers="*", input=CURRENT, weight=CURRENT, grad_output=MX),))
SIDE_BY_SIDE = CustomScaling(
    rules=(
        Rule(layers="*.qkv", input=CURRENT, weight=CURRENT, grad_output=CURRENT),
        Rule(layers="*.proj", input=FOUR, weight=FOUR, grad_output=FOUR),
    )
)
HIGH_WGRAD = CustomScaling(
    rules=(Rule(layers="*", input=FOUR, weight=FOUR, grad_output=MX),), override_linear_precision=(False, False, True)
)


@pytest.mark.parametrize(
    ("recipe", "device", "backend", "expected"),
    [
        (None, CUDA, "auto", "none, all layers in high precision"),
        (CurrentScaling(), CPU, "auto", f"current, GEMMs emulated on cpu: {EVERYWHERE}"),
        (CurrentScaling(), CPU, "scaled_mm", "current, GEMMs on cpu by scaled_mm"),
        (CurrentScaling(), CUDA, "auto", "current, GEMMs on FP8 tensor cores"),
        (CurrentScaling(), CUDA, "emulated", f"current, GEMMs emulated on cuda: {EVERYWHERE}"),
        (MXFP8Scaling(), CUDA, "auto", f"mxfp8, GEMMs {NOT_BLACKWELL}"),
        (MXFP8Scaling(), CPU, "scaled_mm", f"mxfp8, GEMMs {NOT_BLACKWELL}"),
        (NVFP4Scaling(), CUDA, "emulated", f"nvfp4, GEMMs emulated on cuda: {EVERYWHERE}"),
        (SIDE_BY_SIDE, CUDA, "auto", f"custom (current, nvfp4), GEMMs of nvfp4 {NOT_BLACKWELL}"),
        (HIGH_WGRAD, CUDA, "auto", f"custom (nvfp4, mxfp8), GEMMs {NOT_BLACKWELL}"),
        (
            MIXED, CUDA, "cublaslt",
            f"custom (current, mxfp8), GEMMs of mxfp8 {NOT_BLACKWELL}, but current·mxfp8 {APART}",
        ),
    ],
)  # fmt: skip
def test_a_line_for_the_log(recipe: Fp8Recipe | None, device: torch.device, backend: Any, expected: str) -> None:
    assert describe_path(recipe, device, backend) == f"fp8: {expected}"


def test_every_recipe_has_a_line() -> None:
    for name in RECIPES.keys() - {"custom"}:
        assert f"fp8: {name}, GEMMs " in describe_path(RECIPES[name](), CPU)
