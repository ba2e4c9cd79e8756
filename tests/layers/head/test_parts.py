"""Loss of a micro-batch in parts: how tokens are divided, and the gradients of a small output layer.

tests/training/test_layouts.py and the tests of the objectives compare the gradients with a run without parts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megafp8.layers.head.op import LabelLosses
from megafp8.layers.head.parts import PartLoss, SummedLoss, TokenPart, joined, summed_loss, token_parts

S, B, H, V = 10, 2, 8, 16


@pytest.mark.parametrize(
    ("rows", "b", "shards", "at_once", "sizes"),
    [
        (10, 2, 1, 100, [10]), (10, 2, 1, 20, [10]), (10, 2, 1, 19, [5, 5]), (10, 2, 1, 1, [1] * 10),
        (10, 2, 4, 20, [3, 3, 3, 1]), (8192, 1, 1, 5120, [4096, 4096]), (8192, 1, 1, 3000, [2816, 2816, 2560]),
        (300, 1, 1, 250, [256, 44]),
    ],
)  # fmt: skip
def test_parts_are_even_and_aligned(rows: int, b: int, shards: int, at_once: int, sizes: list[int]) -> None:
    parts = token_parts(rows, b, shards=shards, at_once=at_once)
    assert [part.stop - part.start for part in parts] == sizes
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    whole = torch.arange(rows * shards * 3).view(rows * shards, 3)
    assert torch.equal(joined([part.of(whole, 0) for part in parts], parts), whole)
    first = parts[0].of(whole.t(), 1)
    assert first[0].tolist() == [3 * (shard * rows + i) for shard in range(shards) for i in range(sizes[0])]


def _squares(adds_up: bool) -> PartLoss:
    """Return a loss whose value depends on each token alone, or on all of them."""

    def of_part(output: Tensor | LabelLosses, part: TokenPart) -> tuple[Tensor, Tensor]:
        assert isinstance(output, LabelLosses)
        x = output.cross_entropy
        return x.square().sum() if adds_up else x.sum().square(), torch.stack([x.detach().sum()])

    return PartLoss(of_part, reads_logits=False, adds_up=adds_up)


class _Counter(nn.Linear):
    """Output layer that knows how many tokens it has seen at once."""

    most = 0

    def forward(self, x: Tensor) -> Tensor:
        self.most = max(self.most, x.shape[0] * x.shape[1])
        return super().forward(x)


@pytest.mark.parametrize("adds_up", [True, False])
@pytest.mark.parametrize("at_once", [1, 6, 100])
@pytest.mark.parametrize("learns", [(True, True), (False, True), (False, False)])
def test_gradients_are_those_of_autograd(learns: tuple[bool, bool], at_once: int, adds_up: bool) -> None:
    layer = _Counter(H, V, dtype=torch.float64)
    x, other = torch.randn(S, B, H, dtype=torch.float64), torch.randn(B, dtype=torch.float64)
    labels = torch.randint(V, (S, B))

    def output(part: TokenPart, x: Tensor, other: Tensor) -> LabelLosses:
        loss = nn.functional.cross_entropy(layer(x).flatten(0, 1), part.of(labels, 0).flatten(), reduction="none")
        return LabelLosses(loss.view(-1, B) * other, torch.zeros_like(loss).view(-1, B))

    def gradients(at_once: int | None) -> tuple[SummedLoss, list[Tensor]]:
        layer.zero_grad()
        inputs = [tensor.clone().requires_grad_(needed) for tensor, needed in zip((x, other), learns)]
        loss, whole = _squares(adds_up), TokenPart(0, S, 1)
        if at_once is None:
            result = SummedLoss(*loss.compute(output(whole, *inputs), whole))
        else:
            parts = token_parts(S, B, shards=1, at_once=at_once)
            result = summed_loss(loss, output, parts, layer, inputs[0], inputs[1:])
        if result.value.requires_grad:
            (3 * inputs[0].sum() + result.value).backward()
        return result, [tensor.grad for tensor in (*inputs, *layer.parameters()) if tensor.grad is not None]

    expected, layer.most = gradients(None), 0
    found = gradients(at_once)
    assert layer.most <= max(at_once, B)
    assert len(found[1]) == 2 + sum(learns)
    for one, another in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(one, another, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        parts = token_parts(S, B, shards=1, at_once=at_once)
        for one, another in zip(summed_loss(_squares(adds_up), output, parts, layer, x, [other]), expected[0]):
            torch.testing.assert_close(one, another, rtol=1e-12, atol=1e-12)


def test_a_loss_that_is_scaled_after_its_gradients_is_an_error() -> None:
    layer, x = nn.Linear(H, V), torch.randn(S, B, H, requires_grad=True)
    parts = token_parts(S, B, shards=1, at_once=6)
    losses = summed_loss(_squares(True), lambda _, x: LabelLosses(layer(x).sum(-1), x[..., 0]), parts, layer, x)
    with pytest.raises(RuntimeError, match="nonzero"):
        (2 * losses.value).backward()
