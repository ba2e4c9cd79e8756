"""`autocast` and the state of standalone layers: recipes by context, calibration, one all-reduce a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed, nn

from megafp8 import fp8
from tests.world import World


def layers(count: int, recipe: fp8.Fp8Recipe) -> list[nn.Linear]:
    """Each converted alone, so that none shares its state with another."""
    torch.manual_seed(0)
    return [fp8.convert(nn.Linear(32, 32), recipe, skip=()) for _ in range(count)]  # type: ignore[misc]


def chain(modules: list[nn.Linear], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def test_the_innermost_contexts_recipe_counts() -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    current, rowwise = layers(1, fp8.CurrentScaling())[0], layers(1, fp8.RowwiseScaling())[0]
    with fp8.autocast():
        expected, other = rowwise(x), current(x)
    with fp8.autocast(recipe=fp8.BlockwiseScaling()):
        with fp8.autocast(recipe=fp8.RowwiseScaling()):
            assert torch.equal(current(x), expected)
        assert not torch.equal(current(x), expected)
        with fp8.autocast():
            assert torch.equal(current(x), other)
    with (
        pytest.raises(ValueError, match="recipe is 'delayed'; it must be an Fp8Recipe"),
        fp8.autocast(recipe="delayed"),
    ):  # type: ignore[arg-type]
        pass


def test_calibration_makes_the_scales_that_training_would() -> None:
    """In evaluation too, and without a bit of difference to what high precision computes."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    (layer,) = layers(1, fp8.DelayedScaling(amax_history_len=4))
    (twin,) = layers(1, fp8.DelayedScaling(amax_history_len=4))
    with fp8.autocast(False, calibrating=True):
        y = layer.eval()(x)
    assert torch.equal(y, nn.functional.linear(x, layer.weight, layer.bias))
    with fp8.autocast():
        twin(x)
    for module in (layer, twin):
        fp8.end_step(module)
    calibrated, trained = fp8.state_dict(layer), fp8.state_dict(twin)
    for name in ("fp8..input.scale", "fp8..weight.scale"):
        assert torch.equal(calibrated[name], trained[name])
        assert calibrated[name] != 1


def _reductions_of_a_step() -> tuple[list[int], list[float]]:
    modules = layers(3, fp8.DelayedScaling(amax_history_len=4))
    modules += layers(1, fp8.StaticScaling(calibration_steps=5))
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
    sizes: list[int] = []
    original = distributed.all_reduce

    def counted(tensor: Tensor, *args: object, **options: object) -> object:
        sizes.append(tensor.numel())
        return original(tensor, *args, **options)

    distributed.all_reduce = counted
    try:
        for _ in range(3):
            with fp8.autocast():
                chain(modules, torch.full((16, 32), 1.0 + distributed.get_rank())).sum().backward()
            optimizer.step()
    finally:
        distributed.all_reduce = original
    fp8.end_step(nn.ModuleList(modules))
    return sizes, [fp8.state_dict(module)["fp8..input.scale"].item() for module in modules[:3]]


def test_layers_that_ran_together_end_their_step_in_one_all_reduce(world2: World) -> None:
    ranks = world2.run(_reductions_of_a_step)
    assert ranks[0] == ranks[1]
    sizes, scales = ranks[0]
    assert sizes == [12, 12]  # three tensors of four layers; the last step has not ended within
    assert scales[0] == 448 / 2
