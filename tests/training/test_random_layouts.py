"""The trial of random layouts: what it draws, what it compares with which limits, and what it reports."""

from __future__ import annotations

import pytest

from tests.training.random_layouts import differences, documented_difference, draws, sharper
from tests.training.runs import ranks_of

CURVE = [(4.0, 2.0), (3.9, 1.9), (3.8, 0.0), (3.7, 62.0), (3.6, 1.7), (3.5, 1.6)]


def test_draws_are_those_of_the_seed() -> None:
    found = draws(3, 8)
    assert found == draws(3, 8)
    assert len({*found}) == 8
    assert max(map(ranks_of, found)) <= 8


@pytest.mark.parametrize(
    ("words", "step", "limit"),
    [
        ("tp2", 5, 1e-5),
        ("fp64 current tp2", 5, 1e-8),
        ("fp64 current dp2", 0, 1e-8),
        ("fp64 current dp2", 1, 1e-6),
        ("fp64 current dp2", 4, 2e-3),
        ("bf16-moments dp2", 1, 1e-5),
        ("fp64 current tp2 bf16-moments", 1, 1e-8),
        ("bf16 dp2", 0, 2e-3),
        ("fp64 rowwise tp2", 0, 2e-3),
    ],
)
def test_a_loss_beyond_the_limit_is_a_problem(words: str, step: int, limit: float) -> None:
    for share, problems in ((0.5, 0), (2.0, 1)):
        found = [(loss * (1 + share * limit * (i == step)), norm) for i, (loss, norm) in enumerate(CURVE)]
        assert len(differences(found, CURVE, words)) == problems


def test_what_decides_a_draw_with_loose_limits() -> None:
    assert documented_difference("moe fp64 current tp2") is None
    assert "several micro-batches" in (documented_difference("moe fp64 current dp2 ep2") or "")
    assert sharper("moe fp64 current dp2 ep2 fsdp fp8-gather") == "moe dp2 ep2 fsdp"
    assert sharper("dropping cp2 bf16") == "moe cp2"
    assert sharper("bf16 current tp2") == "fp64 current tp2"
    assert sharper("fp64 current tp2") is None
