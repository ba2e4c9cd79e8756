"""What the log says about the way GEMMs are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.fp8 import RECIPES, CurrentScaling, CustomScaling, Fp8Recipe, MXFP8Scaling, NVFP4Scaling, Rule
from megafp8.fp8.describe import describe_path

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HOPPER, BLACKWELL = (9, 0), (10, 3)
EVERYWHERE = "the same FP8 values, products in fp32"
FROM_BLACKWELL = "emulated in fp32: tensor cores for them come with compute capability 10.0, and this is capability 9.0"
NO_BACKEND = "emulated in fp32: this GPU has tensor cores for them, but megafp8 no backend"
MIXED = CustomScaling(
    rules=(Rule(layers="*", input=CurrentScaling(), weight=CurrentScaling(), grad_output=MXFP8Scaling()),)
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
        (NVFP4Scaling(), CUDA, BLACKWELL, "auto", f"nvfp4, GEMMs {NO_BACKEND}"),
        (MIXED, CUDA, HOPPER, "cublaslt", f"custom (current, mxfp8), those GEMMs with mxfp8 {FROM_BLACKWELL}"),
    ],
)
def test_a_line_for_the_log(
    recipe: Fp8Recipe | None, device: torch.device, capability: Any, backend: Any, expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert describe_path(recipe, device, backend) == f"fp8: {expected}"


def test_every_recipe_has_a_line() -> None:
    for name in RECIPES.keys() - {"custom"}:
        assert f"fp8: {name}, GEMMs " in describe_path(RECIPES[name](), CPU)
