"""Who gets which operation, what is saved, and that sharded tensors are cast like whole ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, group

from megafp8.fp8 import CurrentScaling, DelayedScaling, Fp8Manager, Fp8Recipe
from megafp8.numerics.sources import Plain
from megafp8.plan import LinearSite
from tests.fp8.linear_layer import LinearLayer
from tests.fp8.reference import bytes_of
from tests.world import World

CPU = torch.device("cpu")
NAMES = [f"layers.{i}.{part}" for i in range(4) for part in ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")]


def ask(manager: Fp8Manager, name: str) -> LinearLayer:
    return LinearLayer(manager, name)


def fp8_names(**patterns: Any) -> list[str]:
    manager = Fp8Manager(CurrentScaling(), amax_group=None, **patterns)
    return [name for name in NAMES if ask(manager, name).state.plan.fp8]


def test_patterns_choose_layers() -> None:
    assert fp8_names() == NAMES
    assert fp8_names(include=("layers.*.mlp.fc1",)) == [f"layers.{i}.mlp.fc1" for i in range(4)]
    assert fp8_names(include=("layers.[12].*",), exclude=("*.qkv", "*.mlp.*")) == [
        "layers.1.attention.proj",
        "layers.2.attention.proj",
    ]


def test_no_recipe_or_no_fp8_is_high_precision() -> None:
    plan = ask(Fp8Manager(None, amax_group=None), "a").state.plan
    assert plan.gemms == ("high", "high", "high")
    assert plan.reasons == ("all GEMMs in high precision: fp8.recipe is none",)
    state = Fp8Manager(CurrentScaling(), amax_group=None).linear(LinearSite("output", high_precision="asked for"))
    assert not state.plan.fp8
    assert state.plan.reasons == ("all GEMMs in high precision: asked for",)


def test_a_name_is_taken_once() -> None:
    manager = Fp8Manager(CurrentScaling(), amax_group=None)
    ask(manager, "a")
    with pytest.raises(AssertionError, match="layer a"):
        ask(manager, "a")


@pytest.mark.parametrize("field", ["include", "exclude"])
def test_a_pattern_without_a_layer_is_an_error(field: str) -> None:
    options: dict[str, Any] = {field: ("layers.*.mlp.fc1", "layers.*.atention.qkv")}
    manager = Fp8Manager(None, amax_group=None, **options)
    with pytest.raises(ValueError, match="matches no layer") as error:
        manager.check_patterns(NAMES)
    message = str(error.value)
    assert f"{field} pattern 'layers.*.atention.qkv'" in message
    assert "nearest names are layers.3.attention.qkv" in message
    example = message.split("'")[-2]
    Fp8Manager(None, amax_group=None, include=(example,)).check_patterns(NAMES)


def test_good_patterns_pass() -> None:
    Fp8Manager(None, amax_group=None, exclude=("layers.3.*",)).check_patterns(NAMES)
    with pytest.raises(ValueError, match="no linear layers"):
        Fp8Manager(None, amax_group=None).check_patterns([])


class Model:
    """Two layers under one manager; data and gradients depend on the step only."""

    def __init__(self, recipe: Fp8Recipe | None) -> None:
        self.manager = Fp8Manager(recipe, amax_group=None)
        self.ops = [ask(self.manager, name) for name in ("first", "second")]
        self.manager.materialize(CPU)
        generator = torch.Generator().manual_seed(0)
        self.weights = [nn.Parameter(torch.randn(16, 16, generator=generator) * 0.3) for _ in self.ops]

    def forward(self, seed: int) -> Tensor:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)) * (1 + seed % 3)
        return self.ops[1](torch.relu(self.ops[0](x, self.weights[0])), self.weights[1])

    def step(self, seed: int) -> list[Tensor]:
        y = self.forward(seed)
        y.square().mean().backward()
        with torch.no_grad():
            for weight in self.weights:
                assert weight.grad is not None
                weight.sub_(0.1 * weight.grad)
                weight.grad = None
        self.manager.end_step()
        return [y.detach(), *(weight.detach().clone() for weight in self.weights)]


DELAYED = DelayedScaling(amax_history_len=3, interval=2)


def copied(manager: Fp8Manager) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in manager.state_dict().items()}


def test_evaluation_leaves_no_trace() -> None:
    model, untouched = Model(DELAYED), Model(DELAYED)
    for layer in (model.ops[1], untouched.ops[1]):
        layer.state.freeze_weight(keep_copies=True)
    for step in range(5):
        before = copied(model.manager)
        with model.manager.recording(False):
            torch.autograd.grad(model.forward(100 + step).sum() * 100, model.weights)  # gradients count as well
        for name, tensor in model.manager.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        for ours, theirs in zip(model.step(step), untouched.step(step), strict=True):
            assert torch.equal(ours, theirs)
    for ours, theirs in zip(model.manager.state_dict().values(), untouched.manager.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_recording_is_restored() -> None:
    model = Model(DELAYED)
    history = model.manager.state_dict()
    with model.manager.recording(False):
        with model.manager.recording(True):
            pass
        model.forward(0)
    for name in ("input", "weight"):
        assert history[f"fp8.first.{name}.amax_history"].tolist() == [0, 0, 0]
    model.forward(0)
    assert history["fp8.first.weight.amax_history"][0] == model.weights[0].abs().max()
    assert history["fp8.first.input.amax_history"][0] > 0


def test_state_names_and_shapes() -> None:
    state = Model(DELAYED).manager.state_dict()
    expected: dict[str, tuple[int, ...]] = {"fp8.step": ()}
    for layer in ("first", "second"):
        for operand in ("input", "weight", "grad_output"):
            expected[f"fp8.{layer}.{operand}.amax_history"] = (3,)
            expected[f"fp8.{layer}.{operand}.scale"] = ()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected
    assert "fp8.step" not in Model(DelayedScaling()).manager.state_dict()
    assert Model(CurrentScaling()).manager.state_dict() == {}
    assert Model(None).manager.state_dict() == {}


@pytest.mark.parametrize("in_place", [False, True])
def test_a_restart_continues_bit_for_bit(in_place: bool) -> None:
    model = Model(DELAYED)
    for step in range(3):
        model.step(step)
    state, weights = copied(model.manager), [w.detach().clone() for w in model.weights]
    resumed = Model(DELAYED)
    resumed.forward(0)  # leaves FP8 copies of other weights, which loading must drop
    with torch.no_grad():
        for weight, saved in zip(resumed.weights, weights, strict=True):
            weight.copy_(saved)
    if in_place:
        for name, tensor in resumed.manager.state_dict().items():
            tensor.copy_(state[name])
        resumed.manager.invalidate_weights()
    else:
        resumed.manager.load_state_dict(state)
    for step in range(3, 8):
        for ours, theirs in zip(resumed.step(step), model.step(step), strict=True):
            assert torch.equal(ours, theirs)


def test_state_of_another_run_is_refused_untouched() -> None:
    model = Model(DELAYED)
    model.step(0)
    before = copied(model.manager)
    state = copied(Model(DELAYED).manager)
    lost = {name: tensor for name, tensor in state.items() if name != "fp8.first.input.scale"}
    with pytest.raises(ValueError, match=r"missing fp8.first.input.scale, unexpected fp8.other.scale"):
        model.manager.load_state_dict({**lost, "fp8.other.scale": torch.ones(())})
    with pytest.raises(ValueError, match=r"has shape \[5\], but this run needs \[3\].*amax_history_len"):
        model.manager.load_state_dict({**state, "fp8.second.weight.amax_history": torch.zeros(5)})
    for name, tensor in model.manager.state_dict().items():
        assert torch.equal(tensor, before[name])


def whole_operands() -> tuple[Tensor, Tensor, Tensor]:
    """x `[8, 32]`, w `[16, 32]`, dy `[8, 16]`: the largest magnitude of each is in the second half of its last dim."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(*shape, generator=generator) for shape in ((8, 32), (16, 32), (8, 16))]
    for tensor in tensors:
        tensor[-1, -1] = -9.0
    return tensors[0], tensors[1], tensors[2]


