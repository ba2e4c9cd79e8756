"""The end of a delayed-scaling step in one kernel against `DelayedState.end_step` on the CPU, bit for bit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from megafp8.fp8 import DelayedScaling
from megafp8.kernels.scales import end_step_
from megafp8.numerics.recipes.base import Fp8Tensor, OperandName
from megafp8.numerics.recipes.delayed import DelayedState
from megafp8.numerics.step import end_step
from tests.kernels import DEVICE
from tests.marks import slow_but

TENSORS = 13
SPECIAL = [0.0, math.inf, math.nan, 1e-45, 1e-38, 1.17549435e-38, 3.4e38, 448.0, 1.0]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, in the interpreter


def newest(step: int) -> Tensor:
    """Amaxes of 13 tensors, each around a magnitude of its own; every third is one of the special values."""
    generator = torch.Generator().manual_seed(step)
    amax = torch.randn(TENSORS, generator=generator).abs() * 10.0 ** torch.arange(-39, 39, 6)
    for i in range(0, TENSORS, 3):
        amax[i] = SPECIAL[(i // 3 + step) % len(SPECIAL)]
    return amax


HISTORIES = [(1, 1, 0), (2, 1, 1), (7, 3, 0), (16, 1, -2), (1024, 1, 0), (1500, 2, 3)]
CASES = [
    (*history, *more) for history in HISTORIES for more in itertools.product(("max", "most_recent"), (False, True))
]


@pytest.mark.parametrize(
    ("length", "interval", "margin", "algorithm", "power_of_two"),
    slow_but(CASES, *CASES[0::8], *CASES[3::8], *CASES[5::8], *CASES[6::8]),  # of each history two, other each time
)
def test_steps_equal_the_reference(length: int, interval: int, margin: int, algorithm: str, power_of_two: bool) -> None:
    recipe = DelayedScaling(
        amax_history_len=length, interval=interval, margin=margin, power_of_two_scale=power_of_two,
        amax_compute_algo=algorithm,  # type: ignore[arg-type]
    )  # fmt: skip
    operands: tuple[OperandName, OperandName] = ("weight", "grad_output")
    tensors = [Fp8Tensor(f"t{i}", operands[i % 2], None, None) for i in range(TENSORS)]
    reference = DelayedState(recipe, tensors, torch.device("cpu"))
    # As after many steps, but for the slot of the step now running; some histories are empty.
    past = torch.stack([newest(1000 + i).nan_to_num(posinf=0.0) for i in range(length)], dim=1)
    past[4] = 0
    past[:, 0] = 0
    reference.history_tl.copy_(past)
    history, scale = reference.history_tl.clone().to(DEVICE), reference.scale_t.clone().to(DEVICE)
    fp8_max = reference.fp8_max_t.to(DEVICE)
    for step in range(4):
        reference.history_tl[:, 0] = newest(step)
        history[:, 0] = reference.history_tl[:, 0].to(DEVICE)
        end_step([(reference, None)])
        end_step_(
            history, scale, fp8_max, margin=margin, power_of_two=power_of_two, algorithm=algorithm,
            update=step % interval == 0,
        )  # fmt: skip
        assert torch.equal(history.cpu().view(torch.int32), reference.history_tl.view(torch.int32)), step
        assert torch.equal(scale.cpu().view(torch.int32), reference.scale_t.view(torch.int32)), step
    assert len(scale.unique()) > 7


@pytest.mark.parametrize("t", [40, 0])
def test_long_histories_roll_by_one(t: int) -> None:
    """Each slot has its own number, so one that is read after it was overwritten would show."""
    history = torch.arange(t * 1024, dtype=torch.float32, device=DEVICE).view(t, 1024)
    before, ones = history.clone(), torch.ones(t, device=DEVICE)
    end_step_(history, ones, ones.clone(), margin=0, power_of_two=False, algorithm="most_recent", update=False)
    assert torch.equal(history[:, 1:], before[:, :-1])
    assert history[:, 0].count_nonzero() == 0
