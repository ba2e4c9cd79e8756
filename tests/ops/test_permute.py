"""Rows by expert and back, against loops over tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafp8.ops.permute import by_expert, combine, permute


@given(tokens=st.integers(1, 9), experts=st.integers(1, 6), data=st.data())
def test_rows_are_in_the_order_of_experts_and_add_up_to_tokens(tokens: int, experts: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, experts))
    chosen = [data.draw(st.permutations(range(experts)))[:k] for _ in range(tokens)]
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(tokens, 5, generator=generator), torch.randn(tokens, k, generator=generator)
    x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
    permutation, ends_e = by_expert(torch.tensor(chosen), experts)
    rows = permute(x, permutation)
    by_hand = [(e, i, chosen[i].index(e)) for e in range(experts) for i in range(tokens) if e in chosen[i]]
    assert torch.equal(rows, x[[i for _, i, _ in by_hand]])
    assert ends_e.tolist() == [sum(expert <= e for expert, _, _ in by_hand) for e in range(experts)]
    factors = torch.tensor([[float(e + 1)] for e, _, _ in by_hand], dtype=torch.float64)
    y = combine(rows * factors, weights, permutation)
    expected = torch.stack(
        [sum(weights[i, j] * (e + 1) * x[i] for j, e in enumerate(chosen[i])) for i in range(tokens)]
    )
    torch.testing.assert_close(y, expected)
    dy = torch.randn(tokens, 5, generator=generator).double()
    actual = torch.autograd.grad(y, (x, weights), dy)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, (x, weights), dy))


@pytest.mark.parametrize("experts", [2**8, 2**8 + 1, 2**15, 2**15 + 1])
def test_experts_of_any_number(experts: int) -> None:
    """Their ids are sorted in integers that hold the last one."""
    experts_nk = torch.tensor([[experts - 1, 0], [experts // 2, experts - 1], [0, 1]])
    assert by_expert(experts_nk, experts)[0].order.tolist() == [1, 4, 5, 2, 0, 3]
