"""Quantizers that are made for CUDA cast by kernels, with the bits of those that are made for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.numerics import quantizers
from megafp8.numerics.group_quantizer import GroupQuantizer
from megafp8.numerics.groups import RowGroups
from megafp8.numerics.implementations import kernels
from megafp8.numerics.recipes import BlockwiseScaling, CurrentScaling, MXFP8Scaling, NVFP4Scaling, RowwiseScaling
from megafp8.numerics.recipes.base import Fp8Tensor, OperandName, RecipeQuantizer
from megafp8.numerics.recipes.delayed import DelayedQuantizer, DelayedScaling
from megafp8.numerics.recipes.nvfp4 import NVFP4Quantizer
from megafp8.numerics.recipes.static import StaticQuantizer, StaticScaling
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import QuantizedTensor
from tests.kernels import DEVICE, noise

pytest.importorskip("megafp8.kernels.quantize")
CUDA = torch.device("cuda")


def _scales() -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.tensor(3.0, device=DEVICE)
    return scale, scale.reciprocal(), torch.zeros((), device=DEVICE)


Made = Callable[[Fp8Tensor, torch.device], RecipeQuantizer]
QUANTIZERS: dict[str, tuple[Made, list[str]]] = {
    "delayed": (lambda t, on: DelayedQuantizer(DelayedScaling(), t, on, *_scales()), ["cast_tensor"]),
    "fresh": (
        lambda t, on: DelayedQuantizer(DelayedScaling(), t, on, *_scales(), fresh=True), ["amax", "cast_tensor"],
    ),
    "static": (lambda t, on: StaticQuantizer(StaticScaling(), t, on, *_scales()), ["cast_tensor"]),
    "current": (lambda t, on: RecipeQuantizer(CurrentScaling(), t, on), ["amax", "cast_current"]),
    "current, batch-invariant": (
        lambda t, on: RecipeQuantizer(CurrentScaling(), replace(t, batch_invariant=True), on),
        ["cast_rows", "amax", "cast_current"],
    ),
    "rowwise": (lambda t, on: RecipeQuantizer(RowwiseScaling(), t, on), ["cast_rows"]),
    "blockwise": (lambda t, on: RecipeQuantizer(BlockwiseScaling(), t, on), ["cast_1x128"]),
    "mxfp8": (lambda t, on: RecipeQuantizer(MXFP8Scaling(), t, on), ["cast_mxfp8"]),
    "nvfp4": (lambda t, on: NVFP4Quantizer(NVFP4Scaling(), t, on, None), ["nvfp4_amaxes", "cast_nvfp4"]),
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The casts of `megafp8.kernels` that have been called, by name."""
    calls: list[str] = []

    def counting(module: str) -> Any:
        def counted(name: str, function: Any) -> Any:
            return lambda *args, **options: (calls.append(name), function(*args, **options))[1]

        own: ModuleType = kernels(module)
        return SimpleNamespace(**{name: counted(name, x) for name, x in vars(own).items() if callable(x)})

    monkeypatch.setattr(quantizers, "kernels", counting)
    return calls


def assert_same(made: QuantizedTensor, expected: QuantizedTensor) -> None:
    for one, other in zip(made, expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one.data.float(), other.data.float())
        assert torch.equal(one.scale_inv, other.scale_inv)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_quantizer_for_cuda(name: str, launched: list[str]) -> None:
    make, expected = QUANTIZERS[name]
    tensor = Fp8Tensor("layer", "input", None, None)
    ours, reference = make(tensor, CUDA), make(tensor, torch.device("cpu"))
    x_rc, both = noise(16, 160, scale=3, dtype=torch.bfloat16), {"rowwise": True, "columnwise": True}
    assert_same(ours(Plain(x_rc), **both), reference(Plain(x_rc), **both))
    assert launched == expected
    wide = Plain(x_rc.double())  # which kernels do not take
    assert_same(ours(wide, **both), reference(wide, **both))
    assert launched == expected


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise"])
def test_a_quantizer_of_experts_for_cuda(name: str, launched: list[str]) -> None:
    operand: OperandName = "grad_output"
    tensors = [Fp8Tensor(f"experts.{e}.up", operand, None, None) for e in range(2)]
    groups = RowGroups.from_ends(torch.tensor([16, 48], dtype=torch.int32, device=DEVICE), 48)
    scale_2, scale_inv_2, newest_2 = torch.tensor([[3.0, 5.0], [1 / 3, 0.2], [0.0, 0.0]], device=DEVICE)

    def joined(on: torch.device) -> GroupQuantizer:
        if name == "delayed":
            views = zip(scale_2, scale_inv_2, newest_2, strict=True)
            own: list[Any] = [DelayedQuantizer(DelayedScaling(), t, on, *v) for t, v in zip(tensors, views)]
        else:
            own = [QUANTIZERS[name][0](tensor, on) for tensor in tensors]
        made = GroupQuantizer.join(own)
        assert made is not None
        return made

    source, both = Plain(noise(48, 64, scale=3, dtype=torch.bfloat16)), {"rowwise": True, "columnwise": True}
    made, expected = (joined(on)(source, groups, **both) for on in (CUDA, torch.device("cpu")))
    used = int(groups.padded_ends_e[-1])
    for one, other, columns in ((made.rowwise, expected.rowwise, 64), (made.columnwise, expected.columnwise, used)):
        assert one is not None
        assert other is not None
        assert torch.equal(one.data.float()[:, :columns], other.data.float()[:, :columns])
        assert torch.equal(one.scale_inv, other.scale_inv)
    assert [call for call in launched if "groups" in call]
