"""The history against a naive list, one number at a time, for longer than it is long."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.distributed import ProcessGroup, group

from megafp8.fp8 import E4M3, E5M2, DelayedScaling
from megafp8.numerics.recipes.base import Fp8Tensor
from megafp8.numerics.recipes.delayed import DelayedQuantizer, DelayedState, amax_of_history
from megafp8.numerics.sources import Plain
from megafp8.numerics.step import end_step
from tests.fp8.reference import scale_of
from tests.world import World

CPU = torch.device("cpu")
FORMATS = {"a.input": E4M3, "b.grad_output": E5M2, "c.weight": E4M3}


def state_of(recipe: DelayedScaling, *names: str) -> DelayedState:
    """Of tensors named `<layer>.<operand>`."""
    parts = [name.split(".") for name in names]
    return DelayedState(recipe, [Fp8Tensor(layer, operand, None, None) for layer, operand in parts], CPU)  # type: ignore[arg-type]


class NaiveTensor:
    """Delayed scaling of one tensor with Python lists."""

    def __init__(self, fp8_max: float, recipe: DelayedScaling) -> None:
        self.fp8_max, self.recipe = fp8_max, recipe
        self.past: list[float] = []  # newest last, finite only (0 for a bad step)
        self.scale, self.steps = 1.0, 0

    def step(self, amax: float) -> None:
        window = [*self.past, amax][-self.recipe.amax_history_len :]
        chosen = max(window, key=lambda a: math.inf if math.isnan(a) else a)
        if self.recipe.amax_compute_algo == "most_recent":
            chosen = amax
        if self.steps % self.recipe.interval == 0 and math.isfinite(chosen) and chosen > 0:
            self.scale = scale_of(
                chosen, self.fp8_max, margin=self.recipe.margin, power_of_two=self.recipe.power_of_two_scale
            )
        self.past.append(amax if math.isfinite(amax) else 0.0)
        self.steps += 1


@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(),
        DelayedScaling(amax_history_len=16, interval=3, margin=1),
        DelayedScaling(amax_history_len=7, amax_compute_algo="most_recent", power_of_two_scale=True),
        DelayedScaling(amax_history_len=1),
    ],
    ids=["default", "interval", "most_recent", "length_one"],
)
def test_1030_steps_against_a_naive_list(recipe: DelayedScaling) -> None:
    """Or 200 where the history is short; each slot of it is written more than once."""
    rng = random.Random(0)
    state = state_of(recipe, *FORMATS)
    quantizers = state.quantizers
    naive = {name: NaiveTensor(fmt.max, recipe) for name, fmt in FORMATS.items()}
    for step in range(max(200, recipe.amax_history_len + 6)):
        for name in FORMATS:
            peaks = [torch.tensor(rng.lognormvariate(0, 2) * 10 ** (-step / 300)).item() for _ in range(2)]
            if rng.random() < 0.05:
                peaks[0] = rng.choice([0.0, math.inf, math.nan])
            for peak in peaks:  # two micro-batches
                quantizers[name](Plain(torch.tensor([[-peak, peak / 2]])), rowwise=True, columnwise=False)
            naive[name].step(max(peaks, key=lambda a: math.inf if math.isnan(a) else a))
        end_step([(state, None)])
        assert state.scale_t.tolist() == [naive[name].scale for name in FORMATS], step
        assert state.history_tl[:, 0].tolist() == [0, 0, 0]
    length = recipe.amax_history_len
    for i, name in enumerate(FORMATS):
        assert state.history_tl[i, 1:].tolist() == naive[name].past[::-1][: length - 1]


def test_one_bad_step_costs_one_update() -> None:
    state = state_of(DelayedScaling(amax_history_len=4), "a.input")
    quantizer = state.quantizers["a.input"]
    scales = []
    for peak in (2.0, torch.nan, 4.0, 1.0, 1.0, 1.0, 1.0):
        quantizer(Plain(torch.tensor([[peak]])), rowwise=True, columnwise=False)
        end_step([(state, None)])
        scales.append(state.scale_t.item())
        assert state.history_tl.isfinite().all()
    assert scales == [224, 224, 112, 112, 112, 112, 448]


def test_the_first_step_scales_by_the_tensor_at_hand() -> None:
    state = state_of(DelayedScaling(amax_history_len=4), "a.grad_output")
    quantizer = state.quantizers["a.grad_output"]
    tiny = Plain(torch.tensor([[3e-7, -1e-7, 0.0]]))  # below E5M2's least number: a scale of 1 would make them zeros
    for _ in range(2):  # two micro-batches, or a forward that is recomputed
        operand = quantizer(tiny, rowwise=True, columnwise=True)
        assert operand.rowwise is not None
        assert operand.columnwise is not None
        expected = tiny.x_rc.double() * (57344 / 3e-7)
        assert torch.equal(operand.rowwise.data.double(), expected.float().to(torch.float8_e5m2).double())
        assert operand.rowwise.dequantize(torch.float32).allclose(tiny.x_rc, rtol=0.125)
    loaded = state_of(DelayedScaling(amax_history_len=4), "a.grad_output")  # saved before the first step has ended
    for name, tensor in loaded.state_dict().items():
        tensor.copy_(state.state_dict()[name])
    loaded.refresh()
    again = loaded.quantizers["a.grad_output"](tiny, rowwise=True, columnwise=False)
    assert torch.equal(again.required_rowwise.data.float(), operand.rowwise.data.float())
    end_step([(state, None)])
    assert state.scale_t.item() == pytest.approx(57344 / 3e-7)
    grown = quantizer(Plain(torch.tensor([[1.0]])), rowwise=True, columnwise=False)
    assert grown.rowwise is not None
    assert grown.rowwise.data.float().item() == 57344  # saturated: from the second step on by what was seen before


def test_evaluation_before_the_first_step_notes_nothing() -> None:
    state = state_of(DelayedScaling(amax_history_len=4), "a.input")
    quantizer = state.quantizers["a.input"]
    quantizer.recording = False
    operand = quantizer(Plain(torch.tensor([[1e-6]])), rowwise=True, columnwise=False)
    assert operand.rowwise is not None
    assert operand.rowwise.data.float().item() == 448
    assert state.history_tl.sum() == 0
    assert quantizer.fresh


def test_a_callable_sees_the_newest_first() -> None:
    seen = []

    def second_newest(history_tl: torch.Tensor) -> torch.Tensor:
        seen.append(history_tl[0, :3].tolist())
        return history_tl[:, 1]

    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=second_newest)
    state = state_of(recipe, "a.input")
    quantizer = state.quantizers["a.input"]
    for peak in (2.0, 7.0, 4.0):
        quantizer(Plain(torch.tensor([[peak]])), rowwise=True, columnwise=False)
        end_step([(state, None)])
    assert seen == [[2, 0, 0], [7, 2, 0], [4, 7, 2]]
    assert state.scale_t.item() == 64


def _ranks_agree() -> list[list[float]]:
    world = group.WORLD
    assert isinstance(world, ProcessGroup)
    rank = world.rank()
    state = state_of(DelayedScaling(amax_history_len=8), "a.input", "b.grad_output")
    a, b = state.quantizers.values()
    scales = []
    for step in range(4):
        a(Plain(torch.tensor([[1.0 + rank * (3 - step)]])), rowwise=True, columnwise=False)
        b(
            Plain(torch.tensor([[torch.nan if step == 2 and rank == 0 else 2.0 ** (rank + step)]])),
            rowwise=True,
            columnwise=False,
        )
        end_step([(state, world)])
        scales.append(state.scale_t.tolist())
    assert state.history_tl[0, 1:5].tolist() == [1, 2, 3, 4]
    return scales


def test_ranks_share_the_largest_amax_and_a_bad_step(world2: World) -> None:
    first, second = world2.run(_ranks_agree)
    assert first == second
    assert first == [[112, 57344 / 2], [112, 57344 / 4], [112, 57344 / 4], [112, 57344 / 16]]


def test_a_rank_without_fp8_layers_takes_no_part() -> None:
    end_step([(state_of(DelayedScaling()), None)])


def test_casts_with_the_given_scale_and_raises_the_amax() -> None:
    scale, newest = torch.tensor(2.0), torch.tensor(3.0)
    quantizer = DelayedQuantizer(
        DelayedScaling(), Fp8Tensor("a", "input", None, None), CPU, scale, scale.reciprocal(), newest
    )
    made = quantizer(Plain(torch.tensor([[1.0, -2.5]])), rowwise=True, columnwise=False).required_rowwise
    assert made.data.float().tolist() == [[2.0, -5.0]]
    assert made.scale_inv.item() == 0.5
    assert newest.item() == 3
    quantizer(Plain(torch.tensor([[1.0, -4.5]])), rowwise=True, columnwise=False)
    assert newest.item() == 4.5
    quantizer.recording = False
    quantizer(Plain(torch.tensor([[9.0]])), rowwise=True, columnwise=False)
    assert newest.item() == 4.5


def test_amax_of_history() -> None:
    history = torch.tensor([[1.0, 5.0, 2.0], [7.0, 0.0, 3.0]])
    assert amax_of_history(history, "max").tolist() == [5, 7]
    assert amax_of_history(history, "most_recent").tolist() == [1, 7]
    assert amax_of_history(history, lambda h: h[:, 2]).tolist() == [2, 3]
    with pytest.raises(ValueError, match=r"one value per row, torch.float32 \[2\]"):
        amax_of_history(history, lambda h: h.amax())
