"""Rows by expert and back, against loops over tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafp8.layers.experts.permute_op import by_expert, combine, expert_input, permute
from megafp8.linear.fusion import LinearInput
from megafp8.linear.state import InputFormat, QuantizedGradHandoff
from megafp8.numerics.formats import E4M3
from megafp8.numerics.groups import RowGroups, cast_groups_1x128
from megafp8.numerics.sources import MatrixSource, Plain
from megafp8.numerics.tensor import QuantizedTensor


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


class _ByBlocks:
    """Casts rows of experts as blockwise scaling does."""

    per_tensor, shard_alignment = False, 1

    def __init__(self, groups: RowGroups) -> None:
        self._groups = groups

    def for_sharded_input(self, group: object) -> None: ...

    def __call__(self, source: MatrixSource, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        options = {"rowwise": rowwise, "columnwise": columnwise, "power_of_two": True, "eps": 0.0}
        return cast_groups_1x128(source, E4M3, self._groups, **options)


def _same(actual: QuantizedTensor | None, expected: QuantizedTensor) -> bool:
    assert actual is not None
    pairs = [(a, b) for a, b in zip(actual, expected, strict=True) if a is not None and b is not None]
    return len(pairs) == 2 and all(
        torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale_inv, b.scale_inv)
        for a, b in pairs
    )


@pytest.mark.parametrize("own", [6, 4])
def test_what_experts_take_quantized(own: int) -> None:
    """Their rows and their outputs' gradients are those of `permute` and `combine`, cast without a rounding before.

    With `own` 4 of 6 experts; the rows of others are behind theirs.
    """
    generator = torch.Generator().manual_seed(1)
    n, k, h = 7, 3, 128
    chosen_nk = torch.stack([torch.randperm(6, generator=generator)[:k] for _ in range(n)]).clamp(max=own)
    permutation, ends_e = by_expert(chosen_nk, own)
    permutation = permutation._replace(num_rows=ends_e[-1:])
    x_nh, dy_nh = (torch.randn(n, h, generator=generator).bfloat16() for _ in range(2))
    weights_nk = torch.rand(n, k, generator=generator).requires_grad_()
    quantizer = _ByBlocks(RowGroups.from_ends(ends_e, n * k))
    x_nh.requires_grad_()
    rows = expert_input(x_nh, permutation, InputFormat(quantizer))
    assert isinstance(rows, LinearInput)
    plain_mh = permute(x_nh, permutation)
    assert rows.tensor.shape == plain_mh.shape
    assert _same(rows.quantized, quantizer(Plain(plain_mh.detach()), rowwise=True, columnwise=True))
    drows_mh = torch.randn(n * k, h, generator=generator).bfloat16()
    for of_rows in (rows.tensor, plain_mh):
        of_rows.backward(drows_mh)
    of_fused_and_plain = x_nh.grad
    (of_plain,) = torch.autograd.grad(permute(x_nh, permutation), x_nh, drows_mh)
    assert torch.equal(of_fused_and_plain, of_plain + of_plain)

    results_mh = torch.randn(n * k, h, generator=generator).bfloat16().requires_grad_()
    handoff = QuantizedGradHandoff(quantizer)
    y_nh, plain_nh = combine(results_mh, weights_nk, permutation, handoff), combine(results_mh, weights_nk, permutation)
    assert torch.equal(y_nh, plain_nh)
    (dweights_nk,) = torch.autograd.grad(y_nh, weights_nk, dy_nh)
    assert torch.equal(dweights_nk, torch.autograd.grad(plain_nh, weights_nk, dy_nh)[0])
    drows = torch.zeros(n * k, h)
    for row, choice in enumerate(permutation.order.tolist()):
        drows[row] = dy_nh[choice // k].float() * weights_nk.detach().flatten()[choice]
    assert _same(handoff.take(), quantizer(Plain(drows), rowwise=True, columnwise=True))


@pytest.mark.parametrize("experts", [2**8, 2**8 + 1, 2**15, 2**15 + 1])
def test_experts_of_any_number(experts: int) -> None:
    """Their ids are sorted in integers that hold the last one."""
    experts_nk = torch.tensor([[experts - 1, 0], [experts // 2, experts - 1], [0, 1]])
    assert by_expert(experts_nk, experts)[0].order.tolist() == [1, 4, 5, 2, 0, 3]
