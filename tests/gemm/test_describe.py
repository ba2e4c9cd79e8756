"""What the log says about the way GEMMs are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.fp8 import RECIPES, CurrentScaling, CustomScaling, Fp8Recipe, MXFP8Scaling, NVFP4Scaling, Rule
from megafp8.gemm import describe
from megafp8.gemm.describe import describe_path

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HOPPER, BLACKWELL = (9, 0), (10, 3)
EVERYWHERE = "the same FP8 values, products in fp32"
FROM_BLACKWELL = (
    "in bf16, with the same values: tensor cores for them come with compute capability 10.0, and this is capability 9.0"
)
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
    ("recipe", "device", "capability", "backend", "expected"),
    [
        (None, CUDA, HOPPER, "auto", "none, all layers in high precision"),
        (CurrentScaling(), CPU, None, "auto", f"current, GEMMs emulated on cpu: {EVERYWHERE}"),
        (CurrentScaling(), CPU, None, "scaled_mm", "current, GEMMs on cpu by scaled_mm"),
        (CurrentScaling(), CUDA, HOPPER, "auto", "current, GEMMs on FP8 tensor cores"),
        (CurrentScaling(), CUDA, HOPPER, "emulated", f"current, GEMMs emulated on cuda: {EVERYWHERE}"),
        (MXFP8Scaling(), CUDA, HOPPER, "auto", f"mxfp8, GEMMs {FROM_BLACKWELL}"),
        (MXFP8Scaling(), CPU, None, "scaled_mm", f"mxfp8, GEMMs {FROM_BLACKWELL.replace('capability 9.0', 'cpu')}"),
        (MXFP8Scaling(), CUDA, BLACKWELL, "cublaslt", "mxfp8, GEMMs on FP8 tensor cores by scaled_mm"),
        (NVFP4Scaling(), CUDA, BLACKWELL, "auto", "nvfp4, GEMMs on FP4 tensor cores by scaled_mm"),
        (NVFP4Scaling(), CUDA, BLACKWELL, "emulated", f"nvfp4, GEMMs emulated on cuda: {EVERYWHERE}"),
        (
            SIDE_BY_SIDE, CUDA, BLACKWELL, "auto",
            "custom (current, nvfp4), GEMMs on FP8 and FP4 tensor cores, nvfp4 by scaled_mm",
        ),
        (
            MIXED, CUDA, BLACKWELL, "auto",
            f"custom (current, mxfp8), GEMMs on FP8 tensor cores, mxfp8 by scaled_mm, but current·mxfp8 {APART}",
        ),
        (
            HIGH_WGRAD, CUDA, BLACKWELL, "auto",
            f"custom (nvfp4, mxfp8), GEMMs on FP4 and FP8 tensor cores by scaled_mm, but mxfp8·nvfp4 {APART}",
        ),
        (HIGH_WGRAD, CUDA, HOPPER, "auto", f"custom (nvfp4, mxfp8), GEMMs {FROM_BLACKWELL}"),
        (
            MIXED, CUDA, HOPPER, "cublaslt",
            f"custom (current, mxfp8), those GEMMs of mxfp8 {FROM_BLACKWELL}, but current·mxfp8 {APART}",
        ),
    ],
)  # fmt: skip
def test_a_line_for_the_log(
    recipe: Fp8Recipe | None, device: torch.device, capability: Any, backend: Any, expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    if capability == BLACKWELL:  # which is not asked for products here
        monkeypatch.setattr(describe, "why_not_block_scaled", lambda _: None)
    assert describe_path(recipe, device, backend) == f"fp8: {expected}"


def test_every_recipe_has_a_line() -> None:
    for name in RECIPES.keys() - {"custom"}:
        assert f"fp8: {name}, GEMMs " in describe_path(RECIPES[name](), CPU)
