"""What ranks hand back of a comparison becomes one number and the name of a tensor."""

from __future__ import annotations

import math

import pytest

from megafp8.prove.proof import EXACT, Difference, steps_apart, worst
from megafp8.prove.runs import Compared, RunResult, Step

ROWS = tuple((((i, 0), (1, 3)),) for i in range(2))
"""Parts of a tensor of two rows, that of each rank."""


def of_rank(rank: int, **differences: float) -> dict[str, Compared]:
    return {name: Compared(x, 4.0, (2, 3), ROWS[rank]) for name, x in differences.items()}


def test_the_largest_difference_of_any_rank_is_named() -> None:
    ranks = [of_rank(0, a=0.0, b=4e-12), of_rank(1, a=1.0, b=0.0)]
    assert worst(ranks, ["a", "b"]) == Difference(0.25, "a")
    assert worst([of_rank(0, a=0.0), of_rank(1, a=0.0)], ["a"]) == Difference(0.0, "")
    assert worst([of_rank(0, b=4e-12), of_rank(1, b=0.0)], ["b"]) == Difference(1e-12, "b")


def test_three_names_and_how_many_more() -> None:
    ranks = [of_rank(i, **{f"x{n}": n + 1.0 for n in range(5)}) for i in range(2)]
    assert worst(ranks, []).where == "x4, x3, x2 and 2 more"


def test_what_no_rank_holds_is_named() -> None:
    assert worst([of_rank(0, a=0.0)], ["a"]) == Difference(math.inf, "a is missing on the ranks, as a whole or in part")
    assert worst([of_rank(0, a=0.0), of_rank(1, a=0.0)], ["a", "b"]).where.startswith("b is missing")


def test_values_that_are_not_finite() -> None:
    found = worst([of_rank(0, a=math.inf), of_rank(1, a=0.0)], ["a"])
    assert (found.value, found.status(EXACT)) == (math.inf, "DIFFERENT")


def test_small_tensors_are_held_to_a_share_of_the_largest_of_their_kind() -> None:
    tiny = Compared(1e-17, 1e-17, (1,), (((0,), (1,)),))
    large = Compared(0.0, 1.0, (1,), (((0,), (1,)),))
    gradients = {"layers.0.attention.k.bias": tiny, "layers.0.mlp.up.weight": large}
    assert worst([gradients], gradients).value == pytest.approx(1e-13)


def test_the_first_step_that_differs_is_named() -> None:
    expected = [Step(4.0, 0.0, 1.0), Step(3.0, 0.0, 2.0)]
    same, other = RunResult(0, list(expected)), RunResult(1, [expected[0], Step(3.3, 0.0, 4.0)])
    assert steps_apart([same], expected) == Difference(0.0, "")
    assert steps_apart([same, other], expected) == Difference(1.0, "loss 1 of rank 1")
    assert steps_apart([RunResult(0, [Step(math.nan, 0.0, 1.0)])], expected[:1]).value == math.inf
    assert steps_apart([RunResult(0, [Step(4.0, 1.0, 1.0)])], expected[:1]).where == "further loss 0 of rank 0"