def _casts(kind: str, power_of_two: bool) -> list[np.ndarray[Any, Any]]:
    """This rank's casts of its slices of x, w, dy in a column- or row-parallel layer."""
    world = group.WORLD
    assert isinstance(world, ProcessGroup)
    rank, size = world.rank(), world.size()
    x, w, dy = whole_operands()
    manager = Fp8Manager(CurrentScaling(power_of_two=power_of_two), amax_group=world)
    op = LinearLayer(manager, tp_group=world, parallel=kind, tensor_parallel=size)
    manager.materialize(CPU)
    if kind == "column":
        x, w, dy = x, w.chunk(size, 0)[rank], dy.chunk(size, 1)[rank]
    else:
        x, w, dy = x.chunk(size, 1)[rank], w.chunk(size, 1)[rank], dy
    casts: list[np.ndarray[Any, Any]] = []
    for quantizer, tensor in zip(op.state.quantizers, (x, w, dy), strict=True):
        rows = quantizer(Plain(tensor), rowwise=True, columnwise=False).rowwise
        assert rows is not None
        x8, scale_inv, *_ = rows
        casts += [bytes_of(x8), scale_inv.numpy()]
    return casts


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(("kind", "cut"), [("column", (None, 0, 1)), ("row", (1, 1, None))])
def test_sharded_casts_are_slices_of_whole_casts(
    world2: World, kind: str, cut: tuple[int | None, ...], power_of_two: bool
) -> None:
    (whole,) = world2.run(_casts, kind, power_of_two, ranks=1)
    ranks = world2.run(_casts, kind, power_of_two, ranks=2)
    for operand, dim in enumerate(cut):
        parts = [rank[2 * operand] for rank in ranks]
        joined = parts[0] if dim is None else np.concatenate(parts, axis=dim)
        np.testing.assert_array_equal(joined, whole[2 * operand])
        for rank in ranks:
            assert rank[2 * operand + 1] == whole[2 * operand + 1]


def _delayed_two_ranks() -> dict[str, Any]:
    """Three steps of a column-parallel layer whose ranks see different data."""
    world = group.WORLD
    assert isinstance(world, ProcessGroup)
    manager = Fp8Manager(DelayedScaling(amax_history_len=4), amax_group=world)
    op = LinearLayer(manager, tp_group=world, parallel="column", tensor_parallel=world.size())
    manager.materialize(CPU)
    weight = nn.Parameter(torch.full((4, 4), 1.0 + world.rank()))
    for step in range(3):
        x = torch.full((4, 4), 2.0 + step * (1 - world.rank()), requires_grad=True)
        op(x, weight).backward(torch.full((4, 4), 0.5 * (1 + world.rank())))
        manager.end_step()
    return {name: tensor.tolist() for name, tensor in manager.state_dict().items()}


def test_delayed_state_is_one_on_all_ranks(world2: World) -> None:
    first, second = world2.run(_delayed_two_ranks)
    assert first == second
    assert first["fp8.layer.input.amax_history"] == [0, 4, 3, 2]
    assert first["fp8.layer.input.scale"] == 112
    assert first["fp8.layer.weight.amax_history"] == [0, 2, 2, 2]
    assert first["fp8.layer.weight.scale"] == 224
    assert first["fp8.layer.grad_output.scale"] == 57344
