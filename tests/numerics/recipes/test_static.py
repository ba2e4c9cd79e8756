"""Static scaling: amaxes by hand, layers that switch to FP8 when theirs are known, and state that survives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup, group
from torch.utils.checkpoint import checkpoint

from megafp8.fp8 import E4M3, E5M2, CurrentScaling, CustomScaling, Fp8Manager, Rule, StaticScaling
from megafp8.linear.linear import high_precision_linear
from tests.fp8.linear_layer import LinearLayer
from tests.fp8.reference import scale_of
from tests.fp8.test_manager import CPU, Model
from tests.linear.test_linear import assert_product, cast_exactly, closed_over, managed, run
from tests.linear.test_linear import tensors as operands
from tests.world import World

STEPS = 3
FORMATS = {"input": E4M3, "weight": E4M3, "grad_output": E5M2}


def calibrated(manager: Fp8Manager) -> dict[str, float]:
    """The amaxes of the state, by operand."""
    state = manager.state_dict()
    return {operand: state[f"fp8.layer.{operand}.amax"].item() for operand in FORMATS}


def test_calibration_takes_the_largest_of_its_steps_and_microbatches() -> None:
    recipe = StaticScaling(calibration_steps=STEPS, margin=1)
    manager, op = managed(recipe)
    x, weight, dy = operands()
    largest = dict.fromkeys(FORMATS, 0.0)
    for step in range(STEPS):
        assert not op.state.plan.fp8
        with torch.no_grad():
            weight.mul_(1.3 if step == 1 else 0.5)
        for microbatch in range(2):
            x_i = (x.detach() * (3 + step - 2 * microbatch)).requires_grad_()
            dy_i = dy * (5 - step + microbatch)
            weight.grad = None
            y, dx, dw = run(op, x_i, weight, dy_i)
            twin = (x_i.detach().requires_grad_(), nn.Parameter(weight.detach().clone()))
            for ours, theirs in zip((y, dx, dw), run(high_precision_linear, *twin, dy_i), strict=True):
                assert ours is not None
                assert theirs is not None
                assert torch.equal(ours, theirs)
            for operand, tensor in zip(FORMATS, (x_i, weight, dy_i), strict=True):
                largest[operand] = max(largest[operand], tensor.detach().abs().max().item())
        with manager.recording(False):  # an evaluation does not count
            run(op, (x.detach() * 1e6).requires_grad_(), weight, dy * 1e6)
        manager.end_step()
    assert calibrated(manager) == largest

    assert op.state.plan.fp8
    for step in range(2):  # and now nothing changes, whatever comes
        scaled = [x.detach() * 10.0**step, weight, dy * 10.0**step]
        x_i = scaled[0].requires_grad_()
        weight.grad = None
        y, dx, dw = run(op, x_i, weight, scaled[2])
        cast = [
            cast_exactly(t, fmt, torch.tensor(scale_of(largest[operand], fmt.max, margin=1))).flatten(0, -2)
            for t, (operand, fmt) in zip((x_i, weight, scaled[2]), FORMATS.items(), strict=True)
        ]
        assert dx is not None
        assert dw is not None
        assert_product(y, cast[0], cast[1].t())
        assert_product(dx, cast[2], cast[1])
        assert_product(dw, cast[2].t(), cast[0])
        manager.end_step()
        assert calibrated(manager) == largest


def test_a_layer_waits_for_the_last_of_its_tensors() -> None:
    given = managed(StaticScaling(amax=(("*.input", 3.0), ("*", 4.0))))
    assert given[1].state.plan.fp8
    assert given[0].state_dict() == {}
    manager, op = managed(StaticScaling(amax=(("*.weight", 4.0),), calibration_steps=1))
    assert sorted(manager.state_dict()) == [
        f"fp8.layer.{operand}.{what}" for operand in ("grad_output", "input") for what in ("amax", "calibrated_steps")
    ]
    x, weight, dy = operands()
    assert torch.equal(run(op, x, weight, dy)[0], high_precision_linear(x, weight))
    manager.end_step()
    assert_product(
        run(op, x, weight, dy)[0],
        cast_exactly(x, E4M3).flatten(0, 1),
        cast_exactly(weight, E4M3, torch.tensor(112.0)).t(),
    )


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_step_that_is_not_finite_does_not_count(bad: float) -> None:
    manager, op = managed(StaticScaling(calibration_steps=2))
    x, weight, dy = operands()
    run(op, x, weight, dy)
    manager.end_step()
    worse = x.detach().clone()
    worse[0, 0, 0] = bad
    run(op, worse.requires_grad_(), weight, dy)
    manager.end_step()
    assert calibrated(manager)["input"] == x.detach().abs().max()


def test_a_layer_of_zeros_has_scale_one() -> None:
    manager, op = managed(StaticScaling(calibration_steps=1))
    x, weight, dy = operands()
    run(op, x.detach().zero_().requires_grad_(), weight, dy)
    manager.end_step()
    y, _, _ = run(op, torch.ones_like(x, requires_grad=True), weight, dy)
    assert_product(y, torch.ones(48, 32).double(), cast_exactly(weight, E4M3).t())


def test_recompute_notes_the_same() -> None:
    found = []
    for recompute in (False, True):
        manager, op = managed(StaticScaling(calibration_steps=1))
        x, weight, dy = operands()
        y = checkpoint(closed_over, op, weight, x, use_reentrant=False) if recompute else op(x, weight)
        y.backward(dy)
        manager.end_step()
        found.append(calibrated(manager))
    assert found[0] == found[1]
    assert found[0]["grad_output"] > 0


def test_a_layer_that_joins_on_resume_is_calibrated() -> None:
    recipe = StaticScaling(calibration_steps=1)
    model, resumed = Model(recipe), Model(recipe)
    model.step(0)
    for name, tensor in resumed.manager.state_dict().items():
        if name.startswith("fp8.first."):
            tensor.copy_(model.manager.state_dict()[name])
    resumed.manager.invalidate_weights()
    first, second = resumed.ops
    assert (first.state.plan.fp8, second.state.plan.fp8) == (True, False)
    resumed.step(1)
    assert second.state.plan.fp8


def test_a_mixture_calibrates_its_static_operands_only() -> None:
    static, current = StaticScaling(calibration_steps=1), CurrentScaling()
    manager, op = managed(CustomScaling(rules=(Rule(layers="*", input=static, weight=current, grad_output=current),)))
    x, weight, dy = operands()
    assert torch.equal(run(op, x, weight, dy)[0], high_precision_linear(x, weight))
    manager.end_step()
    assert sorted(manager.state_dict()) == ["fp8.layer.input.amax", "fp8.layer.input.calibrated_steps"]
    half = (x.detach() / 3).requires_grad_()
    x8 = cast_exactly(half, E4M3, torch.tensor(448.0) / x.detach().abs().max())
    assert_product(run(op, half, weight, dy)[0], x8.flatten(0, 1), cast_exactly(weight, E4M3).t())


def _two_ranks() -> list[dict[str, Any]]:
    """Two steps of calibration and one after; ranks see different data. The state after each."""
    world = group.WORLD
    assert isinstance(world, ProcessGroup)
    manager = Fp8Manager(StaticScaling(calibration_steps=2), amax_group=world)
    op = LinearLayer(manager, tp_group=world, parallel="column", tensor_parallel=world.size())
    manager.materialize(CPU)
    weight = nn.Parameter(torch.full((4, 4), 1.0 + world.rank()))
    states = []
    for step in range(3):
        x = torch.full((4, 4), 2.0 + step * (1 - world.rank()), requires_grad=True)
        op(x, weight).backward(torch.full((4, 4), 0.5 * (1 + world.rank())))
        manager.end_step()
        states.append({name: tensor.tolist() for name, tensor in manager.state_dict().items()})
    return states


def test_ranks_share_the_largest_amax(world2: World) -> None:
    """After every step of calibration, so that a checkpoint in between is whole; not after."""
    first, second = world2.run(_two_ranks)
    assert first == second
    assert [state["fp8.layer.input.amax"] for state in first] == [2, 3, 3]
    assert [state["fp8.layer.weight.amax"] for state in first] == [2, 2, 2]
    assert [state["fp8.layer.grad_output.amax"] for state in first] == [1, 1, 1]
    assert [state["fp8.layer.input.calibrated_steps"] for state in first] == [1, 2, 2]
